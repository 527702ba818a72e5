import pytest
import torch
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as F

from datamodules.reading.pixels import find_nearest, resize, resize_all


def digits(length: int) -> Tensor:
    """A line of so many pixels, (channels, 1, length) uint8: its numbers in base 256."""
    return torch.stack([torch.arange(length) // 256**place % 256 for place in range(4)])[:, None]


@pytest.mark.parametrize("count", [1, 2, 64, pytest.param(224, marks=pytest.mark.slow), 1000])
def test_the_nearest_pixels_are_those_that_torch_takes(count):
    for length in (*range(1, 700, 3), 4095, 4096, 4097, 10**5 + 1, 2**24 + 3):
        if length > 10**5 and count != 224:
            continue
        nearest = InterpolationMode.NEAREST_EXACT
        taken = F.resize(digits(length).to(torch.uint8), [1, count], interpolation=nearest)
        numbers = torch.stack([taken[place, 0].long() * 256**place for place in range(4)]).sum(0)
        assert torch.equal(find_nearest(length, count), numbers), length


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("image_size", [4, 16, 50])
def test_images_that_are_resized_together_are_what_each_is(device, image_size):
    generator = torch.Generator().manual_seed(0)
    images = [
        torch.randint(256, (3, *size), generator=generator, dtype=torch.uint8).to(device)
        for size in ((1, 1), (16, 16), (50, 7), (33, 120))
    ]
    batch = resize_all(iter(images), image_size)
    assert torch.equal(batch, torch.stack([resize(image, image_size) for image in images]))
    assert resize_all([], image_size).numel() == 0
