"""Groups before and after the loop: compiled with it, and run for the rows of all steps at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hoconv import jit
from hoconv import recurrent as rnn
from hoconv.jit import nvrtc
from hoconv.jit.generated import compile_cuda
from hoconv.recurrent.codegen.cuda import Launch, emit_cuda
from hoconv.recurrent.frontend.cell import Cell
from hoconv.recurrent.ir.axes import Layout
from hoconv.recurrent.ir.evaluate import DTYPES
from hoconv.recurrent.ir.program import Group, Op, Param, Program, Type, Value, Yield, flat
from hoconv.recurrent.ir.verify import verify
from hoconv.recurrent.passes.rows import make_row_programs, repeat_reads
from hoconv.recurrent.plans import find_plan
from hoconv.recurrent.runtime import host
from hoconv.recurrent.runtime.buffers import bind
from hoconv.recurrent.runtime.cpp import compile_loops
from hoconv.recurrent.runtime.interpret import Tensors, run_steps
from hoconv.recurrent.runtime.workspace import run_whole
from hoconv.recurrent.schedule import plan
from tests.hoconv.recurrent.shim import shim_loops
from tests.hoconv.recurrent.support import cell_case, gradients
from tests.hoconv.recurrent.test_compiler import check_loops
from tests.hoconv.recurrent.test_whole import OWN, WAITING

pytestmark = pytest.mark.skipif(jit.obstacle("cpu") is not None, reason=str(jit.obstacle("cpu")))


@rnn.cell(state=("h",))
def prepared(x: Any, h: Any) -> Any:
    """Most of its work depends on the input alone: conditions, reductions, several sizes."""
    z = rnn.layer_norm("norm", rnn.gelu(rnn.linear("z", x)))
    scale = rnn.sum(rnn.abs(x)) * rnn.parameter("scale", 1)
    z = rnn.where(z > 0.2, z * scale, rnn.softmax(rnn.cat(z, x))[:, : z.shape[-1]])
    h = rnn.tanh(z + rnn.linear("h", h)) * rnn.sigmoid(rnn.parameter("gain") * z)
    return rnn.cat(h, rnn.mean(z)), dict(h=h)


CELLS: list[Cell] = [prepared, *OWN, *WAITING]


def of(cell: Cell) -> Any:
    return cell.bind(3, 4, {})


def test_groups_are_exact() -> None:
    options: tuple[dict[str, bool], ...] = ({}, {"masked": True, "resets": True, "reverse": True})
    cases = [cell_case(of(cell), **each) for cell in CELLS for each in options]
    check_loops(cases, "auto", compile_loops)


@rnn.cell(state=("h",))
def gated(x: Any, h: Any) -> Any:
    """Its groups before the loop, and after that of the gradient, have independent features."""
    z = rnn.sigmoid(rnn.linear("z", x)) * rnn.parameter("gain")
    h = rnn.tanh(rnn.linear("h", h) * z)
    return h, dict(h=h)


def test_groups_of_independent_features_are_exact_in_cuda() -> None:
    options: tuple[dict[str, bool], ...] = ({}, {"masked": True, "resets": True, "reverse": True})
    cases = [cell_case(of(gated), **each) for each in options]
    check_loops(cases, "auto", shim_loops)
    for program in (
        plan(of(gated), torch.float64).forward,
        plan(of(gated), torch.float64).backward,
    ):
        assert any(find_launch(each).rows for each in make_row_programs(program).values())


def test_groups_do_not_run_op_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    made = plan(of(prepared), torch.float64)
    assert make_row_programs(made.forward)
    assert make_row_programs(made.backward)
    assert not make_row_programs(plan(of(prepared), torch.float64, "hoisted").common[0][1])
    layer = rnn.RNN(prepared, 3, 4, dtype=torch.float64, impl="cpp")
    x = torch.randn(5, 2, 3, dtype=torch.float64)
    expected = gradients(layer, x)
    kinds = []
    evaluate = host.evaluate_op

    def recorded(op: Any, *rest: Any) -> Any:
        kinds.append(op.kind)
        return evaluate(op, *rest)

    monkeypatch.setattr(host, "evaluate_op", recorded)
    find_plan.cache_clear()  # the host's part of a program is written again
    torch.testing.assert_close(gradients(layer, x), expected)
    find_plan.cache_clear()
    assert not kinds


@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (4, 1), (3, 0)])
def test_any_number_of_rows(shape: tuple[int, int]) -> None:
    ours = rnn.RNN(prepared, 3, 4, dtype=torch.float64, impl="cpp")
    exact = rnn.RNN(prepared, 3, 4, dtype=torch.float64, impl="reference")
    exact.load_state_dict(ours.state_dict())
    x = torch.randn(*shape, 3, dtype=torch.float64)
    torch.testing.assert_close(gradients(ours, x), gradients(exact, x), rtol=1e-9, atol=1e-9)


N = 300  # features, of three blocks; the last one is not full


def elementwise(dtype: str, reverse: bool, *more: Op, rate: Any = "sequence") -> Program:
    """A program without states; it reads a slice, a scalar of the row and a parameter.

    Args:
        more: ops whose results it yields, too.
        rate: of one that it reads.
    """
    wide = "f64" if dtype == "f64" else "f32"
    x, other = Value(Type("sequence", (N + 7,), dtype)), Value(Type(rate, (N,), wide))
    scale, gain = Value(Type("sequence", (1,), wide)), Value(Type("once", (N,), wide))
    row = Type("step", (N,), wide)
    part, where = (Value(replace(row, dtype=own)) for own in (dtype, "bool"))
    cast, scaled, less, made = (Value(row) for _ in range(4))
    narrow = Value(part.type)
    ops = (
        Op("slice", (x,), part, (5, N + 5)),
        Op("cast", (part,), cast),
        Op("mul", (cast, scale), scaled),
        Op("gt", (scaled, other), where),
        Op("sub", (scaled, gain), less),
        Op("where", (where, less, other), made),
        Op("cast", (made,), narrow),
        *more,
    )
    outputs = {op.result: op.result.type for op in (ops[3], ops[5], ops[6], *more)}
    return Program(
        name="elementwise",
        params=(Param(gain, ()),),
        sequences=(("x", x), ("other", other), ("scale", scale)),
        states=(),
        step=(Group(ops),),
        results=(),
        yields=tuple(
            Yield(f"out_{i}", value, Value(replace(of, rate="sequence")))
            for i, (value, of) in enumerate(outputs.items())
        ),
        reverse=reverse,
    )


def find_launch(program: Program) -> Launch:
    launch = emit_cuda(program, whole=True).whole
    assert launch is not None
    return launch


def draw_values(program: Program, T: int, B: int) -> Tensors:
    """Draws what a program reads."""
    torch.manual_seed(0)
    shapes = {"sequence": (T, B), "constant": (1, B), "once": ()}
    read = (*(p.value for p in program.params), *(v for _, v in program.sequences))
    return {
        v: torch.randn(*shapes[v.type.rate], v.type.size).to(DTYPES[v.type.dtype]) for v in read
    }


def check_rows(program: Program, rows: int) -> None:
    """The generated kernel, on a CPU, computes for T steps of B rows what the interpreter does."""
    (loop,) = shim_loops({"program": program}).values()
    seed = torch.tensor(1234567890123)
    # A block of rows, full or not; several, the last one full or not; of one step or of several.
    shapes = [(1, 3), (1, rows), (1, 2 * rows + 3), (3, 1), (7, 3), (2, rows), (5, rows + 1)]
    for T, B in shapes:
        values = draw_values(program, T, B)
        found, _ = loop(program, values, [], seed)
        exact, _ = run_steps(program, values, [], seed)
        torch.testing.assert_close([*found.values()], [*exact.values()])


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", ["f64", "f32", "bf16", "f16"])
def test_a_thread_computes_rows_of_any_steps(dtype: str, reverse: bool) -> None:
    program = elementwise(dtype, reverse)
    rows = find_launch(program).rows
    assert rows is not None and rows > 3  # noqa: PT018
    check_rows(program, rows)


def of_sizes(sizes: tuple[int, ...], dtype: str, reverse: bool = False) -> Program:
    """A program that computes parts of a row, and puts them together in another order."""
    wide = "f64" if dtype == "f64" else "f32"
    x, scale = (Value(Type("sequence", (n,), dtype)) for n in (sum(sizes) + 3, 1))
    row, start, ops, made = Type("step", (1,), wide), 3, [], []
    wide_scale = Value(row)
    ops.append(Op("cast", (scale,), wide_scale))
    for i, n in enumerate(sizes):
        part, cast, scaled, less = (
            Value(replace(row, shape=(n,), dtype=own)) for own in (dtype, wide, wide, wide)
        )
        ops += [
            Op("slice", (x,), part, (start, start + n)),
            Op("cast", (part,), cast),
            Op("mul", (cast, wide_scale if i else 2.0), scaled),
            Op("sub", (scaled, float(i)), less),
        ]
        made.append(less)
        start += n
    row = Value(replace(row, shape=(sum(sizes),)))
    ops.append(Op("cat", tuple(made[::-1]), row))
    return Program(
        name="sizes",
        params=(),
        sequences=(("x", x), ("scale", scale)),
        states=(),
        step=(Group(tuple(ops)),),
        results=(),
        yields=tuple(
            Yield(f"out_{i}", value, Value(replace(value.type, rate="sequence")))
            for i, value in enumerate((row, made[0]))
        ),
        reverse=reverse,
    )


@pytest.mark.parametrize("dtype", ["f64", "f32", "bf16", "f16"])
def test_features_of_several_sizes_are_independent(dtype: str) -> None:
    for sizes, blocks in (((N, 8), 4), ((5, N, 131), 6), ((2, 3), 2), ((128, 128, 256), 3)):
        program = of_sizes(sizes, dtype, reverse=sizes[0] == 5)
        source = emit_cuda(program, whole=True)
        assert source.steps.scratch_bytes == 0
        assert "__syncthreads" not in source.text
        assert source.whole is not None
        assert source.whole.rows is not None
        assert source.whole.blocks == blocks
        check_rows(program, source.whole.rows)


def of_heads(
    heads: int, each: int, dtype: str, *axes: int, kept: bool = False, reduced: bool = False
) -> Program:
    """A program that computes numbers of heads, and repeats them for a row.

    Args:
        each: how often a number is repeated.
        axes: the order of the heads (0), of their features (1) and of more that repeats all (2).
        kept: whether it yields the numbers of the heads, too.
        reduced: whether these need a sum.
    """
    wide, n = "f64" if dtype == "f64" else "f32", 2 * heads * each
    layout = Layout((heads, each, 2), ((0,),), axes)
    x, rates = Value(Type("sequence", (n + heads,), dtype)), Value(Type("sequence", (heads,), wide))
    gain, scale = Value(Type("once", (heads,), wide)), Value(Type("sequence", (1,), wide))

    def value(size: int, own: str = wide) -> Value:
        return Value(Type("step", (size,), own))

    numbers, row = value(heads, dtype), value(n, dtype)
    cast, gated, more, total, where = (value(heads, "bool" if i == 4 else wide) for i in range(5))
    spread, spread_rates, spread_gain, less, made = (value(n) for _ in range(5))
    spread_where = value(n, "bool")
    summed = value(1) if reduced else scale
    ops = [
        Op("slice", (x,), numbers, (n, n + heads)),
        Op("cast", (numbers,), cast),
        *([Op("sum", (cast,), summed)] if reduced else []),
        Op("mul", (cast, summed), gated),
        Op("sigmoid", (gated,), more),
        Op("add", (more, rates), total),
        Op("gt", (cast, 0.0), where),
        Op("arrange", (total,), spread, layout.attrs),
        Op("arrange", (rates,), spread_rates, layout.attrs),
        Op("arrange", (gain,), spread_gain, layout.attrs),
        Op("arrange", (where,), spread_where, layout.attrs),
        Op("slice", (x,), row, (0, n)),
        Op("cast", (row,), less),
        Op("where", (spread_where, spread, spread_rates), made),
    ]
    results = [made]
    for other in (less, spread_gain, spread):
        results.append(value(n))
        ops.append(Op("mul", (results[-2], other), results[-1]))
    results = [*results[-1:], spread, *([total] if kept else [])]
    return Program(
        name="heads",
        params=(Param(gain, ()),),
        sequences=(("x", x), ("rates", rates), ("scale", scale)),
        states=(),
        step=(Group(tuple(ops)),),
        results=(),
        yields=tuple(
            Yield(f"out_{i}", each, Value(replace(each.type, rate="sequence")))
            for i, each in enumerate(results)
        ),
    )


@pytest.mark.parametrize("dtype", ["f64", "f32", "bf16", "f16"])
@pytest.mark.parametrize("kept", [False, True])
def test_features_that_repeat_those_of_heads_are_independent(kept: bool, dtype: str) -> None:
    orders = ((0, 1, 2), (2, 0, 1), (1, 2, 0), (2, 1, 0))
    for (heads, each), axes in zip([(3, 5), (8, 16), (2, 129), (1, 7)], orders, strict=True):
        program = of_heads(heads, each, dtype, *axes, kept=kept and heads > 1)
        source = emit_cuda(verify(program), whole=True)
        assert source.steps.scratch_bytes == 0
        assert "__syncthreads" not in source.text
        assert source.whole is not None
        assert source.whole.rows is not None
        assert source.whole.blocks == -(-2 * heads * each // 128) + (kept and heads > 1)
        check_rows(program, source.whole.rows)


def test_what_is_not_read_is_repeated_from_memory() -> None:
    reduced = of_heads(3, 5, "bf16", 0, 1, 2, reduced=True)
    x, made, turned = (Value(Type(r, (6,), "f32")) for r in ("sequence", "step", "step"))
    order = Layout((2, 3), ((0, 1),), (1, 0)).attrs
    sums, heads, spread = (Value(Type("step", (n,), "f32")) for n in (2, 2, 6))
    summed = (
        Op("einsum", (x,), sums, Layout((2, 3), ((0, 1),), (0,)).attrs),
        Op("exp", (sums,), heads),
        Op("arrange", (heads,), spread, Layout((2, 3), ((0,),), (0, 1)).attrs),
    )
    permuted = Program(
        name="permuted",
        params=(),
        sequences=(("x", x),),
        states=(),
        step=(Group((Op("exp", (x,), made), Op("arrange", (made,), turned, order))),),
        results=(),
        yields=(Yield("out", turned, Value(x.type)),),
    )
    sums_of_heads = replace(
        permuted, step=(Group(summed),), yields=(Yield("out", spread, Value(x.type)),)
    )
    assert tuple(flat(repeat_reads(sums_of_heads).step)) == summed
    scalar = of_heads(1, 7, "f32", 0, 1, 2, kept=True)  # which each thread computes, one stores
    for program in (reduced, verify(permuted), scalar):
        assert find_launch(program).rows is None
        check_rows(program, 8)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_no_number_is_changed_that_is_repeated(number: float) -> None:
    program = of_heads(3, 5, "f32", 0, 1, 2, kept=True)
    (loop,) = shim_loops({"program": program}).values()
    values = draw_values(program, 2, 3)
    for name, value in program.sequences[:2]:
        values[value][..., -2 if name == "x" else 0] = number
    found, _ = loop(program, values, [], None)
    exact, _ = run_steps(program, values, [], None)
    torch.testing.assert_close([*found.values()], [*exact.values()], equal_nan=True)


def test_a_row_of_several_sizes_that_depends_on_its_step_has_a_block() -> None:
    program = of_sizes((N, 8), "f32")
    mask = Op("keep", (), Value(Type("step", (N,), "bool")), (0.4, 3, N))
    (group,) = program.step
    assert isinstance(group, Group)
    drawn = Yield("mask", mask.result, Value(replace(mask.result.type, rate="sequence")))
    masked = replace(program, step=(Group((*group.ops, mask)),), yields=(*program.yields, drawn))
    launch = find_launch(masked)
    assert (launch.rows, launch.blocks) == (None, 1)
    check_rows(masked, 8)


def test_a_block_leaves_rows_past_the_last_alone() -> None:
    program = elementwise("f32", False)
    (loop,) = shim_loops({"program": program}).values()
    storage, rows = loop.source.steps.storage, 3
    values = draw_values(program, 1, rows + 8)
    tensors = bind(program, storage, 1, rows + 8, values, [], {})
    for buffer in storage.yields:
        tensors[buffer].fill_(7)
    run_whole(loop.source, loop.kernels, 1, rows, None, tensors, torch.device("cpu"))
    for buffer in storage.yields[1:]:  # the first one is bool
        written = tensors[buffer] != 7
        assert written[:, :rows].all()
        assert not written[:, rows:].any()


def test_blocks_take_all_rows_and_no_more() -> None:
    launch = Launch("run_all", 3, 128, rows=8)
    counted = [launch.count_rows(T, B) for T, B in [(0, 3), (3, 0), (1, 3), (8, 5), (1, 9)]]
    assert counted == [0, 0, 1, 5, 2]
    assert replace(launch, rows=None).count_rows(8, 5) == 5


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("reads", ["masks", "constants"])
def test_rows_that_depend_on_their_step_or_place_are_not_taken_alike(
    reads: str, reverse: bool
) -> None:
    mask = Op("keep", (), Value(Type("step", (N,), "bool")), (0.4, 3, N))
    of = {
        "masks": elementwise("f32", reverse, mask),
        "constants": elementwise("f32", reverse, rate="constant"),
    }
    assert find_launch(of[reads]).rows is None
    check_rows(of[reads], 8)


@pytest.mark.skipif(nvrtc.obstacle() is not None, reason=str(nvrtc.obstacle()))
@pytest.mark.parametrize("dtype", ["f64", "f32", "bf16", "f16"])
def test_kernels_of_rows_compile(dtype: str) -> None:
    for program in (
        elementwise(dtype, reverse=True),
        of_sizes((N, 8), dtype),
        of_heads(3, 5, dtype, 0, 1, 2),
    ):
        text = emit_cuda(program, whole=True).text
        assert compile_cuda("recurrent", text, "sm_90").stat().st_size
