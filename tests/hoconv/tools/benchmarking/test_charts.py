"""The map of a grid: what it says where there is no time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from matplotlib.axes import Axes

from hoconv.tools.benchmarking.charts import draw_map


def row(size: str, contender: str, ms: float | None, error: str | None = None) -> dict[str, Any]:
    time = ms and {"median_ms": ms, "share_of_floor": 0.5 / ms}
    return {"size": size, "contender": contender, "error": error, "forward": time, "backward": time}


def test_a_call_without_a_time_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    write = Axes.text

    def text(panel: Axes, x: float, y: float, label: str, **options: Any) -> Any:
        if x == 0:  # forward; backward says the same
            said.append(label)
        return write(panel, x, y, label, **options)

    monkeypatch.setattr(Axes, "text", text)
    draw_map(
        {
            "operator": "toy", "device": "cuda", "dtype": "float32",
            "environment": {"gpu": "a GPU", "torch": "2.11"},
            "rows": [
                row("both", "compiled", 4.0), row("both", "cuda", 1.0),
                row("peer is wrong", "compiled", None, "wrong: output: error 1"),
                row("peer is wrong", "cuda", 2.0),
                row("peer fails", "compiled", None, "no such op"), row("peer fails", "cuda", 2.0),
                row("no peer", "cuda", 2.0),
                row("none", "compiled", 4.0), row("none", "cuda", None, "out of memory"),
            ],
        },
        tmp_path / "map.png",
    )  # fmt: skip
    assert said[:5] == ["50%", "25%", "25%", "25%", "out of memory"]
    assert said[5:] == ["4", "wrong", "failed", "not timed", "out of memory"]
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
