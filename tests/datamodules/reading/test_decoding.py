import io
import os
import re
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from datamodules.reading import decoding
from datamodules.reading.decoding import (
    MAX_PIXELS,
    UnreadableImageError,
    decode,
    decode_on,
    decodes_on,
)
from datamodules.reading.pixels import resize
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


JPEGS = {  # what Pillow is told to write -> the mode of the image
    "plain": ("RGB", {}),
    "every pixel its colour": ("RGB", {"subsampling": 0}),
    "two pixels a colour": ("RGB", {"subsampling": 1}),
    "progressive": ("RGB", {"progressive": True}),
    "grey": ("L", {}),
    "CMYK": ("CMYK", {}),
}
# Of the difference between GPU and CPU, by the sampling that Pillow is told, at 224 x 224.
MEAN_AND_P99 = {0: (0.2, 1.0), 2: (0.4, 6.0)}
DECODERS = pytest.mark.parametrize("decoder", ["torchcodec", "Pillow"])


@pytest.fixture
def choose(monkeypatch):
    """Leaves torchcodec out, or asks for it."""

    def choose(decoder: str) -> None:
        if decoder == "Pillow":
            monkeypatch.setattr(decoding, "_find_decoder", lambda: None)
        else:
            pytest.importorskip("torchcodec")

    return choose


def photograph(kind: str, **options) -> bytes:
    mode, how = JPEGS[kind]
    noise = np.random.default_rng(0).integers(256, size=(5, 7, 3), dtype=np.uint8)
    image = Image.fromarray(noise).resize((53, 37), Image.Resampling.BICUBIC).convert(mode)
    return pictures.saved(image, "JPEG", **how, **options)


def as_pillow_reads(contents: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(contents), formats=("JPEG",)) as image:
        return np.asarray(image.convert("RGB"))


@DECODERS
@pytest.mark.parametrize("kind", JPEGS)
def test_every_jpeg_has_the_pixels_that_pillow_reads(tmp_path, choose, decoder, kind):
    choose(decoder)
    contents = photograph(kind)
    found = pixels(tmp_path / "image", contents)
    np.testing.assert_array_equal(found, as_pillow_reads(contents))


@DECODERS
@pytest.mark.parametrize("orientation", UPRIGHT)
def test_a_jpeg_is_turned_upright_when_asked(tmp_path, choose, decoder, orientation):
    choose(decoder)
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    contents = photograph("plain", exif=exif)
    seen, path = as_pillow_reads(contents), tmp_path / "image"
    np.testing.assert_array_equal(pixels(path, contents), seen)
    np.testing.assert_array_equal(pixels(path, contents, upright=True), UPRIGHT[orientation](seen))


def test_jpegs_are_decoded_by_torchcodec(tmp_path, choose, monkeypatch):
    choose("torchcodec")
    monkeypatch.setattr(decoding, "_to_rgb", None)
    assert pixels(tmp_path / "image", photograph("progressive")).shape == (37, 53, 3)


def test_damaged_jpegs_are_what_pillow_says_they_are(tmp_path, choose, capfd):
    choose("torchcodec")
    generator = np.random.default_rng(0)
    contents, said = photograph("plain"), {True: 0, False: 0}
    for _ in range(300):
        damaged = bytearray(contents)
        if generator.random() < 0.3:
            del damaged[generator.integers(2, len(damaged)) :]
        else:
            # Not in the header: its size could be one that takes long to fill.
            damaged[generator.integers(200, len(damaged))] ^= 1 << int(generator.integers(8))
        try:
            expected = as_pillow_reads(bytes(damaged))
        except Exception:  # of any kind
            expected = None
        try:
            found = pixels(tmp_path / "image", bytes(damaged))
        except UnreadableImageError:
            found = None
        assert (found is None) == (expected is None)
        if found is not None:
            np.testing.assert_array_equal(found, expected)
        said[found is None] += 1
    assert min(said.values()) > 50


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


