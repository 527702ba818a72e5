"""Files of tables: how they are read, what their contents decide, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hoconv.approx import LookupTable
from tests.hoconv.ops.approx.tables import exact, random_table

signs = pytest.mark.parametrize("signed", [True, False])
some_bits = pytest.mark.parametrize("bits", [(2, 2), (3, 3), (4, 4), (8, 8), (8, 4), (3, 6)])


def values(bits: int, signed: bool) -> np.ndarray:
    """All integers of so many bits, the least first."""
    return np.arange(1 << bits) - (1 << bits >> 1 if signed else 0)


def by_value(bits: tuple[int, int], signed: bool) -> np.ndarray:
    """Products that are exact but for two dropped bits of large ones."""
    exact = np.multiply.outer(*(values(n, signed) for n in bits))
    return np.where(abs(exact) > 64, exact & ~3, exact)


def by_index(bits: tuple[int, int], signed: bool) -> np.ndarray:
    """The same, each row and column at its number modulo 2^bits."""
    places = [values(n, signed) % (1 << n) for n in bits]
    products = np.zeros([1 << n for n in bits], int)
    products[np.ix_(*places)] = by_value(bits, signed)
    return products


def write(path: Path, products: np.ndarray, separator: str = " ") -> Path:
    path.write_text("\n".join(separator.join(map(str, row)) for row in products.tolist()) + "\n")
    return path


@signs
@some_bits
@pytest.mark.parametrize("order", ["value", "index"])
@pytest.mark.parametrize("form", ["txt", "csv", "npy", "bin"])
def test_contents_tell_sign_and_order(
    tmp_path: Path, signed: bool, bits: tuple[int, int], order: Any, form: str
) -> None:
    products = by_value(bits, signed) if order == "value" else by_index(bits, signed)
    path = tmp_path / f"table.{form}"
    if form == "npy":
        np.save(path, products)
    elif form == "bin":
        products.astype("<i2" if signed else "<u2").tofile(path)
    else:
        write(path, products, {"txt": " ", "csv": ", "}[form])
    read = LookupTable.load(path, bits=bits if form == "bin" else None)
    assert (read.signed, read.bits) == (signed, bits)
    assert torch.equal(read.products, torch.from_numpy(by_index(bits, signed)).int())
    words = {"value": "by value, the least first", "index": "by index, 0 first"}[order]
    assert (words if signed else str(path)) in repr(read)
    chosen = LookupTable.load(path, signed=signed, order=order, bits=bits)
    assert torch.equal(chosen.products, read.products)


@pytest.mark.parametrize("form", ["txt", "npy"])
def test_arguments_decide_what_contents_do_not(tmp_path: Path, form: str) -> None:
    products = np.random.default_rng(0).integers(-99, 99, (16, 16))
    path = write(tmp_path / "table.txt", products)
    if form == "npy":
        path = tmp_path / "table.npy"
        np.save(path, products)
    with pytest.raises(
        ValueError,
        match=r"table\.\w+: its products fit no reading by their likeness to exact ones; choose by "
        "arguments: signed=False; signed=True, order='index'; signed=True, order='value'$",
    ):
        LookupTable.load(path)
    cases: Any = ((False, None, 0), (True, "index", 0), (True, "value", 8))
    for signed, order, shift in cases:
        read = LookupTable.load(path, signed=signed, order=order)
        assert (read.products.numpy() == np.roll(products, (shift, shift), (0, 1))).all()


def test_a_text_by_value_alone_has_no_order_of_its_own(tmp_path: Path) -> None:
    path = write(tmp_path / "table.txt", np.zeros((16, 16), int))
    with pytest.raises(ValueError, match=r"choose by arguments: signed=True, order='index'; s"):
        LookupTable.load(path, signed=True)
    assert LookupTable.load(path, signed=False).products.count_nonzero() == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 2\n3 x\n", r"table\.txt, line 2: expected integers, got 'x'"),
        ("1 2\n3 1.5\n", r"table\.txt, line 2: expected integers, got '1\.5'"),
        ("# products\n1 2 3 4\n\n5 6 7\n", r"line 4: expected 4 products as in line 2, got 3"),
        ("1 2 3\n1 2 3\n", r"table\.txt: expected 2\^p rows of 2\^q .*; it has 2 rows of 3"),
        ("", r"table\.txt: expected 2\^p rows .*; it has 0 rows of 0"),
        ("1\n2\n3\n", r"table\.txt: expected 2\^p rows .*; it has 3 products"),
    ],
)
def test_wrong_texts_are_refused_with_the_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "table.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as refused:
        LookupTable.load(path)
    assert "\n" not in str(refused.value)


def test_a_flat_text_is_square_or_of_the_bits_that_are_given(tmp_path: Path) -> None:
    for bits, given in (((4, 4), None), ((4, 4), 4), ((5, 3), (5, 3))):
        products = by_value(bits, True)
        path = write(tmp_path / "table.txt", products.reshape(-1, 1))
        read = LookupTable.load(path, bits=given)
        assert (read.products.numpy() == by_index(bits, True)).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 9}, r"^bits: expected a number from 2 to 8, or two; got 9$"),
        ({"bits": (8, 8, 8)}, r"^bits: expected a number from 2 to 8, or two; got \(8, 8, 8\)$"),
        ({"bits": "8"}, r"^bits: expected a number from 2 to 8, or two; got '8'$"),
        ({"bits": 5}, r"table\.txt: expected .*; it has 256 products, not the 1,024 of 5 and 5"),
        ({"bits": (5, 3)}, r"table\.txt: expected 32 rows of 8 products for bits=\(5, 3\); it has"),
        ({"order": "rows"}, r"^order: expected 'index' or 'value', got 'rows'$"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(tmp_path: Path, options: Any, message: str) -> None:
    path = write(tmp_path / "table.txt", by_value((4, 4), True))
    with pytest.raises(ValueError, match=message):
        LookupTable.load(path, **options)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.txt"
    path.write_bytes(b"1 2\n\xff\xfe")
    with pytest.raises(ValueError, match=r"table\.txt: not a text \(invalid start byte at byte 4"):
        LookupTable.load(path)


@signs
@pytest.mark.parametrize("shape", [(256, 256), (65536,)])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_reads_npy_files(tmp_path: Path, signed: bool, shape: Any, dtype: Any) -> None:
    table = random_table(signed)
    np.save(tmp_path / "table.npy", table.products.numpy().reshape(shape).astype(dtype))
    read = LookupTable.load(tmp_path / "table.npy", signed=signed)
    assert torch.equal(read.products, table.products)
    assert read.signed == signed


@signs
@pytest.mark.parametrize("width", [2, 4])
def test_reads_raw_files(tmp_path: Path, signed: bool, width: int) -> None:
    products = exact(signed).products.numpy()
    kind = "i" if signed or width == 4 else "u"
    (tmp_path / "table.bin").write_bytes(products.astype(f"<{kind}{width}").tobytes())
    read = LookupTable.load(tmp_path / "table.bin", signed=signed)
    assert torch.equal(read.products, torch.from_numpy(products))


def header(shape: str, dtype: str = "'<i2'") -> bytes:
    text = f"{{'descr': {dtype}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


@pytest.mark.parametrize(
    "contents",
    [
        header("(256, 256)") + bytes(1000),
        header("(1000000, 1000000, 1000)") + bytes(1000),
        header("(9223372036854775807, 3)"),
        header("(-256, -256)") + bytes(131072),
        header("(256, 256)", "'|O'") + bytes(1000),
        header("(256, 256)", "[('a', '<i2')]") + bytes(1000),
        header("(256, 256") + bytes(1000),
        header("(256, 'a')") + bytes(1000),
        header("256") + bytes(1000),
        header("()"),
        header("(0, 256)"),
        b"\x93NUMPY\x01\x00\xff",
        b"\x93NUMPY\x09\x00\xff\xff",
        b"PK\x03\x04" + bytes(100),
        b"",
    ],
)
def test_absurd_headers_are_refused(tmp_path: Path, contents: bytes) -> None:
    path = tmp_path / "table.npy"
    path.write_bytes(contents)
    with pytest.raises(ValueError, match=r"table\.npy: "):
        LookupTable.load(path, signed=True)


def test_malformed_files_are_refused_with_what_they_are(tmp_path: Path) -> None:
    path = tmp_path / "table.bin"
    path.write_bytes(bytes(1000))
    with pytest.raises(ValueError, match=r"table\.bin: expected 2\^p rows .*; it has 1,000$"):
        LookupTable.load(path, signed=True)
    path = tmp_path / "table.npy"
    path.write_bytes(b"no numpy file")
    with pytest.raises(ValueError, match=r"table\.npy: not a readable \.npy file"):
        LookupTable.load(path, signed=True)
    for array, message in (
        (np.zeros((512, 512), int), r"expected shape \(2\^p, 2\^q\) .*, got \(512, 512\)"),
        (np.zeros((256, 256)), "expected integers, got float64"),
        (np.full((256, 256), 2**31), "expected numbers that fit int32, got 2147483648"),
    ):
        np.save(path, array)
        with pytest.raises(ValueError, match=rf"table\.npy: products: {message}"):
            LookupTable.load(path, signed=True)
    np.save(path, np.array([{}]), allow_pickle=True)
    with pytest.raises(ValueError, match=r"table\.npy: not a readable"):
        LookupTable.load(path, signed=True)
    with pytest.raises(FileNotFoundError):
        LookupTable.load(tmp_path / "missing.npy", signed=True)
