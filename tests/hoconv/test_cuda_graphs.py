"""Captures that fail leave PyTorch as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hoconv.cuda_graphs import failures_ended

pytestmark = pytest.mark.gpu


def fail(stream: torch.cuda.Stream, pool: Any) -> None:
    """Captures a function that waits for the GPU."""
    x = torch.ones(1, device="cuda")
    with (
        pytest.raises(RuntimeError),
        failures_ended(x.device, pool),
        torch.cuda.graph(torch.cuda.CUDAGraph(), pool, stream, capture_error_mode="thread_local"),
    ):
        (x + 1).item()


@pytest.fixture
def failed() -> None:
    fail(torch.cuda.Stream(), torch.cuda.graph_pool_handle())


@pytest.mark.usefixtures("failed")
def test_random_numbers_are_drawn_after_a_failure() -> None:
    assert torch.rand(4, device="cuda").unique().numel() == 4


@pytest.mark.usefixtures("failed")
def test_the_stream_is_the_same_after_a_failure() -> None:
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


@pytest.mark.usefixtures("failed")
def test_memory_of_several_streams_is_used_again_after_a_failure() -> None:
    def use() -> None:
        tensor = torch.zeros(2**24, device="cuda")
        tensor.record_stream(other)

    other = torch.cuda.Stream()
    use()
    torch.cuda.synchronize()
    reserved = torch.cuda.memory_reserved()
    for _ in range(10):
        use()
        torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() == reserved


def test_the_stream_captures_after_a_failure() -> None:
    stream = torch.cuda.Stream()
    fail(stream, torch.cuda.graph_pool_handle())
    x, graph = torch.ones(1, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        drawn = torch.rand(1000, device="cuda") + x
    graph.replay()
    first = drawn.clone()
    graph.replay()
    assert not torch.equal(first, drawn)
    assert float(first.min()) >= 1
    assert float(drawn.max()) < 2
