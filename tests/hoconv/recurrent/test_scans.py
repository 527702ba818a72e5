"""Scans of steps that are affine in their states, on a CPU by fibers and on a GPU."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from hoconv import jit
from hoconv import recurrent as rnn
from hoconv.jit import nvrtc
from hoconv.jit.generated import compile_cuda
from hoconv.recurrent import cells
from hoconv.recurrent.codegen.scan import MOST_BLOCKS, emit_scan
from hoconv.recurrent.frontend.cell import BoundCell
from hoconv.recurrent.ir.program import Program, flat
from hoconv.recurrent.runtime.scans import LEAST_STEPS, LEAST_WARPS, MOST_FEATURES, divide_steps
from hoconv.recurrent.schedule import plan
from hoconv.tools.testing.cells import CellCase, run_program
from tests.hoconv.recurrent.affine_cells import affine_cell
from tests.hoconv.recurrent.scan_shim import shim_scans
from tests.hoconv.recurrent.test_compiler import check_loops

needs_compiler = pytest.mark.skipif(
    jit.obstacle("cpu") is not None, reason=str(jit.obstacle("cpu"))
)
needs_nvrtc = pytest.mark.skipif(nvrtc.obstacle() is not None, reason=str(nvrtc.obstacle()))


@rnn.cell(state=("re", "im"))
def spin(x: Any, re: Any, im: Any) -> Any:
    """A complex number that turns."""
    angle = rnn.parameter("angle")
    a, b = rnn.cos(angle) * 0.9, rnn.sin(angle) * 0.9
    re, im = a * re - b * im + rnn.linear("x", x), b * re + a * im
    return re, dict(re=re, im=im)


@rnn.cell(inputs={"decay": "hidden_size"}, state={"h": "hidden_size", "last": "hidden_size"})
def plain(x: Any, decay: Any, h: Any, last: Any) -> Any:
    """h = a h + b as a user writes it, and a state that no step reads."""
    h = rnn.sigmoid(decay) * h + x
    return h, dict(h=h, last=h * x)


@rnn.cell(state=("a", "b", "c"))
def three(x: Any, a: Any, b: Any, c: Any) -> Any:
    return x + c, dict(a=x + 0.5 * a, b=a, c=b)


@rnn.cell(state={"re": "states", "im": "states"})
def turn(x: Any, re: Any, im: Any, *, states: int) -> Any:
    """As `spin`, of parts of the input, and both are returned."""
    angle = rnn.parameter("angle", states)
    a, b = rnn.cos(angle) * 0.9, rnn.sin(angle) * 0.9
    re, im = a * re - b * im + x[:, :states], b * re + a * im + x[:, states:]
    return rnn.cat(re, im), dict(re=re, im=im)


SPIN = spin.bind(3, 4, {})
TURN = turn.bind(8, 8, {"states": 4})
PLAIN = plain.bind(13, 13, {})
ONE = [PLAIN, cells.min_gru.bind(3, 13, {}), cells.rg_lru.bind(3, 4, {})]


def programs(cell: BoundCell, dtype: torch.dtype = torch.float64) -> list[Program]:
    made = plan(cell, dtype, training=True)
    return [made.inference, made.forward, made.backward]


def draw_scanned(states: int, count: int) -> list[BoundCell]:
    """Draws cells whose gradients, too, need no sum over features: they read no scalars."""
    drawn = (affine_cell(seed, states) for seed in itertools.count())
    scanned = (cell for cell in drawn if all(map(emit_scan, programs(cell))))
    return list(itertools.islice(scanned, count))


@needs_compiler
@pytest.mark.parametrize(("warps", "blocks", "reversed"), [(2, 1, True), (1, 3, False)])
def test_scans_are_exact(warps: int, blocks: int, reversed: bool) -> None:
    """Runs several rounds of all blocks, the last one not full, and fewer steps than one round."""
    masked = {"masked": True, "resets": True}
    of: list[tuple[BoundCell, int, dict[str, Any]]] = [
        *((cell, 75, {}) for cell in (*ONE, SPIN, *draw_scanned(1, 2), *draw_scanned(2, 2))),
        *((cell, 61, masked) for cell in (*ONE[1:], *draw_scanned(1, 2))),
        *((cell, 64, {"reverse": True}) for cell in (ONE[2], SPIN)),
        (ONE[2], 66, {**masked, "reverse": True}),
        (ONE[2], 3, {}),
        (ONE[2], 9, {"recompute": "all"}),
        *((cell, 70, {"recompute": "functions"}) for cell in (*ONE, SPIN, TURN)),
        (ONE[2], 66, {"recompute": "functions", "reverse": True, **masked}),
    ]
    cases = [CellCase(cell, steps=T, **options) for cell, T, options in of]
    scans = functools.partial(shim_scans, warps=warps, blocks=blocks, reversed=reversed)
    check_loops(cases, "auto", scans)


@needs_compiler
@pytest.mark.parametrize("blocks", [1, 2])
def test_two_calls_on_the_grid_of_rounds_have_the_bits_of_one(blocks: int) -> None:
    program = plan(PLAIN, torch.float32).inference
    (loop,) = shim_scans({"inference": program}, warps=2, blocks=blocks).values()
    T = 2 * blocks * 2 * loop.source.steps_of_warp
    x = torch.randn(T, 3, PLAIN.row_size)
    states = {name: torch.randn(3, n) for name, n in PLAIN.state_sizes.items()}

    def run(x: Tensor, states: dict[str, Tensor]) -> dict[str, Tensor]:
        return run_program(program, {"x": x}, states, {}, None, loop)

    whole = run(x, states)
    first = run(x[: T // 2].contiguous(), states)
    second = run(x[T // 2 :].contiguous(), {name: first[name] for name in states})
    assert torch.equal(whole["output"], torch.cat((first["output"], second["output"])))
    assert torch.equal(whole["output"][-1], whole["h"])
    assert all(torch.equal(whole[name], second[name]) for name in states)


@rnn.cell(state={"h": "input_size"})
def cut_off(x: Any, h: Any) -> Any:
    h = rnn.where(x > 1, 0.0, h) * x
    return h, dict(h=h)


@needs_compiler
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_lasts_until_a_condition_ends_it(value: float) -> None:
    """A condition at an infinite step does not: 0 times infinity is NaN."""
    T, B, n = 70, 2, 3
    layer = rnn.RNN(cut_off, n, n, impl="reference", dtype=torch.float64)
    program = plan(cut_off.bind(n, n, {}), torch.float64).inference
    (loop,) = shim_scans({"inference": program}, warps=2, blocks=2).values()
    x = torch.rand(T, B, n, dtype=torch.float64) + 0.01  # which ends nothing
    x[9, 0, 0] = x[30, 1, 2] = value
    x[50] = 2.0
    h = torch.ones(B, n, dtype=torch.float64)
    found = run_program(program, {"x": x}, {"h": h}, {}, None, loop)
    output, last = layer(x, h[None])
    for mine, definition in ((found["output"], output), (found["h"], last[0])):
        finite = definition.isfinite()
        assert torch.equal(mine.isfinite(), finite)  # NaN in place of infinity: 0 times a factor
        torch.testing.assert_close(mine[finite], definition[finite])
    assert not output[49].isfinite().all()
    assert output[50:].isfinite().all()


def test_what_is_not_affine_or_not_feature_by_feature_is_not_scanned() -> None:
    heads = {"heads": 2, "keys": 3, "values": 4}
    for cell in (rnn.lstm.bind(3, 4, {}), cells.indrnn.bind(3, 4, {}), three.bind(4, 4, {})):
        assert emit_scan(plan(cell, torch.float32).forward) is None
    for cell in (cells.delta_net.bind(3, 4, heads), cells.gla.bind(3, 4, heads)):
        assert all(emit_scan(program) is None for program in programs(cell))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cell", [*ONE, SPIN, TURN, cells.lru.bind(3, 4, {"states": 4})])
def test_a_gpu_scans_in_every_dtype(cell: BoundCell, dtype: torch.dtype) -> None:
    made = plan(cell, dtype, recompute="functions")
    for program in (made.inference, made.forward, made.backward):
        assert emit_scan(program) is not None


def test_gradients_of_what_is_not_affine_are_scanned() -> None:
    assert emit_scan(plan(cells.indrnn.bind(3, 4, {}), torch.float32).backward) is not None
    assert "cuda: backward: a scan of" in rnn.RNN(cells.indrnn, 3, 4).explain()
    assert "cuda: forward and backward: a scan of" in rnn.RNN(cells.min_gru, 3, 4).explain()
    assert "scan" not in rnn.RNN(cells.min_gru, 3, 4, schedule="fused").explain()


def test_a_gpu_computes_functions_again_where_steps_have_no_product() -> None:
    said = "on a GPU, saved for backward: the state h, 1 sequence made before the loop"
    assert said in rnn.RNN(cells.min_gru, 3, 4).explain()
    assert "on a GPU, saved" not in rnn.RNN(rnn.lstm, 3, 4).explain()
    assert "on a GPU, saved" not in rnn.RNN(cells.min_gru, 3, 4, recompute=True).explain()


@pytest.mark.parametrize("cell", ONE)
def test_only_products_are_computed_before_the_steps(cell: BoundCell) -> None:
    made = plan(cell, torch.float32)
    sequences = [op for op in flat(made.forward.before) if op.result.type.rate != "once"]
    assert {op.kind for op in sequences} <= {"linear"}


@needs_nvrtc
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("cell", [*ONE, SPIN])
def test_scans_compile(cell: BoundCell, dtype: torch.dtype) -> None:
    for program in programs(cell, dtype):
        source = emit_scan(program)
        assert source is not None
        assert source.shared_bytes <= 227 * 1024
        compile_cuda("recurrent", source.text, "sm_90")


def test_blocks_and_warps_divide_the_steps_of_few_features() -> None:
    H100 = 132
    assert divide_steps(MOST_FEATURES + 1, 1000, 16, 16, H100) is None
    assert divide_steps(100, LEAST_STEPS - 1, 16, 16, H100) is None
    assert divide_steps(0, 1000, 16, 16, H100) is None
    assert divide_steps(8 * 1024, 2048, 16, 16, H100) == (1, LEAST_WARPS)
    assert divide_steps(1024, 16384, 16, 16, H100) == (MOST_BLOCKS, LEAST_WARPS)
    assert divide_steps(256, 65536, 16, 16, H100) == (MOST_BLOCKS, 16)
    assert divide_steps(256, 65536, 16, 8, H100) == (MOST_BLOCKS, 8)
    assert divide_steps(1024, 300, 16, 16, H100) == (4, LEAST_WARPS)
    for features in (1, 31, 4096, MOST_FEATURES):
        for T in (LEAST_STEPS, 1000, 65536):
            divided = divide_steps(features, T, 16, 8, H100)
            assert divided is not None
            blocks, warps = divided
            assert blocks & (blocks - 1) == warps & (warps - 1) == 0
            assert 1 <= blocks <= MOST_BLOCKS
            assert LEAST_WARPS <= warps <= 8
            assert blocks * warps == LEAST_WARPS or blocks * warps * 16 <= T


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no CUDA device")
@pytest.mark.parametrize("T", [64, 127, 700, 5000])
@pytest.mark.parametrize(("B", "H"), [(1, 1), (1, 33), (3, 100), (40, 300)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cell", [cells.min_gru, cells.min_lstm, cells.rg_lru, spin])
def test_layers_scan_on_a_gpu(cell: Any, dtype: torch.dtype, B: int, H: int, T: int) -> None:
    torch.manual_seed(0)
    exact = rnn.RNN(cell, H, H, impl="cpp", bidirectional=T < 1000, dtype=torch.float64)
    layer = rnn.RNN(cell, H, H, impl="cuda", bidirectional=T < 1000, device="cuda", dtype=dtype)
    layer.load_state_dict(exact.state_dict())
    exact.load_state_dict(layer.state_dict())  # rounded
    x = torch.randn(T, B, H, device="cuda", dtype=dtype)
    lengths = torch.randint(1, T + 1, (B,)) if T == 700 and cell is not spin else None
    reset = torch.rand(T, B) < 0.01 if T == 700 and cell is not spin else None
    results = []
    for made, given in ((layer, x), (exact, x.cpu().double())):
        leaf = given.detach().requires_grad_()
        cut = None if reset is None else reset.to(leaf.device)
        output, state = made(leaf, lengths=lengths, reset=cut)
        states = state if isinstance(state, tuple) else (state,)
        loss = torch.stack([t.double().sin().mean() for t in (output, *states)]).sum()
        found = torch.autograd.grad(loss, [leaf, *made.parameters()])
        results.append([[t.cpu().double() for t in group] for group in ((output, *states), found)])
    rounding = torch.finfo(dtype).eps
    for mine, definition in zip(*results, strict=True):
        # A sum over all steps can be much less than what it adds up.
        scale = max(t.abs().max().item() for t in definition)
        for value, exact_value in zip(mine, definition, strict=True):
            torch.testing.assert_close(
                value, exact_value, rtol=20 * rounding, atol=20 * rounding * scale
            )
