import numpy as np
import pytorch_lightning as pl
import torch
from PIL import Image
from torch import nn

from datamodules.coco import COCOTiny
from models.segmenter import Segmenter
from reporting.pictures import colours


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


def test_image_truth_and_prediction_are_side_by_side(tmp_path):
    data = COCOTiny(tmp_path / "cache", task="segmentation", image_size=16, batch_size=32)
    trainer = pl.Trainer(
        accelerator="cpu", default_root_dir=tmp_path, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, limit_val_batches=2,
    )  # fmt: skip
    model = Segmenter(lambda weights: AlwaysTwo(), 4, learning_rate=0.1, weight_decay=0.0)
    trainer.validate(model, datamodule=data, verbose=False)

    (path,) = (tmp_path / "pictures").iterdir()
    picture = np.asarray(Image.open(path))
    assert picture.shape == (8 * 16, 3 * 16, 3)
    batch = next(iter(data.val_dataloader()))
    for row in range(8):
        image, truth, prediction = np.split(picture[16 * row : 16 * (row + 1)], 3, axis=1)
        assert np.array_equal(image, batch.images[row].permute(1, 2, 0).numpy())
        assert np.array_equal(truth, colours()[batch.labels[row].long()].numpy())
        assert (prediction == colours()[2].numpy()).all()
