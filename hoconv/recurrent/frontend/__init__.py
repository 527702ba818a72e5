"""Turns a cell, a Python function, into a program: the language, symbols, tracing."""
