"""From a cell, a Python function, to a program: the language, symbols, traces."""
