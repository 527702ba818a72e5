"""An image file as pixels: the one place where images are decoded.

With Pillow: a file with a flipped bit is an exception in it, where other decoders write outside
their memory.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError
from torch import Tensor
from torchvision.transforms.v2 import functional as F

FORMATS = ("GIF", "JPEG", "PNG", "WEBP")
# Of an image: 1.3 GB while it is decoded, in each worker. A file of half a megabyte can claim more
# pixels than there is memory. Photographs have up to 108 million, COCO's at most 0.4.
MAX_PIXELS = 2**27
# EXIF's orientations from 2 on, and what undoes each. `ImageOps.exif_transpose` also writes the
# rest of the EXIF anew, which fails for photographs whose pixels are whole.
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

Image.MAX_IMAGE_PIXELS = None  # Pillow's own limit, for which MAX_PIXELS stands


class UnreadableImageError(Exception):
    """What is wrong with an image file."""


def decode(path: Path, *, upright: bool = False) -> Tensor:
    """An image file as (3, H, W) uint8, RGB; greyscale, palette and CMYK are converted.

    Of 16 bits a channel the upper 8 are kept, of an animation the first frame; transparency is left
    out.

    Args:
        path: JPEG, PNG, GIF or WebP, whatever its name ends in.
        upright: whether to turn it as its EXIF orientation says.

    Raises:
        UnreadableImageError: missing, empty, truncated, damaged where the format shows it, of more
            than `MAX_PIXELS`, or none of these formats.
    """
    if not path.is_file():
        raise UnreadableImageError("the file is missing")
    if path.stat().st_size == 0:
        raise UnreadableImageError("the file is empty")
    try:
        with path.open("rb") as file:
            image = Image.open(file, formats=FORMATS)
            if image.width * image.height > MAX_PIXELS:
                raise UnreadableImageError(
                    f"the image is {image.width} x {image.height}, more than {MAX_PIXELS:,} pixels"
                )
            image.verify()  # PNG's checksums, which decoding passes over
            return F.pil_to_tensor(_rgb(Image.open(file, formats=FORMATS), upright))
    except (MemoryError, UnreadableImageError):
        raise
    except UnidentifiedImageError as error:
        names = ", ".join(FORMATS)
        raise UnreadableImageError(f"the file cannot be decoded (none of {names})") from error
    except Exception as error:  # where a file is damaged, Pillow raises errors of any kind
        reason = str(error).split(" (")[0]  # without numbers of this one file
        raise UnreadableImageError(f"the file cannot be decoded ({reason})") from error


def _rgb(image: Image.Image, upright: bool) -> Image.Image:
    if upright and (orientation := image.getexif().get(ExifTags.Base.Orientation)) in TURNS:
        image = image.transpose(TURNS[orientation])
    if image.mode.startswith("I"):  # 16-bit greyscale, which `convert` would cut off at 255
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    image.info.pop("transparency", None)  # of which `convert` warns
    return image.convert("RGB")
