"""Kernels that keep matrix states in registers, on a CPU by fibers and on a GPU."""

from __future__ import annotations

import copy
import functools
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from hoconv import jit
from hoconv import recurrent as rnn
from hoconv.jit import nvrtc
from hoconv.jit.generated import compile_cuda
from hoconv.recurrent import cells, reference
from hoconv.recurrent.codegen.matrix.kernel import LEAST_SHARED_BYTES, MatrixSource, emit_matrix
from hoconv.recurrent.frontend.cell import BoundCell
from hoconv.recurrent.frontend.serialize import to_text
from hoconv.recurrent.frontend.trace import trace
from hoconv.recurrent.ir.program import SEGMENT, Program, count_segments, flat
from hoconv.recurrent.ops import compiled_op
from hoconv.recurrent.passes.matrix.tiling import choose_tiling
from hoconv.recurrent.plans import find_plan, request
from hoconv.recurrent.runtime.cpp import compile_loops
from hoconv.recurrent.schedule import Plan, plan
from hoconv.tools.testing.cells import CellCase, run_program
from tests.hoconv.recurrent.matrix_cells import CELLS
from tests.hoconv.recurrent.matrix_shim import shim_matrices
from tests.hoconv.recurrent.test_compiler import check_loops

needs_compiler = pytest.mark.skipif(
    jit.obstacle("cpu") is not None, reason=str(jit.obstacle("cpu"))
)
needs_nvrtc = pytest.mark.skipif(nvrtc.obstacle() is not None, reason=str(nvrtc.obstacle()))
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no CUDA device")

LIBRARY = [
    "gla", "retnet", "hgrn2", "mamba", "mamba2", "mlstm", "delta_net", "gated_delta_net", "rwkv7",
]  # fmt: skip
EVERYTHING = {"masked": True, "resets": True, "reverse": True}


def bind(name: str, heads: int = 2, keys: int = 3, values: int = 4) -> BoundCell:
    sizes = {"heads": heads, "keys": keys, "values": values}
    options = {"states": keys} if name == "mamba" else sizes
    return getattr(cells, name).bind(values, 4, options)


def plan_for_gpu(cell: BoundCell, dtype: torch.dtype = torch.float32, **options: Any) -> Plan:
    return plan(cell, dtype, recompute="functions", **options)


def programs(made: Plan) -> list[Program]:
    return [made.inference, made.forward, made.backward]


def check(of: list[tuple[BoundCell, int, dict[str, Any]]], **arguments: Any) -> None:
    """Checks cells on sequences of some lengths, all compiled at once."""
    cases = [
        CellCase(cell, steps=T, **{"recompute": "functions", **given}) for cell, T, given in of
    ]
    check_loops(cases, "auto", functools.partial(shim_matrices, **arguments))


@needs_compiler
@pytest.mark.parametrize("name", LIBRARY)
def test_cells_are_exact(name: str) -> None:
    check([
        (bind(name), 4, {}),
        (bind(name), SEGMENT + 6, EVERYTHING),
        (bind(name, 1, 4, 4), 9, {"recompute": "all", "resets": True}),
        (bind(name, 2, 24, 5), 18, EVERYTHING),
    ], reversed=name in LIBRARY[::2])  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_other_cells_are_exact(cell: Any) -> None:
    # Of several outputs, the gradient cuts what lengths mask.
    lengths = {"masked": cell.name != "both_ways"}
    bound = cell.bind(3, 4, {})
    check([(bound, 5, {}), (bound, 9, {**EVERYTHING, **lengths})])


@needs_compiler
@pytest.mark.parametrize("T", [SEGMENT - 1, SEGMENT, SEGMENT + 1, 2 * SEGMENT + 9])
def test_segments_end_where_they_may(T: int) -> None:
    check([(bind("gated_delta_net", 1), T, {})])


@needs_compiler
@pytest.mark.parametrize(("name", "shared_bytes"), [("rwkv7", 227), ("mlstm", 99)])
def test_slabs_and_warps_divide_the_columns(name: str, shared_bytes: int) -> None:
    """Of 80 keys and 70 columns, some lanes have fewer than others."""
    check([(bind(name, 1, 80, 70), 6, {"masked": True})], shared_bytes=1024 * shared_bytes)
    source = emit_matrix(plan_for_gpu(bind(name, 1, 80, 70)).backward)
    assert isinstance(source, MatrixSource)
    assert source.tiling.slabs == (1 if name == "mlstm" else 2)
    assert source.tiling.warps > 1


