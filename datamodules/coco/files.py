"""The places of the files of a data set in COCO's format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from datamodules.images import DataNotFoundError

SPLITS = ("train", "val")
KINDS = {  # of a task
    "segmentation": "instances",
    "detection": "instances",
    "captions": "captions",
    "denoise": "instances",
}
DOWNLOAD = (
    "`python scripts/prepare_data.py coco` downloads COCO, HOCONV_DATA_DIR names the folder whose "
    "sub-folder coco holds it, and data.folder names data of your own"
)

READ = "docs/use/own_pictures.md says what is read"


class SplitFiles(NamedTuple):
    """The files of a split, which need not be there.

    Attributes:
        annotations: the annotation file.
        images: the folder of the images.
        mend_annotations, mend_images: what to do where one of them cannot be used.
    """

    annotations: Path
    images: Path
    mend_annotations: str
    mend_images: str


class Files:
    """The files of MS COCO as they are published; each can be replaced.

    Args:
        root: holds ``<split><year>`` and ``annotations/<kind>_<split><year>.json``.
        year: in these names.
        given: ``<split>_images`` and ``<split>_annotations`` -> a path that takes the place of that
            one.
    """

    def __init__(
        self, root: Path, year: str, given: Mapping[str, str | Path] | None = None
    ) -> None:
        self.root = root
        self.year = year
        self.given = {name: Path(path).resolve() for name, path in (given or {}).items()}

    def find(self, task: str, split: str) -> SplitFiles:
        """Returns the files of a split.

        Raises:
            DataNotFoundError: they cannot be told.
        """
        annotations = self.given.get(f"{split}_annotations")
        images = self.given.get(f"{split}_images")
        if annotations is None or images is None:
            looked_up, folder = self._look_up(KINDS[task], split, annotations)
            annotations, images = annotations or looked_up, images or folder
        if not self.given and self.year:
            return SplitFiles(annotations, images, DOWNLOAD, DOWNLOAD)
        return SplitFiles(
            annotations,
            images,
            f"data.{split}_annotations names another file; {READ}",
            f"data.{split}_images names another folder; {READ}",
        )

    def _look_up(self, kind: str, split: str, annotations: Path | None) -> tuple[Path, Path]:
        """Returns the annotation file and the folder of its images."""
        name = f"{split}{self.year}"
        return self.root / "annotations" / f"{kind}_{name}.json", self.root / name


class Layout(NamedTuple):
    """The places at which a tool puts the files of a split, relative to the folder of all.

    Attributes:
        annotations: the annotation file.
        images: the folder of its images: the first of these that is there.
    """

    annotations: str
    images: tuple[str, ...]


IMAGES = ("{split}", "images/{split}", "images", "data")
LAYOUTS = (
    Layout("annotations/{kind}_{split}.json", IMAGES),  # COCO, CVAT, datumaro
    Layout("annotations/{split}.json", IMAGES),
    Layout("{split}.json", IMAGES),
    Layout("{split}/_annotations.coco.json", ("{split}",)),  # Roboflow
    Layout("{split}/labels.json", ("{split}/data", "{split}")),  # FiftyOne
    Layout("{split}/annotations/{kind}.json", ("{split}/images", "{split}")),  # Supervisely
)
# Of images that are in no split; the first layout that is there counts.
WHOLE_LAYOUTS = (
    Layout("annotations/{kind}_default.json", ("images/default", "images")),  # CVAT, datumaro
    Layout("*.json", ("images", "data", ".")),  # FiftyOne, Label Studio, VIA and others
    Layout("annotations/*.json", ("images", "data", ".")),
)
NAMES = {  # of a split
    "train": ("train", "train2017", "train2014", "Train", "training"),
    "val": ("val", "val2017", "val2014", "Val", "valid", "validation", "Validation"),
}


class FolderFiles(Files):
    """The files of other data, in a layout that a tool writes.

    Where there are several, ``annotations/<kind>_<split>.json`` is read, or it is an error.

    Args:
        root: the folder of all.
        given: as of :class:`Files`.
        whole: whether images that are in no split are meant too; they are those of train.
    """

    def __init__(
        self, root: Path, given: Mapping[str, str | Path] | None = None, *, whole: bool = False
    ) -> None:
        super().__init__(root, "", given)
        self.whole = whole

    def _look_up(self, kind: str, split: str, annotations: Path | None) -> tuple[Path, Path]:
        if annotations is not None:
            folders = [self._choose(IMAGES, name) for name in NAMES[split]]
            return annotations, next(filter(Path.is_dir, folders), folders[0])
        if not self.root.is_dir():
            raise DataNotFoundError(
                f"data.folder: there is no folder {self.root}; name one, or the files by "
                f"data.{split}_annotations and data.{split}_images"
            )
        found = self._find_all(LAYOUTS, kind, split)
        if (exact := super()._look_up(kind, split, None)[0]) in found:
            return exact, found[exact]
        wholes = (self._find_all([layout], kind, split) for layout in WHOLE_LAYOUTS)
        whole = next(filter(None, wholes), {})
        if self.whole and not found:
            found = whole
        if len(found) == 1:
            return next(iter(found.items()))
        if found:
            raise DataNotFoundError(
                f"data.folder: {self.root} holds several annotation files of {split}: "
                f"{self._list(found)}; data.{split}_annotations says which"
            )
        looked_for = [layout.annotations for layout in (*LAYOUTS, *self.whole * WHOLE_LAYOUTS)]
        message = (
            f"data.folder: {self.root} holds no annotation file of {split}: none of "
            f"{', '.join(looked_for).replace('{kind}', kind)} is there, {{split}} being one of "
            f"{', '.join(NAMES[split])}"
        )
        if whole and not self.whole:
            message += f", but {self._list(whole)} is: data.val_share=0.2 divides its images"
        raise DataNotFoundError(f"{message}; data.{split}_annotations names another")

    def _find_all(self, layouts: Iterable[Layout], kind: str, split: str) -> dict[Path, Path]:
        """Returns the annotation files that are there, and the folder of images of each."""
        found: dict[tuple[int, int], tuple[Path, Path]] = {}
        for layout in layouts:
            for name in NAMES[split]:
                pattern = layout.annotations.format(kind=kind, split=name)
                for path in filter(Path.is_file, sorted(self.root.glob(pattern))):
                    stat = path.stat()  # where names have no case, several lead to one file
                    of_path = path, self._choose(layout.images, name)
                    found.setdefault((stat.st_dev, stat.st_ino), of_path)
        return dict(found.values())

    def _choose(self, images: tuple[str, ...], name: str) -> Path:
        folders = [self.root / folder.format(split=name) for folder in images]
        return next(filter(Path.is_dir, folders), folders[0])

    def _list(self, paths: Iterable[Path]) -> str:
        return ", ".join(str(path.relative_to(self.root)) for path in paths)
