"""Only JPEGs that Pillow reads as they are have a size."""

from __future__ import annotations

import io
import struct

import numpy as np
import pytest
from PIL import Image

from datamodules.reading.jpeg import find_size
from tests.datamodules.coco import pictures

NOISE = np.random.default_rng(0).integers(256, size=(37, 53, 3), dtype=np.uint8)


XMP = b'http://ns.adobe.com/xap/1.0/\0<x tiff:Orientation="6">'


def saved(mode: str = "RGB", **options) -> bytes:
    return pictures.saved(Image.fromarray(NOISE).convert(mode), "JPEG", **options)


def segment(marker: int, contents: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, 2 + len(contents)) + contents


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"progressive": True},
        {"subsampling": 0},
        {"comment": b"a comment"},
        {"icc_profile": b"profile"},
        {"restart_marker_blocks": 1},
        {"optimize": True},
        {"extra": segment(0xED, b"Photoshop 3.0")},
    ],
    ids=lambda how: next(iter(how), "plain"),
)
def test_plain_jpegs_have_the_size_that_pillow_finds(mode, how):
    assert find_size(saved(mode, **how)) == (37, 53)


def exif() -> Image.Exif:
    turned = Image.Exif()
    turned[274] = 6
    return turned


@pytest.mark.parametrize(
    "contents",
    [
        pytest.param(saved("CMYK"), id="CMYK"),
        pytest.param(saved(keep_rgb=True), id="red, green and blue"),
        pytest.param(saved(exif=exif()), id="EXIF"),
        pytest.param(saved(extra=segment(0xE1, XMP)), id="XMP"),
        pytest.param(saved()[:-2], id="cut off at the end"),
        pytest.param(saved()[:300], id="cut off in the header"),
        pytest.param(saved() + b"more", id="more behind it"),
        pytest.param(b"", id="empty"),
        pytest.param(b"\xff\xd8\xff\xd9", id="nothing in it"),
        pytest.param(pictures.saved(Image.fromarray(NOISE), "PNG"), id="PNG"),
    ],
)
def test_others_have_none(contents):
    assert find_size(contents) is None


def test_what_is_damaged_has_the_size_that_pillow_finds_or_none():
    contents, found = saved(), 0
    for position in range(len(contents)):
        for bit in range(8):
            damaged = bytearray(contents)
            damaged[position] ^= 1 << bit
            size = find_size(bytes(damaged))
            if size is not None:
                found += 1
                with Image.open(io.BytesIO(damaged), formats=("JPEG",)) as image:
                    assert size == (image.height, image.width)
                    assert image.mode == "RGB"
    assert found > 1000
