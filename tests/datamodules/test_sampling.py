"""Which samples come next, to how many processes, and after a stop."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from datamodules.sampling import Draws, EvenBatches, Shuffle, TrainingLoader

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
    alone = list(Draws(9, seed=1))
    assert len({seed for _, seed in alone}) == 9
    assert list(Draws(9, 1, rank=1, world_size=3)) == alone[1::3]


@given(length=st.integers(8, 300), world=st.integers(1, 4), batch_size=st.integers(2, 64))
def test_evaluation_has_every_index_once_and_as_many_batches_in_every_process(
    length, world, batch_size
):
    ranks = [list(EvenBatches(length, batch_size, rank, world)) for rank in range(world)]
    assert len({len(batches) for batches in ranks}) == 1
    sizes = {len(batch) for batches in ranks for batch in batches}
    assert max(sizes) <= batch_size
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) > 0
    assert sorted(i for rank in ranks for batch in rank for i in batch) == list(range(length))


@given(stop=st.integers(0, 5), seed=seeds)
def test_a_loader_goes_on_with_the_batch_after_the_last_that_was_done(stop, seed):
    def loader() -> TrainingLoader:
        data = TensorDataset(torch.arange(11))
        return TrainingLoader(data, 2, sampler=Shuffle(11, seed))

    stopped, other = loader(), loader()
    stopped.sampler.set_epoch(3)
    iterator = iter(stopped)
    for _ in range(stop + 1):
        next(iterator)  # the last one is being worked on
    other.load_state_dict(stopped.state_dict())
    rest = [batch.tolist() for (batch,) in other]
    assert rest == [batch.tolist() for (batch,) in stopped][stop:]
    other.sampler.set_epoch(4)
    assert len(list(other)) == 6
