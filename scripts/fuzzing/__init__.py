"""Drawing, running and comparing the cases of scripts/fuzz.py."""
