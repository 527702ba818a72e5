"""Characterises every approximate multiplier: ``python scripts/characterize.py``.

Measures the relative error ``(product - a * b) / (a * b)`` over random operands, uniform in [1, 2)
because the error depends on mantissas only, and over all pairs of the integers from 1 to 255.
Writes, and draws beside it the distribution of the errors over random operands::

    approx_characterization.json
        command, date, environment
        seed
        random, pairs     multiplier -> samples; bias_percent, the mean of the errors, and its
                          standard error; mean_percent, of their absolute values; peak_percent,
                          the largest absolute value
        published         multiplier -> the same as published by its authors
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.table import Table
from torch import Tensor

from hoconv import approx
from hoconv.tools.benchmarking.charts import COLOURS, save
from hoconv.tools.commands import add_out_option, record, write_json
from hoconv.tools.tables import show

# Saadat, Bokhari, Parameswaran, IEEE TCAD 2018.
PUBLISHED = {
    "mbm32": {"bias_percent": -0.094, "mean_percent": 2.58, "peak_percent": 7.81},
    "mbm16": {"bias_percent": -0.095, "mean_percent": 2.60, "peak_percent": 9.35},
}
BATCH = 2**20
BINS = 200
LIMIT = 0.15  # the histogram ranges from -LIMIT to LIMIT


class Errors:
    """Accumulates relative errors: their sums, the largest one, a histogram."""

    def __init__(self) -> None:
        self.count, self.sum, self.absolute, self.squares, self.peak = 0, 0.0, 0.0, 0.0, 0.0
        self.histogram = torch.zeros(BINS)

    def add(self, a: Tensor, b: Tensor, multiplier: str) -> None:
        exact = a.double() * b.double()
        errors = approx.multiply(a, b, multiplier).double() / exact - 1
        self.count += errors.numel()
        self.sum += errors.sum().item()
        self.absolute += errors.abs().sum().item()
        self.squares += errors.square().sum().item()
        self.peak = max(self.peak, errors.abs().max().item())
        self.histogram += torch.histc(errors.float(), BINS, -LIMIT, LIMIT)

    def summary(self) -> dict[str, Any]:
        variance = self.squares / self.count - (self.sum / self.count) ** 2
        return {
            "samples": self.count,
            "bias_percent": 100 * self.sum / self.count,
            "bias_standard_error_percent": 100 * math.sqrt(variance / self.count),
            "mean_percent": 100 * self.absolute / self.count,
            "peak_percent": 100 * self.peak,
        }


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=100 * BATCH,
                        help="random operands of each multiplier")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0)
    add_out_option(parser)
    arguments = parser.parse_args(argv)

    names = [name for name in approx.MULTIPLIERS if name != "exact"]
    random = {name: Errors() for name in names}
    for a, b in _random(arguments.samples, arguments.seed):
        for name in names:
            random[name].add(a, b, name)
    pairs = {name: Errors() for name in names}
    integers = torch.arange(1, 256.0)
    for name in names:
        pairs[name].add(integers.repeat_interleave(255), integers.repeat(255), name)

    measured = {
        "random": {name: errors.summary() for name, errors in random.items()},
        "pairs": {name: errors.summary() for name, errors in pairs.items()},
        "published": PUBLISHED,
    }
    show(_table(measured))
    path = arguments.out / "approx_characterization.json"
    write_json(
        path, record("python scripts/characterize.py", argv) | {"seed": arguments.seed} | measured
    )
    _draw(random, path.with_suffix(".png"))


def _random(samples: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for first in range(0, samples, BATCH):
        a, b = torch.rand(2, min(BATCH, samples - first), generator=generator)
        yield 1 + a, 1 + b


def _table(measured: dict[str, Any]) -> Table:
    table = Table("multiplier", "operands", title="Relative error, percent")
    for column in ("bias", "mean", "peak"):
        table.add_column(column, justify="right")
    for name in measured["random"]:
        for operands in ("random", "pairs", "published"):
            if row := measured[operands].get(name):
                values = (row[f"{column}_percent"] for column in ("bias", "mean", "peak"))
                table.add_row(name, operands, *(f"{value:.3f}" for value in values))
    return table


def _draw(errors: dict[str, Errors], path: Path) -> None:
    figure = Figure(figsize=(8, 5), layout="constrained")
    panel = figure.subplots()
    width = 2 * LIMIT / BINS
    middles = [100 * (-LIMIT + (i + 0.5) * width) for i in range(BINS)]
    for colour, (name, measured) in zip(COLOURS, errors.items(), strict=False):
        share = measured.histogram / measured.count / (100 * width)
        panel.plot(middles, share.tolist(), color=colour, label=name)
    panel.set(xlabel="relative error, %", ylabel="share of products per %", ylim=(0, None))
    save(figure, "Relative error of a product of random operands", path, columns=4)


if __name__ == "__main__":
    main()
