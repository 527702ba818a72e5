"""What ``benchmark.py`` times, a command each."""
