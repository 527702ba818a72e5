import json
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pycocotools import mask as rle_format

from datamodules.coco.annotations.captions import Captions
from datamodules.coco.annotations.instances import Instances
from datamodules.coco.annotations.objects import IGNORE
from datamodules.images import DataNotFoundError
from tests.datamodules.coco.files import Split, rectangle

HEIGHT, WIDTH = 8, 10


def label_map(split: Split, tmp_path) -> np.ndarray:
    """Of the only image of a split."""
    split.write()
    instances = Instances(split.file("instances"), tmp_path / "cache")
    assert len(instances) == 1
    return instances.label_map(0)


def run_lengths(mask: np.ndarray) -> list[int]:
    """Uncompressed RLE as in COCO's files: column by column, zeros first."""
    flat = mask.T.ravel()
    changes = np.flatnonzero(np.diff(flat)) + 1
    bounds = [0, *changes, flat.size]
    lengths = np.diff(bounds).tolist()
    return [0, *lengths] if flat[0] else lengths


boxes = st.tuples(
    st.integers(0, WIDTH - 1), st.integers(0, HEIGHT - 1), st.integers(1, WIDTH),
    st.integers(1, HEIGHT), st.sampled_from([3, 18]),
)  # fmt: skip


@given(drawn=st.lists(boxes, min_size=1, max_size=5))
def test_the_smaller_of_two_instances_is_in_front(tmp_path_factory, drawn):
    tmp_path = tmp_path_factory.mktemp("boxes")
    split = Split(tmp_path / "data")
    image = split.image(height=HEIGHT, width=WIDTH)
    masks = []
    for x, y, width, height, category in drawn:
        width, height = min(width, WIDTH - x), min(height, HEIGHT - y)
        split.instance(image, rectangle(x, y, width, height), category)
        mask = np.zeros((HEIGHT, WIDTH), bool)
        mask[y : y + height, x : x + width] = True
        masks.append((mask, 1 if category == 3 else 2))
    assume(any(x + width > 1 or y + height > 1 for x, y, width, height, _ in drawn))  # pixels
    expected = np.zeros((HEIGHT, WIDTH), np.uint8)
    for mask, label in sorted(masks, key=lambda m: -m[0].sum()):
        expected[mask] = label
    np.testing.assert_array_equal(label_map(split, tmp_path), expected)


def test_a_crowd_counts_in_nothing_but_where_an_instance_is(split, tmp_path):
    image = split.image(height=HEIGHT, width=WIDTH)
    crowd = np.zeros((HEIGHT, WIDTH), np.uint8)
    crowd[2:6, 3:9] = 1
    split.instance(image, rectangle(4, 3, 2, 2), category=18)
    split.instance(
        image, {"size": [HEIGHT, WIDTH], "counts": run_lengths(crowd)}, category=3, crowd=1
    )
    expected = np.where(crowd, IGNORE, 0)
    expected[3:5, 4:6] = 2
    np.testing.assert_array_equal(label_map(split, tmp_path), expected)


@pytest.mark.parametrize("compressed", [True, False])
def test_run_lengths_are_drawn_as_they_are(split, tmp_path, compressed):
    image = split.image(height=HEIGHT, width=WIDTH)
    mask = (np.arange(HEIGHT * WIDTH).reshape(HEIGHT, WIDTH) % 3 == 0).astype(np.uint8)
    counts = run_lengths(mask)
    if compressed:
        encoded: Any = rle_format.encode(np.asfortranarray(mask))
        counts = encoded["counts"].decode()
    split.instance(image, {"size": [HEIGHT, WIDTH], "counts": counts}, category=18)
    np.testing.assert_array_equal(label_map(split, tmp_path), 2 * mask)


