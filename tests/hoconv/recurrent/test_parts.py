"""Groups before and after the loop that compute with parts of rows rather than with rows that are
put together."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hoconv import jit
from hoconv import recurrent as rnn
from hoconv.jit import nvrtc
from hoconv.jit.generated import compile_cuda
from hoconv.recurrent import cells
from hoconv.recurrent.codegen.cuda import emit_cuda
from hoconv.recurrent.frontend.cell import BoundCell
from hoconv.recurrent.ir.program import Group, Op, Program, Type, Value, flat
from hoconv.recurrent.ir.verify import verify
from hoconv.recurrent.ladder import SCHEDULES
from hoconv.recurrent.passes.fuse import fuse
from hoconv.recurrent.passes.parts import take_parts
from hoconv.recurrent.passes.rows import make_row_programs
from hoconv.recurrent.runtime.cpp import compile_loops
from hoconv.recurrent.runtime.interpret import run_steps
from hoconv.recurrent.schedule import Plan, plan
from tests.hoconv.recurrent.shim import shim_loops
from tests.hoconv.recurrent.support import cell_case
from tests.hoconv.recurrent.test_compiler import check_loops
from tests.hoconv.recurrent.test_rows import check_rows, draw_values, find_launch

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@rnn.cell(state={"S": ("heads", "keys", "values")})
def matrices(x: Any, S: Any, *, heads: int, keys: int, values: int) -> Any:
    """Takes four equal parts of its input as they are."""
    q, k, a, v = (rnn.reshape(r, heads, keys) for r in rnn.chunk(x, 4))
    S = rnn.sigmoid(a)[..., None] * S + rnn.einsum("hk,hv->hkv", k, v)
    return rnn.einsum("hkv,hk->hv", S, q * keys**-0.5), dict(S=S)


@rnn.cell(state=("h",))
def halves(x: Any, h: Any) -> Any:
    """Takes parts of its input, some of them twice, and multiplies the whole."""
    a, b = rnn.chunk(x, 2)
    z = rnn.tanh(a) * rnn.sigmoid(b) + rnn.exp(-a * a)
    h = rnn.tanh(rnn.linear("h", h) + rnn.linear("x", x) + z)
    return h, dict(h=h)


@rnn.cell(state=("h",))
def joined(x: Any, h: Any) -> Any:
    """Puts parts together, computes with the whole, and takes parts of that."""
    a, b = rnn.chunk(x, 2)
    z = rnn.where(rnn.cat(a, b) > rnn.sum(a), 0.5, rnn.cat(rnn.tanh(a), b))
    u, v = rnn.chunk(rnn.sigmoid(z * rnn.parameter("gain", x)), 2)
    h = rnn.tanh(rnn.linear("h", h) + u * v)
    return h, dict(h=h)


@rnn.cell(state=("h",))
def normalized(x: Any, h: Any) -> Any:
    """Puts parts together and sums over the whole."""
    a, b = rnn.chunk(x, 2)
    z = rnn.layer_norm("norm", rnn.cat(rnn.tanh(a), b))
    h = rnn.tanh(rnn.linear("h", h) + rnn.linear("z", z))
    return h, dict(h=h)


@rnn.cell(state={"S": ("heads", "keys", "values")})
def gated(x: Any, S: Any, *, heads: int, keys: int, values: int) -> Any:
    """Takes parts of two sizes: queries, keys and values, and a number for each head."""
    n = heads * keys
    q, k, v = (rnn.reshape(x[:, i * n : (i + 1) * n], heads, keys) for i in range(3))
    a = rnn.sigmoid(rnn.reshape(x[:, 3 * n : 3 * n + heads], heads, 1))
    S = a[..., None] * S + rnn.einsum("hk,hv->hkv", k, v)
    return rnn.einsum("hkv,hk->hv", S, q), dict(S=S)


@rnn.cell(state={"S": ("heads", "keys", "values")})
def delta(x: Any, S: Any, *, heads: int, keys: int, values: int) -> Any:
    """As these; the number of a head multiplies all its features."""
    n = heads * keys
    q, k, v = (rnn.reshape(x[:, i * n : (i + 1) * n], heads, keys) for i in range(3))
    b = rnn.sigmoid(rnn.reshape(x[:, 3 * n : 3 * n + heads], heads, 1))
    S = S + rnn.einsum("hk,hv->hkv", k, b * (v - rnn.einsum("hkv,hk->hv", S, k)))
    return rnn.einsum("hkv,hk->hv", S, q * keys**-0.5), dict(S=S)


@rnn.cell(state=("h",))
def overlapping(x: Any, h: Any) -> Any:
    """Takes parts that overlap, which cannot be cut; leaves both ends of its input."""
    z = rnn.tanh(x[:, 1:4]) * rnn.sigmoid(x[:, 3:6]) + rnn.exp(-x[:, 4:7])
    h = rnn.tanh(rnn.linear("h", h) + z)
    return h, dict(h=h)


@rnn.cell(state=("h",))
def unequal(x: Any, h: Any) -> Any:
    a, b, c = x[:, :1], x[:, 1:4], x[:, 4:]
    z = rnn.tanh(b) * a + rnn.cat(rnn.sigmoid(c), a * a)
    h = rnn.tanh(rnn.linear("h", h) + z)
    return h, dict(h=h)


CELLS: dict[str, BoundCell] = {
    "matrices": matrices.bind(4 * 2 * 4, 2 * 4, dict(heads=2, keys=4, values=4)),
    "gla": cells.gla.bind(3, 8, dict(heads=2, keys=4, values=4)),
    "delta_net": cells.delta_net.bind(3, 8, dict(heads=2, keys=4, values=4)),
    "halves": halves.bind(6, 3, {}),
    "joined": joined.bind(6, 3, {}),
    "normalized": normalized.bind(6, 3, {}),
    "unequal": unequal.bind(6, 3, {}),
    "overlapping": overlapping.bind(9, 3, {}),
    "gated": gated.bind(3 * 8 + 2, 8, dict(heads=2, keys=4, values=4)),
    "gated, odd": gated.bind(3 * 15 + 3, 15, dict(heads=3, keys=5, values=5)),
    "gated, a head": gated.bind(3 * 4 + 1, 4, dict(heads=1, keys=4, values=4)),
    "delta": delta.bind(3 * 8 + 2, 8, dict(heads=2, keys=4, values=4)),
    "delta, odd": delta.bind(3 * 15 + 3, 15, dict(heads=3, keys=5, values=5)),
    "delta, a head": delta.bind(3 * 4 + 1, 4, dict(heads=1, keys=4, values=4)),
}
OPTIONS: tuple[dict[str, Any], ...] = (
    {}, {"recompute": "functions"}, {"recompute": "all"},
    {"masked": True, "resets": True, "reverse": True},
)  # fmt: skip
needs_compiler = pytest.mark.skipif(
    jit.obstacle("cpu") is not None, reason=str(jit.obstacle("cpu"))
)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("which", CELLS)
def test_every_schedule_is_exact(which: str, schedule: str) -> None:
    for options in OPTIONS:
        case = cell_case(CELLS[which], **options)
        case.check_plan(plan(case.cell, torch.float64, schedule, **case.options))


@needs_compiler
@pytest.mark.parametrize("compile", [compile_loops, shim_loops])
def test_compiled_groups_are_exact(compile: Any) -> None:
    cases = [cell_case(cell, **options) for cell in CELLS.values() for options in OPTIONS[::3]]
    check_loops(cases, "auto", compile)


def list_pairs(made: Plan) -> list[tuple[Program, Program]]:
    """The programs of a plan without and with the pass."""
    forward, backward = made._gradient
    pairs = ((fuse(forward), made.forward), (fuse(backward), made.backward))
    return [(verify(before), verify(after)) for before, after in pairs]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("which", CELLS)
def test_groups_compute_the_same_in_every_dtype(which: str, dtype: torch.dtype) -> None:
    for recompute in ("cheap", "functions"):
        for pair in list_pairs(plan(CELLS[which], dtype, recompute=recompute)):
            before, after = (make_row_programs(program).values() for program in pair)
            for one, other in zip(before, after, strict=True):
                values = draw_values(one, 3, 2)
                exact, _ = run_steps(one, values, [], None)
                found, _ = run_steps(other, values, [], None)
                assert found.keys() == exact.keys()
                for value, t in exact.items():
                    close: dict[str, Any] = {}
                    if (
                        t.dtype.is_floating_point and dtype.itemsize == 2
                    ):  # of parts, a sum may be rounded less often
                        eps = torch.finfo(dtype).eps
                        close = {"rtol": 2 * eps, "atol": 2 * eps * t.abs().max().item()}
                    torch.testing.assert_close(found[value], t, **close)


def find_last(which: str, dtype: torch.dtype) -> Program:
    """The program of the last group of a gradient."""
    backward = plan(CELLS[which], dtype, recompute="functions").backward
    return [*make_row_programs(backward).values()][-1]


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
def test_features_of_parts_are_independent(dtype: torch.dtype) -> None:
    for which in ("matrices", "halves", "gated", "gated, odd"):
        program = find_last(which, dtype)
        source = emit_cuda(program, whole=True)
        assert source.steps.scratch_bytes == 0
        assert source.whole is not None
        assert source.whole.rows is not None
        check_rows(program, source.whole.rows)


def test_the_gradient_of_a_ready_cell_has_independent_features() -> None:
    for dtype in DTYPES:
        backward = plan(CELLS["gla"], dtype, recompute="functions").backward
        assert all(find_launch(each).rows for each in make_row_programs(backward).values())


@needs_compiler
@pytest.mark.parametrize(("which", "heads", "keys"), [("delta", 2, 4), ("delta, odd", 3, 5)])
def test_what_is_prepared_of_heads_has_independent_features(
    which: str, heads: int, keys: int
) -> None:
    for dtype in DTYPES:
        made = plan(CELLS[which], dtype, recompute="functions")
        for program in (made.inference, made.forward):
            (rows,) = make_row_programs(program).values()
            source = emit_cuda(rows, whole=True)
            assert source.steps.scratch_bytes == 0
            assert source.whole is not None
            assert source.whole.rows is not None
            check_rows(rows, source.whole.rows)
        back = find_last(which, dtype)
        wide = 8 if dtype == torch.float64 else 4
        # At most what is summed over keys, the sums, and what these are multiplied by.
        aligned = sum(-(-n * wide // 64) * 64 for n in (heads * keys, heads, heads))
        assert emit_cuda(back, whole=True).steps.scratch_bytes <= aligned
        check_rows(back, 3)


@pytest.mark.skipif(nvrtc.obstacle() is not None, reason=str(nvrtc.obstacle()))
def test_its_kernel_compiles() -> None:
    text = emit_cuda(find_last("matrices", torch.bfloat16), whole=True).text
    assert compile_cuda("recurrent", text, "sm_90").stat().st_size


def test_nothing_is_computed_of_zeros() -> None:
    program = find_last("matrices", torch.bfloat16)
    kinds = [op.kind for op in flat(program.step)]
    assert kinds.count("cat") == 1
    assert not {"add", "fill"} & {*kinds}


def group(*ops: Op) -> Program:
    """A program that returns the last result of a group after the loop."""
    made = {op.result for op in ops}
    read = dict.fromkeys(v for op in ops for v in op.values if v not in made)
    return verify(
        Program(
            name="group",
            params=(),
            sequences=tuple((f"in_{i}", value) for i, value in enumerate(read)),
            states=(),
            step=(),
            after=(Group(ops),),
            results=(("out", ops[-1].result),),
        )
    )


def value(size: int, dtype: str = "f32") -> Value:
    return Value(Type("sequence", (size,), dtype))


def put_together(*parts: Value) -> Op:
    size = sum(part.type.size for part in parts)
    return Op("cat", parts, value(size, parts[0].type.dtype))


def list_ops(program: Program) -> list[tuple[str, int]]:
    return [(op.kind, op.result.type.size) for op in flat(verify(program).after)]


def add_whole(row: Op, *before: Op) -> Program:
    """Adds a row that is put together and one that is read."""
    size = row.result.type.size
    return group(*before, row, Op("add", (row.result, value(size)), value(size)))


def test_what_is_read_is_sliced() -> None:
    taken = take_parts(add_whole(put_together(value(4), value(4))))
    assert list_ops(taken) == [("slice", 4), ("slice", 4), ("add", 4), ("add", 4), ("cat", 8)]
    given = value(20)
    some = Op("slice", (given,), value(8), (5, 13))
    row = put_together(value(4), value(4))
    taken = take_parts(group(some, row, Op("sub", (row.result, some.result), value(8))))
    slices = [op for op in flat(taken.after) if op.kind == "slice"]
    assert [(op.inputs, op.attrs) for op in slices] == [((given,), (5, 9)), ((given,), (9, 13))]


def test_rows_of_rows_are_put_together_once() -> None:
    inner = put_together(value(4), value(4))
    taken = take_parts(add_whole(put_together(inner.result, value(4)), inner))
    assert [kind for kind, _ in list_ops(taken)] == ["slice"] * 3 + ["add"] * 3 + ["cat"]
    inner = put_together(value(4), value(4))
    doubled = Op("add", (inner.result, inner.result), value(8))
    outer = put_together(doubled.result, value(4))
    assert list_ops(take_parts(group(inner, doubled, outer))) == [("add", 4)] * 2 + [("cat", 12)]


@pytest.mark.parametrize("gap", [4, 8])
def test_zeros_have_parts_of_any_size(gap: int) -> None:
    zeros = Op("fill", (), value(gap), (0.0, gap))
    narrow = Op("cast", (zeros.result,), value(gap, "bf16"))
    row = put_together(value(4, "bf16"), narrow.result)
    wide = Op("cast", (row.result,), value(4 + gap))
    taken = take_parts(group(zeros, narrow, row, wide))
    assert list_ops(taken) == [("cast", 4), ("fill", gap), ("cat", 4 + gap)]


def test_rows_are_cut_where_a_part_of_any_of_them_ends() -> None:
    zeros = Op("fill", (), value(6), (0.0, 6)), Op("fill", (), value(2), (0.0, 2))
    one, other = value(5), value(3)
    row = put_together(zeros[0].result, one, zeros[1].result)
    parts = put_together(value(4), value(4), other, value(2))
    taken = take_parts(group(*zeros, row, parts, Op("add", (row.result, parts.result), value(13))))
    *_, last = flat(verify(taken).after)
    assert [v.type.size for v in last.values] == [4, 2, 2, 3, 2]
    assert list_ops(taken).count(("add", 2)) == list_ops(taken).count(("add", 3)) == 1
    made = {op.result: op for op in flat(taken.after)}
    assert made[last.values[3]].values[1] is other
    slices = [(op.values[0], op.attrs) for op in made.values() if op.kind == "slice"]
    assert (one, (0, 2)) in slices
    assert (one, (2, 5)) in slices


@pytest.mark.parametrize(("kind", "computed"), [("add", 1), ("sub", 2), ("mul", 2)])
def test_only_a_sum_with_zeros_is_dropped(kind: str, computed: int) -> None:
    zeros = Op("fill", (), value(4), (0.0, 4))
    row, other = put_together(zeros.result, value(4)), put_together(value(4), value(4))
    whole = group(zeros, row, other, Op(kind, (other.result, row.result), value(8)))
    assert list_ops(take_parts(whole)).count((kind, 4)) == computed


def test_slices_of_the_result_are_parts() -> None:
    row = put_together(value(4), value(4))
    doubled = Op("add", (row.result, row.result), value(8))
    for start in (0, 4):
        part = Op("slice", (doubled.result,), value(4), (start, start + 4))
        taken = [*flat(take_parts(group(row, doubled, part)).after)]
        assert [op.kind for op in taken] == ["add", "cast"]
        assert taken[0].inputs == (row.values[start // 4],) * 2


def test_rows_stay_whole_that_have_many_parts_or_cannot_be_cut_or_are_reduced() -> None:
    scalars = add_whole(put_together(value(4), value(1)))
    many = add_whole(put_together(*(value(2) for _ in range(17))))
    row = put_together(value(4), value(4))
    doubled = Op("add", (row.result, row.result), value(8))
    reduced = group(row, doubled, Op("sum", (doubled.result,), value(1)))
    square = Op("mul", (value(8),) * 2, value(8))  # its features are in registers
    rows = put_together(square.result, value(4)), put_together(value(4), value(8))
    computed = group(square, *rows, Op("add", tuple(op.result for op in rows), value(12)))
    for whole in (scalars, many, reduced, computed):
        assert take_parts(whole).after == whole.after
