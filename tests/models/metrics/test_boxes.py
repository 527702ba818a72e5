"""Average precision is that of pycocotools, given the annotation file and a file of results."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
from typing import Any

import numpy as np
import pytest
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from datamodules.coco.annotations.boxes import Boxes
from models.metrics.boxes import NAMES, ScoredBoxes, average_precision
from tests.datamodules.coco.files import CATEGORIES

IMAGES = 12


def draw_boxes(generator: np.random.Generator, count: int) -> np.ndarray:
    corner = generator.uniform(0, 150, (count, 2))
    return np.concatenate((corner, generator.uniform(4, 140, (count, 2))), axis=1).round(2)


def draw(generator: np.random.Generator) -> tuple[dict, list[dict], list[ScoredBoxes]]:
    """An annotation file, and results for it in both forms: some near its boxes, others not."""
    ids = list(CATEGORIES)
    images = [
        {"id": 7 * i + 3, "file_name": f"{i}.jpg", "height": 300, "width": 300}
        for i in range(IMAGES)
    ]
    annotations, results, found = [], [], []
    for image in images:
        boxes = draw_boxes(generator, int(generator.integers(0, 6)))
        labels = generator.integers(len(ids), size=len(boxes))
        for box, label in zip(boxes.tolist(), labels):
            annotations.append(
                {"id": len(annotations) + 1, "image_id": image["id"], "category_id": ids[label],
                 "bbox": box, "area": box[2] * box[3] * generator.uniform(0.3, 1),
                 "iscrowd": int(generator.random() < 0.2)}
            )  # fmt: skip
        near = boxes + generator.normal(0, 4, boxes.shape)
        near[:, 2:] = near[:, 2:].clip(1)
        guesses = np.concatenate((near, draw_boxes(generator, 3)))
        classes = np.concatenate((labels, generator.integers(len(ids), size=3)))
        scores = generator.random(len(guesses))
        found.append(ScoredBoxes(guesses, scores, classes))
        for box, score, label in zip(guesses.tolist(), scores.tolist(), classes):
            results.append(
                {"image_id": image["id"], "category_id": ids[label], "bbox": box, "score": score}
            )
    categories = [{"id": i, "name": name} for i, name in CATEGORIES.items()]
    file = {"images": images, "annotations": annotations, "categories": categories}
    return file, results, found


@pytest.mark.parametrize("seed", range(5))
def test_it_is_that_of_the_files(tmp_path, seed):
    file, results, found = draw(np.random.default_rng(seed))
    path = tmp_path / "instances.json"
    path.write_text(json.dumps(file))
    boxes = Boxes(path, tmp_path / "cache")
    truth = [boxes.of_image(i) for i in range(IMAGES)]
    repeated = pickle.loads(pickle.dumps(truth[0]))  # DDP repeats some, from another process
    scores = average_precision([*truth, repeated], [*found, found[0]])

    with contextlib.redirect_stdout(io.StringIO()):
        official: Any = COCO(str(path))
        evaluation = COCOeval(official, official.loadRes(results), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    expected = dict(zip(NAMES, evaluation.stats.tolist()))
    expected = {n: v if v >= 0 else np.nan for n, v in expected.items()}
    assert scores == pytest.approx(expected, nan_ok=True)
    assert 0.05 < scores["ap"] < 0.95


def test_nothing_found_is_a_score_of_zero(tmp_path):
    file, _, found = draw(np.random.default_rng(0))
    path = tmp_path / "instances.json"
    path.write_text(json.dumps(file))
    boxes = Boxes(path, tmp_path / "cache")
    nothing = ScoredBoxes(np.zeros((0, 4)), np.zeros(0), np.zeros(0, np.int64))
    truth = [boxes.of_image(i) for i in range(IMAGES)]
    scores = average_precision(truth, IMAGES * [nothing])
    assert scores["ap50"] == 0
    assert set(scores) == set(average_precision(truth, found)) == set(NAMES)


def test_images_without_objects_count_only_what_is_found_in_them(tmp_path):
    file, _, found = draw(np.random.default_rng(0))
    path = tmp_path / "instances.json"
    path.write_text(json.dumps(file))
    boxes = Boxes(path, tmp_path / "cache")
    truth = [boxes.of_image(i) for i in range(IMAGES)]
    empty = truth[0]._replace(
        image=1000, boxes=np.zeros((0, 4)), classes=np.zeros(0, np.int64), areas=np.zeros(0),
        crowds=np.zeros(0, bool),
    )  # fmt: skip
    nothing = ScoredBoxes(np.zeros((0, 4)), np.zeros(0), np.zeros(0, np.int64))
    scores = average_precision(truth, found)
    assert average_precision([*truth, empty], [*found, nothing]) == pytest.approx(
        scores, nan_ok=True
    )
    sure = ScoredBoxes(np.full((20, 4), 50.0), np.ones(20), np.arange(20) % 2)
    assert average_precision([*truth, empty], [*found, sure])["ap"] < scores["ap"]


def test_a_score_of_nothing_is_no_number(tmp_path):
    file, _, found = draw(np.random.default_rng(0))
    path = tmp_path / "instances.json"
    path.write_text(json.dumps(file))
    boxes = Boxes(path, tmp_path / "cache")
    truth = [boxes.of_image(i) for i in range(IMAGES)]
    small = [said._replace(areas=np.ones_like(said.areas)) for said in truth]
    scores = average_precision(small, found)
    assert [name for name in NAMES if np.isnan(scores[name])] == ["ap_medium", "ap_large"]
    crowds = [said._replace(crowds=np.ones_like(said.crowds)) for said in truth]
    for said, guessed in ((crowds, found), ([], [])):
        assert average_precision(said, guessed) == pytest.approx(
            dict.fromkeys(NAMES, np.nan), nan_ok=True
        )
