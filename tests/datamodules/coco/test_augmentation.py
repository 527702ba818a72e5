"""Changes of a batch are those of each image; what is drawn is distributed as by torchvision."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torchvision.transforms import v2

from datamodules.coco.augmentation import (
    FACTORS,
    Crops,
    colour,
    colour_batch,
    crop_image,
    crop_labels,
    draw_colours,
    draw_crops,
    draw_uniform,
)

IMAGES = 3
seeds = st.integers(0, 2**31)
sizes = st.one_of(st.integers(1, 40), st.sampled_from((64, 100, 224)))


def draw_seeds(seed: int, count: int) -> tuple[Tensor, torch.Generator]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2**62, (count,), generator=generator), generator


def draw_pixels(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(256, shape, generator=generator).to(torch.uint8)


def same_crops(boxes: Tensor, image_size: int, generator: torch.Generator) -> None:
    images = draw_pixels(generator, IMAGES, 3, image_size, image_size)
    labels = draw_pixels(generator, IMAGES, image_size, image_size)
    numbers = torch.randint(IMAGES, (len(boxes),), generator=generator)
    crops = Crops(image_size, images.device)
    lines = crops.lines(boxes)
    cropped = crops.images(images, numbers, lines)
    cropped_labels = crops.labels(labels, numbers, lines)
    assert cropped.dtype == cropped_labels.dtype == torch.uint8
    for row, (number, box) in enumerate(zip(numbers, boxes, strict=True)):
        image, label = crop_image(images[number], box), crop_labels(labels[number], box)
        assert torch.equal(cropped[row], image), box
        assert torch.equal(cropped_labels[row], label), box


@given(seed=seeds, image_size=sizes)
def test_crops_of_a_batch_are_those_of_each_image(seed: int, image_size: int) -> None:
    drawn, generator = draw_seeds(seed, 6)
    same_crops(draw_crops(drawn, image_size), image_size, generator)


@pytest.mark.parametrize("image_size", [1, 2, 17, 64])
def test_crops_of_every_size_are_those_of_each_image(image_size: int) -> None:
    length = torch.arange(1, image_size + 1)
    last = image_size - length
    mirrored = length % 2
    boxes = torch.cat(
        [
            torch.stack((last, 0 * last, length, length.flip(0), mirrored), dim=1),
            torch.stack((0 * last, last, length.flip(0), length, 1 - mirrored), dim=1),
        ]
    )
    same_crops(boxes, image_size, torch.Generator().manual_seed(image_size))


@given(seed=seeds, image_size=sizes)
def test_colours_of_a_batch_are_those_of_each_image(seed: int, image_size: int) -> None:
    drawn, generator = draw_seeds(seed, 6)
    images, changes = draw_pixels(generator, 6, 3, image_size, image_size), draw_colours(drawn)
    expected = torch.stack([colour(image, each) for image, each in zip(images, changes)])
    difference = (colour_batch(images, changes).int() - expected.int()).abs()
    assert difference.max() <= 1
    assert difference.sum() <= max(0.01 * difference.numel(), 3 * image_size**2)


def test_colours_differ_from_those_of_each_image_in_few_pixels() -> None:
    drawn, generator = draw_seeds(0, 200)
    images, changes = draw_pixels(generator, 200, 3, 64, 64), draw_colours(drawn)
    expected = torch.stack([colour(image, each) for image, each in zip(images, changes)])
    assert (colour_batch(images, changes) != expected).double().mean() < 1e-3


def test_labels_are_where_their_pixels_are() -> None:
    """In a ramp a pixel says from which column it comes, and so does its label."""
    columns = torch.arange(64, dtype=torch.uint8).expand(64, 64)
    shifts = []
    for box in draw_crops(draw_seeds(0, 100)[0], 64):
        image = crop_image((4 * columns).expand(3, -1, -1), box)
        labels = crop_labels(columns, box)
        shifts.append((labels.double() - image[0].double() / 4).mean())
    assert max(map(abs, shifts)) < 0.2


@given(seed=seeds, image_size=sizes)
def test_crops_are_inside_the_image(seed: int, image_size: int) -> None:
    boxes = draw_crops(draw_seeds(seed, 50)[0], image_size)
    starts, lengths, mirrored = boxes.split((2, 2, 1), dim=1)
    assert ((starts >= 0) & (lengths > 0) & (starts + lengths <= image_size)).all()
    assert ((mirrored == 0) | (mirrored == 1)).all()


def test_crops_are_distributed_as_torchvision_has_them() -> None:
    size, count = 1000, 4000
    drawn = draw_crops(draw_seeds(0, count)[0], size).double()
    theirs = v2.RandomResizedCrop(size, scale=(0.5, 1.0), antialias=True)
    image = torch.empty(3, size, size)
    made = [theirs.make_params([image]) for _ in range(count)]
    expected = torch.tensor([[m["top"], m["left"], m["height"], m["width"]] for m in made]).double()
    for ours, others in zip(measure(drawn), measure(expected), strict=True):
        same_distribution(ours, others)
    assert drawn[:, 4].mean() == pytest.approx(0.5, abs=0.03)


def measure(boxes: Tensor) -> Tensor:
    """Position, area and aspect ratio of boxes, (5, n)."""
    top, left, height, width = boxes[:, :4].T
    return torch.stack((top, left, height * width, height / width, height))


def same_distribution(one: Tensor, other: Tensor) -> None:
    """Returns whether quantiles agree, to 3 % of the range."""
    at = torch.linspace(0.05, 0.95, 19, dtype=torch.float64)
    difference = (torch.quantile(one, at) - torch.quantile(other, at)).abs()
    assert difference.max() < 0.03 * (other.max() - other.min())


def test_colours_are_uniform_and_in_either_order() -> None:
    changes = draw_colours(draw_seeds(0, 4000)[0])
    factors, contrast = changes.unbind(2)
    assert (contrast.sum(dim=1) == 1).all(), "each is changed once"
    assert contrast[:, 0].mean() == pytest.approx(0.5, abs=0.03)
    low, high = FACTORS
    uniform = low + (high - low) * (torch.arange(4000) + 0.5) / 4000
    for column in factors.T:
        same_distribution(column.double(), uniform.double())


def test_draws_depend_on_their_own_seed_alone() -> None:
    drawn, _ = draw_seeds(3, 20)
    together = draw_uniform(drawn, 8)
    assert (together[5:6] == draw_uniform(drawn[5:6], 8)).all()
    neighbours = draw_uniform(torch.arange(2000), 8)  # seeds that differ in a bit or two
    assert len(set(neighbours.flatten().tolist())) == neighbours.size
    assert abs(neighbours.mean() - 0.5) < 0.01
    correlation = torch.corrcoef(torch.from_numpy(neighbours.T)) - torch.eye(8)
    assert correlation.abs().max() < 0.1
