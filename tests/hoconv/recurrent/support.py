"""What the tests of recurrent cells share: every ready cell, and layers of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hoconv import recurrent as rnn
from hoconv.recurrent.frontend.cell import BoundCell, Cell
from hoconv.tools.testing.cells import CellCase
from hoconv.tools.testing.random_cells import random_cell

READY: Mapping[str, tuple[Cell, dict[str, Any]]] = {
    "lstm": (rnn.lstm, {}),
    "gru": (rnn.gru, {}),
    "elman": (rnn.elman, {}),
    "peephole_lstm": (rnn.peephole_lstm, {}),
    "layernorm_lstm": (rnn.layernorm_lstm, {}),
    "coupled_lstm": (rnn.coupled_lstm, {}),
    "minimal_gated": (rnn.minimal_gated, {}),
    "projected_lstm": (rnn.projected_lstm, {"proj_size": 3}),
}


def bound(name: str, input_size: int = 3, hidden_size: int = 4) -> BoundCell:
    cell, options = READY[name]
    return cell.bind(input_size, hidden_size, options)


def cell_case(which: str | int | BoundCell, device: str = "cpu", /, **options: Any) -> CellCase:
    """Of a ready cell, a random one by its seed, or any."""
    if not isinstance(which, BoundCell):
        which = bound(which) if isinstance(which, str) else random_cell(which)
    return CellCase(which, device, **options)


def layer(name: str, **arguments: Any) -> rnn.RNN:
    """A small layer in float64 whose parameters are all random; the definition by default."""
    cell, options = READY[name]
    arguments = {"impl": "reference", **arguments}
    made = rnn.RNN(cell, 3, 4, dtype=torch.float64, **options, **arguments)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.5)
    return made


def sequence(*shape: int) -> Tensor:
    return torch.randn(shape or (5, 2, 3), dtype=torch.float64)


def agree(
    made: rnn.RNN, *arguments: Any, tolerance: float = 1e-10, equal_nan: bool = False
) -> None:
    """A layer computes in C++ what its definition says: outputs, states and all gradients."""
    T, B = 5, 3
    x = sequence(T, B, made.input_size).to(next(made.parameters(), sequence()).dtype)
    found = []
    for impl in ("cpp", "reference"):
        made.impl = impl
        torch.manual_seed(1)
        found.append(gradients(made, x, *arguments))
    for mine, exact in zip(*found, strict=True):
        torch.testing.assert_close(mine, exact, rtol=tolerance, atol=tolerance, equal_nan=equal_nan)


def gradients(made: Callable[..., Any], x: Tensor, *arguments: Any, **named: Any) -> list[Tensor]:
    """The output, the final states and all gradients, of a function that uses all of them."""
    x = x.detach().requires_grad_()
    parameters = made.parameters() if isinstance(made, nn.Module) else ()
    output, state = made(x, *arguments, **named)
    states = state if isinstance(state, tuple) else (state,)
    loss = sum(t.sin().sum() * (i + 1) for i, t in enumerate((output, *states)))
    assert isinstance(loss, Tensor)
    found = torch.autograd.grad(loss, [x, *parameters], materialize_grads=True)
    return [t.detach() for t in (output, *states, *found)]


def check_many_gradients(made: rnn.RNN) -> None:
    """Gradients of several cotangents at once are those of each, and so are their gradients."""
    like = next(made.parameters())
    x = sequence(3, 2, 3).to(like).requires_grad_()
    leaves = [x, *made.parameters()]
    output = made(x)[0]
    several = torch.randn(3, *output.shape).to(like)

    def differentiate(create_graph: bool) -> list[list[Tensor]]:
        """At once, and each."""

        def of(gradient: Tensor, many: bool) -> tuple[Tensor, ...]:
            return torch.autograd.grad(
                output, leaves, gradient, True, create_graph, is_grads_batched=many
            )

        each = zip(*(of(gradient, False) for gradient in several), strict=True)
        return [[*of(several, True)], [*map(torch.stack, each)]]

    torch.testing.assert_close(*differentiate(create_graph=False))
    at_once, each = differentiate(create_graph=True)
    torch.testing.assert_close(at_once, each)
    again = [
        torch.autograd.grad(
            torch.stack([g.square().sum() for g in found]).sum(), leaves, retain_graph=True
        )
        for found in (at_once, each)
    ]
    torch.testing.assert_close(*again)
