"""Batches of data sets in memory: those that a DataLoader gives, and after a stop."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from datamodules.memory import Batch, EvaluationBatches, LabelledImages, TrainingBatches
from datamodules.sampling import Epochs, EvenBatches, Shuffle, TrainingLoader

lengths = st.integers(1, 40)
batch_sizes = st.integers(1, 9)
worlds = st.integers(1, 3)


def numbered(length: int) -> LabelledImages:
    images = torch.arange(length, dtype=torch.uint8)[:, None, None, None].repeat(1, 1, 2, 2)
    return LabelledImages(images, torch.arange(length))


def labels(batches: Iterable[Batch]) -> list[list[int]]:
    found = []
    for images, numbers in batches:
        assert torch.equal(images[:, 0, 1, 1], numbers.to(torch.uint8))
        found.append(numbers.tolist())
    return found


@given(
    length=lengths, batch_size=batch_sizes, world=worlds, epoch=st.integers(0, 9), data=st.data()
)
def test_an_epoch_is_that_of_a_loader_and_continues_after_a_stop(
    length: int, batch_size: int, world: int, epoch: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, world - 1))

    def shuffle() -> Shuffle:
        return Shuffle(length, 7, rank, world)

    epochs = Epochs(shuffle(), batch_size, drop_last=False)
    loader = TrainingLoader(TensorDataset(torch.arange(length)), batch_sampler=epochs)
    loader.batch_sampler.sampler.set_epoch(epoch)
    expected = [numbers.tolist() for (numbers,) in itertools.islice(loader, len(loader))]

    batches = TrainingBatches(numbered(length), shuffle(), batch_size)
    batches.sampler.set_epoch(epoch)
    assert len(batches) == len(loader) == len(expected)
    assert labels(batches) == expected

    used = data.draw(st.integers(0, len(expected) - 1))
    iterator = iter(batches)
    for _ in range(used + 1):
        next(iterator)  # the last one is being worked on
    resumed = TrainingBatches(numbered(length), shuffle(), batch_size)
    resumed.load_state_dict(batches.state_dict())
    assert labels(resumed) == expected[used:]
    # The epochs after it are whole, the next one and any other.
    for later in (epoch + 1, *data.draw(st.lists(st.integers(0, 9), max_size=3))):
        fresh = TrainingBatches(numbered(length), shuffle(), batch_size)
        for each in (fresh, resumed):
            each.sampler.set_epoch(later)
        assert labels(resumed) == labels(fresh)


@given(length=st.integers(9, 60), batch_size=batch_sizes, world=worlds)
def test_evaluation_gives_every_sample_once(length: int, batch_size: int, world: int) -> None:
    found = []
    for rank in range(world):
        even = EvenBatches(length, batch_size, rank, world)
        batches = EvaluationBatches(numbered(length), even)
        assert len(batches) == len(even)
        found += labels(batches)
    assert sorted(itertools.chain(*found)) == list(range(length))
