"""What scripts/fuzz.py draws, runs and compares."""
