"""Boxes found in images: COCO's format of results, and pictures, in the folder of the run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from PIL import Image
from pytorch_lightning.callbacks import BasePredictionWriter

from training import disk
from training.callbacks.pictures import draw_boxes, write


class BoxWriter(BasePredictionWriter):
    """``boxes/<name of the image>.png``: the image with its boxes, and ``detections.json``: all
    boxes as COCO's results (https://cocodataset.org/#format-results), which `COCO.loadRes` of
    pycocotools reads. ``image_id`` is the id in the annotation file, or of the images of a folder
    the name of the file; ``category_id`` is that of the annotation file of the training.

    The model's predict step returns boxes, scores and classes for each of the batch's names, and
    its `category_ids` has the id of each class. The names of the classes are the data's
    `class_names`, or their ids where it has none. The data's `read` returns an image.

    Args:
        min_score: the least probability of a box that is drawn.

    Raises:
        DiskError: a file cannot be written; those before it are there.
    """

    def __init__(self, min_score: float = 0.3) -> None:
        super().__init__("batch")
        self.min_score = min_score
        self._results: list[dict[str, Any]] = []

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._results = []

    def write_on_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: Any,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        ids = pl_module.category_ids
        data: Any = trainer.datamodule  # pyright: ignore
        names = data.class_names or [str(number) for number in ids]
        for name, image_id, found in zip(batch.names, batch.ids, prediction, strict=True):
            image_id = disk.plain(image_id) if isinstance(image_id, str) else image_id
            columns = (values.tolist() for values in found)
            for box, score, label in zip(*columns, strict=True):
                self._results.append(
                    {"image_id": image_id, "category_id": ids[label], "bbox": box, "score": score}
                )
            picture = Image.fromarray(data.read(name).movedim(0, -1).contiguous().numpy())
            shown = found.scores >= self.min_score
            boxes, classes = found.boxes[shown], found.classes[shown]
            boxes[:, 2:] += boxes[:, :2]
            texts = [
                f"{names[label]} {score:.2f}"
                for label, score in zip(classes, found.scores[shown], strict=True)
            ]
            draw_boxes(picture, boxes, classes, texts)
            write(Path(trainer.default_root_dir) / "boxes" / disk.file_name(name, ".png"), picture)

    def on_predict_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        results = self._results
        if trainer.world_size > 1:
            parts: list[Any] = [None] * trainer.world_size
            torch.distributed.all_gather_object(parts, results)
            results = [each for part in parts for each in part]
        if trainer.is_global_zero:
            with disk.replaced(Path(trainer.default_root_dir) / "detections.json") as file:
                file.write(json.dumps(results).encode())
