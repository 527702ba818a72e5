"""Loops without products: on a GPU one kernel runs all steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hoconv import jit
from hoconv import recurrent as rnn
from hoconv.jit import nvrtc
from hoconv.jit.generated import compile_cuda
from hoconv.recurrent.codegen.cuda import emit_cuda
from hoconv.recurrent.frontend.cell import Cell
from hoconv.recurrent.ir.program import Program
from hoconv.recurrent.runtime.cuda import CudaLoop
from hoconv.recurrent.schedule import plan
from hoconv.tools.testing.cells import run_program
from tests.hoconv.recurrent.shim import shim_loops
from tests.hoconv.recurrent.support import bound, cell_case
from tests.hoconv.recurrent.test_compiler import check_loops

needs_compiler = pytest.mark.skipif(
    jit.obstacle("cpu") is not None, reason=str(jit.obstacle("cpu"))
)
needs_nvrtc = pytest.mark.skipif(nvrtc.obstacle() is not None, reason=str(nvrtc.obstacle()))


@rnn.cell(state=("h",))
def independent(x: Any, h: Any) -> Any:
    """IndRNN: every unit sees itself alone (Li et al., CVPR 2018)."""
    h = rnn.relu(rnn.linear("x", x) + rnn.parameter("u") * h)
    return h, dict(h=h)


@rnn.cell(state=("c",))
def simple(x: Any, c: Any) -> Any:
    """SRU: the gates see the input and their own unit (Lei et al., EMNLP 2018)."""
    f = rnn.sigmoid(rnn.linear("f", x) + rnn.parameter("vf") * c)
    r = rnn.sigmoid(rnn.linear("r", x) + rnn.parameter("vr") * c)
    c = f * c + (1 - f) * rnn.linear("w", x)
    return r * c + (1 - r) * rnn.linear("skip", x), dict(c=c)


@rnn.cell(state=("h",))
def minimal(x: Any, h: Any) -> Any:
    """minGRU: gates of the input alone (Feng et al., 2024)."""
    z = rnn.sigmoid(rnn.linear("z", x))
    h = (1 - z) * h + z * rnn.linear("h", x)
    return h, dict(h=h)


@rnn.cell(state=("n", "m", "c"))
def several(x: Any, n: Any, m: Any, c: Any) -> Any:
    """Three states, of which one is passed on and one changes places; slices, cat and noise."""
    gates = rnn.linear("gates", x, size=2 * c.shape[-1])
    forget, write = rnn.chunk(gates, 2)
    following = rnn.maximum(forget + m, write)
    c = rnn.zoneout(rnn.exp(forget + m - following) * c + write, c, 0.3)
    return rnn.cat(c / rnn.maximum(rnn.abs(n), 1.0), rnn.tanh(c)), dict(n=c, m=following, c=n)


@rnn.cell(state=("h",))
def normed(x: Any, h: Any) -> Any:
    """The features of a row are reduced: threads wait for each other."""
    h = rnn.layer_norm("norm", rnn.linear("x", x) + rnn.parameter("u") * h) * rnn.mean(h + 1)
    return h, dict(h=h)


@rnn.cell(state=("h",))
def shifted(x: Any, h: Any) -> Any:
    """A feature reads its neighbour."""
    h = rnn.tanh(rnn.cat(h[:, 1:], h[:, :1]) + rnn.linear("x", x))
    return h, dict(h=h)


@rnn.cell(state=("h",))
def repeated(x: Any, h: Any) -> Any:
    """Two features read one."""
    n = h.shape[-1] // 2
    each = rnn.reshape(h[:, :n], n, 1) + rnn.reshape(rnn.linear("x", x), n, 2)
    h = rnn.tanh(rnn.reshape(each, 2 * n))
    return h, dict(h=h)


@rnn.cell(state={"h": "hidden_size", "s": 1})
def two_sizes(x: Any, h: Any, s: Any) -> Any:
    s = rnn.tanh(0.5 * s + rnn.sum(h))
    h = rnn.tanh(rnn.linear("x", x) + h * s)
    return h, dict(h=h, s=s)


OWN: list[Cell] = [independent, simple, minimal, several]
WAITING: list[Cell] = [normed, shifted, repeated, two_sizes]


def of(cell: Cell, hidden_size: int = 4) -> Any:
    return cell.bind(3, hidden_size, {})


def is_whole(program: Program) -> bool:
    return emit_cuda(program, whole=True).whole is not None


@pytest.mark.parametrize("cell", [*OWN, *WAITING])
def test_one_kernel_runs_all_steps(cell: Cell) -> None:
    made = plan(of(cell), torch.float32)
    assert all(map(is_whole, (made.inference, made.forward, made.backward)))
    waits = "__syncthreads" in emit_cuda(made.forward, whole=True).text
    assert waits == (cell in WAITING)
    assert "cuda: not cuDNN" in rnn.RNN(cell, 3, 4).explain()
    assert (
        "cuda: one kernel for all steps; backwards one kernel for" in rnn.RNN(cell, 3, 4).explain()
    )


def test_a_product_in_a_step_needs_more() -> None:
    assert not is_whole(plan(bound("lstm"), torch.float32).forward)
    assert emit_cuda(plan(of(simple), torch.float32).forward).launches  # of schedules before graph


@needs_compiler
@pytest.mark.parametrize("schedule", ["graph", "auto"])
def test_loops_are_exact(schedule: str) -> None:
    options: tuple[dict[str, Any], ...] = (
        {}, {"reverse": True}, {"masked": True, "resets": True},
        {"masked": True, "resets": True, "reverse": True}, {"recompute": "all", "masked": True},
    )  # fmt: skip
    cases = [cell_case(of(cell), **each) for cell in (*OWN, *WAITING) for each in options]
    check_loops(cases, schedule, shim_loops)


@needs_compiler
@pytest.mark.parametrize("T", [1, 7, 8, 9, 70])
def test_every_length_is_loaded_ahead(T: int) -> None:
    layer = rnn.RNN(simple, 3, 300, dtype=torch.float64, impl="reference")
    program = plan(of(simple, 300), torch.float64).inference
    loop = shim_loops({"inference": program})["inference"]
    parameters = {n.removesuffix("_l0"): p.detach() for n, p in layer.named_parameters()}
    x, c = torch.randn(T, 2, 3).double(), torch.randn(2, 300).double()
    found = run_program(program, {"x": x}, {"c": c}, parameters, None, loop)
    output, last = layer(x, c[None])
    torch.testing.assert_close(found["output"], output)
    torch.testing.assert_close(found["c"], last[0])
    assert loop.recorded == 0


@needs_nvrtc
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("cell", [*OWN, *WAITING])
def test_kernels_compile(cell: Cell, dtype: torch.dtype) -> None:
    made = plan(of(cell), dtype, masked=True, resets=True)
    for program in (made.inference, made.forward, made.backward):
        text = emit_cuda(program, whole=True).text
        assert compile_cuda("recurrent", text, "sm_90").stat().st_size


@pytest.mark.gpu
@pytest.mark.parametrize("cell", [*OWN, *WAITING])
def test_loops_are_exact_on_a_gpu(cell: Cell) -> None:
    for options in ({}, {"reverse": True}, {"masked": True, "resets": True}):
        case = cell_case(of(cell, 70), "cuda", **options)
        made = plan(case.cell, torch.float64, "auto", **case.options)
        case.check_plan(made, lambda program: CudaLoop(program, recorded=True))
