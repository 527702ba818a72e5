"""Judging a kernel that one does not trust: what `hoconv judge` does."""
