"""The outcome of a fit: what it can do, which of its losses are NaN, and why it ended."""
