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


def test_workers_give_the_same_batches():
    alone, workers = load(seed=5), load(seed=5, num_workers=1)
    for (images, labels), (images_w, labels_w) in zip(
        alone.train_dataloader(), workers.train_dataloader(), strict=True
    ):
        assert torch.equal(images, images_w)
        assert torch.equal(labels, labels_w)
