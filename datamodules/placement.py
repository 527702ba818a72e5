"""The memory that holds a data set: that of the GPU that trains, or of the host."""

from __future__ import annotations

import pytorch_lightning as pl
import torch

from datamodules.reading.decoding import decodes_on

DEVICES = ("auto", "gpu", "cpu")
# The most of a GPU's free memory that a data set takes by itself: the model comes after it.
MOST_OF_FREE = 0.1
# Photographs a second that a GPU decodes beside a training, and each process of a loader: captions
# in batches of 64, docs/results/loading_cuda.json; the same with data.num_workers=4 and 6, 276 and
# 299 each.
GPU_RATE, PROCESS_RATE = 2300, 290


class DataDeviceError(ValueError):
    """A data set is to be on a device where it cannot be; says which, why, and what to do."""


def require_known(device: str) -> None:
    """Raises ValueError for an argument `device` that is not one of `DEVICES`."""
    if device not in DEVICES:
        raise ValueError(f"device: expected one of {', '.join(DEVICES)}; got {device!r}")


def get_training_device(trainer: pl.Trainer | None) -> torch.device:
    """Returns the device that trains in this process."""
    return torch.device("cpu") if trainer is None else trainer.strategy.root_device


def is_resident(device: str, nbytes: int, training: torch.device) -> bool:
    """Returns whether a data set is to be on the GPU that trains.

    Args:
        device: the argument of the data module, one of `DEVICES`.
        nbytes: of the data that is still to be moved there.
        training: the device that trains.

    Raises:
        DataDeviceError: `device` is ``"gpu"`` and the run has none.
    """
    if training.type != "cuda":
        if device == "gpu":
            raise DataDeviceError(
                f"data.device: expected auto or cpu for a run on {training.type}, got 'gpu'; or "
                "use trainer=gpu"
            )
        return False
    return device == "gpu" or (device == "auto" and _fits(nbytes, training))


def is_decoded(device: str, training: torch.device, num_workers: int) -> bool:
    """Returns whether files are to be decoded by the GPU that trains.

    Args:
        device, training: as of `is_resident`.
        num_workers: processes of a loader that would decode them instead. Where they are enough, a
            step is shorter than beside a GPU that decodes.

    Raises:
        DataDeviceError: `device` is ``"gpu"`` and the run has none, or none that decodes.
    """
    if device == "cpu" or (device == "auto" and num_workers * PROCESS_RATE >= GPU_RATE):
        return False
    if training.type == "cuda" and not decodes_on(training):
        if device == "gpu":
            raise DataDeviceError(
                "data.device: expected auto or cpu where torchcodec cannot decode on the GPU, got "
                "'gpu'; or install it (pip install torchcodec), or use data.cache_images=true"
            )
        return False
    return is_resident(device, 0, training)


def _fits(nbytes: int, device: torch.device) -> bool:
    if nbytes == 0:
        return True
    free, _ = torch.cuda.mem_get_info(device)
    return nbytes <= MOST_OF_FREE * free
