"""Image files of every kind, with the pixels that they hold by their format's definition."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import Image

GREY, COLOUR, PALETTE, GREY_ALPHA, COLOUR_ALPHA = 0, 2, 3, 4, 6  # PNG's numbers
CHANNELS = {GREY: 1, COLOUR: 3, PALETTE: 1, GREY_ALPHA: 2, COLOUR_ALPHA: 4}
KINDS = [
    *((GREY, depth) for depth in (1, 2, 4, 8, 16)),
    *((PALETTE, depth) for depth in (1, 2, 4, 8)),
    *((kind, depth) for kind in (COLOUR, GREY_ALPHA, COLOUR_ALPHA) for depth in (8, 16)),
]
ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2),
         (0, 1, 1, 2))  # fmt: skip
SIGNATURE = b"\x89PNG\r\n\x1a\n"
ORIENTATION = 0x0112  # EXIF


def chunk(name: bytes, contents: bytes) -> bytes:
    checksum = zlib.crc32(name + contents)
    return struct.pack(">I", len(contents)) + name + contents + struct.pack(">I", checksum)


def with_right_checksums(contents: bytes) -> bytes:
    """Returns a damaged PNG with the checksums of its chunks corrected."""
    right, offset = contents[:8], 8
    while offset + 12 <= len(contents):
        (length,) = struct.unpack(">I", contents[offset : offset + 4])
        right += chunk(
            contents[offset + 4 : offset + 8], contents[offset + 8 : offset + 8 + length]
        )
        offset += 12 + length
    return right + contents[offset:]


def header(width: int, height: int, kind: int, depth: int, interlaced: bool = False) -> bytes:
    return chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, interlaced))


def png(
    generator: np.random.Generator, kind: int, depth: int, interlaced: bool = False
) -> tuple[bytes, np.ndarray]:
    """A file, and its pixels (H, W, 3) uint8: of 16 bits the upper 8, transparency left out."""
    height, width = generator.integers(1, 20, 2)
    samples = generator.integers(2**depth, size=(height, width, CHANNELS[kind]))
    palette = generator.integers(256, size=(2**depth, 3), dtype=np.uint8)
    chunks = header(width, height, kind, depth, interlaced)
    if kind == PALETTE:
        chunks += chunk(b"PLTE", palette.tobytes())
        chunks += chunk(b"tRNS", generator.bytes(2**depth))
        pixels = palette[samples[..., 0]]
    else:
        scaled = samples >> 8 if depth == 16 else samples * 255 // (2**depth - 1)
        colours = scaled[..., :3] if kind in (COLOUR, COLOUR_ALPHA) else scaled[..., [0, 0, 0]]
        pixels = colours.astype(np.uint8)
    rows = b""
    for left, top, right, down in ADAM7 if interlaced else ((0, 0, 1, 1),):
        for row in samples[top::down, left::right]:
            bits = row.reshape(-1, 1) >> np.arange(depth)[::-1] & 1
            rows += b"\0" + np.packbits(bits).tobytes() if bits.size else b""
    chunks += chunk(b"IDAT", zlib.compress(rows, int(generator.integers(10))))
    return SIGNATURE + chunks + chunk(b"IEND", b""), pixels


def saved(image: Image.Image, name: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, name, **options)
    return file.getvalue()


def others(generator: np.random.Generator) -> Iterator[bytes]:
    """JPEG, GIF and WebP files of all their kinds."""
    height, width = generator.integers(1, 40, 2)
    image = Image.fromarray(generator.integers(256, size=(height, width, 4), dtype=np.uint8))
    exif = Image.Exif()
    exif[ORIENTATION] = int(generator.integers(1, 9))
    exif[0x010E] = "a description"
    for mode in ("L", "RGB", "CMYK"):
        for progressive in (False, True):
            yield saved(
                image.convert("RGB").convert(mode), "JPEG", progressive=progressive, exif=exif
            )
    frames = [image.convert("P").rotate(90 * turn) for turn in range(2)]
    yield saved(frames[0], "GIF", save_all=True, append_images=frames[1:], interlace=1)
    yield saved(frames[0], "GIF", transparency=3)
    for lossless in (False, True):
        yield saved(image, "WEBP", lossless=lossless, exif=exif)
    frames = [image.rotate(90 * turn) for turn in range(2)]
    yield saved(frames[0], "WEBP", save_all=True, append_images=frames[1:])
