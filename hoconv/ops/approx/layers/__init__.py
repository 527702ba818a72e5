"""Layers whose products are approximate, and models converted to them."""
