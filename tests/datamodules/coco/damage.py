"""Files with damage at random, read in a process of their own: what is wrong is said, and nothing
else happens.

``python -m tests.datamodules.coco.damage {images,annotations,folders} FIRST COUNT`` reads those of
COUNT seeds from FIRST on. A crash leaves the last seed on stdout.
"""

from __future__ import annotations

import copy
import faulthandler
import functools
import json
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from PIL import Image

from datamodules.coco import COCO
from datamodules.coco.annotations.captions import Captions
from datamodules.coco.annotations.instances import Instances
from datamodules.coco.annotations.objects import IGNORE
from datamodules.coco.datamodule import TASKS
from datamodules.images import DataNotFoundError
from datamodules.reading import decoding
from datamodules.reading.decoding import UnreadableImageError, decode
from datamodules.reading.skipped import Skipped
from tests.datamodules.coco import pictures
from tests.datamodules.coco.files import Split, rectangle
from tests.own_data import write_coco

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
    """Returns what an annotation file says of each image, by its name."""
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
            if not str(error).startswith(f"{path}: ") or "\n" in str(error):
                raise
            return "error: " + str(error).removeprefix(f"{path}: ").split(";")[0].split(": ")[0]
    if len(damaged) == 1 and damaged[0][0] in ("images", "annotations"):
        same = [name for name, said in as_it_was(kind, folder).items() if found.get(name) == said]
        assert len(same) >= 1, "damage to one entry is none to more than two images"
    return "; ".join(sorted(skipped)) or "read"


@functools.cache
def as_it_was(kind: str, folder: Path) -> dict[str, Any]:
    path = folder / "whole.json"
    path.write_text(whole(kind))
    return contents(kind, path, folder / kind)[0]


# Folders of data of people's own


def rename_key(generator: np.random.Generator, file: Any) -> None:
    """Gives a value another key."""
    keys = [path for path in paths_in(file) if isinstance(path[-1], str)]
    if keys:
        *path, key = keys[generator.integers(len(keys))]
        parent = at(file, tuple(path))
        parent[generator.choice(["Id", "label", "path", "coco_url", "file_name"])] = parent.pop(key)


def retype(generator: np.random.Generator, file: Any) -> None:
    """Writes all numbers of one key in another way, as a tool does."""
    keys = ("id", "image_id", "category_id", "width", "height", "iscrowd")
    key = keys[generator.integers(len(keys))]
    change = (str, float, lambda n: f" {n}.0", lambda n: None, lambda n: -1, lambda n: n / 3)[
        generator.integers(6)
    ]
    for path in list(paths_in(file)):
        if path[-1] == key and type(number := at(file, path)) is int:
            at(file, path[:-1])[key] = change(number)


def rename_files(generator: np.random.Generator, file: Any) -> None:
    """Writes all names of files in another way, or some names in others."""
    ways = (
        lambda name: f"images\\{name}", lambda name: f"./{name}", lambda name: f"/home/ada/{name}",
        lambda name: f"https://example.com/{name}?x=1", quote, lambda name: f"train/{name}",
        lambda name: f"../{name}", lambda name: f"0a1b2c3d-{name}", lambda name: name.upper(),
        lambda name: f"{name}/", lambda name: f"a\n{name}", os.path.basename,
        lambda name: name * 20, lambda name: "1.jpg",
    )  # fmt: skip
    same = generator.random() < 0.6
    way = ways[generator.integers(len(ways))]
    for path in list(paths_in(file)):
        if path[-1] == "file_name" and isinstance(name := at(file, path), str):
            at(file, path[:-1])["file_name"] = way(name)
            way = way if same else ways[generator.integers(len(ways))]


def keep_few(generator: np.random.Generator, file: Any) -> None:
    """Leaves none or one of the entries of a list."""
    lists = [key for key, part in file.items() if isinstance(part, list)]
    if lists:
        key = lists[generator.integers(len(lists))]
        file[key] = file[key][: generator.integers(2)]


