"""Networks, the tasks that train them, metrics."""
