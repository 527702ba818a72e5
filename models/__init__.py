"""The networks, one file each, and the LightningModules that train them, one per task."""
