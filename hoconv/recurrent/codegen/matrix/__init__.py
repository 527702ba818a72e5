"""Writes loops whose states are matrices of independent columns."""
