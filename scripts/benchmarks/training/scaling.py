"""Times training on 1, 2, 4... devices: ``python scripts/benchmark.py scaling``.

Writes::

    scaling_<device>.json
        command, date, method, environment, device, overrides
        rows              one for each number of devices:
            devices
            error, step_ms, samples_per_s, peak_memory_mb, data_wait_fraction
                          as training_run.py measures them; samples_per_s is of all devices
            efficiency    samples_per_s over the number of devices times samples_per_s of one
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from rich.table import Table

from benchmarks.training.training_run import METHOD as TRAINING
from benchmarks.training.training_run import add_run_options, measure_training
from hoconv.tools.commands import count, write_json
from hoconv.tools.tables import show

OVERRIDES = (
    "experiment=coco_segmentation", "data=coco_tiny", "data.image_size=224", "data.batch_size=32",
    "data.num_workers=12", "model.network.depth=5",
)  # fmt: skip
STEPS, INTERVAL = 200, 10
METHOD = (
    "The batch of each device stays the same (weak scaling). So do the threads of each process: "
    f"the machine's threads over the largest number of devices. {TRAINING}"
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--devices", nargs="+", type=count, default=[1, 2, 4],
                        help="how many; default: 1 2 4")  # fmt: skip
    add_run_options(parser, STEPS, 300, OVERRIDES)


def run(arguments: argparse.Namespace, head: dict[str, Any]) -> None:
    """Measures, shows and writes the results."""
    for device in arguments.device:
        measured = head | {
            "method": METHOD,
            "device": device,
            "overrides": arguments.overrides,
            "rows": measure(device, arguments),
        }
        show(_table(measured["rows"]))
        write_json(arguments.out / f"scaling_{device}.json", measured)


def measure(device: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Trains on each number of devices; returns a row for each."""
    rows: list[dict[str, Any]] = []
    threads = max(1, torch.get_num_threads() // max(arguments.devices))
    for devices in arguments.devices:
        trainer = (
            "trainer=ddp", f"trainer.devices={devices}",
            f"trainer.accelerator={'gpu' if device == 'cuda' else 'cpu'}",
        )  # fmt: skip
        print(f"{devices} x {device}", flush=True)
        found = measure_training(
            (*arguments.overrides, *trainer), arguments.steps, INTERVAL, arguments.timeout, threads
        )
        rows.append({"devices": devices, **found, "efficiency": None})
    alone = next((row["samples_per_s"] for row in rows if row["devices"] == 1), None)
    for row in rows:
        if alone and row["samples_per_s"]:
            row["efficiency"] = row["samples_per_s"] / (row["devices"] * alone)
    return rows


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table("devices", title="Weak scaling")
    for column in ("ms per step", "samples/s", "efficiency", "waiting for data"):
        table.add_column(column, justify="right")
    for row in rows:
        cells = [row["error"], "", "", ""] if row["error"] else [
            f"{row['step_ms']['median_ms']:.4g}",
            f"{row['samples_per_s']:,.0f}",
            "" if row["efficiency"] is None else f"{row['efficiency']:.0%}",
            f"{row['data_wait_fraction']:.0%}",
        ]  # fmt: skip
        table.add_row(str(row["devices"]), *cells)
    return table
