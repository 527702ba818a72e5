import math
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from lightning_fabric.utilities.exceptions import MisconfigurationException
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from models.tasks.segmenter import Segmenter, pixel_cross_entropy, upsample_classes

IGNORE = 255


class Constant(nn.Module):
    """Predicts class 1 for the pixels whose first channel is positive, else class 0, of three."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * torch.stack((-x[:, 0], x[:, 0], torch.full_like(x[:, 0], -9)), dim=1)


def segmenter() -> Segmenter:
    return Segmenter(lambda weights: Constant(), 3, learning_rate=0.1, weight_decay=0.0)


def trainer(**options) -> pl.Trainer:
    quiet: dict[str, Any] = {
        "accelerator": "cpu", "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False,
    }  # fmt: skip
    return pl.Trainer(**quiet | options)


def test_loss_is_the_mean_over_labelled_pixels():
    logits = torch.randn(2, 4, 3, 5, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(4, (2, 3, 5))
    labels[0, 1] = IGNORE
    expected = [
        -logits[b, :, h, w].log_softmax(0)[labels[b, h, w]]
        for b in range(2)
        for h in range(3)
        for w in range(5)
        if labels[b, h, w] != IGNORE
    ]
    loss = pixel_cross_entropy(logits, labels).value()
    torch.testing.assert_close(loss, torch.stack(expected).mean())
    loss.backward()
    assert logits.grad is not None
    assert not logits.grad[0, :, 1].any()


def test_loss_of_nothing_is_no_number_and_changes_no_weight():
    logits = torch.randn(1, 4, 2, 2, requires_grad=True)
    mean = pixel_cross_entropy(logits, torch.full((1, 2, 2), IGNORE))
    assert mean.value().isnan()
    loss = mean.share()
    loss.backward()
    assert loss == 0
    assert logits.grad is not None
    assert not logits.grad.any()


def test_metrics_are_those_of_the_whole_set():
    """Against a count by hand; class 2 never occurs and is left out of the mean."""
    images = torch.randn(7, 3, 4, 4)
    labels = (torch.rand(7, 4, 4) > 0.5).to(torch.uint8)
    labels[2] = IGNORE
    labels[3, :2] = IGNORE
    predicted = images[:, 0] > 0
    counted = labels != IGNORE
    ious = []
    for label in (0, 1):
        truth, found = (labels == label) & counted, (predicted == label) & counted
        ious.append((truth & found).sum() / (truth | found).sum())
    accuracy = ((predicted == labels) & counted).sum() / counted.sum()

    batches = DataLoader(list(zip(images, labels)), batch_size=3)  # pyright: ignore
    (metrics,) = trainer().test(segmenter(), batches, verbose=False)
    assert metrics["test/mean_iou"] == pytest.approx(torch.stack(ious).mean().item())
    assert metrics["test/pixel_accuracy"] == pytest.approx(accuracy.item())


@pytest.mark.parametrize("label", [0, IGNORE], ids=["background", "crowds"])
def test_scores_without_an_object_are_no_numbers(label):
    labels = torch.full((3, 4, 4), label, dtype=torch.uint8)
    batches = DataLoader(list(zip(torch.randn(3, 3, 4, 4), labels)), batch_size=2)  # pyright: ignore
    (metrics,) = trainer().test(segmenter(), batches, verbose=False)
    finite = {name for name, value in metrics.items() if math.isfinite(value)}
    assert finite == ({"test/loss"} if label == 0 else set())
    assert set(metrics) == {"test/loss", "test/mean_iou", "test/pixel_accuracy"}


def test_what_is_no_number_is_never_the_best(tmp_path):
    """The first epoch validates on crowds alone, the others do not."""

    class Data(pl.LightningDataModule):
        def train_dataloader(self) -> DataLoader:
            return DataLoader([(torch.zeros(3, 4, 4), torch.ones(4, 4))])  # pyright: ignore

        def val_dataloader(self) -> DataLoader:
            assert self.trainer is not None
            label = IGNORE if self.trainer.current_epoch != 1 else 1
            return DataLoader([(torch.zeros(3, 4, 4), torch.full((4, 4), label))])  # pyright: ignore

    for monitor, mode in (("val/mean_iou", "max"), ("val/loss", "min")):
        best = ModelCheckpoint(tmp_path / mode, "{epoch}", monitor=monitor, mode=mode)
        trainer(
            enable_checkpointing=True, callbacks=[best], max_epochs=3,
            reload_dataloaders_every_n_epochs=1, num_sanity_val_steps=0,
        ).fit(segmenter(), datamodule=Data())  # fmt: skip
        assert Path(best.best_model_path).name == "epoch=1.ckpt"


def test_labels_of_whole_images_are_an_error_that_says_what_to_use():
    batches = DataLoader([(torch.randn(3, 4, 4), 1)], batch_size=1)  # pyright: ignore
    with pytest.raises(MisconfigurationException, match=r"got \(1,\).*data=coco_tiny"):
        trainer(max_epochs=1).fit(segmenter(), batches, batches)


@pytest.mark.parametrize("size", [(4, 4), (9, 7), (2, 3)])
def test_classes_are_those_of_the_logits_interpolated_all_at_once(size):
    logits = torch.randn(6, 4, 4)
    expected = F.interpolate(logits[None], size, mode="bilinear").argmax(1)[0]
    assert torch.equal(upsample_classes(logits, size), expected.to(torch.uint8))