@needs_compiler
def test_rounds_need_not_divide_segments() -> None:
    cell = bind("gated_delta_net", 1, 24, 70)
    source = emit_matrix(plan_for_gpu(cell, torch.float64).backward)
    assert isinstance(source, MatrixSource)
    found = re.search(r"ROUND = (\d+)", source.text)
    assert found is not None
    assert SEGMENT % int(found[1]) != 0
    assert source.tiling.warps > 1
    check([(cell, 2 * SEGMENT + 7, {})])


@needs_compiler
@pytest.mark.parametrize("B", [0, 1, 3])
@pytest.mark.parametrize("T", [1, 2, 17])
def test_half_precision_is_rounded_at_its_inputs_and_output_alone(T: int, B: int) -> None:
    cell = bind("delta_net", 2, 24, 5)
    program = plan_for_gpu(cell, torch.bfloat16).inference
    (loop,) = shim_matrices({"inference": program}).values()
    declared = trace(cell).declarations
    given = {d.name: torch.randn(d.read_shape).bfloat16() for d in declared}
    x, S = torch.randn(T, B, 5).bfloat16(), torch.rand(B, cell.state_sizes["S"])
    found = run_program(program, {"x": x}, {"S": S}, given, None, loop)
    wide = {name: t.double() for name, t in given.items()}
    output, (last,) = reference.recurrent(cell, x.double(), [S.double()], wide)
    for mine, exact in ((found["output"], output), (found["S"], last)):
        assert (mine.double() - exact).norm() <= 2e-2 * exact.norm()


@needs_compiler
def test_other_loops_run_the_same_programs() -> None:
    given = [("all", EVERYTHING), ("functions", {})]
    cases = [
        CellCase(bind(name), steps=5, recompute=recompute, **options)
        for name in LIBRARY
        for recompute, options in given
    ]
    check_loops(cases, "auto", compile_loops)


@needs_nvrtc
@pytest.mark.parametrize(
    ("keys", "values"),
    [
        (3, 3),
        (128, 128),
        (101, 7),
        *(pytest.param(n, n, marks=pytest.mark.slow) for n in (24, 64, 80, 256)),
    ],
)
def test_kernels_compile(keys: int, values: int) -> None:
    for name in ("rwkv7", "mlstm"):
        for program in programs(plan_for_gpu(bind(name, 2, keys, values), torch.bfloat16)):
            for shared_bytes in (LEAST_SHARED_BYTES, 227 * 1024):
                source = emit_matrix(program, shared_bytes)
                assert isinstance(source, MatrixSource)
                assert source.shared_bytes <= shared_bytes
            compile_cuda("recurrent", source.text, "sm_90")


def test_the_text_is_the_same_in_every_process() -> None:
    """Else the cache of compiled kernels would find none of another process."""
    lines = (
        "import hashlib; from tests.hoconv.recurrent.test_matrices import *",
        "texts = [emit_matrix(p).text for n in ('mlstm', 'rwkv7')"
        " for p in programs(plan_for_gpu(bind(n)))]",
        "print(hashlib.sha256(''.join(texts).encode()).hexdigest())",
    )
    command = [sys.executable, "-c", "; ".join(lines)]
    runs = [subprocess.run(command, capture_output=True, check=True).stdout for _ in range(4)]
    assert len({*runs}) == 1


def test_every_column_has_a_thread() -> None:
    for keys in (1, 3, 16, 17, 24, 64, 80, 100, 128, 256, 300, 512):
        for columns in (1, 2, 5, 63, 64, 65, 100, 128, 251, 256, 4096):
            for number_bytes in (4, 8):
                found = choose_tiling(keys, columns, number_bytes, whole=False)
                assert not isinstance(found, str)
                assert found.lanes * found.rows >= keys
                assert (found.slabs - 1) * found.slab < columns <= found.slabs * found.slab
                assert found.padded_slab >= found.slab
                assert found.padded_slab - found.padded_slab // found.warps < found.slab
    assert isinstance(choose_tiling(513, 4, 4, whole=False), str)
    assert isinstance(choose_tiling(256, 1024, 4, whole=True), str)


def test_states_of_few_steps_are_saved() -> None:
    made = plan_for_gpu(bind("gated_delta_net"))
    assert [y.name for y in made.forward.yields if y.sparse] == ["saved_0"]
    assert [r.value.hint for r in made.backward.replays] == ["saved_0"]
    # One vector of columns, by which a step is repeated without a sum over keys.
    assert [y.source.type.size for y in made.forward.yields] == [8, 24, 8]
    assert not [y for y in plan(bind("gated_delta_net"), torch.float32).forward.yields if y.sparse]


