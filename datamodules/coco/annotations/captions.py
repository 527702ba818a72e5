"""Reads sentences that describe images from COCO's annotation files.

N images, A annotations.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from datamodules.coco.annotations.file import (
    Annotations,
    ImageRecords,
    Skips,
    describe,
    load_packed,
    offsets,
    require_some,
)
from datamodules.coco.annotations.names import encode_text


def split_words(text: str) -> list[str]:
    """Returns the words of a sentence in lower case, without punctuation.

    An apostrophe within a word stays: ``A man's dog.`` is ``a``, ``man's``, ``dog``.
    """
    return re.findall(r"[^\W_]+(?:'[^\W_]+)*", text.lower())


class Captions(Annotations):
    """An annotation file of sentences that describe the images."""

    def __init__(self, path: Path, cache_dir: Path, *, folder: Path | None = None) -> None:
        super().__init__(path, load_packed(path, "captions", cache_dir, _pack_captions, folder))

    def of_image(self, index: int) -> list[str]:
        return [self.text(annotation) for annotation in self.annotations_of(index)]

    def text(self, annotation: int) -> str:
        first, end = self.packed["text_offsets"][annotation : annotation + 2]
        return self.packed["text"][first:end].tobytes().decode()

    def texts(self, numbers: np.ndarray) -> Iterator[str]:
        """Returns all captions of the images of `numbers`, image by image."""
        return (text for number in numbers.tolist() for text in self.of_image(number))

    def images_without(self) -> list[str]:
        """Returns the file names of the images that have no caption."""
        return self.file_names[np.diff(self.packed["image_offsets"]) == 0].tolist()


def _pack_captions(
    file: dict[str, Any], images: ImageRecords, annotations: dict[int, list[Any]], skips: Skips
) -> dict[str, Any]:
    texts: list[bytes] = []
    counts: list[int] = []
    for number, image in images.items():
        captions = []
        for annotation in sorted(annotations[number], key=lambda a: a["id"]):
            text = annotation.get("caption")
            if "caption" not in annotation:
                skips["there is no caption"].append(describe(annotation, image))
            elif encode_text(text) is None:
                skips["the caption is not a text"].append(describe(annotation, image))
            elif split_words(text):
                captions.append(text.strip().encode())
            else:
                skips["the caption has no word"].append(describe(annotation, image))
        texts += captions
        counts.append(len(captions))
    require_some("annotations", len(texts), skips)
    return {
        "image_offsets": offsets(counts),
        "text_offsets": offsets(map(len, texts)),
        "text": np.frombuffer(b"".join(texts), np.uint8),
    }
