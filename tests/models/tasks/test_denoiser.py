import pytest
import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader

from datamodules.coco.denoising import DenoisingBatch
from datamodules.reading.pixels import PIXEL_STD, normalise
from models.tasks.denoiser import Denoiser


class Scaled(nn.Module):
    """Returns the noisy image times a number, at first 1."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x


def denoiser(noise: float = 25) -> Denoiser:
    return Denoiser(Scaled(), noise, learning_rate=0.1, weight_decay=0.0)


def trainer(**options) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, **options,
    )  # fmt: skip


def batches(count: int, batch_size: int) -> DataLoader:
    grey = normalise(torch.full((count, 3, 32, 32), 128, dtype=torch.uint8))
    items = [DenoisingBatch(image, torch.tensor(i)) for i, image in enumerate(grey)]
    return DataLoader(items, batch_size=batch_size)  # pyright: ignore


@pytest.mark.parametrize("noise", [0, 25])
def test_noise_has_the_deviation_asked_for_in_every_channel(noise):
    model = denoiser(noise)
    (batch,) = batches(64, 64)
    added = model.add_noise(batch) - batch.images
    deviations = added.std(dim=(0, 2, 3)) * torch.tensor(PIXEL_STD)
    assert deviations.tolist() == pytest.approx([noise] * 3, rel=0.008)


def test_the_loss_is_the_squared_error_of_what_the_network_returns():
    model = denoiser()
    (batch,) = batches(4, 4)
    noisy = model.add_noise(batch)
    loss = model.training_step(batch, 0)
    torch.testing.assert_close(loss, ((noisy - batch.images) ** 2).mean())
    loss.backward()
    assert model.network.scale.grad != 0


def test_scores_are_those_of_the_whole_set():
    """Noise alone has 20 lg(255 / 25) decibels, the same noise in batches of any size."""
    results = [trainer().test(denoiser(), batches(7, size), verbose=False)[0] for size in (3, 7)]
    assert set(results[0]) == {"test/loss", "test/psnr"}
    assert results[0] == pytest.approx(results[1])
    assert results[0]["test/psnr"] == pytest.approx(20.17, abs=0.1)
    expected = sum((25 / deviation) ** 2 for deviation in PIXEL_STD) / 3
    assert results[0]["test/loss"] == pytest.approx(expected, rel=0.03)


def test_images_without_seeds_are_an_error_that_says_what_to_use():
    other = DataLoader([(torch.randn(3, 4, 4), 1)], batch_size=1)  # pyright: ignore
    with pytest.raises(MisconfigurationException, match=r"got a list.*data=coco_tiny with model=d"):
        trainer(max_epochs=1).fit(denoiser(), other, other)


def test_noise_is_not_negative():
    with pytest.raises(ValueError, match="noise: expected a number of at least 0, got -1"):
        denoiser(-1)
