"""The folders of configuration that a user adds to conf/."""

from __future__ import annotations

import argparse
import importlib.resources
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from training.configuration.errors import MisconfigurationException
from training.configuration.names import first_values


def own_folders(arguments: Sequence[str]) -> list[Path]:
    """Returns the folders that ``--config-dir`` and ``hydra.searchpath`` name."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-dir", "-cd", type=Path)
    folder = parser.parse_known_args(arguments)[0].config_dir
    added: Any = first_values(arguments).get("hydra.searchpath") or []
    added = OmegaConf.to_container(OmegaConf.create(added), resolve=True)
    return [*([folder] if folder else []), *filter(None, map(_path, map(str, added)))]


def _path(entry: str) -> Path | None:
    """Returns the folder of an entry of Hydra's search path; None where it is no folder."""
    scheme, separator, rest = entry.partition("://")
    if separator and scheme == "pkg":
        try:
            return Path(str(importlib.resources.files(rest.replace("/", "."))))
        except (ModuleNotFoundError, TypeError, ValueError):  # Hydra says it
            return None
    return Path(rest if separator else entry)


def check_files(conf: Path, own: Sequence[Path]) -> None:
    """Checks the files of a user's folders.

    Hydra takes the first file of a name that it finds, and looks into `conf` first.

    Raises:
        MisconfigurationException: one is not YAML, or has the name of another, whose contents are
            not the same.
    """
    known = {path.relative_to(conf): path for path in conf.rglob("*.yaml")}
    for folder in own:
        for path in sorted(folder.rglob("*.yaml")):
            _require_yaml(path)
            first = known.setdefault(path.relative_to(folder), path)
            if first.read_bytes() != path.read_bytes():
                raise MisconfigurationException(
                    f"{path} would never be read: {first} has its name and comes first; rename it"
                )


def _require_yaml(path: Path) -> None:
    try:
        yaml.compose(path.read_text())
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        raise MisconfigurationException(f"{path}{line}: no YAML: {error.problem}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise MisconfigurationException(
            f"{path}: no YAML: {' '.join(str(error).split())}"
        ) from error
