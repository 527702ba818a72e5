"""The library of cells against definitions that were written from the papers, apart from it."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hoconv import jit
from hoconv import recurrent as rnn
from hoconv.recurrent import cells
from hoconv.recurrent.frontend.cell import Cell
from hoconv.recurrent.ladder import SCHEDULES
from hoconv.recurrent.schedule import plan
from tests.hoconv.recurrent.definitions import DEFINITIONS
from tests.hoconv.recurrent.shim import shim_loops
from tests.hoconv.recurrent.support import cell_case
from tests.hoconv.recurrent.test_compiler import check_loops

needs_compiler = pytest.mark.skipif(
    jit.obstacle("cpu") is not None, reason=str(jit.obstacle("cpu"))
)
_HEADS = {"heads": 2, "keys": 3, "values": 4}
OPTIONS: dict[str, dict[str, int]] = {
    "lru": {"states": 3},
    "mamba": {"states": 3},
    "block_gru": {"blocks": 2},
    "tied_rhn": {"depth": 3},
    **dict.fromkeys(
        ("gla", "retnet", "hgrn2", "mamba2", "mlstm", "delta_net", "gated_delta_net", "rwkv7"),
        _HEADS,
    ),
}
# Those whose gradient is not that of their values.
SURROGATES = {"lif"}


def ready() -> dict[str, Cell]:
    return {name: cell for name, cell in vars(cells).items() if isinstance(cell, Cell)}


def make(name: str, impl: str, **arguments: Any) -> rnn.RNN:
    layer = rnn.RNN(getattr(cells, name), 5, 4, impl=impl, dtype=torch.float64,
                    **OPTIONS.get(name, {}), **arguments)  # fmt: skip
    torch.manual_seed(3)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return layer


def draw_states(layer: rnn.RNN, B: int) -> tuple[Tensor, ...]:
    """Positive ones: a normaliser is a sum of exponentials."""
    shapes = layer.runs[0][0].state_shapes.values()
    states = (torch.rand(1, B, *shape, dtype=torch.float64) + 0.5 for shape in shapes)
    return tuple(state.requires_grad_() for state in states)


def compare(name: str, impl: str, T: int, B: int) -> None:
    layer = make(name, impl)
    states = draw_states(layer, B)
    x = torch.randn(T, B, 5, dtype=torch.float64, requires_grad=True)
    weights = {key.removesuffix("_l0"): value for key, value in layer.named_parameters()}

    def differentiate(output: Tensor, last: tuple[Tensor, ...]) -> list[Tensor]:
        loss = sum(((i + 1) * t.sin()).sum() for i, t in enumerate((output, *last)))
        leaves = [x, *states, *layer.parameters()]
        found = torch.autograd.grad(loss, leaves, materialize_grads=True)  # pyright: ignore
        return [output, *last, *found]

    output, last = layer(x, states[0] if len(states) == 1 else states)
    ours = differentiate(output, last if isinstance(last, tuple) else (last,))
    options = {"hidden_size": 4} | dict(layer.options)
    defined, ends = DEFINITIONS[name](weights, x, *(s[0] for s in states), **options)
    theirs = differentiate(defined, tuple(end[None] for end in ends))
    for mine, exact in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("B", [1, 3])
@pytest.mark.parametrize("T", [1, 2, 17])
@pytest.mark.parametrize("name", DEFINITIONS)
def test_the_reference_is_what_the_paper_defines(name: str, T: int, B: int) -> None:
    compare(name, "reference", T, B)


@needs_compiler
@pytest.mark.parametrize("name", DEFINITIONS)
def test_the_kernels_compute_what_the_paper_defines(name: str) -> None:
    for T, B in ((1, 3), (17, 1), (17, 3)):
        compare(name, "cpp", T, B)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", DEFINITIONS)
def test_programs_of_every_schedule_are_exact(name: str, schedule: str) -> None:
    bound = getattr(cells, name).bind(5, 4, OPTIONS.get(name, {}))
    for given in ({"masked": True}, {"reverse": True}, {"resets": True, "recompute": "all"}):
        case = cell_case(bound, **given)
        case.check_plan(plan(case.cell, torch.float64, schedule, **case.options))


@needs_compiler
@pytest.mark.slow
def test_kernels_for_a_gpu_are_exact() -> None:
    bound = [getattr(cells, n).bind(5, 4, OPTIONS.get(n, {})) for n in DEFINITIONS]
    check_loops([cell_case(each, masked=True) for each in bound], "auto", shim_loops)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in DEFINITIONS if name not in SURROGATES])
def test_gradients_of_gradients(name: str) -> None:
    layer = make(name, "cpp")
    states = tuple(state.detach() for state in draw_states(layer, 2))
    given = states[0] if len(states) == 1 else states
    x = torch.randn(2, 2, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: layer(x, given)[0], x)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("heads", [1, 24, 80])
@pytest.mark.parametrize("name", ["gla", "gated_delta_net", "mamba2", "mlstm"])
def test_gradients_of_any_number_of_heads(name: str, heads: int) -> None:
    def differentiate(impl: str) -> list[Tensor]:
        layer = rnn.RNN(getattr(cells, name), 5, 4, impl=impl, dtype=torch.float64,
                        heads=heads, keys=3, values=2)  # fmt: skip
        torch.manual_seed(3)
        for parameter in layer.parameters():
            nn.init.normal_(parameter, std=0.5)
        leaves = [torch.randn(5, 3, 5, dtype=torch.float64).requires_grad_(), *layer.parameters()]
        output = layer(leaves[0])[0]
        first = torch.autograd.grad(output.sin().square().sum(), leaves, create_graph=True)
        second = torch.autograd.grad(torch.stack([g.square().sum() for g in first]).sum(), leaves)
        return [output, *first, *second]

    for ours, exact in zip(differentiate("cpp"), differentiate("reference"), strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-10, atol=1e-10)


def test_every_cell_is_short_and_names_its_paper() -> None:
    found = ready()
    assert set(DEFINITIONS) < set(found)
    for name, cell in found.items():
        assert cell.name == name
        lines = inspect.getsource(cell.function).strip().splitlines()
        assert len(lines) <= 20, name
        assert any(character.isdigit() for character in cell.function.__doc__ or ""), name