@pytest.mark.parametrize("name", ["mlstm", "delta_net", "gated_delta_net", "rwkv7"])
def test_what_only_ops_after_the_loop_read_is_computed_again(name: str) -> None:
    """Compares kinds: ops after the loop read products and sums that were made before it."""
    forward, backward = plan_for_gpu(bind(name, 2, 16, 16), torch.bfloat16)._gradient
    made = {op.result: op.kind for op in flat(forward.before)}
    kinds = {each: made[v] for each, v in forward.results if v in made and v.type.rate != "once"}
    in_steps = {v for op in (*flat(backward.before), *flat(backward.step)) for v in op.values}
    in_memory = {each for each, v in backward.sequences if v in in_steps}
    assert in_memory & kinds.keys()
    assert {kinds[each] for each in kinds.keys() - in_memory} <= {"linear", "einsum"}


def test_a_saved_state_has_the_length_that_torch_compile_expects() -> None:
    cell, T, B = bind("gated_delta_net"), 2 * SEGMENT + 1, 3
    text = request(to_text(trace(cell)), torch.float32, "auto", False, False, False, "functions")
    made = find_plan(text)
    x = torch.empty(T, B, cell.row_size, device="meta")
    states = [torch.empty(B, n, device="meta") for n in cell.state_sizes.values()]
    parameters = [torch.empty(d.read_shape, device="meta") for d in trace(cell).declarations]
    for impl, entries in (("cuda", count_segments(T)), ("cpp", T)):
        found = compiled_op([x], states, parameters, None, text, "forward", impl)
        names = [name for name, _ in made.program("forward").results]
        assert entries == len(found[names.index("saved_0")])


def say(cell: Any, **options: Any) -> str:
    return rnn.RNN(cell, 8, 8, **options).explain()


def test_explains_where_the_states_are() -> None:
    heads = {"heads": 2, "keys": 24, "values": 100}
    has = "of 2 warps has 50 of 100 columns of a head, each with 24 keys in 2 lanes"
    assert f"cuda: the states in registers: a block {has}" in say(cells.delta_net, **heads)
    assert f"the states in registers backwards: a block {has}" in say(cells.delta_net, **heads)
    # Those of the gradient are the keys of the cell, which are fewer.
    assert "has all 24 columns of a head, each with 100 keys" in say(cells.mlstm, **heads)
    assert "saved for backward: the state S before segments of 64" in say(cells.gla, **heads)
    assert "registers" not in say(cells.gla, schedule="fused", **heads)
    assert "registers" not in say(rnn.lstm)


@rnn.cell(state={"S": (2, 3, 4)})
def mixes(x: Any, S: Any) -> Any:
    """Every feature of the next state depends on all heads, keys and columns."""
    v = rnn.linear("v", x, S, size=(2, 3, 4))
    return rnn.einsum("hkv->v", S), dict(S=S + v)


@rnn.cell(state={"S": (2, 3, 4)})
def returns_all(x: Any, S: Any) -> Any:
    k, v = rnn.linear("k", x, size=(2, 3)), rnn.linear("v", x, size=(2, 4))
    S = S + rnn.einsum("hk,hv->hkv", k, v - rnn.einsum("hkv,hk->hv", S, k))
    return S, dict(S=S)


def test_explains_why_states_are_elsewhere() -> None:
    assert "not kept in registers: every step writes a matrix" in say(returns_all)
    long = {"heads": 1, "keys": 1024, "values": 1024}
    assert "not kept in registers: 1024 keys are more than 512" in say(cells.delta_net, **long)
    assert isinstance(plan_for_gpu(mixes.bind(3, 4, {})).matrices, str)
    wide = {"heads": 1, "keys": 256, "values": 1024}
    assert "for a gradient, they are not: 1024 columns that depend" in say(cells.mlstm, **wide)


def layers(name: str, dtype: torch.dtype, *sizes: int) -> tuple[rnn.RNN, rnn.RNN]:
    """The same layer on a GPU, compiled, and as the definition in float64."""
    heads, keys, values = sizes
    options: dict[str, Any] = {"heads": heads, "keys": keys, "values": values}
    if name == "mamba":
        options = {"states": keys}
    given = getattr(cells, name), 32, 32
    exact = rnn.RNN(*given, impl="reference", dtype=torch.float64, device="cuda", **options)
    mine = rnn.RNN(*given, impl="cuda", dtype=dtype, device="cuda", **options)
    mine.load_state_dict(exact.state_dict())
    exact.load_state_dict(mine.state_dict())  # rounded
    return mine, exact


