"""Downloads, checks and prepares data sets: ``python scripts/prepare_data.py coco``.

mnist      downloads 11 MB, into <data-dir>/mnist
coco       downloads 20 GB, into <data-dir>/coco; unpacking needs 21 GB more; 2017, or --year 2014.
           What is unpacked there already is not downloaded
coco_tiny  downloads nothing: generates the data set

If a command is interrupted, run it again: it continues.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import common
import downloads
import torchvision

from datamodules.coco import COCO, COCOTiny
from datamodules.coco.datamodule import TASKS, YEARS
from datamodules.images import CacheError, DataNotFoundError
from datamodules.mnist import MD5 as MNIST_MD5
from training.disk import DiskError

FILES = ("instances", "captions")  # of annotations
COCO_HOST = "http://images.cocodataset.org"
COCO_MD5 = {
    2014: {
        "annotations/annotations_trainval2014.zip": "0a379cfc70b0e71301e0f377548639bd",
        "zips/val2014.zip": "a3d79f5ed8d289b7a7554ce06a5782b3",
        "zips/train2014.zip": "0da8c0bd3d6becc4dcb32757491aca88",
    },
    2017: {
        "annotations/annotations_trainval2017.zip": "f4bbac642086de4f52a3fdda2de5fa2c",
        "zips/val2017.zip": "442b8da7639aecaf257c1dceb8ba8c80",
        "zips/train2017.zip": "cced6f7f71b7629ddf16f17bbcfab6b2",
    },
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", choices=("mnist", "coco", "coco_tiny"))
    default = os.environ.get("HOCONV_DATA_DIR", common.ROOT / "data")
    parser.add_argument("--data-dir", type=Path, default=Path(default),
                        help="default: HOCONV_DATA_DIR, or data/ of the project")  # fmt: skip
    parser.add_argument("--cache-dir", type=Path, default=common.ROOT / "data" / "cache",
                        help="of data.cache_dir; default: data/cache of the project")  # fmt: skip
    parser.add_argument("--year", type=int, choices=YEARS, default=2017, help="of COCO")
    parser.add_argument("--image-size", type=int, metavar="PIXELS",
                        help="also keep COCO's images decoded at this size, for "
                        "data.cache_images=true")  # fmt: skip
    options = parser.parse_args(argv)
    try:
        if options.data == "mnist":
            prepare_mnist(options.data_dir)
        elif options.data == "coco":
            prepare_coco(options.data_dir, options.cache_dir, options.year, options.image_size)
        else:
            prepare_tiny(options.cache_dir)
    except (downloads.DownloadError, DiskError, DataNotFoundError, CacheError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    return 0


def prepare_mnist(data_dir: Path) -> None:
    folder = data_dir.resolve() / "mnist"
    for name, md5 in MNIST_MD5.items():
        mirrors = [mirror + name for mirror in torchvision.datasets.MNIST.mirrors]
        downloads.download(mirrors, folder / name, md5)
    print(f"MNIST is ready: {folder}")


def prepare_coco(data_dir: Path, cache_dir: Path, year: int, image_size: int | None) -> None:
    folder = data_dir.resolve() / "coco"
    for name, md5 in COCO_MD5[year].items():
        archive = folder / Path(name).name
        unpacked = archive.with_suffix(
            ".unpacked"
        )  # holds the md5 of the archive that was unpacked
        if unpacked.exists() and unpacked.read_text() == md5:
            continue
        if not archive.exists() and (found := _unpacked_by_others(folder, archive.stem, year)):
            print(f"{found} is there: {archive.name} is not downloaded")
            continue
        downloads.download([f"{COCO_HOST}/{name}"], archive, md5)
        downloads.unpack(archive, folder)
        unpacked.write_text(md5)
        archive.unlink()
    keep = image_size is not None
    for task in TASKS:
        data = COCO(data_dir, task, image_size or 1, 1, cache_dir, cache_images=keep, year=year)
        data.prepare_data()
        data.setup("fit")  # prints which files are damaged
    print(f"COCO {year} is ready: {folder}")


def _unpacked_by_others(folder: Path, archive: str, year: int) -> Path | None:
    """Returns where all that an archive holds is; None where some of it is missing.

    An unpacking of ours that was interrupted has its archive beside it.
    """
    if archive.startswith("annotations"):
        names = [f"{task}_{split}{year}.json" for task in FILES for split in ("train", "val")]
        complete = all((folder / "annotations" / name).is_file() for name in names)
        return folder / "annotations" if complete else None
    images, split = folder / archive, archive.removesuffix(str(year))
    annotations = folder / "annotations" / f"instances_{split}{year}.json"
    if not images.is_dir() or not annotations.is_file():
        return None
    names = {image["file_name"] for image in json.loads(annotations.read_text())["images"]}
    missing = names - {path.name for path in images.iterdir()}
    if not missing:
        return images
    print(f"{images} lacks {len(missing)} of {len(names)} images, such as {min(missing)}")
    return None


def prepare_tiny(cache_dir: Path) -> None:
    data = COCOTiny(cache_dir, task="segmentation", image_size=64, batch_size=1)
    data.prepare_data()
    data.setup("fit")
    print(f"coco_tiny is ready: {data.splits.files.root}")


if __name__ == "__main__":
    sys.exit(main())
