"""The description of a run in its checkpoints, which makes them self-contained."""

from __future__ import annotations

import itertools
import json
from importlib.util import find_spec
from pathlib import Path
from pickle import UnpicklingError
from textwrap import shorten
from typing import TYPE_CHECKING, Any, NamedTuple
from zipfile import BadZipFile

from omegaconf import DictConfig, OmegaConf

from training.configuration.errors import MisconfigurationException

if TYPE_CHECKING:
    import pytorch_lightning as pl

MOST_OF_A_REASON = 200  # characters: PyTorch lists every weight
# The ranges and learned scales, in the state of a layer that multiplies integers.
RANGES = ".quantizer."
KEY = "run"  # of the description, in a checkpoint


class Saved(NamedTuple):
    """A checkpoint that was read.

    Attributes:
        path: of the file.
        config: of the run that wrote it, resolved.
        identity: ``model``, ``data`` and ``seed`` of that run.
        class_names: of the data set that it was trained on; None where that names none.
        state_dict: the weights.
    """

    path: Path
    config: Any
    identity: dict[str, Any]
    class_names: list[str] | None
    state_dict: dict[str, Any]

    def description(self) -> dict[str, Any]:
        """Returns what a file says of the run beside the weights, plain data."""
        return _describe(self.config, self.identity, self.class_names)


def describe(
    config: DictConfig, identity: dict[str, Any], data: pl.LightningDataModule
) -> dict[str, Any]:
    """Returns what a checkpoint holds beside Lightning's state, plain data.

    ``hyper_parameters`` are the model's arguments, for ``load_from_checkpoint``.
    """
    run = _describe(config, identity, class_names(data))
    arguments = run["config"]["model"].items()
    return {KEY: run, "hyper_parameters": {k: v for k, v in arguments if not k.startswith("_")}}


def _describe(
    config: DictConfig, identity: dict[str, Any], names: list[str] | None
) -> dict[str, Any]:
    return {
        "config": OmegaConf.to_container(config, resolve=True),
        "identity": {key: identity[key] for key in ("model", "data", "seed")},
        "class_names": names,
    }


def class_names(data: pl.LightningDataModule) -> list[str] | None:
    """Returns what a data set calls its classes; None where it names none."""
    names = getattr(data, "class_names", None)
    return None if names is None else [str(name) for name in names]


def difference(before: list[str], now: list[str], of: str, where: str) -> str | None:
    """Says which is the first class that two data sets call differently; None where none is."""
    for label, (old, new) in enumerate(itertools.zip_longest(before, now)):
        if old != new:
            return f"class {label} of {of} is {old!r}, of {where} {new!r}"
    return None


def read(ckpt: str | Path) -> Saved:
    """Reads a checkpoint, or what ``mode=export format=safetensors`` made of one.

    Raises:
        MisconfigurationException: there is none, it is damaged or unreadable, or it does not
            describe its run.
    """
    path = Path(ckpt).resolve()
    if not path.is_file():
        raise MisconfigurationException(
            f"ckpt: there is no file {path}; give the path of a checkpoint, such as "
            "outputs/<run>/checkpoints/epoch_5.ckpt"
        )
    import torch  # here: to compose a configuration, only one of a checkpoint needs it

    try:
        if path.suffix == ".safetensors":
            weights, run = _read_safetensors(path)
        else:
            contents = torch.load(path, map_location="cpu", weights_only=True)
            weights, run = contents["state_dict"], contents[KEY]
    except (
        BadZipFile, EOFError, KeyError, OSError, RuntimeError, TypeError, UnpicklingError
    ) as error:  # fmt: skip
        raise MisconfigurationException(
            f"ckpt: {path} is damaged, unreadable, or not of a run of train.py "
            f"({type(error).__name__}); give a checkpoint that a run wrote"
        ) from error
    return Saved(
        path, OmegaConf.create(run["config"]), run["identity"], run["class_names"], weights
    )


def _read_safetensors(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the weights, and the description of the run."""
    if find_spec("safetensors") is None:
        raise MisconfigurationException(
            f"ckpt: {path} needs safetensors; pip install 'hoconv[export]'"
        )
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            run = json.loads((file.metadata() or {})[KEY])
            return {name: file.get_tensor(name) for name in file.keys()}, run  # noqa: SIM118
    except SafetensorError as error:
        raise RuntimeError(str(error)) from error


def load_weights(model: pl.LightningModule, saved: Saved) -> None:
    """Loads all weights of a checkpoint into the model that it describes.

    Raises:
        MisconfigurationException: they are not those of this model.
    """
    own = model.state_dict().keys()
    missing = own - saved.state_dict.keys()
    if missing and all(RANGES in name for name in missing):
        raise MisconfigurationException(
            "approx.multiplier: one of integers needs the ranges of the layers' inputs, which "
            f"{saved.path} does not have; leave mode out, to train from its weights and find them"
        )
    # A multiplier of floats, in place of one of integers, needs no ranges.
    weights = {n: v for n, v in saved.state_dict.items() if n in own or RANGES not in n}
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise MisconfigurationException(
            f"ckpt: {saved.path} is damaged, or not of the model that it describes: "
            f"{shorten(str(error), MOST_OF_A_REASON)}"
        ) from error