def draw(layer: rnn.RNN, T: int, B: int) -> tuple[Tensor, list[Tensor]]:
    x = torch.randn(T, B, layer.input_size, device="cuda").to(next(layer.parameters()).dtype)
    shapes = layer.runs[0][0].state_shapes.values()
    return x, [torch.rand(1, B, *shape, device="cuda").to(x) * 0.3 for shape in shapes]


def differentiate(layer: rnn.RNN, x: Tensor, states: list[Tensor], **given: Any) -> list[Tensor]:
    """The output, the last states and all gradients."""
    leaves = [t.detach().requires_grad_() for t in (x, *states)]
    first = leaves[1] if len(states) == 1 else tuple(leaves[1:])
    output, last = layer(leaves[0], first, **given)
    results = (output, *(last if isinstance(last, tuple) else (last,)))
    loss = torch.stack([t.double().sin().sum() * (i + 1) for i, t in enumerate(results)]).sum()
    found = torch.autograd.grad(loss, [*leaves, *layer.parameters()])
    return [t.detach() for t in (*results, *found)]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("sizes", [(1, 3, 3), (2, 24, 24), (2, 80, 80), (1, 128, 128), (2, 256, 9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LIBRARY)
def test_layers_equal_the_definition_on_a_gpu(
    name: str, dtype: torch.dtype, sizes: tuple[int, ...]
) -> None:
    """In half precision, up to the error of the same products and the steps op by op."""
    torch.manual_seed(0)
    mine, exact = layers(name, dtype, *sizes)
    other = copy.deepcopy(mine)
    other.impl = "cpp"  # on a GPU, op by op
    for T, B, cut in ((1, 1, False), (63, 2, False), (150, 3, True)):
        x, states = draw(mine, T, B)
        given: dict[str, Any] = {}
        if cut:
            reset = (torch.rand(T, B) < 0.05).cuda()
            given = {"lengths": torch.randint(1, T + 1, (B,)), "reset": reset}
        found = differentiate(mine, x, states, **given)
        wide = differentiate(exact, x.double(), [s.double() for s in states], **given)
        half = dtype == torch.bfloat16
        rounded = differentiate(other, x, states, **given) if half else wide
        for value, definition, near in zip(found, wide, rounded, strict=True):
            error, allowed = ((t.double() - definition).norm() for t in (value, near))
            relative = 4e-3 if half else 1e-4
            assert error <= 1.2 * allowed + relative * definition.norm() + 1e-12


@pytest.mark.gpu
@needs_gpu
def test_equal_inputs_give_equal_bits_and_new_lengths_compile_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine, _ = layers("gated_delta_net", torch.bfloat16, 2, 128, 128)
    differentiate(mine, *draw(mine, 5, 2))
    monkeypatch.setattr("hoconv.recurrent.runtime.matrices.compile_cuda", None)
    monkeypatch.setattr("hoconv.recurrent.runtime.cuda.compile_cuda", None)
    for T, B in ((300, 3), (64, 1), (7, 0)):
        given = draw(mine, T, B)
        for first, second in zip(differentiate(mine, *given), differentiate(mine, *given)):
            assert torch.equal(first, second)


@pytest.mark.gpu
@needs_gpu
def test_gradients_have_gradients_and_torch_compile_sees_one_op() -> None:
    mine, exact = layers("delta_net", torch.float32, 2, 5, 4)
    x, states = draw(mine, 70, 2)
    found = []
    for layer, leaf in ((mine, x), (torch.compile(mine, fullgraph=True), x), (exact, x.double())):
        leaf = leaf.detach().requires_grad_()
        output, last = layer(leaf, states[0].to(leaf.dtype))
        loss = output.sin().sum() + last.sin().sum()
        (first,) = torch.autograd.grad(loss, leaf, create_graph=not found or layer is exact)
        found.append([output, first])
        if first.requires_grad:
            found[-1] += torch.autograd.grad(first.square().sum(), leaf)
    for other in found[:2]:
        for value, definition in zip(other, found[2]):
            assert (value.double() - definition).norm() <= 1e-4 * definition.norm()
