"""The code of a run: from its configuration to its results."""
