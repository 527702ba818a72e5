"""Times how long training on COCO waits for a loader: ``python scripts/benchmark.py loading``.

Writes::

    loading_<device>.json
        command, date, method, environment, device, overrides
        rows              one for each model, without and with the cache of decoded images:
            experiment, cache_images
            error, step_ms, samples_per_s, peak_memory_mb, data_wait_fraction
                          as scripts/benchmarks/training/training_run.py measures them
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from rich.table import Table

from benchmarks.training.training_run import METHOD, measure_training
from hoconv.commands import count, write_json
from hoconv.tables import show

EXPERIMENTS = ("coco_segmentation", "coco_captions")
OVERRIDES = (
    "data.image_size=224", "data.num_workers=2", "data.device=cpu", "data.batch_size=8",
    "model.network.depth=5",
)  # fmt: skip
STEPS, INTERVAL = 40, 5


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--experiment", nargs="+", choices=EXPERIMENTS, default=list(EXPERIMENTS),
                        help="default: both")  # fmt: skip
    parser.add_argument(
        "--steps", type=count, default=STEPS, help="of each run; default: %(default)s"
    )
    parser.add_argument(
        "--timeout", type=float, default=600, help="seconds for each run; default: %(default)s"
    )
    parser.add_argument("overrides", nargs="*", default=list(OVERRIDES),
                        help="of train.py; default: " + " ".join(OVERRIDES))  # fmt: skip


def run(arguments: argparse.Namespace, head: dict[str, Any]) -> None:
    """Measures, shows and writes the results."""
    for device in arguments.device:
        measured = head | {"method": METHOD, "device": device, "overrides": arguments.overrides}
        measured["rows"] = [
            _row(experiment, cache, device, arguments)
            for experiment in arguments.experiment
            for cache in (False, True)
        ]
        show(_table(measured["rows"]))
        write_json(arguments.out / f"loading_{device}.json", measured)


def _row(experiment: str, cache: bool, device: str, arguments: argparse.Namespace) -> dict:
    print(f"{experiment}, data.cache_images={cache}", flush=True)
    overrides = (
        f"experiment={experiment}", *arguments.overrides, f"data.cache_images={cache}",
        f"trainer={'gpu' if device == 'cuda' else 'cpu'}",
    )  # fmt: skip
    found = measure_training(
        overrides, arguments.steps, INTERVAL, arguments.timeout, torch.get_num_threads()
    )
    return {"experiment": experiment, "cache_images": cache, **found}


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table("experiment", "images decoded", title="Waiting for data")
    for column in ("ms a step", "samples/s", "waiting for data"):
        table.add_column(column, justify="right")
    for row in rows:
        cells = [row["error"], "", ""] if row["error"] else [
            f"{row['step_ms']['median_ms']:.4g}",
            f"{row['samples_per_s']:,.3g}",
            f"{row['data_wait_fraction']:.1%}",
        ]  # fmt: skip
        table.add_row(row["experiment"], "ahead" if row["cache_images"] else "each time", *cells)
    return table