@pytest.mark.parametrize(
    ("polygon", "rows", "columns"),
    [
        (rectangle(0, 0, WIDTH, HEIGHT), slice(None), slice(None)),
        (rectangle(-2, -3, 5, 6), slice(0, 3), slice(0, 3)),
        (rectangle(WIDTH - 2, HEIGHT - 1, 2, 1), slice(HEIGHT - 1, None), slice(WIDTH - 2, None)),
        (rectangle(WIDTH - 2, 1, 6, 2), slice(1, 3), slice(WIDTH - 2, None)),
    ],
    ids=["the whole image", "over the corner", "in the corner", "over the right border"],
)
def test_instances_on_the_border_are_cut_off_there(split, tmp_path, polygon, rows, columns):
    split.instance(split.image(height=HEIGHT, width=WIDTH), polygon)
    expected = np.zeros((HEIGHT, WIDTH), np.uint8)
    expected[rows, columns] = 1
    np.testing.assert_array_equal(label_map(split, tmp_path), expected)


def test_several_polygons_are_one_instance(split, tmp_path):
    polygons = rectangle(0, 0, 2, 2) + rectangle(5, 5, 2, 2) + [[1.0, 1.0, 2.0, 2.0]]
    split.instance(split.image(height=HEIGHT, width=WIDTH), polygons)
    assert label_map(split, tmp_path).sum() == 8, "a polygon of two points is left out"


