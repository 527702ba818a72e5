"""Label maps that a device draws are those of the CPU."""

import numpy as np
import pytest
import torch

from datamodules.coco.annotations.instances import Instances
from datamodules.coco.pixels import LabelMaps
from tests.datamodules.coco.files import Split

SIZES = [(1, 1), (1, 30), (30, 1), (7, 5), (40, 33), (64, 64), (100, 3), (37, 120)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("image_size", [1, 7, 32, 100])
def test_drawn_label_maps_are_those_of_the_cpu(split: Split, tmp_path, device, image_size):
    generator = np.random.default_rng(0)
    for height, width in SIZES:
        image = split.image(height=height, width=width)
        for number in range(int(generator.integers(0, 4)) if height > 1 else 0):
            pixels = generator.random((height, width)) < 0.4
            flat = pixels.T.ravel()
            bounds = [0, *(np.flatnonzero(flat[1:] != flat[:-1]) + 1).tolist(), flat.size]
            runs = ([0] if flat[0] else []) + np.diff(bounds).tolist()
            mask = {"size": [height, width], "counts": runs}
            split.instance(image, mask, category=(3, 18)[number % 2], crowd=int(number == 2))
    split.write()
    instances = Instances(split.file("instances"), tmp_path / "cache")
    maps = LabelMaps(instances, image_size, tmp_path / "cache", keep=False)
    for numbers in ([0], [4, 4], list(range(len(SIZES))), list(range(len(SIZES)))[::-1]):
        drawn = maps.draw_on(torch.device(device), numbers)
        assert (drawn.dtype, drawn.device.type) == (torch.uint8, device)
        assert torch.equal(drawn.cpu(), torch.stack([maps[number] for number in numbers]))
