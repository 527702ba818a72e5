"""Tables fit the terminal."""

from __future__ import annotations

import pytest
from rich.table import Table

from hoconv.tools import tables


@pytest.mark.parametrize("width", [200, 60, 40])
def test_a_table_that_is_too_wide_is_turned_and_nothing_is_cut(monkeypatch, capsys, width):
    monkeypatch.setattr(tables, "PIPE_WIDTH", width)
    headings = ("contender", "forward, ms", "backward, ms", "of the floor", "peak memory, MB")
    table = Table(*headings, title="operator")
    cells = [[f"name{row}", *(f"{row}.{column}23" for column in range(4))] for row in range(6)]
    for row in cells:
        table.add_row(*row)
    tables.show(table)
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= width
    for text in (*headings, *(cell for row in cells for cell in row), "operator"):
        assert text in out
    assert ("name0" in out.split("forward")[0]) == (width < 200)
