"""The networks, the LightningModules that train them, one per task, and what these predict."""