def several(folder: Path) -> list[Path]:
    """Files of every kind: JPEGs of which a GPU decodes most, other formats, and damaged ones."""
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    whole = photograph("plain")
    noise = np.random.default_rng(1).integers(256, size=(40, 50, 3), dtype=np.uint8)
    files = {
        **{kind: photograph(kind) for kind in JPEGS},
        "turned": photograph("every pixel its colour", exif=exif),
        "red, green and blue": pictures.saved(Image.fromarray(noise), "JPEG", keep_rgb=True),
        "cut off": whole[: len(whole) // 2],
        "cut off at the end": whole[:-2],
        "more behind it": whole + b"more",
        "empty": b"",
        "text": b"no image",
        "png": pictures.png(np.random.default_rng(0), GREY, 8)[0],
    }
    for name, contents in files.items():
        (folder / name).write_bytes(contents)
    return [folder / name for name in (*files, "missing")]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("upright", [False, True])
@pytest.mark.parametrize("most", [MAX_PIXELS, 2500])
def test_files_that_are_decoded_together_are_what_each_is(
    tmp_path, monkeypatch, device, upright, most
):
    monkeypatch.setattr(decoding, "MAX_PIXELS", most)  # more files than one group
    paths = several(tmp_path)
    results = list(decode_on(torch.device(device), iter(paths), upright=upright))
    # A colour for several pixels is smoothed by a CPU only.
    rough = {"plain", "two pixels a colour", "progressive", "more behind it"}
    for path, result in zip(paths, results, strict=True):
        if isinstance(result, UnreadableImageError):
            with pytest.raises(UnreadableImageError, match=f"^{re.escape(str(result))}$"):
                decode(path, upright=upright)
            continue
        expected = decode(path, upright=upright)
        assert (result.device.type, result.dtype) == (device, torch.uint8)
        assert result.shape == expected.shape
        difference = (result.cpu().int() - expected.int()).abs().float().mean()
        assert difference <= (10 if device == "cuda" and path.name in rough else 0), path.name


@pytest.mark.gpu
def test_a_gpu_decodes_here():
    pytest.importorskip("torchcodec")
    assert decodes_on(torch.device("cuda", 0))


@pytest.mark.gpu
@pytest.mark.data
@pytest.mark.skipif("HOCONV_DATA_DIR" not in os.environ, reason="HOCONV_DATA_DIR is not set")
@pytest.mark.parametrize("sampling", [0, 2], ids=["a colour a pixel", "a colour for four"])
def test_photographs_of_a_gpu_are_those_of_a_cpu(tmp_path, sampling):
    """The mean and the 99th percentile of the difference, of 255, as in docs/use/segmentation.md.
    Lists of any length give the same bits; none of the images is another."""
    gpu = torch.device("cuda", 0)
    paths = []
    for path in Path(os.environ["HOCONV_DATA_DIR"], "coco", "train2017").glob("*.jpg"):
        paths.append(tmp_path / path.name)
        Image.open(path).convert("RGB").save(paths[-1], "JPEG", subsampling=sampling, quality=90)
    cpu = torch.stack([resize(decode(path), 224) for path in paths])
    for length in (1, 8, len(paths)):
        found = []
        for first in range(0, len(paths), length):
            for image in decode_on(gpu, paths[first : first + length]):
                assert isinstance(image, torch.Tensor)
                found.append(resize(image, 224).cpu())
        difference = (torch.stack(found).int() - cpu.int()).abs().float()
        mean, most = MEAN_AND_P99[sampling]
        assert difference.mean() <= mean
        assert difference.flatten(1).quantile(0.99, dim=1).max() <= most
        to_each = (torch.stack(found).float()[:, None, :, ::8, ::8] - cpu[:, :, ::8, ::8]).abs()
        assert to_each.mean((2, 3, 4)).argmin(1).tolist() == list(range(len(paths)))
