"""Decodes image files; nothing else in the app does.

Pillow reads the headers and decides what is damaged: for a file with a flipped bit it raises an
exception, where other decoders write outside their memory. torchcodec decodes JPEGs, to the same
bits and with libjpeg-turbo too, in less time of a processor.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import ExifTags, Image, UnidentifiedImageError
from torch import Tensor
from torchvision.transforms.v2 import functional as F

from datamodules.reading.jpeg import END, find_size

S = TypeVar("S")
T = TypeVar("T")
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
    return _File(path, upright).decode()


def read_size(path: Path) -> tuple[int, int]:
    """Returns H and W of an image as it is stored in its file, which is not decoded.

    Raises:
        UnreadableImageError: the file is missing, empty, of another format or too large.
    """
    return _File(path, upright=False).size


def decode_on(
    device: torch.device, paths: Iterable[Path], *, upright: bool = False
) -> Iterator[Tensor | UnreadableImageError]:
    """Yields for each file what `decode` returns, on a device, or raises.

    A GPU decodes JPEGs, many at once: of each stretch of files that have `MAX_PIXELS` together. It
    works in the current stream, and the host waits for it. The bits are those of a CPU where a file
    has a colour for every pixel. Where it has one for several, a GPU repeats it and a CPU smooths
    it. A JPEG that a GPU would take for another is decoded by the CPU.
    """
    group: list[_File | UnreadableImageError] = []
    pixels = 0
    for path in paths:
        file = _attempt(lambda path: _File(path, upright), path)
        if isinstance(file, _File):
            if pixels + file.pixels > MAX_PIXELS:
                yield from _decode_group(device, group)
                group, pixels = [], 0
            pixels += file.pixels
        group.append(file)
    yield from _decode_group(device, group)


@functools.cache
def decodes_on(device: torch.device) -> bool:
    """Returns whether a device is a GPU that decodes JPEGs here."""
    decode_jpeg = _find_decoder()
    if device.type != "cuda" or decode_jpeg is None:
        return False
    contents = BytesIO()
    Image.new("RGB", (16, 16)).save(contents, "JPEG")
    try:
        decode_jpeg([contents.getvalue()], device=device)
    except RuntimeError:
        return False
    return True


class _File:
    """An image file of which the header is read.

    Raises:
        UnreadableImageError: it is missing, empty, of another format or too large.
    """

    def __init__(self, path: Path, upright: bool) -> None:
        if not os.path.isfile(path):  # Path.is_file raises where it may not look
            raise UnreadableImageError("the file is missing")
        self._upright = upright
        with _explained():
            self._contents = path.read_bytes()
        if not self._contents:
            raise UnreadableImageError("the file is empty")
        size = find_size(self._contents)
        self._plain = size is not None
        self.size = height, width = size or (self._image.height, self._image.width)
        self.pixels = height * width
        if self.pixels > MAX_PIXELS:
            raise UnreadableImageError(
                f"the image is {width} x {height}, more than {MAX_PIXELS:,} pixels"
            )

    @functools.cached_property
    def _image(self) -> Image.Image:
        with _explained():
            return Image.open(BytesIO(self._contents), formats=FORMATS)

    @property
    def jpeg(self) -> bytes | None:
        """Returns what torchcodec is to decode; None where that is work for Pillow."""
        if self._plain:
            return self._contents
        if self._image.format != "JPEG" or self._image.mode not in ("RGB", "L"):
            return None
        if self._upright and _find_turn(self._image) is not None:
            return None
        # torchcodec turns every image as its EXIF says; here it finds none.
        return EXIF.sub(NO_EXIF, self._contents) if "exif" in self._image.info else self._contents

    @property
    def jpeg_for_gpu(self) -> bytes | None:
        """The same for a GPU. It decodes red, green and blue as if they were YCbCr, and fills up
        what is cut off."""
        if self._plain:
            return self.jpeg
        numbers = [channel[0] for channel in getattr(self._image, "layer", ())]
        known = numbers in ([1], [1, 2, 3]) and self._image.info.get("adobe_transform") != 0
        return self.jpeg if known and self._contents.endswith(END) else None

    def decode(self) -> Tensor:
        with _explained():
            if (decoded := self._decode_jpeg()) is not None:
                return decoded
            self._image.verify()  # checks PNG's checksums, which decoding skips
            image = Image.open(BytesIO(self._contents), formats=FORMATS)
            if self._upright and (turn := _find_turn(image)) is not None:
                image = image.transpose(turn)
            return F.pil_to_tensor(_to_rgb(image))

    def _decode_jpeg(self) -> Tensor | None:
        decode_jpeg = _find_decoder()
        if decode_jpeg is None or (jpeg := self.jpeg) is None:
            return None
        try:
            return decode_jpeg(jpeg)
        except RuntimeError:  # Pillow says what is wrong, or reads it
            return None


def _decode_group(
    device: torch.device, group: list[_File | UnreadableImageError]
) -> Iterator[Tensor | UnreadableImageError]:
    on_gpu: dict[_File, Tensor] = {}
    decode_jpeg = _find_decoder()
    if device.type == "cuda" and decode_jpeg is not None:
        files = [file for file in group if isinstance(file, _File)]
        jpegs = {file: jpeg for file in files if (jpeg := file.jpeg_for_gpu) is not None}
        if jpegs:
            with suppress(RuntimeError):  # for one of them: the CPU decodes them all
                on_gpu = dict(zip(jpegs, decode_jpeg(list(jpegs.values()), device=device)))
    for file in group:
        if isinstance(file, UnreadableImageError):
            yield file
        elif file in on_gpu:
            yield on_gpu.pop(file)
        else:
            yield _attempt(lambda file: file.decode().to(device), file)


def _attempt(read: Callable[[S], T], source: S) -> T | UnreadableImageError:
    try:
        return read(source)
    except UnreadableImageError as error:
        return error


@contextmanager
def _explained() -> Iterator[None]:
    """Says why a file cannot be decoded, where Pillow says that it cannot."""
    try:
        yield
    except (MemoryError, UnreadableImageError):
        raise
    except UnidentifiedImageError as error:
        names = ", ".join(FORMATS)
        raise UnreadableImageError(f"the file cannot be decoded (none of {names})") from error
    except Exception as error:  # Pillow raises errors of any kind for damaged files
        # Without the details of this file: equal reasons are counted.
        of_system = isinstance(error, OSError) and error.strerror
        reason = of_system or str(error).split(" (")[0]
        raise UnreadableImageError(f"the file cannot be decoded ({reason})") from error


@functools.cache
def _find_decoder() -> Callable[..., Any] | None:
    """Returns torchcodec's decoder; None where it is not installed or cannot be loaded."""
    try:
        from torchcodec.decoders import decode_jpeg  # pyright: ignore
    except (ImportError, OSError, RuntimeError):
        return None
    return decode_jpeg


def _find_turn(image: Image.Image) -> Image.Transpose | None:
    """Returns what turns an image upright, as its EXIF says."""
    return TURNS.get(image.getexif().get(ExifTags.Base.Orientation, 1))


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16-bit greyscale, which `convert` would cut off at 255
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    image.info.pop("transparency", None)  # `convert` would warn of it
    return image.convert("RGB")
