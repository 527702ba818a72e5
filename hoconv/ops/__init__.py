"""The operators, one folder each, and what bilinear operators share."""
