"""Networks as a configuration describes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hydra.utils import instantiate


def make(network: Any) -> Any:
    """Returns a network, or what its ``_target_`` and arguments make.

    A model of a run is given the network itself; ``load_from_checkpoint`` gives the description
    that the checkpoint holds.
    """
    return instantiate(network) if isinstance(network, Mapping) else network
