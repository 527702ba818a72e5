"""Photographs that are decoded ahead, beside a training, are those that are decoded alone."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from datamodules.reading.ahead import ahead
from datamodules.reading.decoding import decode_on
from datamodules.reading.pixels import resize_all

IMAGE_SIZE, BATCH = 224, 20

pytestmark = [
    pytest.mark.data,
    pytest.mark.skipif("HOCONV_DATA_DIR" not in os.environ, reason="HOCONV_DATA_DIR is not set"),
]


@pytest.mark.parametrize(
    ("device_type", "epochs"),
    [("cpu", 2), pytest.param("cuda", 250, marks=[pytest.mark.gpu, pytest.mark.slow])],
)
def test_photographs_are_those_that_are_decoded_alone(device_type: str, epochs: int) -> None:
    """On a GPU 20,000 of them."""
    device = torch.device(device_type)
    folder = Path(os.environ["HOCONV_DATA_DIR"], "coco", "train2017")
    paths = sorted(folder.glob("*.jpg"))[:80]

    def read(numbers: list[int]) -> tuple[Tensor, list[int]]:
        files = decode_on(device, [paths[number] for number in numbers])
        return resize_all(
            (image for image in files if isinstance(image, Tensor)), IMAGE_SIZE
        ), numbers

    alone, _ = read(list(range(len(paths))))
    assert alone.shape == (len(paths), 3, IMAGE_SIZE, IMAGE_SIZE)
    assert len(alone.flatten(1).unique(dim=0)) == len(paths), "no two are the same"

    network = nn.Linear(512, 512, device=device)
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    order = torch.cat([torch.randperm(len(paths), generator=generator) for _ in range(epochs)])
    makers = (functools.partial(read, rows.tolist()) for rows in order.split(BATCH))
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    count = 0
    for images, numbers in ahead(makers, device):
        network(torch.ones(4096, 512, device=device)).square().mean().backward()
        optimizer.step()
        wrong += (images != alone[numbers]).flatten(1).any(1).sum()  # no wait: the GPU stays busy
        count += len(images)
    assert count == epochs * len(paths)
    assert wrong == 0