CHANGES = (damage_value, damage_value, rename_key, retype, rename_files, keep_few)
ENCODINGS = ("utf-8-sig", "utf-16", "utf-16-le", "utf-32", "cp1252", "cp037")


def move_something(generator: np.random.Generator, folder: Path) -> None:
    """Renames, removes, empties or doubles a file or folder."""
    paths = sorted(folder.rglob("*"))
    path = paths[generator.integers(len(paths))]
    names = ("train", "val", "valid", "images", "data", "labels.json", "Train", "gone")
    target = path.with_name(names[generator.integers(len(names))])
    how = generator.integers(4)
    if how == 0 and not target.exists():
        path.rename(target)
    elif how == 1 and not target.exists():
        (shutil.copytree if path.is_dir() else shutil.copy)(path, target)
    elif path.is_dir():
        shutil.rmtree(path)
        if how == 2:
            path.write_text("")
    else:
        path.unlink()
        if how == 2:
            path.mkdir()


def read_task(task: str, folder: Path, cache_dir: Path, options: dict[str, Any]) -> str:
    """Returns "read" where all that is not used was counted, or what is wrong in one line."""
    try:
        data = COCO(folder, task, 8, 2, cache_dir, folder=folder, min_count=1, **options)
        data.prepare_data()
        data.setup("fit")
    except DataNotFoundError as error:
        (line,) = str(error).splitlines()
        return line.split("; ")[0].replace(f"{folder}", "").split(": ")[-1]
    for of_stage in data._sets.values():
        require_whole(of_stage)
    if not all(map(len, data._sets.values())):
        return "read, and nothing counts"
    for loader in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader()):
        batches = list(loader)
        assert batches
        assert all(len(batch[0]) == len(batch[1]) > 0 for batch in batches)
    return "read"


def require_whole(data: Any) -> None:
    """Compares a set with its files: every image is used or counted, with its size."""
    images, annotations = data.images, data.images.annotations
    said = json.loads(annotations.path.read_bytes())["images"]
    left_out = [name for names in annotations.skipped.values() for name in names]
    count = sum(name.startswith("images[") for name in left_out)
    assert len(said) == count + len(annotations)
    assert len(annotations) >= len(images.usable) > 0
    assert set(data.numbers.tolist()) <= set(images.usable.tolist())
    for number in images.usable.tolist():
        path = images.folder / str(annotations.file_names[number])
        assert path.resolve().is_relative_to(images.folder)
        with Image.open(path) as picture:
            assert (picture.height, picture.width) == tuple(annotations.sizes[number].tolist())


def read_folder(generator: np.random.Generator, folder: Path) -> str:
    """Reads a folder with damage for each task; what was said of it."""
    data = folder / "data"
    shutil.rmtree(data, ignore_errors=True)
    write_coco(write_coco(data, "train", int(generator.integers(1, 4))), "val", 2)
    files = sorted(data.glob("annotations/*.json"))
    for _ in range(generator.choice([1, 1, 2, 4])):
        path = files[generator.integers(len(files))]
        if (how := generator.random()) < 0.75:
            file = json.loads(path.read_bytes())
            CHANGES[generator.integers(len(CHANGES))](generator, file)
            text = json.dumps(file, ensure_ascii=generator.random() < 0.5)
            path.write_text(text, errors="surrogatepass")
        elif how < 0.85:
            text = path.read_text()
            path.write_text(text, ENCODINGS[generator.integers(len(ENCODINGS))], errors="replace")
            break
        else:
            move_something(generator, data)
            break
    options = {"val_share": 0.5} if generator.random() < 0.3 else {}
    said = [read_task(task, data, folder / "cache", options) for task in TASKS]
    shutil.rmtree(folder / "cache", ignore_errors=True)
    return " | ".join(said)


READ = {"images": read_image, "annotations": read_annotations, "folders": read_folder}


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
