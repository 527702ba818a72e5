"""Passes for kernels of clusters: they share the steps of a program among blocks."""
