"""Trains a network to remove noise from images. B batch, S image size."""

from __future__ import annotations

from collections.abc import Callable

import torch
from lightning_fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from datamodules.coco.denoising import DenoisingBatch
from datamodules.reading.pixels import PIXEL_STD, denormalise
from models.metrics.mean import EpochMean, Mean
from models.metrics.psnr import psnr
from models.tasks.noise import draw_normal
from models.tasks.optimizer import Optimized, make, warmup_cosine


class Denoiser(Optimized):
    """Adds Gaussian noise to images, and minimises the mean squared error of what the network makes
    of them.

    A batch is a :class:`DenoisingBatch`; its seeds determine the noise. Logs under ``val/`` and
    ``test/``: ``loss``, and ``psnr``, the peak signal-to-noise ratio of an image with 8 bits a
    channel, averaged over the images.

    Args:
        network: maps noisy images (B, 3, S, S) to clean ones, both normalised; or its description.
        noise: the standard deviation, of 255 grey levels.
        learning_rate: the highest of the schedule.
        weight_decay: of the optimizer.
        optimizer, scheduler: see :func:`models.tasks.optimizer.configure`; or their descriptions.

    Raises:
        ValueError: `noise` is negative.
    """

    deviation: Tensor

    def __init__(
        self,
        network: nn.Module,
        noise: float,
        learning_rate: float,
        weight_decay: float,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
        scheduler: Callable[..., LRScheduler] = warmup_cosine,
    ) -> None:
        super().__init__(learning_rate, weight_decay, optimizer, scheduler)
        self.network = make(network)
        if noise < 0:
            raise ValueError(f"noise: expected a number of at least 0, got {noise}")
        deviation = noise / torch.tensor(PIXEL_STD).view(3, 1, 1)  # of normalised pixels
        self.register_buffer("deviation", deviation, persistent=False)
        self.means.update({f"{stage}/psnr": EpochMean() for stage in ("val", "test")})

    def forward(self, noisy: Tensor) -> Tensor:
        return self.network(noisy.to(self.dtype))

    def add_noise(self, batch: DenoisingBatch) -> Tensor:
        """Returns the images of a batch with noise."""
        drawn = draw_normal(batch.seeds, batch.images[0].numel()).view_as(batch.images)
        return batch.images + self.deviation * drawn

    def training_step(self, batch: DenoisingBatch, batch_idx: int) -> Tensor:
        _check(batch)
        return squared_errors(self(self.add_noise(batch)), batch.images).mean()

    def validation_step(self, batch: DenoisingBatch, batch_idx: int) -> tuple[Tensor, Tensor]:
        return self._evaluate("val", batch)

    def test_step(self, batch: DenoisingBatch, batch_idx: int) -> None:
        self._evaluate("test", batch)

    def _evaluate(self, stage: str, batch: DenoisingBatch) -> tuple[Tensor, Tensor]:
        """Updates and logs the metrics; returns noisy and denoised images, (B, 3, S, S) uint8."""
        _check(batch)
        noisy = self.add_noise(batch)
        denoised = self(noisy)
        count = torch.tensor(len(noisy), device=noisy.device)
        errors = squared_errors(denoised, batch.images)
        self.log_mean(f"{stage}/loss", Mean(errors.sum(), count))
        pixels = denormalise(denoised)
        ratios = psnr(pixels, denormalise(batch.images))
        self.log_mean(f"{stage}/psnr", Mean(ratios.sum(), count), prog_bar=True)
        return denormalise(noisy), pixels


def squared_errors(denoised: Tensor, images: Tensor) -> Tensor:
    """Returns the mean squared error of each image (3, S, S), (B,)."""
    return (denoised - images).square().flatten(1).mean(1)


def _check(batch: DenoisingBatch) -> None:
    if not isinstance(batch, DenoisingBatch):
        raise MisconfigurationException(
            "data: expected images with the seeds of their noise, a DenoisingBatch; got a "
            f"{type(batch).__name__}. Use data=coco or data=coco_tiny with model=denoise"
        )
