"""Starting from a checkpoint: its configuration, its weights, or all of its state."""
