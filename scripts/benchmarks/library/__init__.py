"""Benchmarks of the library alone: operators, layers, first use."""
