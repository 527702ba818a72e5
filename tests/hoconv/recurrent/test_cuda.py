"""Generated CUDA without a GPU: that it compiles, and what its kernels and loops compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hoconv import recurrent as rnn
from hoconv.jit import nvrtc, obstacle
from hoconv.jit.generated import compile_cuda
from hoconv.recurrent.codegen.cuda import Launch, emit_cuda
from hoconv.recurrent.frontend.trace import trace
from hoconv.recurrent.ir.program import Op, Program
from hoconv.recurrent.runtime.interpret import interpret
from hoconv.recurrent.runtime.packing import pack
from hoconv.recurrent.schedule import plan
from hoconv.tools.testing.cells import run_program
from tests.hoconv.recurrent.shim import shim_loops
from tests.hoconv.recurrent.support import READY, bound, cell_case
from tests.hoconv.recurrent.test_compiler import check_loops

needs_nvrtc = pytest.mark.skipif(nvrtc.obstacle() is not None, reason=str(nvrtc.obstacle()))
needs_compiler = pytest.mark.skipif(obstacle("cpu") is not None, reason=str(obstacle("cpu")))


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", READY)
def test_kernels_of_every_ready_cell_compile(
    name: str, dtype: torch.dtype, architecture: str
) -> None:
    made = plan(bound(name), dtype, masked=True)
    for program in (made.inference, made.forward, made.backward):
        assert compile_cuda("recurrent", emit_cuda(program).text, architecture).stat().st_size


@needs_nvrtc
def test_kernels_in_half_precision_compile_and_mistakes_are_shown() -> None:
    text = emit_cuda(plan(bound("lstm"), torch.bfloat16).backward).text
    assert compile_cuda("recurrent", text, "sm_80").stat().st_size
    with pytest.raises(RuntimeError, match=r"NVRTC failed(?s:.*)sigmoyd"):
        compile_cuda("recurrent", emit_cuda(lstm()).text.replace("sigmoid", "sigmoyd"), "sm_80")


def lstm() -> Program:
    return plan(bound("lstm"), torch.float64).forward


@needs_compiler
@pytest.mark.parametrize("option", ["masked", "reverse", "resets"])
def test_loops_are_exact(option: str) -> None:
    check_loops([cell_case(which, **{option: True}) for which in READY], "auto", shim_loops)


@needs_compiler
def test_kernels_fused_across_steps_wait_for_shared_features() -> None:
    @rnn.cell(state=("h",))
    def turned(x: Any, h: Any) -> Any:
        h = rnn.tanh(rnn.linear("h", rnn.cat(h[:, 300:], h[:, :300]), x))
        return h, dict(h=h)

    cell = turned.bind(3, 400, {})
    program = plan(cell, torch.float64).forward
    assert launches(program) == ["linear", "2 parts"]
    assert shapes(program) == [(1, 416)]
    check_loops([cell_case(cell)], "auto", shim_loops)


@needs_compiler
def test_kernels_fused_across_steps_wait_for_features_that_are_repeated() -> None:
    @rnn.cell(state=("h",))
    def repeated(x: Any, h: Any) -> Any:
        n = h.shape[-1] // 2
        each = rnn.reshape(h[:, :n], n, 1) + rnn.reshape(rnn.parameter("b"), n, 2)
        h = rnn.tanh(rnn.linear("h", rnn.reshape(each, 2 * n), x))
        return h, dict(h=h)

    cell = repeated.bind(3, 400, {})
    program = plan(cell, torch.float64).forward
    assert launches(program) == ["linear", "2 parts"]
    assert shapes(program) == [(1, 416)]
    check_loops([cell_case(cell)], "auto", shim_loops)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 50, 10))
def test_loops_of_random_cells_are_exact(first: int) -> None:
    cases = [cell_case(which, reverse=which % 2 == 1) for which in range(first, first + 10)]
    check_loops(cases, "auto", shim_loops)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("schedule", rnn.SCHEDULES)
def test_loops_of_every_schedule_are_exact(schedule: str) -> None:
    cases = [
        cell_case(which, reverse=True) for which in ("lstm", "minimal_gated", "layernorm_lstm")
    ]
    check_loops(cases, schedule, shim_loops)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_chunks_of_steps_serve_every_length_and_batch(dtype: torch.dtype) -> None:
    cell = bound("minimal_gated")
    program = plan(cell, dtype).forward
    loop = shim_loops({"forward": program})["forward"]
    parameters = {d.name: torch.randn(d.shape).to(dtype) for d in trace(cell).declarations}
    params = pack(program, parameters)
    for B in (2, 5):
        for T in (1, 2, 3, 31, 32, 33, 70):
            x = torch.randn(T, B, 3).to(dtype)
            states = {"h": torch.randn(B, 4, dtype=torch.promote_types(dtype, torch.float32))}
            exact, last = interpret(program, params, {"x": x}, states)
            # The sums of a product are in another order for another number of rows.
            found = run_program(program, {"x": x}, states, parameters, None, loop)
            torch.testing.assert_close(found, exact | last)
    assert loop.recorded == 2 * 5  # of 2, 4, 8, 16 and 32 steps, for each batch


def launches(program: Program) -> list[str]:
    """The products and kernels of a step, a kernel with the number of parts it is made of."""
    return [
        op.kind if isinstance(op, Op) else f"{op.name.count('kernel')} parts"
        for op in emit_cuda(program).launches
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("which", ["lstm", "gru"])
def test_a_step_is_a_product_and_a_kernel(which: str, dtype: torch.dtype) -> None:
    made = plan(bound(which), dtype)
    parts = "1 parts" if dtype == torch.float32 else "2 parts"
    assert launches(made.forward) == ["linear", parts]
    back = [launches(made.backward)]
    assert back[0] in (["linear_t", "2 parts"], ["1 parts", "linear_t"])
    assert launches(plan(bound(which), torch.float32, "naive").forward).count("linear") > 4


def shapes(program: Program) -> list[tuple[int, int]]:
    launches = emit_cuda(program).launches
    return [(each.blocks, each.threads) for each in launches if isinstance(each, Launch)]


def test_only_threads_that_wait_for_each_other_share_a_block() -> None:
    assert shapes(plan(bound("lstm", 8, 512), torch.float32).forward) == [(4, 128)]
    assert shapes(plan(bound("layernorm_lstm", 8, 512), torch.float32).forward) == [(1, 512)]
    assert shapes(plan(bound("layernorm_lstm", 8, 2048), torch.float32).forward) == [(1, 1024)]
    assert shapes(plan(bound("gru", 8, 40), torch.bfloat16).backward) == [(1, 64)]


def test_without_a_gpu_the_reason_is_said() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(RuntimeError, match=r"impl=cuda cannot run recurrent: .*CUDA"):
        rnn.LSTM(2, 3, impl="cuda")(torch.zeros(1, 1, 2))


@needs_compiler
def test_what_the_driver_says_of_a_mistake_is_told() -> None:
    (loop,) = shim_loops({"forward": lstm()}).values()
    with pytest.raises(RuntimeError, match="the CUDA driver says CUDA_ERROR_NOT_FOUND"):
        loop.kernels("missing", 1, 1, 1)
