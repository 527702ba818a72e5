"""The direction in which a metric improves."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from training.configuration.errors import MisconfigurationException
from training.configuration.targets import locate

MODES = {"minimize": "min", "maximize": "max"}  # by direction: as Lightning's callbacks call it
# Words of names: val/mean_iou has "mean" and "iou".
RISING = {
    "acc", "accuracy", "ap", "ap50", "ap75", "ar", "auc", "auroc", "bleu", "bleu4", "cider",
    "dice", "f1", "iou", "map", "meteor", "miou", "precision", "psnr", "r2", "recall", "rouge",
    "score", "spice", "ssim",
}  # fmt: skip
FALLING = {
    "bce", "ce", "cer", "error", "fid", "loss", "mae", "mse", "nll", "perplexity", "rmse", "wer",
}  # fmt: skip
OF_SCHEDULER = "val/loss"  # what scheduler=plateau follows


def direction(metric: str) -> str:
    """Returns ``minimize`` or ``maximize``, as the name of a metric, such as ``val/loss``, says.

    Raises:
        ValueError: no word of the name is known, or words of both kinds.
    """
    words = set(re.findall(r"[a-z0-9]+", metric.rpartition("/")[2].lower()))
    rises, falls = bool(words & RISING), bool(words & FALLING)
    if rises == falls:
        raise ValueError(
            f"the name of {metric} does not say whether it is to rise or to fall; correct the "
            "name, or set this to maximize or minimize"
        )
    return "maximize" if rises else "minimize"


def mode(metric: str | None, *, _root_: Any) -> str:
    """Returns ``min`` or ``max`` for what monitors a metric; ``max`` where it monitors nothing.

    Raises:
        ValueError: the name of the metric does not say it.
    """
    if not isinstance(metric, str):  # another value than null is refused where it is used
        return "max"
    return MODES[_root_.direction] if metric == _root_.objective else _mode(metric)


def missing_mode(name: str, description: Any) -> dict[str, str]:
    """Returns the ``mode`` of a callback that monitors a metric and was not given one: Lightning's
    own default is ``min`` for every metric.

    Args:
        name: of the callback, in messages.
        description: its ``_target_`` and arguments.

    Raises:
        MisconfigurationException: the name of the metric does not say it.
    """
    monitor = description.get("monitor") if OmegaConf.is_dict(description) else None
    if not isinstance(monitor, str):
        return {}
    found = locate(name, description.get("_target_", ""))
    if "mode" in description or "mode" not in inspect.signature(found).parameters:
        return {}
    try:
        return {"mode": _mode(monitor)}
    except ValueError as error:
        raise MisconfigurationException(f"{name}.mode: {error}") from error


def check_directions(config: DictConfig, sweeper: Any = None) -> None:
    """Checks that all settings that monitor the same metric agree which way it improves.

    Args:
        sweeper: Hydra's, of a sweep.

    Raises:
        MisconfigurationException: two do not.
    """
    found: dict[str, tuple[str, str]] = {}
    for name, metric, said in _statements(config, sweeper or {}):
        other, before = found.setdefault(metric, (name, said))
        if MODES.get(before, before) != MODES.get(said, said):
            raise MisconfigurationException(
                f"{name}: {said} contradicts {other}: {before}, of the same metric, {metric}"
            )


def _statements(config: DictConfig, sweeper: Any) -> Iterator[tuple[str, str, str]]:
    """Yields each setting that says which way a metric improves, the metric, and what it says."""
    yield "direction", config.objective, config.direction
    if isinstance(searched := sweeper.get("direction"), str):
        yield "hydra.sweeper.direction", config.objective, searched
    described = {"checkpoint": config.checkpoint}
    described |= {f"callbacks.{name}": each for name, each in config.callbacks.items()}
    for name, each in described.items():
        if OmegaConf.is_dict(each) and each.get("monitor") and each.get("mode"):
            yield f"{name}.mode", each.monitor, each.mode
    if OmegaConf.is_dict(config.scheduler) and config.scheduler.get("mode"):
        yield "scheduler.mode", OF_SCHEDULER, config.scheduler.mode


def _mode(metric: str) -> str:
    try:
        return MODES[direction(metric)]
    except ValueError as error:
        raise ValueError(str(error).replace("maximize or minimize", "max or min")) from None
