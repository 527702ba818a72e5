"""Folders of classes: names, files and what is beside them."""

from __future__ import annotations

import io
import math
import os
from collections import Counter
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor, nn

from datamodules.folder import ClassFolder
from models.tasks.classifier import Classifier
from tests.datamodules.counted.run import attempt, main, run
from training.callbacks.census import Census

SIZE = 16  # of the images of batches
JUNK = ("@eaDir", "__MACOSX", ".ipynb_checkpoints", "lost+found", "#recycle", ".hidden")
NAMES = (
    "cat",
    "Dog",
    "größe",
    os.fsdecode(b"caf\xe9"),
    "with space",
    "line\nbreak",
    "'",
    "a" * 200,
)


def image_bytes(generator: np.random.Generator) -> tuple[bytes, bool]:
    """An image file, and whether it can be read."""
    contents = io.BytesIO()
    mode = str(generator.choice(["RGB", "L", "RGBA", "P", "1", "I;16"]))
    kind = str(generator.choice(["PNG", "JPEG", "GIF", "WEBP", "PNG", "JPEG", "BMP"]))
    size = int(generator.integers(1, 24)), int(generator.integers(1, 24))
    if kind in ("JPEG", "WEBP", "GIF", "BMP"):
        mode = "RGB"
    Image.new(mode, size, int(generator.integers(0, 2))).save(contents, kind)
    whole, how = contents.getvalue(), generator.integers(24)
    if how == 0:
        return b"", False
    if how == 1:
        return whole[:1], False
    if how == 2:
        return whole[: len(whole) // 3], False
    if how == 3:
        return b"no image", False
    return whole, kind != "BMP"


def write_folder(generator: np.random.Generator, folder: Path) -> Counter[str]:
    """Fills the folder of a class; returns how many images in it can be read, and cannot."""
    found: Counter[str] = Counter()
    folder.mkdir(parents=True)
    for i in range(int(generator.choice([0, 1, 2, *range(4, 14)]))):
        inside = folder
        for _ in range(int(generator.choice([0, 0, 0, 1, 2]))):
            inside /= str(generator.choice(["deeper", "größe", *JUNK]))
        inside.mkdir(parents=True, exist_ok=True)
        suffix = str(generator.choice([".png", ".JPG", ".jpeg", ".GIF", ".txt", ".webp", ""]))
        stems = ["image", "image", "._image", "\u00fc\u0308", os.fsdecode(b"\xff"), "a b"]
        stem = str(generator.choice(stems))
        path = inside / f"{stem}{i}{suffix}"
        contents, readable = image_bytes(generator)
        how = generator.integers(20)
        if how == 0:
            path.symlink_to(path.name)
            readable = False
        elif how == 1:
            path.mkdir()
            continue
        else:
            path.write_bytes(contents)
        parts = path.relative_to(folder).parts
        if suffix in ("", ".txt") or any(part in JUNK or part[0] == "." for part in parts):
            continue
        found["readable" if readable else "not"] += 1
    for name in ("Thumbs.db", ".DS_Store", "desktop.ini"):
        if generator.random() < 0.2:
            (folder / name).write_bytes(b"\0")
    return found


class Dot(nn.Module):
    """Classifies by the mean colour."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(3, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.linear(images.mean((2, 3)))


def train(generator: np.random.Generator, root: Path) -> None:
    """Makes a folder and trains on it."""
    classes = [
        str(n) for n in generator.permutation(NAMES)[: generator.choice([0, 1, *4 * [2, 3]])]
    ]
    share = float(generator.choice([0.3, 0.5])) if generator.random() < 0.5 else None
    (root / "photos").mkdir()
    parts = {"train": root / "photos"}
    if share is None:
        parts = {name: root / "photos" / name for name in ("train", "val")}
    found: dict[str, dict[str, Counter[str]]] = {}
    for part, folder in parts.items():
        kept = [c for c in classes if part == "train" or generator.random() < 0.9]
        found[part] = {name: write_folder(generator, folder / name) for name in kept}
        if generator.random() < 0.3 and folder.exists():
            write_folder(generator, folder / str(generator.choice(JUNK)))
    data = ClassFolder(root / "photos", SIZE, 2, root / "cache", val_share=share)
    model = Classifier(Dot(attempt(lambda: data.num_classes)), data.num_classes, 0.1, 0.0)
    scores = run("fit", model, data, Census())
    assert data.class_names == tuple(sorted(classes))
    assert len(classes) > 1
    counts = data.census()
    for name, of_class in found.items():
        readable = sum(each["readable"] for each in of_class.values())
        names = ("train", "val") if share is not None else (name,)
        assert sum(counts[each].counted for each in names) == readable
    assert set(data.splits["train"].labels.tolist()) == set(range(len(classes)))
    assert all(map(math.isfinite, scores.values()))
    assert scores.keys() == {"val/loss", "val/accuracy"}


if __name__ == "__main__":
    main(train)
