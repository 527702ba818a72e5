from types import SimpleNamespace
from typing import Any

import pytest
import torch

from datamodules.digits import Digits


def load(**arguments) -> Digits:
    data = Digits(batch_size=64, **arguments)
    data.setup("fit")
    return data


def test_splits_share_no_image_and_hold_them_all():
    splits = load().splits
    assert {name: len(split) for name, split in splits.items()} == {
        "train": 1257,
        "val": 180,
        "test": 360,
    }
    images = torch.cat([split.images for split in splits.values()]).flatten(1)
    assert len(images.unique(dim=0)) == 1797


def test_every_class_is_in_proportion_in_every_split():
    for name, split in load().splits.items():
        shares = split.labels.bincount(minlength=10) / len(split)
        assert (shares - 0.1).abs().max() < 0.012, name


def test_splits_do_not_depend_on_the_seed_of_the_run():
    one, other = load(seed=1).splits, load(seed=2).splits
    assert all(torch.equal(one[name].images, other[name].images) for name in one)


def test_training_order_depends_on_the_seed_alone():
    def order(seed: int) -> torch.Tensor:
        torch.rand(seed + 1)  # another state of the global generator
        return torch.cat([labels for _, labels in load(seed=seed).train_dataloader()])

    assert torch.equal(order(3), order(3))
    assert not torch.equal(order(3), order(4))


def test_batches_are_bytes_until_they_are_normalised():
    data = load()
    batches = list(data.train_dataloader())
    assert [len(labels) for _, labels in batches] == [64] * 19 + [41]
    assert {images.dtype for images, _ in batches} == {torch.uint8}
    images = torch.cat([data.on_after_batch_transfer(batch, 0)[0] for batch in batches])
    assert images.shape == (1257, *Digits.image_shape)
    assert images.dtype == torch.float32
    assert abs(images.mean()) < 1e-3
    assert abs(images.std() - 1) < 1e-3


def test_validation_order_is_that_of_the_split():
    data = load()
    labels = torch.cat([labels for _, labels in data.val_dataloader()])
    assert torch.equal(labels, data.splits["val"].labels)


def test_unknown_device_is_refused():
    with pytest.raises(ValueError, match="device: expected one of auto, gpu, cpu; got 'tpu'"):
        load(device="tpu")


def test_batch_without_images_is_refused():
    with pytest.raises(ValueError, match="batch_size: expected at least 1, got 0"):
        Digits(batch_size=0)


@pytest.mark.gpu
@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_batches_are_the_same_on_a_gpu(split):
    trainer: Any = SimpleNamespace(
        strategy=SimpleNamespace(root_device=torch.device("cuda", 0)), global_rank=0, world_size=1
    )

    def batches(device: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
        data = load(seed=5, device=device)
        data.trainer = trainer
        found = list(getattr(data, f"{split}_dataloader")())
        where = {"cpu": "cpu", "gpu": "cuda", "auto": "cuda"}[device]
        assert {t.device.type for batch in found for t in batch} == {where}
        assert all(t.is_pinned() for batch in found for t in batch if device == "cpu")
        on_gpu = (tuple(t.to("cuda") for t in batch) for batch in found)
        return [data.on_after_batch_transfer(batch, 0) for batch in on_gpu]

    expected = batches("cpu")
    for device in ("gpu", "auto"):
        for (images, labels), (images_c, labels_c) in zip(batches(device), expected, strict=True):
            assert torch.equal(images, images_c)
            assert torch.equal(labels, labels_c)
