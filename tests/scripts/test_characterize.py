"""scripts/characterize.py: what it writes, and that it finds the published figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hoconv.approx import MULTIPLIERS


def test_finds_the_published_errors(script, tmp_path: Path, capsys) -> None:
    script("characterize").main(["--samples", "2000000", "--out", str(tmp_path)])
    written = json.loads((tmp_path / "approx_characterization.json").read_text())
    assert list(written["random"]) == [name for name in MULTIPLIERS if name != "exact"]
    for name, published in written["published"].items():
        row = written["random"][name]
        assert row["samples"] == 2_000_000
        assert row["bias_percent"] == pytest.approx(published["bias_percent"], abs=0.01)
        assert row["mean_percent"] == pytest.approx(published["mean_percent"], abs=0.005)
        assert row["peak_percent"] == pytest.approx(published["peak_percent"], rel=0.02)
    assert {row["samples"] for row in written["pairs"].values()} == {255**2}
    # Mitchell's largest error is 1/9, of 1.5 times 1.5.
    assert written["pairs"]["mitchell32"]["peak_percent"] == pytest.approx(100 / 9)
    assert (tmp_path / "approx_characterization.png").stat().st_size > 0
    assert "published" in capsys.readouterr().out
