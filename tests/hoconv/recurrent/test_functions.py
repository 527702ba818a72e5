"""The table of functions: a new one is an entry, and everything that compiles cells knows it."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import pickle
from typing import Any

import pytest
import torch

from hoconv import jit
from hoconv import recurrent as rnn
from hoconv.jit import nvrtc
from hoconv.jit.generated import compile_cuda
from hoconv.recurrent.codegen.cuda import emit_cuda
from hoconv.recurrent.ir.functions import FUNCTIONS, Function, Reduction
from hoconv.recurrent.ladder import SCHEDULES
from hoconv.recurrent.schedule import plan
from hoconv.tools.testing.random_cells import random_cell
from tests.hoconv.recurrent.shim import shim_loops
from tests.hoconv.recurrent.support import agree, cell_case
from tests.hoconv.recurrent.test_compiler import check_loops

needs_compiler = pytest.mark.skipif(
    jit.obstacle("cpu") is not None, reason=str(jit.obstacle("cpu"))
)
needs_nvrtc = pytest.mark.skipif(nvrtc.obstacle() is not None, reason=str(nvrtc.obstacle()))

ARCTANGENT = Function(
    "atan",
    torch.atan,
    "atan({0})",
    lambda rnn, g, y, x: (g / (1 + x * x),),
    doc="The arctangent.",
)


@pytest.fixture(autouse=True)
def _arctangent(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that it takes to add a function."""
    monkeypatch.setitem(FUNCTIONS, ARCTANGENT.name, ARCTANGENT)


@rnn.cell(state=("h", "phase"))
def wave(x: Any, h: Any, phase: Any) -> Any:
    phase = phase + rnn.atan(rnn.linear("rate", x, h))
    h = rnn.tanh(rnn.atan(phase) + rnn.atan(rnn.parameter("shift")) * rnn.linear("h", x, h))
    return h, dict(h=h, phase=phase)


def test_the_language_has_it() -> None:
    x = torch.linspace(-3, 3, 12).view(2, 6)
    torch.testing.assert_close(rnn.atan(x), x.atan())
    assert rnn.atan.__doc__ == "The arctangent."
    assert "atan" in dir(rnn)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_gives_its_values_and_gradients(schedule: str) -> None:
    for options in ({"masked": True}, {"reverse": True}):
        case = cell_case(wave.bind(3, 4, {}), **options)
        case.check_plan(plan(case.cell, torch.float64, schedule, **case.options))


@needs_compiler
def test_layers_in_cpp_give_its_values_and_gradients() -> None:
    agree(rnn.RNN(wave, 3, 4, num_layers=2, bidirectional=True, dtype=torch.float64))


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_in_cpp_compute_it_in_the_dtype_of_the_states(dtype: torch.dtype) -> None:
    agree(rnn.RNN(wave, 3, 4, dtype=dtype), tolerance=1e-5 if dtype == torch.float32 else 0.05)


@rnn.cell(state=("h",))
def largest(x: Any, h: Any) -> Any:
    h = h + rnn.max(x) * rnn.tanh(rnn.linear("h", h))
    return rnn.max(x), dict(h=h)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_largest_of_a_row_is_nan_where_one_is(schedule: str, dtype: torch.dtype) -> None:
    for n in (2, 5, 17):
        layer = rnn.RNN(largest, n, 3, impl="cpp", schedule=schedule, dtype=dtype)
        x = torch.randn(n, 2, n, dtype=dtype)
        x[range(n), 0, range(n)] = math.nan
        x.requires_grad_()
        output, _ = layer(x)
        torch.testing.assert_close(output, x.amax(-1, keepdim=True), equal_nan=True)
        (found,) = torch.autograd.grad(output.sum(), x)
        (expected,) = torch.autograd.grad(x.amax(-1).sum(), x)
        torch.testing.assert_close(found[:, 1], expected[:, 1])
        assert found[:, 0].isnan().all()


@rnn.cell(state=("h", "m"))
def attended(x: Any, h: Any, m: Any) -> Any:
    a = rnn.tanh(rnn.linear("a", x, h))
    m = a * rnn.sigmoid(m) + h * rnn.tanh(m)
    h = rnn.softmax(m * a + h)
    return rnn.max(m), dict(h=h, m=m)


@needs_compiler
def test_the_largest_of_what_is_computed_again_has_a_gradient() -> None:
    """The sum of products is rounded otherwise in the backward step, and so is its largest."""
    agree(rnn.RNN(attended, 3, 17, dtype=torch.float64))
    check_loops([cell_case(attended.bind(3, 17, {}))], "auto", shim_loops)


@needs_compiler
def test_kernels_for_a_gpu_give_its_values_and_gradients() -> None:
    check_loops([cell_case(wave.bind(3, 4, {}), masked=True)], "auto", shim_loops)


@needs_nvrtc
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_kernels_for_a_gpu_compile(dtype: torch.dtype) -> None:
    text = emit_cuda(plan(wave.bind(3, 4, {}), dtype).forward).text
    assert "atan(" in text
    assert compile_cuda("recurrent", text, "sm_90").stat().st_size


def test_it_is_saved_unless_it_is_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    @rnn.cell(state=("h",))
    def squared(x: Any, h: Any) -> Any:
        s = rnn.atan(h)
        h = s * s * s + rnn.linear("x", x)
        return h, dict(h=h)

    def saved() -> list[str]:
        forward = plan(squared.bind(3, 4, {}), torch.float64, "hoisted").forward
        return [y.source.hint for y in forward.yields if y.name.startswith("saved")]

    assert len(saved()) == 2  # the state, for the derivative, and the arctangent
    monkeypatch.setitem(FUNCTIONS, "atan", dataclasses.replace(ARCTANGENT, cheap=True))
    assert saved() == ["h"]


def test_random_cells_draw_it() -> None:
    def drawn(seed: int) -> bool:
        made = plan(random_cell(seed), torch.float64, "naive", training=True)
        return any(getattr(op, "kind", "") == "atan" for op in made.definition.step)

    assert any(map(drawn, range(60)))


def test_calls_are_as_the_entry_says() -> None:
    x = torch.ones(2, 3)
    torch.testing.assert_close(rnn.where(condition=x > 0, b=0.0, a=x), x)
    assert str(inspect.signature(rnn.where)) == "(condition, a, b)"
    with pytest.raises(TypeError, match="missing a required argument: 'b'"):
        rnn.minimum(x)
    with pytest.raises(TypeError, match="too many positional arguments"):
        rnn.atan(x, x)
    with pytest.raises(AttributeError, match=r"hoconv\.recurrent has no function 'cosine'"):
        _ = rnn.cosine
    with pytest.raises(AttributeError, match="no function 'add'"):
        _ = rnn.add


def test_functions_can_be_options() -> None:
    assert copy.deepcopy(rnn.atan) is rnn.atan
    assert pickle.loads(pickle.dumps(rnn.tanh)) is rnn.tanh


@pytest.mark.parametrize("name", FUNCTIONS)
def test_entries_are_whole(name: str) -> None:
    function = FUNCTIONS[name]
    assert function.name == name
    assert (function.derivative is None) == (function.result == "condition")
    assert (function.evaluate is None) == (name == "cast")
    operands = 2 if isinstance(function, Reduction) else len(function.operands)
    if name == "straight_through":
        operands = 1  # the other one has its gradient only
    assert all(f"{{{i}}}" in function.c for i in range(operands))