@pytest.mark.parametrize(
    ("segmentation", "category", "reason"),
    [
        (rectangle(0, 0, 2, 2), 0, "the category is not one of the file's"),
        (None, 3, "there is no mask"),
        ([], 3, "there is no mask"),
        ([[1, 2, 3, 4]], 3, "no polygon has three points that are on no line"),
        ([[1, 2, 3, 4, 5, 6]], 3, "no polygon has three points that are on no line"),
        ([[0.1, 0.1, 0.3, 0.3, 0.7, 0.7]], 3, "no polygon has three points that are on no line"),
        ([6 * [3]], 3, "no polygon has three points that are on no line"),
        (rectangle(11, 1, 2, 2), 3, "the mask covers no pixel of the image"),
        (rectangle(1, -4, 5, 3), 3, "the mask covers no pixel of the image"),
        (rectangle(2.6, 2.6, 0.3, 0.3), 3, "the mask covers no pixel of the image"),
        ({"size": [8, 10], "counts": [80]}, 3, "the mask covers no pixel of the image"),
        ({"size": [8, 10], "counts": "`2"}, 3, "the mask covers no pixel of the image"),
        ([[1, 2, 3, 4, 5, 6, 7]], 3, "a polygon is not a list of x and y"),
        ([[1, 2, 3, 4, 5, "6"]], 3, "a polygon is not a list of x and y"),
        ([[1, 2, 3, 4, 5, True]], 3, "a polygon is not a list of x and y"),
        ([[1, 2], [3, 4], [5, 6, 7]], 3, "a polygon is not a list of x and y"),
        ([[1, 2, 3, float("nan"), 5, 6]], 3, "a polygon is far outside the image"),
        ([[1, 2, 3, 4, 5, 1e9]], 3, "a polygon is far outside the image"),
        ([[1, 2, 3, 4, 5, float("inf")]], 3, "a polygon is far outside the image"),
        ([[1, 2, 3, 4, 5, 10**400]], 3, "a polygon is far outside the image"),
        (
            [75_000 * [-10, -8, 20, 16, 0, 16]],
            3,
            "the mask's outline is longer than 4,194,304 pixels",
        ),
        ("a mask", 3, "neither polygons nor run lengths"),
        ({"size": [8, 9], "counts": [72]}, 3, "the mask is not of the image's size"),
        ({"size": [8, 10], "counts": [10, 90]}, 3, "do not add up to the image"),
        ({"size": [8, 10], "counts": [90, -10]}, 3, "do not add up to the image"),
        ({"size": [8, 10], "counts": []}, 3, "do not add up to the image"),
        ({"size": [8, 10], "counts": [10.5, 69.5]}, 3, "neither text nor a list of integers"),
        ({"size": [8, 10], "counts": None}, 3, "neither text nor a list of integers"),
        ({"size": [8, 10]}, 3, "neither text nor a list of integers"),
        ({"counts": [80]}, 3, "the mask is not of the image's size"),
        ({"size": [8, 10], "counts": ""}, 3, "cut off or not in COCO's format"),
        ({"size": [8, 10], "counts": "`"}, 3, "cut off or not in COCO's format"),
        ({"size": [8, 10], "counts": "`2`"}, 3, "cut off or not in COCO's format"),
        ({"size": [8, 10], "counts": "`2" + 20 * "P"}, 3, "cut off or not in COCO's format"),
        ({"size": [8, 10], "counts": "`2\0"}, 3, "cut off or not in COCO's format"),
        ({"size": [8, 10], "counts": "\xe9"}, 3, "cut off or not in COCO's format"),
        ({"size": [8, 10], "counts": "4"}, 3, "do not add up to the image"),
        ({"size": [8, 10], "counts": "J2o2"}, 3, "do not add up to the image"),
        ({"size": [8, 10], "counts": "`R" + 5 * "P" + "0"}, 3, "do not add up to the image"),
        ({"size": [8, 10], "counts": "oooooo0"}, 3, "do not add up to the image"),
    ],
)
def test_a_damaged_instance_is_left_out_by_name(split, tmp_path, segmentation, category, reason):
    image = split.image(height=HEIGHT, width=WIDTH)
    damaged = split.instance(image, segmentation, category)
    split.instance(image, rectangle(1, 1, 2, 2), 18)
    assert label_map(split, tmp_path).sum() == 8, "the other instance is drawn"
    ((found, names),) = Instances(split.file("instances"), tmp_path / "cache").skipped.items()
    assert reason in found
    assert names == [f"annotation {damaged} of {split.images[0]['file_name']}"]


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("image_id", [1], "its image is not in the file or was skipped"),
        ("image_id", "one", "its image is not in the file or was skipped"),
        ("category_id", [3], "the category is not one of the file's"),
        ("category_id", 3.5, "the category is not one of the file's"),
        ("category_id", "cat", "the category is not one of the file's"),
        ("iscrowd", "no", "iscrowd is neither 0 nor 1"),
    ],
)
def test_a_damaged_annotation_is_left_out_by_name(split, tmp_path, key, value, reason):
    image = split.image(height=HEIGHT, width=WIDTH)
    split.instance(image, rectangle(1, 1, 2, 2), 18)
    damaged = split.instance(image, rectangle(0, 0, 9, 7))
    split.instances[1][key] = value
    assert label_map(split, tmp_path).sum() == 8, "the other instance is drawn"
    skipped = Instances(split.file("instances"), tmp_path / "cache").skipped
    ((found, (name,)),) = skipped.items()
    assert found == reason
    assert name.startswith(f"annotation {damaged}")


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("id", None, "the id of the image is not a whole number of 64 bits"),
        ("id", "one", "the id of the image is not a whole number of 64 bits"),
        ("id", 2**64, "the id of the image is not a whole number of 64 bits"),
        ("id", True, "the id of the image is not a whole number of 64 bits"),
        ("id", 100, "several images have the same id"),
        ("file_name", None, "the image has no valid file name"),
        ("file_name", "../val2017/1.jpg", "the image has no valid file name"),
        ("file_name", "a/../1.jpg", "the image has no valid file name"),
        ("file_name", "/", "the image has no valid file name"),
        ("file_name", "a/.", "the image has no valid file name"),
        ("file_name", "a\0", "the image has no valid file name"),
        ("file_name", "\ud800", "the image has no valid file name"),
        ("file_name", 300 * "a", "the image has no valid file name"),
        ("height", 0, "the height or width is missing"),
        ("height", -8, "the height or width is not a positive whole number"),
        ("width", 10.5, "the height or width is not a positive whole number"),
        ("width", float("nan"), "the height or width is not a positive whole number"),
        ("height", 2**31, "the image has more than 134,217,728 pixels"),
        ("height", 10**30, "the image has more than 134,217,728 pixels"),
    ],
)
@pytest.mark.parametrize("kind", ["instances", "captions"])
def test_a_damaged_image_is_left_out_by_its_place(split, tmp_path, kind, key, value, reason):
    for _ in range(3):
        image = split.image()
        split.instance(image, rectangle(1, 1, 2, 2))
        split.caption(image, "a cat")
    split.images[1][key] = value
    split.write()
    read = (Instances if kind == "instances" else Captions)(split.file(kind), tmp_path / "cache")
    of_one_id = (key, value) == ("id", 100)
    names = [name.split(" (")[0] for name in read.skipped[reason]]
    assert names == (["images[0]"] if of_one_id else []) + ["images[1]"]
    assert len(read.skipped["its image is not in the file or was skipped"]) == 1 + of_one_id
    left = [image["file_name"] for image in split.images[2:] + split.images[: 1 - of_one_id]]
    assert read.file_names.tolist() == left


