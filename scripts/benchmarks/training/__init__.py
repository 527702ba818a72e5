"""Training steps, data and whole runs."""
