"""Files with damage at random, read in a process of their own: what is wrong is said, and nothing
else happens.

``python -m tests.datamodules.coco.damage {images,annotations} FIRST COUNT`` reads those of COUNT
seeds from FIRST on. A crash leaves the last seed on stdout.
"""

from __future__ import annotations

import copy
import faulthandler
import functools
import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from datamodules.coco.annotations.captions import Captions
from datamodules.coco.annotations.instances import Instances
from datamodules.coco.annotations.objects import IGNORE
from datamodules.images import DataNotFoundError
from datamodules.reading import decoding
from datamodules.reading.decoding import UnreadableImageError, decode
from datamodules.reading.skipped import Skipped
from tests.datamodules.coco import pictures
from tests.datamodules.coco.files import Split, rectangle

Damage = Callable[[np.random.Generator, bytearray], Any]


def cut(generator: np.random.Generator, contents: bytearray) -> None:
    del contents[generator.integers(len(contents)) :]


def flip(generator: np.random.Generator, contents: bytearray) -> None:
    for _ in range(generator.choice([1, 1, 1, 5, 20])):
        contents[generator.integers(len(contents))] ^= 1 << int(generator.integers(8))


def flip_in_the_beginning(generator: np.random.Generator, contents: bytearray) -> None:
    contents[generator.integers(min(60, len(contents)))] ^= 1 << int(generator.integers(8))


def replace(generator: np.random.Generator, contents: bytearray) -> None:
    first = generator.integers(len(contents))
    contents[first : first + generator.integers(30)] = generator.bytes(int(generator.integers(60)))


def fill(generator: np.random.Generator, contents: bytearray) -> None:
    first, count = generator.integers(len(contents)), int(generator.integers(1, 5))
    contents[first : first + count] = count * generator.choice([b"\0", b"\xff"])


DAMAGES: tuple[Damage, ...] = (cut, flip, flip_in_the_beginning, replace, fill)


# Images


def read_image(generator: np.random.Generator, folder: Path) -> str:
    """Reads an image with damage; what was said of it."""
    pixels = None
    if generator.random() < 0.5:
        kind = pictures.KINDS[generator.integers(len(pictures.KINDS))]
        contents, pixels = pictures.png(generator, *kind, interlaced=generator.random() < 0.5)
    else:
        files = list(pictures.others(generator))
        contents = files[generator.integers(len(files))]
    damaged = bytearray(contents)
    DAMAGES[generator.integers(len(DAMAGES))](generator, damaged)
    if pixels is not None and generator.random() < 0.6:
        damaged = bytearray(pictures.with_right_checksums(bytes(damaged)))
        pixels = None
    path = folder / "image"
    path.write_bytes(damaged)
    try:
        image = decode(path, upright=generator.random() < 0.5)
    except UnreadableImageError as error:
        return str(error)
    assert str(image.dtype) == "torch.uint8"
    assert image.shape[0] == 3
    if pixels is not None:
        assert np.array_equal(image.permute(1, 2, 0), pixels), "its checksums are wrong"
    return "read"


# Annotations

VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 3, 255, 256, 2**31, -(2**31), 2**63, 10**400, 0.5, -0.0, 1e308,
    float("inf"), float("-inf"), float("nan"), "", "a", "0", "\ud800", "\0", "../a", 300 * "a",
    [], [[]], {}, [1], [1, 2, 3, 4], [[1, 2, 3, 4]], [[1, 2, 3, 4, 5]], [[0, 0, 5, 0, 5, 5]],
    [[0, 0, 5, 0, 5, float("nan")]], [80], [0, 80], [90, -10], [8, 10], {"id": 1},
    {"size": [8, 10], "counts": "`2"}, {"size": [8, 10], "counts": []},
)  # fmt: skip


@functools.cache
def whole(kind: str) -> str:
    """An annotation file, and what its images hold."""
    with tempfile.TemporaryDirectory() as folder:
        split = Split(Path(folder))
        for i in range(3):
            image = split.image(height=8, width=10)
            split.instance(image, rectangle(1, 1, 3 + i, 4) + rectangle(6, 1, 2, 2), category=3)
            split.instance(image, rectangle(5, 2, 2, 2), category=18)
            runs = [10, 5, 3, 5, 57]
            split.instance(image, {"size": [8, 10], "counts": runs}, category=18, crowd=1)
            split.instance(image, {"size": [8, 10], "counts": "j02600000f0"}, category=3)
            split.caption(image, f"a cat, number {i}")
            split.caption(image, "a dog")
        split.write()
        return split.file(kind).read_text()


