"""Helpers for checks, tests and fuzzing: comparisons with a definition, random recurrent cells."""
