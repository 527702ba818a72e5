"""The tables that ``hoconv benchmark`` prints of a record."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from hoconv.tools.commands import hardware


def tables(measured: dict[str, Any]) -> list[Table]:
    """A table for the forward and one for the backward."""
    floor = (
        f"copy {measured['copy_gb_per_s']:.4g} GB/s, "
        f"matrix product {measured['matmul_tflop_per_s']:.3g} TFLOP/s"
    )
    made = []
    for way in ("forward", "backward"):
        title = f"{measured['operator']}, {way}, {measured['dtype']}, {hardware(measured)}\n{floor}"
        table = Table(title=title, box=SIMPLE)
        table.add_column("size", justify="right")
        table.add_column("contender")
        for column in ("ms", "spread\nms", "floor\nms", "share of\nfloor", "extra\nMiB"):
            table.add_column(column, justify="right")
        for i, row in enumerate(measured["rows"]):
            if i and row["size"] != measured["rows"][i - 1]["size"]:
                table.add_section()
            table.add_row(str(row["size"]), row["contender"], *_cells(row, way))
        made.append(table)
    return made


def kernels_table(measured: dict[str, Any]) -> Table:
    """A table of the kernels that the last contender, which is `auto`'s choice, launches."""
    contender = measured["rows"][-1]["contender"]
    table = Table(title=f"{measured['operator']}, {contender}: kernels", box=SIMPLE)
    for column in ("size", "forward", "backward"):
        table.add_column(column)
    for row in measured["rows"]:
        if row["contender"] == contender and row["kernels"]:
            ways = (row["kernels"][way] for way in ("forward", "backward"))
            table.add_row(str(row["size"]), *map("\n".join, ways))
    return table


def _cells(row: dict[str, Any], way: str) -> list[str]:
    timing = row[way]
    if timing is None:
        return ["[red]failed" if row["error"] else "", "", "", "", ""]
    return [
        f"{timing['median_ms']:.4g}",
        f"{timing['p20_ms']:.4g}-{timing['p80_ms']:.4g}",
        f"{timing['floor_ms']:.3g}",
        f"{timing['share_of_floor']:.0%}",
        f"{row['extra_memory_bytes'] / 2**20:.3g}",
    ]
