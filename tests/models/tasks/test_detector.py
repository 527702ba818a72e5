"""Targets, loss and results of the detector."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from datamodules.coco.augmentation import CROWD, NOTHING
from models.networks.box_detector import BoxDetector
from models.tasks.centres import Found, find, loss, make_targets, to_boxes
from models.tasks.detector import scale

SIZE, GRID, CATEGORIES = 64, (16, 16), 3
STEP = SIZE / GRID[0]
BOXES = torch.tensor(
    [
        [[2.0, 4, 22, 20], [30, 30, 62, 63], [40, 2, 43, 5], [0, 0, 0, 0]],
        [[8, 8, 24, 24], [32, 0, 64, 32], [0, 0, 0, 0], [0, 0, 0, 0]],
    ]
)
CLASSES = torch.tensor([[0, 2, 1, NOTHING], [1, CROWD, NOTHING, NOTHING]])


def perfect(boxes: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    """Returns what a network would say that finds exactly these."""
    logits = torch.full((len(boxes), CATEGORIES, *GRID), -20.0)
    found = torch.zeros(len(boxes), 4, *GRID)
    for image, (those, labels) in enumerate(zip(boxes, classes, strict=True)):
        for (left, top, right, bottom), label in zip(those.tolist(), labels.tolist(), strict=True):
            if label >= 0:
                x, y = (left + right) / 2 / STEP, (top + bottom) / 2 / STEP
                column, row = int(x), int(y)
                logits[image, label, row, column] = 20 - label
                found[image, :, row, column] = torch.tensor(
                    (x - column - 0.5, y - row - 0.5, (right - left) / STEP, (bottom - top) / STEP)
                )
                found[image, 2:, row, column].log_()
    return logits, found


def test_what_a_perfect_network_says_is_found_again():
    for found, boxes, classes in zip(
        find(*perfect(BOXES, CLASSES), SIZE), BOXES, CLASSES, strict=True
    ):
        real, certain = classes >= 0, found.scores > 0.99
        order = classes[real].argsort()
        assert found.classes[certain].tolist() == classes[real][order].tolist()
        torch.testing.assert_close(found.boxes[certain], boxes[real][order])
        assert (found.scores[~certain] < 0.01).all()


def test_targets_are_one_at_the_centres_of_objects_and_nowhere_else():
    targets = make_targets(BOXES, CLASSES, CATEGORIES, GRID, SIZE)
    expected = {
        (0, 0, 3, 3), (0, 2, 11, 11), (0, 1, 0, 10), (1, 1, 4, 4),
    }  # fmt: skip
    assert {tuple(place) for place in (targets.centres == 1).nonzero().tolist()} == expected
    assert int(targets.count) == 4
    for image, label, row, column in expected:
        box = targets.boxes[image, :, row, column].tolist()
        assert box in BOXES[image][CLASSES[image] == label].tolist()
    assert targets.weights.sum().item() == pytest.approx(4, rel=1e-5)
    assert (targets.centres[1, :, 8:] < 0.05).all()


def test_a_crowd_counts_in_no_loss_but_at_the_centres_of_objects():
    targets = make_targets(BOXES, CLASSES, CATEGORIES, GRID, SIZE)
    crowd = torch.zeros(2, 1, *GRID, dtype=torch.bool)
    crowd[1, :, :8, 8:] = True
    assert torch.equal(targets.counted, ~crowd)
    logits, found = perfect(BOXES, CLASSES)
    before = loss(logits, found, targets, SIZE).total
    logits[1, 0, 2, 12] = 20.0  # in the crowd
    torch.testing.assert_close(loss(logits, found, targets, SIZE).total, before)
    logits[1, 0, 12, 2] = 20.0
    assert loss(logits, found, targets, SIZE).total > before + 10


def test_the_loss_is_least_where_everything_is_found():
    targets = make_targets(BOXES, CLASSES, CATEGORIES, GRID, SIZE)
    logits, _ = perfect(BOXES, CLASSES)
    # Every location says the box that it is to find, those beside a centre too.
    left, top, right, bottom = targets.boxes.unbind(1)
    places = torch.arange(GRID[0]) + 0.5
    x, y = (left + right) / 2 / STEP - places, (top + bottom) / 2 / STEP - places[:, None]
    sizes = ((right - left) / STEP, (bottom - top) / STEP)
    found = torch.stack((x, y, *(each.clamp(min=1e-6).log() for each in sizes)), dim=1)
    least = loss(logits, found, targets, SIZE)
    assert int(least.count) == 4
    assert least.value() == pytest.approx(0, abs=1e-4)
    for change in (logits.flip(1), logits.roll(1, -1), logits - 30):
        assert loss(change, found, targets, SIZE).value() > least.value() + 1
    assert loss(logits, found + 0.3, targets, SIZE).value() > least.value() + 0.1


def test_a_batch_without_objects_has_a_loss():
    nothing = torch.full_like(CLASSES, NOTHING)
    targets = make_targets(torch.zeros_like(BOXES), nothing, CATEGORIES, GRID, SIZE)
    logits = torch.zeros(2, CATEGORIES, *GRID, requires_grad=True)
    found = torch.zeros(2, 4, *GRID, requires_grad=True)
    mean = loss(logits, found, targets, SIZE)
    assert mean.value().isnan()
    mean.share().backward()
    assert logits.grad is not None
    assert (logits.grad > 0).all()
    assert found.grad is not None
    assert (found.grad == 0).all()


@pytest.mark.parametrize("value", [100.0, -100.0])
def test_boxes_of_any_size_have_a_gradient(value):
    found = torch.full((1, 4, 4, 4), value, requires_grad=True)
    boxes = to_boxes(found, SIZE)
    boxes.sum().backward()
    assert boxes.isfinite().all()
    assert found.grad is not None
    assert found.grad.isfinite().all()


def test_of_two_boxes_of_one_object_the_more_probable_is_kept():
    logits, found = perfect(BOXES[1:, :1], CLASSES[1:, :1])
    logits[0, 1, 4, 6] = 5.0  # two locations on: no neighbour of the peak
    found[0, :, 4, 6] = torch.tensor((-2.4, -0.5, 4.0, 4.0))
    found[0, 2:, 4, 6] = torch.tensor((4.0, 4.0)).log()
    logits[0, 0, 4, 6] = 4.0  # another category
    (objects,) = find(logits, found, SIZE)
    assert objects.classes[objects.scores > 0.5].tolist() == [1, 0]


def test_a_location_beside_a_more_probable_one_is_no_object():
    logits, found = perfect(BOXES[1:, :1], CLASSES[1:, :1])
    for row, column in ((3, 4), (4, 5), (5, 5)):
        logits[0, 1, row, column] = 5.0
        found[0, 2:, row, column] = -5.0  # a small box, which overlaps little
    (objects,) = find(logits, found, SIZE)
    assert (objects.scores > 0.5).sum() == 1


def test_boxes_end_where_the_image_does():
    logits, found = perfect(BOXES[1:, :1], CLASSES[1:, :1])
    found[0, 2:, 4, 4] = 5.0
    (objects,) = find(logits, found, SIZE)
    assert objects.boxes[0].tolist() == [0, 0, SIZE, SIZE]


def test_boxes_of_results_are_in_pixels_of_the_file():
    boxes = torch.tensor([[16.0, 8, 48, 64], [0, 0, 64, 64]])
    found = Found(boxes, torch.tensor([0.75, 0.5]), torch.tensor([2, 0]))
    scaled = scale(found, SIZE, (480, 640))  # height and width
    assert scaled.boxes.tolist() == [[160, 60, 320, 420], [0, 0, 640, 480]]
    assert scaled.scores.tolist() == [0.75, 0.5]
    assert scaled.classes.tolist() == [2, 0]
    nothing = Found(torch.zeros(0, 4), torch.zeros(0), torch.zeros(0, dtype=torch.int64))
    assert scale(nothing, SIZE, (480, 640)).boxes.shape == (0, 4)


def test_a_step_waits_for_no_gpu_and_its_shapes_are_known():
    """Tensors without contents: what depends on those cannot be computed."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        images = torch.rand(2, 3, SIZE, SIZE)
        boxes, classes = torch.rand(2, 4, 4), torch.zeros(2, 4, dtype=torch.int64)
        network = BoxDetector(CATEGORIES, width=4, depth=2)
        logits, found = network(images)
        grid = (logits.shape[2], logits.shape[3])
        assert grid == GRID
        targets = make_targets(boxes, classes, CATEGORIES, grid, SIZE)
        loss(logits, found, targets, SIZE).value().backward()
        assert all(p.grad is not None for p in network.parameters())


@pytest.mark.parametrize("stride", [1, 2, 4])
def test_the_grid_has_the_stride_that_is_asked_for(stride):
    network = BoxDetector(CATEGORIES, width=4, depth=2, stride=stride)
    logits, boxes = network(torch.zeros(1, 3, 17, 20))
    assert logits.shape == (1, CATEGORIES, 17 // stride, 20 // stride)
    assert boxes.shape == (1, 4, 17 // stride, 20 // stride)


def test_a_stride_that_cannot_be_is_named():
    with pytest.raises(ValueError, match=r"stride: expected one of \[1, 2, 4\], got 8"):
        BoxDetector(CATEGORIES, depth=2, stride=8)
