"""The resolvers ``${name:...}`` of conf/, beside Hydra's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra.utils import get_class
from lightning_fabric.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError

from datamodules.images import CacheError, DataNotFoundError
from training.folder import run_folder
from training.implementations import label
from training.instantiation import instantiate

DATA_ERRORS = (CacheError, DataNotFoundError, MisconfigurationException)
ROOT = Path(__file__).resolve().parents[1]


def register() -> None:
    """``${project:x}`` is a path in the project; ``${attribute:${data},x}`` is what the class of
    ``data`` declares, or what an object of it says where that is a property;
    ``${attribute:module.Class,x}`` is what a class declares; ``${run_folder:...}`` is
    :func:`training.folder.run_folder`; ``${label:${impl}}`` is
    :func:`training.implementations.label`."""
    OmegaConf.register_new_resolver("project", lambda path: str(ROOT / path), replace=True)
    OmegaConf.register_new_resolver("attribute", _attribute, replace=True)
    OmegaConf.register_new_resolver("run_folder", run_folder, replace=True)
    OmegaConf.register_new_resolver("label", label, replace=True)


def check(config: DictConfig) -> None:
    """Resolves the whole configuration once, before anything is instantiated.

    Raises:
        MisconfigurationException: some value cannot be resolved.
        CacheError, DataNotFoundError: the data that decides about one cannot be read.
    """
    try:
        OmegaConf.to_container(config, resolve=True)
    except InterpolationResolutionError as error:
        cause: BaseException | None = error
        while isinstance(cause, InterpolationResolutionError):
            cause = cause.__context__
        if isinstance(cause, DATA_ERRORS):  # of data that was asked for an attribute
            raise cause from None
        reason = str(error.msg).splitlines()[0].split("raised while resolving interpolation: ")[-1]
        raise MisconfigurationException(f"{error.full_key}: {reason}") from error


def _attribute(described: str | DictConfig, name: str) -> Any:
    declared: Any = get_class(described if isinstance(described, str) else described._target_)
    if not hasattr(declared, name):
        raise AttributeError(f"{declared.__name__} has none; choose another model= or data=")
    value = getattr(declared, name)
    if isinstance(value, property):  # data of the user's, which its files describe
        if isinstance(described, str):
            raise AttributeError(f"it depends on the data; use ${{attribute:${{data}},{name}}}")
        value = getattr(instantiate(described), name)
    return OmegaConf.create([value])[0]
