"""Times the simple model on photographs: ``python scripts/benchmark.py images``.

The model is the high-order layer on 3 x 224 x 224 images, global average pooling and a linear
classifier. Writes::

    images_<device>.json
        command, date, method, environment, device
        images            the number of images that went through
        files             the number of image files in the folder
        student_project_s the time that the student project reported for 1,000 COCO images
        rows              one for each implementation:
            impl
            error             null, or why nothing was measured
            seconds           for all images: of the pass that is the median
            reading_s         the part of it spent reading images
            images_per_s
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from common import ROOT
from rich.table import Table
from torch import Tensor

from benchmarks.training.step import CLASSES, NETWORKS, synchronize
from datamodules.images import DataNotFoundError
from datamodules.prediction import ImageFolder
from hoconv import HighOrderConv2d
from hoconv.dispatch.implementations import ImplementationError, choose
from hoconv.tools.benchmarking.measurement import failure, memory_limit, temporarily
from hoconv.tools.commands import count, write_json
from hoconv.tools.tables import show

NETWORK = NETWORKS["one layer at 224 x 224"]
IMAGES = 1000
BATCH = {"cpu": 8, "cuda": 64}
PASSES = 3
STUDENT_PROJECT_S = 213.0  # forward and backward, on a CPU
METHOD = (
    f"Images in batches of {BATCH['cpu']} on a CPU and of {BATCH['cuda']} on a GPU: each is read, "
    "decoded, resized to 224 x 224 and normalised, then forward, cross-entropy with random labels, "
    "and backward. A GPU decodes and resizes, in threads ahead; a CPU does it in turn with the "
    "rest. reading_s is the time in which no batch is there; time.perf_counter from the first file "
    "to the end of the last backward pass. Files repeat until there are as many images as asked "
    f"for. One batch before that is not timed. The median of {PASSES} passes. float32, no TF32. "
    "student_project_s was measured by others on another CPU."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    data_dir = Path(os.environ.get("HOCONV_DATA_DIR", ROOT / "data"))
    parser.add_argument("--input", type=Path, default=data_dir / "coco", metavar="FOLDER",
                        help="of images; default: coco in HOCONV_DATA_DIR, or in data/ of the "
                        "project")  # fmt: skip
    parser.add_argument("--images", type=count, default=IMAGES, help="default: %(default)s")


def run(arguments: argparse.Namespace, head: dict[str, Any]) -> None:
    """Measures, shows and writes the results."""
    for device in arguments.device:
        data = ImageFolder(arguments.input, NETWORK.image_shape, BATCH[device])
        implementations = HighOrderConv2d.operator.implementations.items()
        impls = [name for name, i in implementations if device in (i.devices or (device,))]
        measured = head | {
            "method": METHOD,
            "device": device,
            "images": arguments.images,
            "files": len(data.images),
            "student_project_s": STUDENT_PROJECT_S,
            "rows": [_row(impl, device, data, arguments.images) for impl in impls],
        }
        show(_table(measured))
        write_json(arguments.out / f"images_{device}.json", measured)
        data.teardown("predict")  # prints which files were skipped


def _row(impl: str, device: str, data: ImageFolder, count: int) -> dict[str, Any]:
    print(f"{impl}, {device}", flush=True)
    found: dict[str, Any] = dict.fromkeys(("seconds", "reading_s", "images_per_s"))

    def measure() -> None:
        passes = _measure_passes(impl, torch.device(device), data, count)
        found.update(sorted(passes, key=lambda each: each["seconds"])[PASSES // 2])

    try:
        choose(HighOrderConv2d.operator, impl, device)
    except ImplementationError as error:
        return {"impl": impl, "error": str(error), **found}
    with memory_limit(device), temporarily(torch.backends.cudnn, allow_tf32=False):
        return {"impl": impl, "error": failure(measure), **found}


def _measure_passes(
    impl: str, device: torch.device, data: ImageFolder, count: int
) -> list[dict[str, float]]:
    model = NETWORK.make(impl).to(device)
    accelerator = "gpu" if device.type == "cuda" else "cpu"
    data.trainer = pl.Trainer(accelerator=accelerator, devices=1, logger=False, barebones=True)

    def forward_and_backward(images: Tensor) -> None:
        labels = torch.randint(CLASSES, (len(images),), device=device)
        F.cross_entropy(model(images), labels).backward()
        model.zero_grad()

    for images in _batches(data, data.batch_size, device):
        forward_and_backward(images)
    synchronize(device)
    return [_time_pass(forward_and_backward, device, data, count) for _ in range(PASSES)]


def _time_pass(
    compute: Callable[[Tensor], None], device: torch.device, data: ImageFolder, count: int
) -> dict[str, float]:
    computing = 0.0
    begin = time.perf_counter()
    for images in _batches(data, count, device):
        begin_of_batch = time.perf_counter()
        compute(images)
        synchronize(device)
        computing += time.perf_counter() - begin_of_batch
    seconds = time.perf_counter() - begin
    return {
        "seconds": seconds,
        "reading_s": seconds - computing,
        "images_per_s": count / seconds,
    }


def _batches(data: ImageFolder, count: int, device: torch.device) -> Iterator[Tensor]:
    """Yields `count` images in batches; repeats the folder's."""
    left = count
    while left:
        before = left
        for batch in data.predict_dataloader():
            batch = batch._replace(images=batch.images[:left].to(device))
            images = data.on_after_batch_transfer(batch, 0).images
            left -= len(images)
            yield images
            if not left:
                return
        if left == before:
            raise DataNotFoundError(f"input: no image in {data.images.folder} can be read")


def _table(measured: dict[str, Any]) -> Table:
    title = f"{measured['images']:,} images, forward and backward"
    table = Table("", title=title)
    for column in ("seconds", "of these reading", "images/s"):
        table.add_column(column, justify="right")
    for row in measured["rows"]:
        cells = [row["error"], "", ""] if row["error"] else [
            f"{row['seconds']:.4g}", f"{row['reading_s']:.3g}", f"{row['images_per_s']:.4g}"
        ]  # fmt: skip
        table.add_row(row["impl"], *cells)
    table.add_row("student project, 1,000 images", f"{measured['student_project_s']:.4g}", "", "")
    return table
