"""Times how long training on COCO waits for its data: ``python scripts/benchmark.py loading``.

Writes::

    loading_<device>.json
        command, date, method, environment, device, overrides, images
        rows              one for each model, number of images a batch, and source of the images:
            experiment, batch_size
            source            one of `SOURCES`
            error, step_ms, samples_per_s, peak_memory_mb, data_wait_fraction
                          as scripts/benchmarks/training/training_run.py measures them
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import ROOT
from rich.table import Table

from benchmarks.training.training_run import METHOD, add_run_options, measure_training
from hoconv.tools.commands import count, write_json
from hoconv.tools.tables import show

EXPERIMENTS = ("coco_segmentation", "coco_captions")
OVERRIDES = ("data.image_size=224", "model.network.depth=5")
SOURCES = {  # where images come from -> the overrides that choose it
    "a loader": ("data.cache_images=false", "data.device=cpu"),
    "the GPU": ("data.cache_images=false", "data.device=gpu"),
    "the cache": ("data.cache_images=true", "data.device=auto"),
}
IMAGES = 2000
STEPS, INTERVAL = 60, 5
LISTS = ("images", "annotations")  # of an annotation file, whose entries have ids


def add_options(parser: argparse.ArgumentParser) -> None:
    data_dir = Path(os.environ.get("HOCONV_DATA_DIR", ROOT / "data"))
    parser.add_argument("--input", type=Path, default=data_dir / "coco", metavar="FOLDER",
                        help="of COCO; default: coco in HOCONV_DATA_DIR, or in data/ of the "
                        "project")  # fmt: skip
    parser.add_argument("--images", type=count, default=IMAGES, metavar="N",
                        help="COCO's training images repeat under other names until there are so "
                        "many; default: %(default)s")  # fmt: skip
    parser.add_argument("--experiment", nargs="+", choices=EXPERIMENTS, default=list(EXPERIMENTS),
                        help="default: both")  # fmt: skip
    parser.add_argument("--batch-size", nargs="+", type=count, default=[8, 64], metavar="N",
                        help="default: %(default)s")  # fmt: skip
    parser.add_argument("--source", nargs="+", choices=SOURCES, default=list(SOURCES),
                        help="of the images; default: all that the device has")  # fmt: skip
    add_run_options(parser, STEPS, 600, OVERRIDES)


def run(arguments: argparse.Namespace, head: dict[str, Any]) -> None:
    """Measures, shows and writes the results."""
    for device in arguments.device:
        path = arguments.out / f"loading_{device}.json"
        measured = head | {
            "method": METHOD,
            "device": device,
            "overrides": arguments.overrides,
            "images": arguments.images,
            "rows": [],
        }
        with tempfile.TemporaryDirectory() as folder:
            _repeat(arguments.input, Path(folder), arguments.images)
            for experiment in arguments.experiment:
                for batch_size in arguments.batch_size:
                    for source in arguments.source:
                        if device == "cpu" and source == "the GPU":
                            continue
                        row = _row(experiment, batch_size, source, device, folder, arguments)
                        measured["rows"].append(row)
                        write_json(path, measured, say=False)
        show(_table(measured["rows"]))
        print(path)


def _repeat(source: Path, folder: Path, images: int) -> None:
    """Writes a data set whose training images are those of another, under as many names as there
    are to be images; those that validate are as they are."""
    (folder / "annotations").mkdir()
    (folder / "val").symlink_to(source.resolve() / "val2017")
    (folder / "train").mkdir()
    for kind in ("instances", "captions"):
        name = f"{kind}_{{}}.json"
        annotations = source.resolve() / "annotations"
        val = annotations / name.format("val2017")
        (folder / "annotations" / name.format("val")).symlink_to(val)
        file = json.loads((annotations / name.format("train2017")).read_text())
        repeated: dict[str, list[dict[str, Any]]] = {what: [] for what in LISTS}
        first = {what: max(entry["id"] for entry in file[what]) + 1 for what in LISTS}
        copy = 0
        while len(repeated["images"]) < images:
            numbers = set()
            for image in file["images"][: images - len(repeated["images"])]:
                numbers.add(image["id"])
                link = folder / "train" / f"{copy}_{image['file_name']}"
                if not link.exists():
                    link.symlink_to(source.resolve() / "train2017" / image["file_name"])
                repeated["images"].append(
                    image | {"id": image["id"] + copy * first["images"], "file_name": link.name}
                )
            repeated["annotations"] += [
                annotation
                | {
                    "id": annotation["id"] + copy * first["annotations"],
                    "image_id": annotation["image_id"] + copy * first["images"],
                }
                for annotation in file["annotations"]
                if annotation["image_id"] in numbers
            ]
            copy += 1
        (folder / "annotations" / name.format("train")).write_text(json.dumps(file | repeated))


def _row(
    experiment: str,
    batch_size: int,
    source: str,
    device: str,
    folder: str,
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    print(f"{experiment}, {batch_size} a batch, images from {source}", flush=True)
    overrides = (
        f"experiment={experiment}", f"data.folder={folder}", f"data.cache_dir={folder}/cache",
        *arguments.overrides, f"data.batch_size={batch_size}", *SOURCES[source],
        f"trainer={'gpu' if device == 'cuda' else 'cpu'}",
    )  # fmt: skip
    found = measure_training(
        overrides, arguments.steps, INTERVAL, arguments.timeout, torch.get_num_threads()
    )
    return {"experiment": experiment, "batch_size": batch_size, "source": source, **found}


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table("experiment", "batch", "images from", title="Waiting for data")
    for column in ("ms per step", "samples/s", "waiting"):
        table.add_column(column, justify="right")
    for row in rows:
        cells = [row["error"], "", ""] if row["error"] else [
            f"{row['step_ms']['median_ms']:.4g}",
            f"{row['samples_per_s']:,.3g}",
            f"{row['data_wait_fraction']:.1%}",
        ]  # fmt: skip
        table.add_row(row["experiment"], str(row["batch_size"]), row["source"], *cells)
    return table
