"""The sub-command `images` of scripts/benchmark.py: what goes through the model, what it writes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from tests.datamodules.coco.files import write_jpeg

Script = Callable[[str], ModuleType]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Five images and a file that is none."""
    folder = tmp_path / "coco" / "val2017"
    folder.mkdir(parents=True)
    for i in range(5):
        write_jpeg(torch.full((3, 9, 12), 40 * i, dtype=torch.uint8), folder / f"{i}.jpg")
    (folder / "damaged.jpg").write_bytes(b"no image")
    return folder


@pytest.fixture
def images(script: Script, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, with a model of small images."""
    module = script("benchmarks.training.images")
    monkeypatch.setattr(module, "BATCH", {"cpu": 2})
    small = dataclasses.replace(module.NETWORK, image_shape=(3, 8, 8))
    monkeypatch.setattr(module, "NETWORK", small)
    return module


def test_every_implementation_sees_so_many_images(
    script: Script, images: ModuleType, folder: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    seen: list[Tensor] = []

    class Seen(nn.Sequential):
        def forward(self, input: Tensor) -> Tensor:
            seen.append(input)
            return super().forward(input)

    build = images.NETWORK.build
    network = dataclasses.replace(images.NETWORK, build=lambda: Seen(*build()))
    monkeypatch.setattr(images, "NETWORK", network)
    command = ["images", "--device", "cpu", "--out", str(tmp_path), "--images", "12"]
    with pytest.warns(UserWarning, match=r"damaged\.jpg"):
        assert script("benchmark").main([*command, "--input", str(folder.parent)]) == 0

    record = json.loads((tmp_path / "images_cpu.json").read_text())
    assert (record["images"], record["files"], record["student_project_s"]) == (12, 6, 213.0)
    assert [row["impl"] for row in record["rows"]] == ["reference", "cpp"]
    done = [row for row in record["rows"] if row["error"] is None]
    assert done
    for row in done:
        assert 0 < row["reading_s"] < row["seconds"]
        assert row["images_per_s"] == pytest.approx(12 / row["seconds"])
    assert len(torch.cat(seen)) == len(done) * (2 + images.PASSES * 12)  # a batch to warm up
    again = torch.cat(seen)[2 : 2 + 12, 0, 0, 0]
    assert torch.equal(again[:5], again[5:10])
    assert len(again[:5].unique()) == 5


@pytest.mark.parametrize("left", [(), ("damaged.jpg",)], ids=["empty", "damaged"])
def test_no_images_are_one_line(
    script: Script, images: ModuleType, folder: Path, capsys: pytest.CaptureFixture[str],
    left: tuple[str, ...],
) -> None:  # fmt: skip
    for path in folder.iterdir():
        if path.name not in left:
            path.unlink()
    command = ["images", "--device", "cpu", "--out", str(folder / "out"), "--input", str(folder)]
    assert script("benchmark").main(command) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("Error: input: ")
    assert str(folder) in line
