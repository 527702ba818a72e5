from pathlib import Path

import numpy as np
import pytorch_lightning as pl
import torch
from PIL import Image
from torch import nn

from datamodules.coco import COCOTiny
from models.networks.attention_decoder import AttentionDecoder
from models.tasks.captioner import Captioner
from models.tasks.denoiser import Denoiser
from models.tasks.segmenter import Segmenter
from tests.support import set_to_reference
from training.callbacks.pictures import (
    LINE,
    MIN_SIDE,
    CaptionPictures,
    DenoisingPictures,
    Pictures,
    SegmentationPictures,
    colours,
)


def test_colours_are_pascal_voc_s():
    """The first and some later ones, from the development kit's documentation."""
    table = colours()
    assert table.shape == (256, 3)
    for label, colour in {
        0: (0, 0, 0), 1: (128, 0, 0), 2: (0, 128, 0), 3: (128, 128, 0), 4: (0, 0, 128),
        15: (192, 128, 128), 20: (0, 64, 128), 255: (224, 224, 192),
    }.items():  # fmt: skip
        assert tuple(table[label].tolist()) == colour
    assert len(table.unique(dim=0)) == 256


class AlwaysTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.tensor([0.0, 0.0, 1.0, 0.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bias.view(1, 4, 1, 1).expand(len(x), 4, *x.shape[2:])


def validate(
    model: pl.LightningModule, pictures: Pictures, data: COCOTiny, folder: Path
) -> np.ndarray:
    """The picture that a validation leaves."""
    trainer = pl.Trainer(
        accelerator="cpu", default_root_dir=folder, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, limit_val_batches=2,
        callbacks=pictures,
    )  # fmt: skip
    trainer.validate(model, datamodule=data, verbose=False)
    (path,) = (folder / "pictures").iterdir()
    return np.asarray(Image.open(path))


def test_image_truth_and_prediction_are_side_by_side(tmp_path):
    data = COCOTiny(tmp_path / "cache", task="segmentation", image_size=16, batch_size=32)
    model = Segmenter(lambda weights: AlwaysTwo(), 4, learning_rate=0.1, weight_decay=0.0)
    picture = validate(model, SegmentationPictures(), data, tmp_path)
    heading, images, legend = np.split(picture, [LINE, LINE + 8 * MIN_SIDE])
    assert picture.shape[1] == 3 * MIN_SIDE
    assert all((part < 128).any() for part in np.split(heading, 3, axis=1)), "no heading"
    batch = next(iter(data.val_dataloader()))
    for label in batch.labels[:8].unique():
        assert (legend == colours()[label.long()].numpy()).all(2).sum() > 100
    images = images[:: MIN_SIDE // 16, :: MIN_SIDE // 16]
    for row in range(8):
        image, truth, prediction = np.split(images[16 * row : 16 * (row + 1)], 3, axis=1)
        assert np.array_equal(image, batch.images[row].permute(1, 2, 0).numpy())
        assert np.array_equal(truth, colours()[batch.labels[row].long()].numpy())
        assert (prediction == colours()[2].numpy()).all()


class Grey(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x)


def test_noisy_denoised_and_clean_images_are_side_by_side(tmp_path):
    data = COCOTiny(tmp_path / "cache", task="denoise", image_size=16, batch_size=4)
    model = Denoiser(Grey(), 25, learning_rate=0.1, weight_decay=0.0)
    picture = validate(model, DenoisingPictures(), data, tmp_path)
    heading, images = np.split(picture, [LINE])
    assert picture.shape[1] == 3 * MIN_SIDE
    assert all((part < 128).any() for part in np.split(heading, 3, axis=1)), "no heading"
    (batch, *_) = data.val_dataloader()
    images = images[:: MIN_SIDE // 16, :: MIN_SIDE // 16].astype(int)
    for row in range(4):
        noisy, denoised, image = np.split(images[16 * row : 16 * (row + 1)], 3, axis=1)
        assert np.array_equal(image, batch.images[row].permute(1, 2, 0).numpy())
        assert (denoised == (124, 116, 104)).all(), "the mean of all images"
        assert 10 < (noisy - image).std() < 30


def test_captions_are_beside_their_image(tmp_path, monkeypatch):
    data = COCOTiny(tmp_path / "cache", task="captions", image_size=96, batch_size=4, min_count=1)
    model = Captioner(
        lambda weights: set_to_reference(AttentionDecoder(width=4, hidden_size=8)), 0.1, 0.0,
        beam_width=1, max_length=5,
    )  # fmt: skip
    data.setup("validate")
    assert data.vocabulary is not None
    model.set_extra_state(data.vocabulary.words)
    monkeypatch.setattr(model, "describe", lambda images: ["", "one word", "two", 99 * "long "])
    picture = validate(model, CaptionPictures(), data, tmp_path)
    (batch, *_) = data.val_dataloader()
    assert len(picture) == 4 * 96
    ink = []
    for row in range(4):
        image, text = np.split(picture[96 * row : 96 * (row + 1)], [96], axis=1)
        assert np.array_equal(image, batch.images[row].permute(1, 2, 0).numpy())
        assert (text[:, -1] == 255).all(), "lines are broken before the border"
        ink.append((text < 128).sum())
    assert 0 < ink[0] < ink[1] < ink[3]