@pytest.mark.parametrize("several", [False, True])
def test_a_polygon_of_a_huge_image_is_refused_before_memory_is_taken(split, tmp_path, several):
    image = split.image()
    split.images[0] |= {"height": 60_000, "width": 60_000}
    split.instance(image, (1 + several) * rectangle(0, 0, 59_000, 59_000))
    split.write()
    with pytest.raises(
        DataNotFoundError, match=r"\(60000 x 60000\): .* more than 134,217,728 pixels"
    ):
        Instances(split.file("instances"), tmp_path / "cache")


@pytest.mark.parametrize(
    ("categories", "reason"),
    [
        (None, '"categories" is None, not a list'),
        ([], '"categories" is an empty list'),
        ([{"id": 3}], r"the name of categories\[0\] is not a text of 1 to 255 bytes"),
        ([{"id": 3, "name": None}], r"the name of categories\[0\] is not a text"),
        ([{"id": 3, "name": "\ud800"}], r"the name of categories\[0\] is not a text"),
        ([{"id": "c", "name": "cat"}], r"the id of categories\[0\] is 'c', not a whole number"),
        (2 * [{"id": 3, "name": "cat"}], r"the id of categories\[1\], 3, is not unique"),
        ([None], r"categories\[0\] is None, not an object"),
        (
            [{"id": 3, "name": "cat"}, {"id": 5, "name": "cat"}],
            "the categories 3 and 5 are both named 'cat', and can be one class or two",
        ),
        ([{"id": i, "name": f"{i}"} for i in range(255)], "255 categories, more than 254"),
        ([{"id": i, "name": f"{i}"} for i in range(300)], "300 categories, more than 254"),
    ],
)
def test_damaged_categories_make_a_damaged_file(split, tmp_path, categories, reason):
    split.instance(split.image(), rectangle(1, 1, 2, 2))
    split.write()
    path = split.file("instances")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"categories": categories}))
    with pytest.raises(DataNotFoundError, match=reason):
        Instances(path, tmp_path / "cache")


def test_the_last_of_the_most_categories_is_drawn(split, tmp_path):
    split.instance(split.image(height=HEIGHT, width=WIDTH), rectangle(1, 1, 2, 2), category=253)
    split.write()
    path = split.file("instances")
    categories = [{"id": i, "name": f"{i}"} for i in range(254)]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"categories": categories}))
    labels = Instances(path, tmp_path / "cache").label_map(0)
    assert set(labels.ravel().tolist()) == {0, 254}


def test_an_instance_of_no_image_is_left_out(split, tmp_path):
    split.instance(split.image(height=HEIGHT, width=WIDTH), rectangle(1, 1, 2, 2))
    lost = split.instance(77, rectangle(1, 1, 2, 2))
    label_map(split, tmp_path)
    skipped = Instances(split.file("instances"), tmp_path / "cache").skipped
    assert skipped == {
        "its image is not in the file or was skipped": [f"annotation {lost} (image_id 77)"]
    }


@pytest.mark.parametrize("name", ["./1.jpg", "a//b/1.jpg"])
def test_a_file_name_may_be_written_in_other_ways(split, tmp_path, name):
    split.instance(split.image(height=HEIGHT, width=WIDTH), rectangle(1, 1, 2, 2))
    split.images[0]["file_name"] = name
    split.write()
    instances = Instances(split.file("instances"), tmp_path / "cache")
    assert instances.file_names.tolist() == [name.replace("./", "").replace("//", "/")]


def test_images_are_in_the_order_of_their_ids(split, tmp_path):
    for i in range(3):
        split.instance(split.image(height=HEIGHT, width=WIDTH), rectangle(0, 0, i + 1, 1))
    split.write()
    instances = Instances(split.file("instances"), tmp_path / "cache")
    assert instances.file_names.tolist() == sorted(i["file_name"] for i in split.images)
    assert [int(instances.label_map(i).sum()) for i in range(3)] == [3, 2, 1]
    assert instances.categories == ["cat", "dog"]
    assert instances.category_ids == [3, 18]


