"""What keeps a run alive: its folder, its checkpoints, and a stop where numbers are no more."""
