"""Batches that a thread prepares are those that it is given."""

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from datamodules.reading.ahead import AHEAD, ahead

CPU = torch.device("cpu")


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "batches ahead" in thread.name]


def counted(count: int, called: list[int]) -> Iterator[Callable[[], tuple[Tensor, int]]]:
    def make(number: int) -> tuple[Tensor, int]:
        called.append(number)
        return torch.full((2,), number), number

    return (functools.partial(make, number) for number in range(count))


@pytest.mark.parametrize("count", [0, 1, AHEAD, 20])
def test_batches_come_in_order_and_once(count):
    for _ in range(2):
        found = [(values.tolist(), number) for values, number in ahead(counted(count, []), CPU)]
        assert found == [([number, number], number) for number in range(count)]
        assert not threads()


def test_a_slow_batch_is_waited_for_while_others_are_made():
    later, order = threading.Event(), []

    def make(number: int) -> tuple[int]:
        if number == 0:
            assert later.wait(60)
        order.append(number)
        if number == 2:
            later.set()
        return (number,)

    makers = (functools.partial(make, number) for number in range(4))
    assert [number for (number,) in ahead(makers, CPU)] == [0, 1, 2, 3]
    assert order.index(0) > order.index(2)


def test_no_more_are_prepared_than_are_said():
    called: list[int] = []
    batches: Any = ahead(counted(20, called), CPU)
    for used in range(1, 10):
        next(batches)
        assert len(called) < used + AHEAD
    batches.close()


@pytest.mark.parametrize("used", [1, 3])
def test_threads_end_with_what_uses_them(used):
    batches: Any = ahead(counted(10**9, []), CPU)
    for _ in range(used):
        next(batches)
    assert threads()
    batches.close()
    assert not threads()


def test_an_error_is_raised_when_its_batch_is_asked_for():
    def fail() -> tuple[int]:
        raise ValueError("the second is broken")

    batches = ahead([lambda: (1,), fail, lambda: (3,)], CPU)
    assert next(batches) == (1,)
    with pytest.raises(ValueError, match="the second is broken"):
        next(batches)
    assert not threads()


@pytest.mark.gpu
def test_the_current_stream_waits_for_a_batch_and_keeps_its_memory():
    device = torch.device("cuda", 0)
    size = 2**22

    def slow(number: int) -> tuple[Tensor, int]:
        torch.cuda._sleep(2_000_000)
        return torch.full((size,), number, device=device), number

    makers = (functools.partial(slow, number) for number in range(40))
    for values, number in ahead(makers, device):
        torch.cuda._sleep(3_000_000)
        total = values.sum()  # later than the thread has given the memory back
        del values
        assert int(total) == size * number
