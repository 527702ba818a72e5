import io
import zlib

import numpy as np
import pytest
from PIL import Image

from datamodules.reading import decoding
from datamodules.reading.decoding import MAX_PIXELS, UnreadableImageError, decode
from tests.datamodules.coco import pictures
from tests.datamodules.coco.pictures import GREY, ORIENTATION, SIGNATURE, chunk, header


def pixels(path, contents: bytes, **options) -> np.ndarray:
    """(H, W, 3)"""
    path.write_bytes(contents)
    image = decode(path, **options)
    assert str(image.dtype) == "torch.uint8"
    return image.permute(1, 2, 0).numpy()


@pytest.mark.parametrize("interlaced", [False, True])
@pytest.mark.parametrize(("kind", "depth"), pictures.KINDS)
def test_every_png_has_the_pixels_of_its_definition(tmp_path, kind, depth, interlaced):
    generator = np.random.default_rng(depth)
    for _ in range(5):
        contents, expected = pictures.png(generator, kind, depth, interlaced)
        np.testing.assert_array_equal(pixels(tmp_path / "image", contents), expected)


def test_other_formats_have_the_pixels_that_pillow_reads(tmp_path):
    for contents in pictures.others(np.random.default_rng(0)):
        with Image.open(io.BytesIO(contents)) as image:
            expected = np.asarray(image.convert("RGB"))
        np.testing.assert_array_equal(pixels(tmp_path / "image", contents), expected)


UPRIGHT = {  # an EXIF orientation -> the pixels as they should be seen
    1: lambda seen: seen,
    2: lambda seen: seen[:, ::-1],
    3: lambda seen: seen[::-1, ::-1],
    4: lambda seen: seen[::-1],
    5: lambda seen: seen.swapaxes(0, 1),
    6: lambda seen: np.rot90(seen, -1),
    7: lambda seen: np.rot90(seen, 2).swapaxes(0, 1),
    8: lambda seen: np.rot90(seen),
}


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("orientation", UPRIGHT)
def test_an_image_is_turned_upright_when_asked(tmp_path, orientation, bits):
    dtype = np.uint8 if bits == 8 else np.uint16
    grey = np.arange(0, 2**bits, 2**bits // 6, dtype=dtype)[:6].reshape(2, 3)
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    contents = pictures.saved(Image.fromarray(grey), "PNG", exif=exif)
    seen = np.stack(3 * [grey if bits == 8 else grey >> 8], axis=-1)
    path = tmp_path / "image.png"
    np.testing.assert_array_equal(pixels(path, contents), seen)
    np.testing.assert_array_equal(pixels(path, contents, upright=True), UPRIGHT[orientation](seen))


def test_a_photograph_with_unwritable_exif_is_read(tmp_path):
    entries = (
        "0112 0003 00000001 00060000"  # turned
        "011A 0002 00000002 78000000"  # a resolution that is a letter
    )
    exif = b"Exif\0\0MM\0*\0\0\0\x08\0\x02" + bytes.fromhex(entries) + bytes(4)
    contents = pictures.saved(Image.new("RGB", (6, 2)), "JPEG", exif=exif)
    assert pixels(tmp_path / "image.jpg", contents, upright=True).shape == (6, 2, 3)


def test_a_flipped_bit_of_a_png_changes_no_pixel(tmp_path):
    contents, expected = pictures.png(np.random.default_rng(0), GREY, 8)
    read = 0
    for bit in range(0, 8 * len(contents), 7):
        damaged = bytearray(contents)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            found = pixels(tmp_path / "image", bytes(damaged))
        except UnreadableImageError:
            continue
        np.testing.assert_array_equal(found, expected)
        read += 1
    assert read <= 8 * len(chunk(b"IEND", b"")), "nothing but the mark of the end may be damaged"


def bomb(side: int) -> bytes:
    """A PNG of `side` x `side` pixels of 16 bits, all 0: a thousandth of their bytes."""
    deflate = zlib.compressobj()
    rows = b"".join(deflate.compress(bytes(2 * side + 1)) for _ in range(side)) + deflate.flush()
    return SIGNATURE + header(side, side, GREY, 16) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def test_an_image_of_too_many_pixels_is_refused_by_its_header(tmp_path):
    path = tmp_path / "image.png"
    side = int(MAX_PIXELS**0.5) + 1
    path.write_bytes(SIGNATURE + header(side, side, GREY, 1) + chunk(b"IDAT", b""))
    with pytest.raises(UnreadableImageError, match=f"is {side} x {side}, more than 134,217,728"):
        decode(path)


def test_an_image_of_as_many_pixels_as_are_allowed_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(decoding, "MAX_PIXELS", 50**2)
    assert pixels(tmp_path / "image", bomb(50)).shape == (50, 50, 3)
    with pytest.raises(UnreadableImageError, match="51 x 51, more than 2,500 pixels"):
        pixels(tmp_path / "image", bomb(51))


def test_no_other_format_is_read(tmp_path):
    path = tmp_path / "image.png"
    Image.new("RGB", (2, 2)).save(path, "BMP")
    with pytest.raises(UnreadableImageError, match="none of GIF, JPEG, PNG, WEBP"):
        decode(path)


def test_what_a_file_is_called_does_not_matter(tmp_path):
    contents, expected = pictures.png(np.random.default_rng(0), GREY, 8)
    np.testing.assert_array_equal(pixels(tmp_path / "image.jpg", contents), expected)


def test_running_out_of_memory_is_not_taken_for_damage(tmp_path, monkeypatch):
    """It would be remembered as such."""

    def none_left(*arguments):
        raise MemoryError

    monkeypatch.setattr(decoding.F, "pil_to_tensor", none_left)
    with pytest.raises(MemoryError):
        pixels(tmp_path / "image", bomb(2))
