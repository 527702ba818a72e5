"""The configuration of a command that uses a checkpoint: the checkpoint's own, but for what the
command names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf

from training import console
from training.configuration.errors import MisconfigurationException
from training.configuration.names import first_values
from training.configuration.same import ABOUT, LONGER, require_same
from training.configuration.targets import check_targets
from training.results.saved import Saved, read

# What a test or a prediction takes from the checkpoint. The rest says where and how it computes.
OF_THE_MODEL = ("approx", "callbacks", "data", "model", "optimizer", "scheduler", "seed", "task")
# What a run that goes on takes from the command; all else must be as the checkpoint has it.
OF_THE_COMMAND = (*ABOUT, "data_dir", "logger", "step_checkpoints")
MAY_DIFFER = (
    *OF_THE_COMMAND, *LONGER, "data.data_dir", "trainer.accelerator", "trainer.max_time",
)  # fmt: skip
UNKNOWN = "of_checkpoint"  # the option of data or of a model of which there is no file here
OF_TRAINER_GROUP = ("accelerator", "devices", "num_nodes", "strategy")  # what trainer=... chooses
# How data prepares its images: its arguments, and what its class says.
PREPROCESSING = (
    "image_shape", "image_size", "mean", "normalise", "normalize", "pixel_mean", "pixel_std", "std",
)  # fmt: skip


def uses_configuration(mode: Any, resume: Any) -> bool:
    """Returns whether a command starts from the configuration of its checkpoint."""
    return mode in ("test", "predict", "export") or resume is True


def complete(arguments: Sequence[str], folders: Sequence[Path]) -> list[str]:
    """Returns a command line from which Hydra composes what :func:`merge` needs.

    Where the command uses the configuration of a checkpoint, it names the data and the model of
    that, unless it names others; and its values of theirs are those of keys that conf/ may lack.

    Args:
        folders: of the configuration, the user's included.

    Raises:
        MisconfigurationException: the checkpoint cannot be read, or an override takes something
            away from its configuration.
    """
    given = first_values(arguments)
    ckpt = given.get("ckpt")
    if not uses_configuration(given.get("mode"), given.get("resume")) or not isinstance(ckpt, str):
        return [*arguments]
    found = [_forced(argument) for argument in arguments]
    identity = read(ckpt).identity
    for group in ("data", "model"):
        if not {group, "experiment"} & given.keys():
            name = identity[group]
            if not any((folder / group / f"{name}.yaml").is_file() for folder in folders):
                ConfigStore.instance().store(name := UNKNOWN, {}, group)
            found.append(f"{group}={name}")
    return found


def _forced(argument: str) -> str:
    """Returns an override of a part of the model's or its data's, such that Hydra takes any key."""
    group, dot, _ = argument.lstrip("+~").partition("=")[0].partition(".")
    if not dot or group not in ("callbacks", "data", "model"):
        return argument
    if argument.startswith("~"):
        raise MisconfigurationException(
            f"{argument}: it is the checkpoint's; set it to another value, or to null"
        )
    return f"++{argument.lstrip('+')}"


def merge(config: DictConfig, saved: Saved, given: Sequence[str]) -> DictConfig:
    """Returns the configuration of a checkpoint with what a command names.

    Says what differs from training in how images are prepared.

    Args:
        config: as Hydra composed it.
        given: the overrides of the command.

    Raises:
        MisconfigurationException: the command names another model; or an argument that there is
            not; or, of a run that goes on, what must stay the same.
    """
    named = {text.lstrip("+").partition("=")[0] for text in given}
    longer = config.mode == "train"
    if longer and "debug" in named:
        raise MisconfigurationException("debug: resume=true changes nothing but how long it trains")
    before: Any = OmegaConf.to_container(saved.config, resolve=True)
    found: Any = OmegaConf.to_container(config, resolve=False)
    for key, value in before.items():
        if (key not in OF_THE_COMMAND if longer else key in OF_THE_MODEL) and key not in named:
            found[key] = value
    for group in ("data", "model"):
        found[group] = _chosen(group, config, saved, bool({group, "experiment"} & named))
    if not longer:  # one of this command's may write what is predicted
        more = OmegaConf.to_container(config.callbacks, resolve=False)
        found["callbacks"] = more | before["callbacks"]  # pyright: ignore
    elif "trainer" in named:
        chosen = {key: found["trainer"][key] for key in OF_TRAINER_GROUP}
        found["trainer"] = before["trainer"] | chosen
    merged: Any = OmegaConf.create(found)
    if "data_dir" in merged.data:
        merged.data.data_dir = config.data_dir  # of this machine
    for name in named:
        if re.match(r"(?!hydra)\w+\.[^@]*$", name):
            value = OmegaConf.select(config, name)
            OmegaConf.update(merged, name, value, merge=False, force_add=True)
    check_targets(merged.data, {})
    if longer:
        fix = "resume=true changes nothing but how long it trains"
        require_same(saved.config, merged, f"the run of {saved.path}", fix, MAY_DIFFER)
    else:
        _say_differences(saved.config.data, merged.data)
        other = merged.data.get("folder") != saved.config.data.get("folder")
        if config.mode == "test" and other and "data.val_share" not in named:
            _say_share(merged.data)
    return merged


def _chosen(group: str, config: DictConfig, saved: Saved, named: bool) -> dict[str, Any]:
    """Returns the data or the model: the checkpoint's, unless the command names other data."""
    before: Any = OmegaConf.to_container(saved.config[group], resolve=True)
    now: Any = OmegaConf.to_container(config[group], resolve=False)
    if not named or _targets(now) in ([], _targets(before)):  # complete() names the checkpoint's
        return before
    if group == "data" and config.mode != "train":
        return now | {key: before[key] for key in PREPROCESSING if key in before and key in now}
    raise MisconfigurationException(
        f"{group}: {saved.path} is of {' with '.join(_targets(before))}, and the command names "
        f"{' with '.join(_targets(now))}; leave {group} and experiment out"
    )


def _targets(described: dict[str, Any]) -> list[str]:
    """Returns the classes of data or of a model and its network."""
    network = described.get("network")
    parts = [described, network if isinstance(network, dict) else {}]
    return [part["_target_"] for part in parts if "_target_" in part]


def _say_differences(before: Any, now: Any) -> None:
    old, new = _preprocessing(before), _preprocessing(now)
    said = [
        f"{name} is {new[name]}, and was {old[name]} in training"
        for name in old
        if name in new and new[name] != old[name]
    ]
    if said:
        console.warn(f"data: images are prepared in another way: {'; '.join(said)}")


def _say_share(data: Any) -> None:
    if share := data.get("val_share"):
        console.warn(
            f"data.val_share: as in training, {share} of the images in {data.folder} is tested; "
            "data.val_share=null tests those in its folder test or val"
        )


def _preprocessing(data: Any) -> dict[str, Any]:
    """Returns what data says of how it prepares images: its class, then its arguments."""
    dataset = get_class(data._target_)
    said = {name: getattr(dataset, name, None) for name in PREPROCESSING}
    said = {name: value for name, value in said.items() if isinstance(value, float | int | tuple)}
    return said | {name: data[name] for name in PREPROCESSING if name in data}
