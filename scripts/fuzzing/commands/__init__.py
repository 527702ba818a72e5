"""What ``fuzz.py`` can fuzz, a command each."""
