"""Judging the implementations of operators: what `hoconv check` does."""
