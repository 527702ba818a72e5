"""Checks of what networks and tasks are made with."""

from __future__ import annotations


def require_sizes(**sizes: int) -> None:
    """Raises ValueError for a size that is no whole number of at least 1."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{name}: expected a whole number of at least 1, got {size!r}")


def require_share(name: str, share: float) -> None:
    """Raises ValueError for what is no number from 0 to 1."""
    if not isinstance(share, int | float) or not 0 <= share <= 1:
        raise ValueError(f"{name}: expected a number from 0 to 1, got {share!r}")
