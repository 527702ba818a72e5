"""Weights & Biases without surprises: no prompt, no waiting for a network, one run per job."""

from __future__ import annotations

import importlib.util
import netrc
import os
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lightning_fabric.utilities.exceptions import MisconfigurationException
from pytorch_lightning.loggers import WandbLogger


def wandb_logger(**arguments: Any) -> WandbLogger:
    """A WandbLogger that is offline where there is no API key, unless WANDB_MODE says otherwise.

    Args:
        arguments: of ``pytorch_lightning.loggers.WandbLogger``.

    Raises:
        MisconfigurationException: wandb is not installed.
    """
    if importlib.util.find_spec("wandb") is None:
        raise MisconfigurationException(
            "logger=wandb needs the package wandb: `pip install wandb`, or use logger=csv"
        )
    if "WANDB_MODE" not in os.environ and not has_api_key():
        arguments["mode"] = "offline"
        os.environ.setdefault("WANDB_SILENT", "true")
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # the rest of what needs a network
        import wandb

        wandb.setup()  # from here on it is silent, while Lightning makes the run
    return WandbLogger(**arguments)


def has_api_key() -> bool:
    """Whether wandb would find a key without asking: in the environment or in a netrc file."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).netloc
    path = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        return netrc.netrc(path).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def finish(exit_code: int) -> Path | None:
    """Ends the W&B run of this process, if there is one, so that the next job gets its own.

    Returns the folder of the run.
    """
    wandb = sys.modules.get("wandb")
    if wandb is None or wandb.run is None:
        return None
    folder = Path(wandb.run.dir).parent
    wandb.finish(exit_code=exit_code)
    return folder
