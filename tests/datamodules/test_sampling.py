"""Which samples come next, to how many processes, and after a stop."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, TensorDataset

from datamodules import sampling
from datamodules.sampling import (
    Epochs,
    EvenBatches,
    SeededShuffle,
    Shuffle,
    TrainingLoader,
    loader_options,
)

lengths = st.integers(1, 200)
seeds = st.integers(0, 2**32 - 1)


@given(length=lengths, seed=seeds, epoch=st.integers(0, 1000))
def test_an_epoch_has_every_index_once_and_is_always_the_same(length, seed, epoch):
    sampler = Shuffle(length, seed)
    sampler.set_epoch(epoch)
    order = list(sampler)
    assert sorted(order) == list(range(length))
    assert len(sampler) == length
    assert list(sampler) == order
    if length > 50:
        sampler.set_epoch(epoch + 1)
        assert list(sampler) != order
        assert list(Shuffle(length, seed + 1)) != list(Shuffle(length, seed))


@given(length=lengths, world=st.integers(1, 5), batch_size=st.integers(1, 16))
def test_batches_of_all_processes_make_those_of_one(length, world, batch_size):
    alone = list(Shuffle(length, seed=1))
    ranks = [list(Shuffle(length, 1, rank, world)) for rank in range(world)]
    assert len({len(rank) for rank in ranks}) == 1
    for begin in range(0, length // (world * batch_size) * batch_size, batch_size):  # full ones
        together = {i for rank in ranks for i in rank[begin : begin + batch_size]}
        assert together == set(alone[world * begin : world * (begin + batch_size)])


def test_draws_are_the_same_for_any_number_of_processes():
    alone = list(SeededShuffle(9, seed=1))
    assert len({seed for _, seed in alone}) == 9
    assert list(SeededShuffle(9, 1, rank=1, world_size=3)) == alone[1::3]


@given(length=st.integers(8, 300), world=st.integers(1, 4), batch_size=st.integers(2, 64))
def test_evaluation_gives_each_index_once_in_equally_many_batches(length, world, batch_size):
    ranks = [list(EvenBatches(length, batch_size, rank, world)) for rank in range(world)]
    assert len({len(batches) for batches in ranks}) == 1
    sizes = {len(batch) for batches in ranks for batch in batches}
    assert max(sizes) <= batch_size
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) > 0
    assert sorted(i for rank in ranks for batch in rank for i in batch) == list(range(length))


def loader(data: Dataset, sampler: Shuffle, **options: Any) -> TrainingLoader:
    return TrainingLoader(data, batch_sampler=Epochs(sampler, 2, drop_last=False), **options)


def epoch(loader: TrainingLoader, number: int, batches: int | None = None) -> list[list[int]]:
    """As Lightning takes it: by number, and without asking for one batch more than there are."""
    loader.batch_sampler.sampler.set_epoch(number)
    taken = itertools.islice(loader, len(loader) if batches is None else batches)
    return [batch.tolist() for (batch,) in taken]


@given(stop=st.integers(0, 5), seed=seeds)
def test_a_loader_continues_after_the_last_finished_batch(stop, seed):
    stopped, other = (loader(TensorDataset(torch.arange(11)), Shuffle(11, seed)) for _ in range(2))
    stopped.batch_sampler.sampler.set_epoch(3)
    iterator = iter(stopped)
    for _ in range(stop + 1):
        next(iterator)  # the last one is being worked on
    other.load_state_dict(stopped.state_dict())
    assert epoch(other, 3, 6 - stop) == epoch(stopped, 3)[stop:]
    assert epoch(other, 4) == epoch(stopped, 4)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_epoch_is_the_same_whatever_came_before(num_workers):
    data = TensorDataset(torch.arange(11))
    used = loader(data, Shuffle(11, 0), num_workers=num_workers, persistent_workers=num_workers > 0)
    # The one after it, after a part of it, the same again, an earlier one, and two more.
    for number, batches in [(0, None), (1, 3), (2, None), (2, None), (0, None), (1, 6), (2, 2)]:
        expected = epoch(loader(data, Shuffle(11, 0)), number, batches)
        assert epoch(used, number, batches) == expected
        assert len(expected) == (batches or 6)
    assert [len(batch) for batch in epoch(used, 3)] == [2, 2, 2, 2, 2, 1]


class Said(TensorDataset):
    """Says which items are fetched."""

    def __init__(self, length: int) -> None:
        super().__init__(torch.arange(length))
        self.fetched = torch.multiprocessing.get_context("fork").Queue()

    def __getitem__(self, index: int) -> Any:
        self.fetched.put(index)
        return super().__getitem__(index)


def test_workers_fetch_the_next_epoch_before_it_begins():
    data = Said(4)
    ahead = loader(
        data, Shuffle(4, 0), num_workers=1, persistent_workers=True, multiprocessing_context="fork"
    )
    begun = [*epoch(ahead, 0), *epoch(ahead, 1)]
    fetched = [data.fetched.get(timeout=60) for _ in range(12)]  # each item once
    assert fetched == list(itertools.chain(*begun, *epoch(ahead, 2)))


@pytest.mark.parametrize(
    ("asked", "device", "devices", "cores", "count"),
    [
        (None, "cpu", 1, 8, 2),
        (None, "cpu", 1, 1, 1),
        (None, "cuda", 1, 8, 8),
        (None, "cuda", 4, 8, 2),
        (None, "cuda", 16, 8, 1),
        (None, "cuda", 1, 64, 16),
        (0, "cuda", 1, 64, 0),
        (40, "cpu", 1, 2, 40),
    ],
)
def test_as_many_workers_as_the_machine_can_use(monkeypatch, asked, device, devices, cores, count):
    monkeypatch.setattr(sampling.joblib, "cpu_count", lambda: cores)
    strategy = SimpleNamespace(root_device=torch.device(device))
    trainer: Any = SimpleNamespace(strategy=strategy, num_devices=devices)
    options = loader_options(trainer, asked)
    assert options["num_workers"] == count
    assert options["persistent_workers"] == (count > 0)
