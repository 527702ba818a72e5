"""Operators, layers and builds by themselves."""
