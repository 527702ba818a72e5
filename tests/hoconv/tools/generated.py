"""A package that `hoconv new` writes, as if it were installed."""

from __future__ import annotations

from pathlib import Path

from hoconv.tools import cli


def install(name: str, folder: Path) -> Path:
    """Does what `hoconv new` and `pip install -e` do; returns the folder that Python imports from,
    which is to be on its path."""
    assert cli.main(["new", name, str(folder)]) == 0
    path = folder / "src"
    info = path / f"{name}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[hoconv.operators]\n{name} = {name}\n")
    return path
