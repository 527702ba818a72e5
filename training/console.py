"""Printing to the terminal: configuration, implementations, results, errors.

Plain text where the output is a file or a pipe: no colours, no moving bar, no cut lines.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_only
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

GROUPS = (
    "experiment", "data", "model", "optimizer", "scheduler", "callbacks", "logger", "trainer",
    "debug", "sweep",
)  # fmt: skip


class _Console(Console):
    """Prints text as it is, without rich's markup; drops what cannot be written, to a full disk or
    a closed pipe: the run goes on."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(markup=False, **arguments)

    def print(self, *args: Any, **kwargs: Any) -> None:
        with contextlib.suppress(OSError):
            super().print(*args, **kwargs)


def take_any_text() -> None:
    """Lets the terminal, or what takes its place, show what its encoding lacks as ``\\xe9``: the
    name of a file ends no run."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def stdout() -> Console:
    """A console that is silent in all processes of a distributed run but the first."""
    quiet = os.environ.get("LOCAL_RANK", "0") != "0"
    console = _Console(quiet=quiet)
    return console if console.is_terminal else _Console(quiet=quiet, width=120)


def show_config(config: DictConfig) -> None:
    """Prints the whole configuration."""
    text = OmegaConf.to_yaml(config, resolve=True)
    stdout().print(Syntax(text, "yaml", theme="ansi_dark", background_color="default"))


def show_choices(choices: Mapping[str, Any], overrides: Iterable[str]) -> None:
    """Prints a line for each group: what was chosen of it, and which of its values were set.

    Args:
        choices: group -> option.
        overrides: ``name=value``, of the command line or a sweep.
    """
    chosen = {group: choices.get(group) for group in GROUPS}
    given: dict[str, list[str]] = {group: [] for group in (*GROUPS, "")}
    for override in overrides:
        name, _, value = override.lstrip("+~").partition("=")
        group = name.partition(".")[0]
        if name in GROUPS:
            chosen[name] = value.strip("[]")  # of several Hydra names none
        else:
            given[group if group in GROUPS else ""].append(override)
    table = Table(box=None, show_header=False, pad_edge=False)
    for group, values in given.items():
        if values or chosen.get(group) not in (None, "none"):
            table.add_row(group, chosen.get(group), Text(" ".join(values)))
    stdout().print(table)


def show_implementations(
    names: Mapping[str, str], reasons: Mapping[str, str], data: tuple[str, str] | None
) -> None:
    """Prints the start-up table: the implementation of each layer, and why it was chosen; and where
    the data comes from, and why, if the data says so."""
    table = Table("layer", "implementation", "why", title="Implementations")
    for layer, name in names.items():
        table.add_row(layer, name, reasons[layer])
    if data is not None:
        table.add_section()
        table.add_row("data", *data)
    stdout().print(table)


def show_multipliers(lines: object) -> None:
    """Prints which layers were made approximate, and why others were not, a line for each."""
    stdout().print(f"Multipliers\n{lines}", soft_wrap=True, highlight=False)


def show_results(
    metrics: Mapping[str, float],
    notes: Iterable[str],
    throughput: Mapping[str, float | None],
    capture: Mapping[str, Any],
    cost: Mapping[str, Any],
    paths: Iterable[tuple[str, Path | None]],
) -> None:
    table = Table("measured", title="Results")
    table.add_column("value", justify="right")
    for name, value in metrics.items():
        table.add_row(name, f"{value:.6g}")
    table.add_section()
    for name, label, form in (
        ("samples_per_sec", "samples/s", "{:,.0f}"),
        ("step_ms", "ms per step", "{:.2f}"),
        ("data_wait_fraction", "waiting for data", "{:.1%}"),
        ("peak_memory_mb", "peak memory, MB", "{:,.0f}"),
        ("warmup_seconds", "warm-up and compiling, s", "{:.1f}"),
    ):
        if name in throughput:  # of a fit
            value = throughput[name]
            table.add_row(label, "too short to measure" if value is None else form.format(value))
    if capture.get("captures"):
        table.add_section()
        table.add_row("captured steps", f"{capture['replays']:,}")
        table.add_row("CUDA graphs", f"{capture['captures']:,}")
        for why, count in capture["eager_steps"].items():
            table.add_row(f"eager steps: {why}", f"{count:,}")
        table.add_row("capturing, s", f"{capture['capture_seconds']:.1f}")
    if cost:
        table.add_section()
        table.add_row("multiplications of a sample", f"{cost['multiplications']:,}")
        if cost["unknown"]:
            table.add_row("those of unknown energy", f"{cost['unknown']:,}")
        if cost["energy_pj"] is not None:
            table.add_row("energy of the others, pJ" if cost["unknown"] else "their energy, pJ",
                          f"{cost['energy_pj']:,.0f}")  # fmt: skip
    console = stdout()
    if table.row_count:  # a prediction may measure nothing
        console.print(table)
    rows = [("note", note) for note in notes]
    rows += [(label, str(short(path))) for label, path in paths if path is not None]
    for label, text in rows:
        console.print(f"{label:<12}{text}", soft_wrap=True, highlight=False)


def show_problem(kind: str, message: str) -> None:
    """Prints one line on stderr, red in a terminal."""
    _complain(f"{kind}: {message}", "bold red")


@contextlib.contextmanager
def plain_warnings() -> Iterator[None]:
    """Shows Python's warnings as one line, without the place in a library that warns."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: warn(" ".join(str(message).split()))
        yield


@rank_zero_only
def warn(message: str) -> None:
    """Prints one line on stderr about a problem that does not stop the run."""
    _complain(f"Warning: {message}", "yellow")


def _complain(text: str, style: str) -> None:
    """Prints a line on stderr; while a bar moves, above it: rich has put a file there that does so,
    which its own consoles pass by."""
    console = _Console(stderr=True)
    with console.capture() as captured:
        console.print(text, style=style, soft_wrap=True, markup=False, highlight=False)
    with contextlib.suppress(OSError):
        sys.stderr.write(captured.get())


def short(path: Path) -> Path:
    """Returns the path relative to the working directory, if it is inside."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
