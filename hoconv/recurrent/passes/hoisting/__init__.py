"""Passes that move ops out of the loop over time, and back."""
