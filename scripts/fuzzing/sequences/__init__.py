"""Sequences of operations on one layer: what is drawn, done, and compared."""
