"""Batches that a thread prepares are those that it is given."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from datamodules.reading.ahead import AHEAD, ahead

CPU = torch.device("cpu")


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "batches ahead"]


def counted(count: int, made: list[int]) -> Iterator[tuple[Tensor, int]]:
    for number in range(count):
        made.append(number)
        yield torch.full((2,), number), number


@pytest.mark.parametrize("count", [0, 1, AHEAD, 20])
def test_batches_come_in_order_and_once(count):
    for _ in range(2):
        found = [(values.tolist(), number) for values, number in ahead(counted(count, []), CPU)]
        assert found == [([number, number], number) for number in range(count)]
        assert not threads()


def test_no_more_are_prepared_than_can_be_ready():
    made: list[int] = []
    batches: Any = ahead(counted(20, made), CPU)
    for used in range(1, 10):
        next(batches)
        assert len(made) <= used + AHEAD + 1, "those in the queue, and one that waits for room"
    batches.close()


@pytest.mark.parametrize("used", [1, 3])
def test_a_thread_ends_with_what_uses_it(used):
    batches: Any = ahead(counted(10**9, []), CPU)
    for _ in range(used):
        next(batches)
    assert threads()
    batches.close()
    assert not threads()


def test_an_error_is_raised_when_its_batch_is_asked_for():
    def broken() -> Iterator[tuple[int]]:
        yield (1,)
        raise ValueError("the second is broken")

    batches = ahead(broken(), CPU)
    assert next(batches) == (1,)
    with pytest.raises(ValueError, match="the second is broken"):
        next(batches)
    assert not threads()


@pytest.mark.gpu
def test_the_current_stream_waits_for_a_batch_and_keeps_its_memory():
    device = torch.device("cuda", 0)
    size = 2**22

    def slow(count: int) -> Iterator[tuple[Tensor, int]]:
        for number in range(count):
            torch.cuda._sleep(2_000_000)
            yield torch.full((size,), number, device=device), number

    for values, number in ahead(slow(40), device):
        torch.cuda._sleep(3_000_000)
        total = values.sum()  # later than the thread has given the memory back
        del values
        assert int(total) == size * number
