"""Helpers of tests and fuzzing: random cells, and cases that compare cells with definitions."""