@pytest.mark.parametrize("kind", ["instances", "captions"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "{}",
        lambda text: "[]",
        lambda text: 100_000 * "[",
        lambda text: json.dumps(json.loads(text) | {"annotations": None}),
        lambda text: json.dumps(json.loads(text) | {"images": {}}),
        lambda text: json.dumps(json.loads(text) | {"images": []}),
        lambda text: json.dumps(json.loads(text) | {"annotations": []}),
        lambda text: json.dumps(json.loads(text) | {"annotations": [{"id": 1}]}),
        lambda text: json.dumps(json.loads(text) | {"images": [{"id": 1}]}),
    ],
    ids=[
        "no bytes",
        "cut",
        "{}",
        "[]",
        "deep",
        "null",
        "no list",
        "no images",
        "no annotations",
        "annotation",
        "image",
    ],
)
def test_a_damaged_file_is_named(split, tmp_path, kind, damage):
    image = split.image()
    split.instance(image, rectangle(1, 1, 2, 2))
    split.caption(image, "a cat")
    split.write()
    path = split.file(kind)
    path.write_text(damage(path.read_text()))
    read = Instances if kind == "instances" else Captions
    for _ in range(2):  # nothing of it is kept
        with pytest.raises(DataNotFoundError, match=f"^{path}: .+"):
            read(path, tmp_path / "cache")


def test_a_missing_file_is_named(split, tmp_path):
    path = split.file("instances")
    with pytest.raises(DataNotFoundError, match=f"^{path} cannot be read .No such file"):
        Instances(path, tmp_path / "cache")


def test_captions_keep_their_image_and_empty_ones_are_left_out(split, tmp_path):
    first, second, third = split.image(), split.image(), split.image()
    split.caption(second, "Ein größerer Hund")
    split.caption(first, "a cat")
    empty = [split.caption(first, text) for text in ("  ", "...", "_ -!")]
    split.caption(second, "a dog")
    split.write()
    captions = Captions(split.file("captions"), tmp_path / "cache")
    names = {image["id"]: image["file_name"] for image in split.images}
    found = {name: captions.of_image(i) for i, name in enumerate(captions.file_names.tolist())}
    assert found == {
        names[first]: ["a cat"],
        names[second]: ["Ein größerer Hund", "a dog"],
        names[third]: [],
    }
    assert captions.images_without() == [names[third]]
    assert captions.skipped == {
        "the caption has no word": [f"annotation {n} of {names[first]}" for n in empty]
    }


def test_a_caption_that_is_no_text_is_left_out(split, tmp_path):
    image = split.image()
    damaged = [split.caption(image, text) for text in (None, 3, ["a cat"], "a \ud800")]  # pyright: ignore
    split.caption(image, "a cat")
    split.write()
    captions = Captions(split.file("captions"), tmp_path / "cache")
    assert captions.of_image(0) == ["a cat"]
    name = split.images[0]["file_name"]
    assert captions.skipped == {
        "the caption is not a text": [f"annotation {number} of {name}" for number in damaged]
    }


@pytest.mark.parametrize("categories", [[], None, [{"id": 1, "name": "cat"}]])
def test_categories_in_a_file_of_captions_are_passed_over(split, tmp_path, categories):
    split.caption(split.image(), "a cat")
    split.write()
    path = split.file("captions")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"categories": categories}))
    assert Captions(path, tmp_path / "cache").of_image(0) == ["a cat"]


def test_a_copy_for_a_worker_carries_no_arrays(split, tmp_path):
    image = split.image(height=HEIGHT, width=WIDTH)
    for _ in range(2000):
        split.instance(image, rectangle(1, 1, 2, 2))
    split.write()
    instances = Instances(split.file("instances"), tmp_path / "cache")
    instances.label_map(0)
    copy = pickle.dumps(instances)
    assert len(copy) < 2000
    np.testing.assert_array_equal(pickle.loads(copy).label_map(0), instances.label_map(0))
