"""The data sets: a file or folder for each, with a LightningDataModule."""
