"""The commands of ``fuzz.py``, one a file."""
