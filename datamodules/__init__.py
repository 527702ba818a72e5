"""The data sets: one file, one LightningDataModule each."""
