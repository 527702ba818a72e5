"""The commands of ``benchmark.py``, one a file."""
