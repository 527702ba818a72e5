import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pycocotools import mask as rle_format

from datamodules.coco.annotations import masks
from datamodules.reading.skipped import DamagedError

HEIGHT, WIDTH = 5, 7


def definition(text: str) -> list[int] | None:
    """The runs of a text, one character after the other; None where it is not of runs."""
    runs: list[int] = []
    value = shift = 0
    for character in text:
        code = ord(character) - 48
        if not 0 <= code < 64:
            return None
        value |= (code & 31) << shift
        shift += 5
        if not code & 32:
            value -= (code & 16) and 1 << shift
            runs.append(value + (runs[-2] if len(runs) > 2 else 0))
            value = shift = 0
    return None if shift or not runs else runs


def draw(text: bytes, size: tuple[int, ...]) -> np.ndarray:
    ends, labels, seen = masks.compose([(text, 1)], HEIGHT * WIDTH)
    assert seen.tolist() == [masks.area(text, (HEIGHT, WIDTH))]
    return np.repeat(labels == 1, np.diff(ends, prepend=0)).reshape(size, order="F")


def compressed(pixels: np.ndarray) -> str:
    mask: Any = rle_format.encode(np.asfortranarray(pixels.astype(np.uint8)))
    return mask["counts"].decode()


pixels = st.lists(st.booleans(), min_size=HEIGHT * WIDTH, max_size=HEIGHT * WIDTH).map(
    lambda values: np.reshape(values, (HEIGHT, WIDTH))
)


@given(pixels=pixels)
def test_masks_are_drawn_as_pycocotools_compressed_them(pixels):
    text = masks.encode({"size": [HEIGHT, WIDTH], "counts": compressed(pixels)}, HEIGHT, WIDTH)
    np.testing.assert_array_equal(draw(text, pixels.shape), pixels)
    assert masks.area(text, pixels.shape) == pixels.sum()


@given(layers=st.lists(st.tuples(pixels, st.integers(1, 255)), max_size=5))
def test_masks_are_drawn_over_each_other(layers):
    size = {"size": [HEIGHT, WIDTH]}
    expected = np.zeros((HEIGHT, WIDTH), int)
    front = np.full((HEIGHT, WIDTH), -1)
    texts = []
    for mask, label in layers:
        expected[mask] = label
        front[mask] = len(texts)
        segmentation = size | {"counts": compressed(mask)}
        texts.append((masks.encode(segmentation, HEIGHT, WIDTH), label))
    ends, labels, seen = masks.compose(texts, HEIGHT * WIDTH)
    drawn = np.repeat(labels, np.diff(ends, prepend=0)).reshape((HEIGHT, WIDTH), order="F")
    np.testing.assert_array_equal(drawn, expected)
    assert seen.tolist() == [(front == number).sum() for number in range(len(texts))]
    assert (labels[1:] != labels[:-1]).all(), "runs are as long as they can be"


@given(pixels=pixels, data=st.data())
def test_a_text_is_refused_unless_its_runs_fill_the_image(pixels, data):
    text = list(compressed(pixels))
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, len(text)))
        text[position : position + data.draw(st.integers(0, 2))] = data.draw(
            st.text(st.characters(min_codepoint=46, max_codepoint=113), max_size=2)
        )
    counts = "".join(text)
    runs = definition(counts)
    segmentation = {"size": [HEIGHT, WIDTH], "counts": counts}
    if runs is None or min(runs) < 0 or sum(runs) != HEIGHT * WIDTH:
        with pytest.raises(DamagedError):
            masks.encode(segmentation, HEIGHT, WIDTH)
    else:
        expected = np.repeat(np.arange(len(runs)) % 2, runs).reshape(WIDTH, HEIGHT).T
        drawn = draw(masks.encode(segmentation, HEIGHT, WIDTH), (HEIGHT, WIDTH))
        np.testing.assert_array_equal(drawn, expected)


# Multiples of 1 / 8, so that it can be said exactly which are on a line.
coordinates = st.one_of(
    st.integers(-8 * WIDTH, 16 * WIDTH).map(lambda n: n / 8), st.integers(-HEIGHT, HEIGHT)
)


def encloses(polygon: list[float]) -> bool:
    """Returns whether its points are not on a line."""
    (x, y), *rest = zip(polygon[::2], polygon[1::2])
    moved = [(a - x, b - y) for a, b in rest]
    return any(a * d != b * c for (a, b), (c, d) in itertools.combinations(moved, 2))


@given(
    polygons=st.lists(
        st.lists(coordinates, min_size=6, max_size=16).filter(lambda p: len(p) % 2 == 0),
        min_size=1,
        max_size=4,
    )
)
def test_any_polygons_near_the_image_are_what_pycocotools_draws(polygons):
    try:
        text = masks.encode(polygons, HEIGHT, WIDTH)
    except DamagedError as error:
        assert "far outside" in str(error) or not any(map(encloses, polygons))  # noqa: PT017
        return
    polygons = [polygon for polygon in polygons if encloses(polygon)]
    merged: Any = rle_format.merge(rle_format.frPyObjects(polygons, HEIGHT, WIDTH))
    drawn = draw(text, (HEIGHT, WIDTH))
    np.testing.assert_array_equal(drawn, rle_format.decode(merged).astype(bool))
