"""Benchmarks of training: steps, reading data, whole runs."""
