"""Comparing the configuration of a run that goes on with that with which it was begun."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from omegaconf import OmegaConf

from training.configuration.errors import MisconfigurationException

# What makes a run longer.
LONGER = ("trainer.max_epochs", "trainer.max_steps")
# What says nothing of what a run computes.
ABOUT = (
    "ckpt", "direction", "input", "mode", "objective", "print_config", "resume", "run_name",
    "unavailable",
)  # fmt: skip


def require_same(before: Any, now: Any, where: str, fix: str, but: Sequence[str] = ()) -> None:
    """Checks that a run goes on with the configuration with which it was begun.

    What earlier versions did not have, and where loggers write, may differ.

    Args:
        where: it was begun.
        fix: what the user can do.
        but: what else may differ.

    Raises:
        MisconfigurationException: something else differs; says the first that does.
    """
    allowed = {*ABOUT, *but}
    old, new = (dict(_flat(OmegaConf.to_container(each, resolve=True))) for each in (before, now))
    for name in dict.fromkeys([*old, *new]):
        group, _, rest = name.partition(".")
        counts = group in before and (group != "logger" or rest.endswith("_target_"))
        if counts and not {group, name} & allowed and old.get(name) != new.get(name):
            raise MisconfigurationException(
                f"{name}: {where} was begun with another configuration: {old.get(name)} there, "
                f"{new.get(name)} here; {fix}"
            )


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the values within a value, by their full names."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _flat(item, f"{name}.{key}" if name else str(key))
    else:
        yield name, value
