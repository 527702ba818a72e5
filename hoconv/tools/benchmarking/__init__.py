"""Timing operators: measurements, the command ``hoconv benchmark``, charts, marks of layers."""
