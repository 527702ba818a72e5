"""Networks, the LightningModules that train them, and metrics."""
