import pytest
import torch
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as F

from datamodules.reading.pixels import find_nearest


def digits(length: int) -> Tensor:
    """A line of so many pixels, (channels, 1, length) uint8: its numbers in base 256."""
    return torch.stack([torch.arange(length) // 256**place % 256 for place in range(4)])[:, None]


@pytest.mark.parametrize("count", [1, 2, 64, 224, 1000])
def test_the_nearest_pixels_are_those_that_torch_takes(count):
    for length in (*range(1, 700, 3), 4095, 4096, 4097, 10**5 + 1, 2**24 + 3):
        if length > 10**5 and count != 224:
            continue
        nearest = InterpolationMode.NEAREST_EXACT
        taken = F.resize(digits(length).to(torch.uint8), [1, count], interpolation=nearest)
        numbers = torch.stack([taken[place, 0].long() * 256**place for place in range(4)]).sum(0)
        assert torch.equal(find_nearest(length, count), numbers), length
