"""Names that not every file and terminal takes: bytes that are no UTF-8, and very long ones."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from PIL import Image

from hoconv.files import PARTIAL
from training import console, disk
from training.results.table import GrowingTable

CPU = ("trainer=cpu", "impl=reference", "logger=none")
BYTES = os.fsdecode(b"\xff\xe9")  # no UTF-8
SHOWN = "\\udcff\\udce9"
# As long as a file system allows; and two that have the same beginning.
LONG = ["a" * 251 + ".png", "b" * 247 + "0.png", "b" * 247 + "1.png", "é" * 125 + ".png"]


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("kept")


@pytest.fixture
def trained(run, kept, tmp_path):
    """The checkpoint of a short run of a model, the same for all tests."""

    def train(model: str) -> Path:
        if not (kept / model).exists():
            done = run(
                f"model={model}", "data=coco_tiny", "data.image_size=16", "data.batch_size=4",
                "debug=fast", "model.network.width=4", f"data.cache_dir={tmp_path / 'cache'}", *CPU,
            )  # fmt: skip
            assert done.exit_code == 0, done.err
            shutil.copytree(done.folder, kept / model)
        return next((kept / model / "checkpoints").iterdir())

    return train


@pytest.fixture
def photos(tmp_path) -> list[str]:
    """The names of the images in the folder ``photos``, as they are in predictions."""
    folder = tmp_path / "photos"
    names = [f"a{BYTES}.png", f"{BYTES}/b.png", "[bold]c[/bold].jpg", *LONG]
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 16), "red").save(folder / name)
    return sorted(name.replace(BYTES, SHOWN) for name in names)


@pytest.mark.parametrize(
    ("model", "files"),
    [
        ("segmentation", "masks"),
        pytest.param("detection", "boxes", marks=pytest.mark.slow),
        pytest.param("captions", None, marks=pytest.mark.slow),
    ],
)
def test_every_image_is_predicted_whatever_its_name(run, trained, photos, tmp_path, model, files):
    checkpoint = trained(model)
    done = run("mode=predict", f"ckpt={checkpoint}", f"input={tmp_path / 'photos'}", *CPU)
    assert done.exit_code == 0, done.err
    assert done.results["metrics"] == {"predict/images": len(photos), "predict/skipped": 0}
    if model == "segmentation":
        with (done.folder / "masks.csv").open(encoding="utf-8", newline="") as file:
            named = {row["image"] for row in csv.DictReader(file)}
    elif model == "captions":
        lines = (done.folder / "captions.jsonl").read_text("utf-8").splitlines()
        named = {json.loads(line)["image"] for line in lines}
    else:
        named = {
            each["image_id"] for each in json.loads((done.folder / "detections.json").read_text())
        }
    assert sorted(named) == photos or (model == "detection" and named <= set(photos))
    if files is None:
        return
    written = [str(path.relative_to(done.folder / files))
               for path in (done.folder / files).rglob("*.png")]  # fmt: skip
    assert sorted(written) == sorted(disk.file_name(name, ".png") for name in photos)


def test_the_name_of_a_file_for_another_one_is_short_and_its_own():
    names = [disk.file_name(name, ".png") for name in LONG]
    assert len(set(names)) == len(names)
    assert all(len((name + PARTIAL).encode()) <= 255 for name in names)
    assert all(name.endswith(".png") for name in names)
    assert disk.file_name("one/two.jpg", ".png") == "one/two.jpg.png"
    assert disk.file_name(f"{BYTES}/a.jpg", ".png") == f"{SHOWN}/a.jpg.png"


def test_classes_have_names_that_are_not_utf_8(run, tmp_path):
    for label in (f"a{BYTES}", "b"):
        for part in ("train", "val"):
            folder = tmp_path / f"data{BYTES}" / part / label
            folder.mkdir(parents=True)
            for i in range(3):
                Image.new("RGB", (20, 16), "red").save(folder / f"{i}.png")
    done = run(
        "data=folder", "model=cnn", f'data.folder="{tmp_path}/data{BYTES}"', "debug=fast",
        "data.image_size=16", f"data.cache_dir={tmp_path / 'cache'}", *CPU,
        "trainer.limit_train_batches=1", "trainer.limit_val_batches=1",
        "trainer.limit_test_batches=1",
    )  # fmt: skip
    assert done.exit_code == 0, done.err
    (checkpoint,) = (done.folder / "checkpoints").iterdir()
    images = f"{tmp_path}/data{BYTES}/val/a{BYTES}"
    predicted = run("mode=predict", f"ckpt={checkpoint}", f'input="{images}"', *CPU)
    assert predicted.exit_code == 0, predicted.err
    with (predicted.folder / "classes.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0])[3:] == [f"a{SHOWN}", "b"]


def test_a_table_takes_any_name(tmp_path):
    table = GrowingTable(tmp_path / "table.csv", ("step",))
    table.extend([{"step": 1, f"val/{BYTES}": 2.0}])
    table.extend([{"step": 2, f"val/{BYTES}": 3.0}])
    text = (tmp_path / "table.csv").read_text("utf-8")
    assert text == f"step,val/{SHOWN}\n1,2.0\n2,3.0\n"


@pytest.mark.parametrize("encoding", ["ascii", "utf-8", "latin-1"])
def test_a_terminal_takes_any_name(monkeypatch, encoding):
    streams = [io.TextIOWrapper(io.BytesIO(), encoding) for _ in range(2)]
    monkeypatch.setattr(sys, "stdout", streams[0])
    monkeypatch.setattr(sys, "stderr", streams[1])
    console.take_any_text()
    console.show_results({}, [f"é€{BYTES}[bold]"], {}, {}, {}, [("run", Path(f"/[b]{BYTES}€"))])
    console.warn(f"é€{BYTES}[bold]")
    for stream, end in zip(streams, ("[bold]\nrun         /[b]\\udcff\\udce9", "[bold]\n")):
        stream.flush()
        shown = stream.buffer.getvalue().decode(encoding)  # pyright: ignore
        assert SHOWN in shown
        assert end in shown
