"""Decodes image files; nothing else in the app does.

Pillow reads the headers and decides what is damaged: for a file with a flipped bit it raises an
exception, where other decoders write outside their memory. torchcodec decodes JPEGs, to the same
bits and with libjpeg-turbo too, in less time of a processor.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError
from torch import Tensor
from torchvision.transforms.v2 import functional as F

FORMATS = ("GIF", "JPEG", "PNG", "WEBP")
# An image of so many pixels takes 1.3 GB in each worker while it is decoded; a file of half a
# megabyte can claim more pixels than the memory holds. Photographs have up to 108 million pixels,
# those of COCO at most 0.4 million.
MAX_PIXELS = 2**27
# An orientation of EXIF, from 2 on -> what undoes it. `ImageOps.exif_transpose` also rewrites the
# other EXIF fields, and that fails for some photographs whose pixels are intact.
TURNS = dict(
    enumerate(
        (
            Image.Transpose.FLIP_LEFT_RIGHT,
            Image.Transpose.ROTATE_180,
            Image.Transpose.FLIP_TOP_BOTTOM,
            Image.Transpose.TRANSPOSE,
            Image.Transpose.ROTATE_270,
            Image.Transpose.TRANSVERSE,
            Image.Transpose.ROTATE_90,
        ),
        start=2,
    )
)
# The segment APP1 of a JPEG that holds EXIF, and the same as APP15, which nobody reads.
EXIF, NO_EXIF = re.compile(rb"\xff\xe1(..Exif\0\0)", re.DOTALL), b"\xff\xef\\1"

Image.MAX_IMAGE_PIXELS = None  # MAX_PIXELS takes the place of Pillow's own limit


class UnreadableImageError(Exception):
    """An image file cannot be decoded; says why."""


def decode(path: Path, *, upright: bool = False) -> Tensor:
    """Decodes an image file to (3, H, W) uint8, RGB; converts greyscale, palette and CMYK.

    Keeps the upper 8 of 16 bits a channel, and the first frame of an animation; drops transparency.

    Args:
        path: JPEG, PNG, GIF or WebP, whatever its name ends in.
        upright: whether to turn it as its EXIF orientation says.

    Raises:
        UnreadableImageError: the file is missing, empty, truncated, of another format or has more
            than `MAX_PIXELS` pixels; or it is damaged and its format shows that.
    """
    if not path.is_file():
        raise UnreadableImageError("the file is missing")
    if path.stat().st_size == 0:
        raise UnreadableImageError("the file is empty")
    try:
        contents = path.read_bytes()
        image = Image.open(BytesIO(contents), formats=FORMATS)
        if image.width * image.height > MAX_PIXELS:
            raise UnreadableImageError(
                f"the image is {image.width} x {image.height}, more than {MAX_PIXELS:,} pixels"
            )
        if (decoded := _decode_jpeg(image, contents, upright)) is not None:
            return decoded
        image.verify()  # checks PNG's checksums, which decoding skips
        return F.pil_to_tensor(_to_rgb(Image.open(BytesIO(contents), formats=FORMATS), upright))
    except (MemoryError, UnreadableImageError):
        raise
    except UnidentifiedImageError as error:
        names = ", ".join(FORMATS)
        raise UnreadableImageError(f"the file cannot be decoded (none of {names})") from error
    except Exception as error:  # Pillow raises errors of any kind for damaged files
        # Without the details of this file: equal reasons are counted.
        reason = str(error).split(" (")[0]
        raise UnreadableImageError(f"the file cannot be decoded ({reason})") from error


def _decode_jpeg(image: Image.Image, contents: bytes, upright: bool) -> Tensor | None:
    """Decodes what is no work for Pillow: a JPEG that torchcodec accepts and nothing turns."""
    decode_jpeg = _find_decoder()
    if decode_jpeg is None or image.format != "JPEG" or image.mode not in ("RGB", "L"):
        return None
    if upright and image.getexif().get(ExifTags.Base.Orientation) in TURNS:
        return None
    try:
        # torchcodec turns every image as its EXIF says; here it finds none.
        return decode_jpeg(EXIF.sub(NO_EXIF, contents))
    except RuntimeError:  # Pillow says what is wrong, or reads it
        return None


@functools.cache
def _find_decoder() -> Callable[[bytes], Any] | None:
    """Returns torchcodec's decoder; None where it is not installed or cannot be loaded."""
    try:
        from torchcodec.decoders import decode_jpeg  # pyright: ignore
    except (ImportError, OSError, RuntimeError):
        return None
    return decode_jpeg


def _to_rgb(image: Image.Image, upright: bool) -> Image.Image:
    if upright and (orientation := image.getexif().get(ExifTags.Base.Orientation)) in TURNS:
        image = image.transpose(TURNS[orientation])
    if image.mode.startswith("I"):  # 16-bit greyscale, which `convert` would cut off at 255
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    image.info.pop("transparency", None)  # `convert` would warn of it
    return image.convert("RGB")
