"""Gradients of products of integers: tables of their derivatives, and sums with these."""