def contents(kind: str, path: Path, cache_dir: Path) -> tuple[dict[str, Any], Skipped]:
    """What an annotation file says of each image, by its name."""
    if kind == "captions":
        captions = Captions(path, cache_dir)
        names = captions.file_names.tolist()
        return {n: captions.of_image(i) for i, n in enumerate(names)}, captions.skipped
    instances = Instances(path, cache_dir)
    labels = {}
    for i, (name, size) in enumerate(zip(instances.file_names.tolist(), instances.sizes.tolist())):
        labels[name] = instances.label_map(i).tolist()
        assert np.shape(labels[name]) == tuple(size)
        assert set(np.unique(labels[name])) <= {IGNORE, *range(len(instances.categories) + 1)}
    return labels, instances.skipped


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the path to every value inside a value: the keys and indices that lead to it."""
    if path:
        yield path
    keys = value if isinstance(value, dict) else range(len(value)) if type(value) is list else ()
    for key in keys:
        yield from paths_in(value[key], (*path, key))


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def damage_value(generator: np.random.Generator, file: Any) -> tuple[Any, ...]:
    """Replaces, drops, cuts or doubles one value; returns the path to it."""
    paths = list(paths_in(file))
    if not paths:  # everything was dropped
        return ()
    *path, key = paths[generator.integers(len(paths))]
    parent = at(file, tuple(path))
    how = generator.integers(5)
    if how == 0:
        del parent[key]
    elif how == 1:
        parent[key] = copy.deepcopy(at(file, paths[generator.integers(len(paths))]))
    elif how == 2 and isinstance(parent, list):
        parent.append(copy.deepcopy(parent[key]))
    elif how <= 3 and isinstance(text := parent[key], str) and text:
        position = generator.integers(len(text))
        parent[key] = text[:position] + generator.choice(["", chr(generator.integers(40, 120))])
        parent[key] += text[position + 1 :] if generator.random() < 0.5 else ""
    else:
        parent[key] = copy.deepcopy(VALUES[generator.integers(len(VALUES))])
    return *path, key


def read_annotations(generator: np.random.Generator, folder: Path) -> str:
    """Reads an annotation file with damage; what was said of it."""
    kind = str(generator.choice(["instances", "captions"]))
    text = whole(kind)
    damaged: list[tuple[Any, ...]] = []
    if (how := generator.random()) < 0.1:
        raw = bytearray(text.encode())
        DAMAGES[generator.integers(len(DAMAGES))](generator, raw)
        text = raw.decode(errors="surrogateescape")
    elif how < 0.12:
        text = text.replace("[", 100_000 * "[", 1)
    else:
        file = json.loads(text)
        damaged = [damage_value(generator, file) for _ in range(generator.choice([1, 1, 1, 2, 5]))]
        text = json.dumps(file)
    path = folder / "damaged.json"
    path.write_text(text, errors="surrogateescape")
    with tempfile.TemporaryDirectory(dir=folder) as cache_dir:
        try:
            found, skipped = contents(kind, path, Path(cache_dir))
        except DataNotFoundError as error:
            what, reason = str(error).split(" (", 1)
            if what != f"{path} is damaged":
                raise
            return "is damaged: " + reason.split(";")[0].split(": ")[0]
    if len(damaged) == 1 and damaged[0][0] in ("images", "annotations"):
        same = [name for name, said in as_it_was(kind, folder).items() if found.get(name) == said]
        assert len(same) >= 1, "damage to one entry is none to more than two images"
    return "; ".join(sorted(skipped)) or "read"


@functools.cache
def as_it_was(kind: str, folder: Path) -> dict[str, Any]:
    path = folder / "whole.json"
    path.write_text(whole(kind))
    return contents(kind, path, folder / kind)[0]


READ = {"images": read_image, "annotations": read_annotations}


def main(kind: str, first: int, count: int) -> None:
    faulthandler.enable()
    warnings.simplefilter("ignore")  # of Pillow's, about metadata
    decoding.MAX_PIXELS = 2**22
    said: dict[str, list[int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(first, first + count):
            print(f"\rseed {seed} ", end="", flush=True)
            reason = READ[kind](np.random.default_rng(seed), Path(folder))
            said.setdefault(reason, []).append(seed)
    print()
    for reason, seeds in sorted(said.items(), key=lambda item: -len(item[1])):
        print(f"{len(seeds):6} {reason}, first with seed {seeds[0]}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
