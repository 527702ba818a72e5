"""Which cells cuDNN computes, and that it computes the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hoconv import recurrent as rnn
from hoconv.recurrent import reference
from hoconv.recurrent.frontend.cell import BoundCell
from hoconv.recurrent.frontend.trace import trace
from hoconv.recurrent.match import CudnnLayer, match
from hoconv.recurrent.schedule import plan
from tests.hoconv.recurrent.support import READY, bound


@rnn.cell(state=("memory", "out"))
def renamed(x: Any, memory: Any, out: Any) -> Any:
    """An LSTM with its states, gates and operands in another order."""
    leave = rnn.sigmoid(rnn.linear("leave", x, out))
    keep = rnn.sigmoid(rnn.linear("keep", x, out))
    new = rnn.tanh(rnn.linear("new", x, out))
    take = rnn.sigmoid(rnn.linear("take", x, out))
    memory = new * take + memory * keep
    out = rnn.tanh(memory) * leave
    return out, dict(out=out, memory=memory)


@rnn.cell(state=("h",))
def reset_before(x: Any, h: Any) -> Any:
    """A GRU whose reset gate is applied before the product."""
    r = rnn.sigmoid(rnn.linear("r", x, h))
    z = rnn.sigmoid(rnn.linear("z", x, h))
    n = rnn.tanh(rnn.linear("n", x, r * h))
    h = (1 - z) * n + z * h
    return h, dict(h=h)


@rnn.cell(state=("h",))
def without_relu(x: Any, h: Any) -> Any:
    h = rnn.relu(rnn.linear("h", x, h))
    return h, dict(h=h)


def matched(cell: BoundCell) -> CudnnLayer | None:
    return match(trace(cell).program)


@pytest.mark.parametrize("which", [c for c in READY if c not in ("lstm", "gru", "elman")])
def test_other_ready_cells_are_no_library_s(which: str) -> None:
    assert matched(bound(which)) is None


@pytest.mark.parametrize("cell", [reset_before, without_relu])
def test_what_differs_in_one_place_is_no_library_s(cell: rnn.Cell) -> None:
    assert matched(cell.bind(3, 4, {})) is None


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    ("cell", "options", "function"),
    [
        (rnn.lstm, {}, "lstm"), (rnn.lstm, {"bias": False}, "lstm"), (renamed, {}, "lstm"),
        (rnn.gru, {}, "gru"), (rnn.gru, {"bias": False}, "gru"), (rnn.elman, {}, "rnn_tanh"),
    ],
)  # fmt: skip
def test_the_library_computes_the_cell(
    cell: rnn.Cell, options: dict[str, Any], function: str, reverse: bool
) -> None:
    made = cell.bind(3, 4, options)
    cudnn = matched(made)
    assert cudnn is not None
    assert cudnn.function == function

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64).requires_grad_()

    parameters = {d.name: draw(*d.shape) for d in trace(made).declarations}
    x, states = draw(5, 2, 3), [draw(2, n) for n in made.state_sizes.values()]
    output, final = reference.recurrent(made, x, states, parameters, reverse=reverse)
    found = cudnn.run(x, states, parameters, reverse)
    leaves = [x, *states, *parameters.values()]
    for mine, exact in zip(found, (output, *final), strict=True):
        torch.testing.assert_close(mine, exact)
        cotangent = torch.randn_like(mine)
        mine, exact = (torch.autograd.grad(t, leaves, cotangent, retain_graph=True,
                                           materialize_grads=True)
                       for t in (mine, exact))  # fmt: skip
        torch.testing.assert_close(mine, exact)


def test_only_auto_and_small_float32_take_the_library() -> None:
    assert plan(bound("lstm"), torch.float32).cudnn
    assert not plan(bound("lstm"), torch.float32, "graph").cudnn
    assert not plan(bound("lstm"), torch.float32, masked=True).cudnn
    assert not plan(bound("lstm"), torch.bfloat16).cudnn
    assert not plan(bound("lstm", 3, 512), torch.float32).cudnn
