"""The data sets: one file or folder, one LightningDataModule each."""
