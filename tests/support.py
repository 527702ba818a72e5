"""Helpers for tests of several rooms."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from hoconv.dispatch.implementations import set_impl

Network = TypeVar("Network", bound=nn.Module)


def set_to_reference(network: Network) -> Network:
    """Sets the layers of a network to the reference, so that nothing is compiled; returns it."""
    set_impl(network, "reference")
    return network
