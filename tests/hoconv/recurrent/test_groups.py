"""Rows whose features form groups, in registers: by single threads, by fibers, and on a GPU."""

from __future__ import annotations

import ctypes
import random
from collections import defaultdict
from typing import Any

import pytest
import torch

from hoconv import jit
from hoconv.jit import nvrtc
from hoconv.jit.driver import as_argument
from hoconv.jit.generated import compile_cpp, compile_cuda
from hoconv.recurrent import cells
from hoconv.recurrent.codegen.cuda import emit_cuda
from hoconv.recurrent.codegen.groups import Groups, find_groups
from hoconv.recurrent.ir.axes import Layout
from hoconv.recurrent.ir.program import Group, Op, Program, Type, Value, Yield
from hoconv.recurrent.ir.verify import verify
from hoconv.recurrent.passes.rows import make_row_programs
from hoconv.recurrent.runtime.buffers import bind, results
from hoconv.recurrent.runtime.interpret import Tensors, run_steps
from hoconv.recurrent.runtime.workspace import describe_call
from hoconv.recurrent.schedule import plan
from tests.hoconv.recurrent.cluster_shim import with_fibers
from tests.hoconv.recurrent.shim import shim_loops
from tests.hoconv.recurrent.test_rows import draw_values

needs_compiler = pytest.mark.skipif(
    jit.obstacle("cpu") is not None, reason=str(jit.obstacle("cpu"))
)
SIZES = [(1, 2), (8, 128), (3, 33), (5, 8), (40, 7), (2, 256), (16, 16), (1, 130)]


def draw(seed: int, count: int, size: int, dtype: str) -> Program:
    """Draws ops of rows of `count` groups: elementwise ones, repeats, sums and maxima, of parts of
    one sequence and of whole ones, of parameters, and of results of each other."""
    draws = random.Random(seed)
    wide = "f64" if dtype == "f64" else "f32"
    numbers = {"": 1, "g": count, "i": size, "gi": count * size}
    if count == 1:
        numbers = {"": 1, "i": size}
    if count == size:
        numbers.pop("i")
    ops: list[Op] = []
    found: dict[str, list[Value]] = defaultdict(list)

    def make(axes: str, kind: str, *inputs: Any, attrs: Any = (), own: str = wide) -> Value:
        result = Value(Type("step", (numbers[axes],), own))
        ops.append(Op(kind, inputs, result, attrs))
        if own == wide:
            found[axes].append(result)
        return result

    def lay_out(*each: str) -> Any:
        """The attributes of an op of operands, then of a result, that lie along axes."""
        number = {"g": 0, "i": 1} if count > 1 else {"i": 0}
        sizes = (count, size) if count > 1 else (size,)
        lists = [tuple(number[a] for a in axes) for axes in each]
        return Layout(sizes, tuple(lists[:-1]), lists[-1]).attrs

    parts = [draws.choice([*numbers]) for _ in range(6)]
    x = Value(Type("sequence", (sum(numbers[a] for a in parts) + 3,), dtype))
    start = 3
    for axes in parts:
        n = numbers[axes]
        part = make(axes, "slice", x, attrs=(start, start + n), own=dtype)
        if dtype != wide:
            part = make(axes, "cast", part)
        found[axes].append(part)
        start += n
    whole = {axes: Value(Type("sequence", (n,), wide)) for axes, n in numbers.items()}
    once = {axes: Value(Type("once", (n,), wide)) for axes, n in numbers.items()}
    for axes, value in whole.items():
        found[axes].append(value)
    reduced, into = ("gi", "g") if count > 1 else ("i", "")
    make(into, "einsum", draws.choice(found[reduced]), attrs=lay_out(reduced, into))
    for _ in range(20):
        axes = draws.choice([a for a in numbers if found[a]])
        value, other = (draws.choice(found[axes]) for _ in range(2))
        match draws.randrange(6):
            case 0:
                make(axes, draws.choice(["tanh", "neg", "sigmoid"]), value)
            case 1:
                other = draws.choice([other, once[axes], once[""], *found[""]])
                make(axes, draws.choice(["add", "mul", "sub"]), *draws.sample([value, other], 2))
            case 2 if "i" in axes:
                fewer = axes.replace("i", "")
                kind = draws.choice(["einsum", "largest"])
                make(fewer, kind, value, attrs=lay_out(axes, fewer))
            case 3 if "i" in axes:
                fewer = axes.replace("i", "")
                make(fewer, "einsum", value, other, attrs=lay_out(axes, axes, fewer))
            case 4 if axes == "g":
                make("gi", "arrange", value, attrs=lay_out("g", "gi"))
            case 5 if axes == "gi" and found["g"]:
                scale = draws.choice(found["g"])
                make("gi", "einsum", value, scale, attrs=lay_out("gi", "g", "gi"))
    yields = [(op.result, f"out_{i}") for i, op in enumerate(ops[-6:])]
    together = [draws.choice(found[a]) for a in draws.choices([*found], k=4)]
    together = [v for v in together if v not in whole.values()]
    if together:
        total = sum(v.type.size for v in together)
        joined = Value(Type("step", (total,), wide))
        ops.append(Op("cat", tuple(together), joined))
        yields.append((joined, "joined"))
    read = [*whole.values(), *once.values()]
    return verify(
        Program(
            name="drawn",
            params=(),
            sequences=tuple((f"in_{i}", v) for i, v in enumerate((x, *read))),
            states=(),
            step=(Group(tuple(ops)),),
            results=(),
            yields=tuple(
                Yield(name, v, Value(Type("sequence", v.type.shape, v.type.dtype)))
                for v, name in yields
            ),
        )
    )


def run_by_fibers(program: Program, values: Tensors, T: int, B: int, reversed: bool) -> Tensors:
    """Runs the kernel of a program lane by lane."""
    source = emit_cuda(program, whole=True)
    launch, storage = source.whole, source.steps.storage
    assert launch is not None and launch.rows is not None  # noqa: PT018
    body = source.text.split("\n", 1)[1].replace('extern "C" __global__', "static")
    text = f"""{with_fibers()}
{body}
extern "C" void launch(const Call* call, int rows, int blocks, bool reversed) {{
  hoconv::recurrent::run_clusters(rows, blocks, 1, {launch.threads}, 1, 1, reversed,
                                  [=] {{ {launch.name}(*call); }});
}}
"""
    library = ctypes.CDLL(str(compile_cpp("recurrent", text)))
    tensors = bind(program, storage, T, B, values, [], {})
    call = as_argument(describe_call(storage, T, B, None, tensors))
    library.launch(ctypes.byref(call), launch.count_rows(T, B), launch.blocks, reversed)
    return results(program, storage, tensors, T)[0]


def check(found: Tensors, exact: Tensors) -> None:
    for value, t in exact.items():
        tolerance = 1e-4 if value.type.dtype == "f32" else 1e-9
        torch.testing.assert_close(found[value], t, rtol=tolerance, atol=tolerance)


@needs_compiler
@pytest.mark.parametrize("dtype", ["f64", "f32", "bf16", "f16"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_groups_are_exact(sizes: tuple[int, int], dtype: str) -> None:
    programs = {f"drawn_{seed}": draw(seed, *sizes, dtype) for seed in range(12)}
    assert all(find_groups(program) == Groups(*sizes) for program in programs.values())
    loops = shim_loops(programs)
    for name, program in programs.items():
        for T, B in ((1, 1), (3, 7), (2, 32)):
            values = draw_values(program, T, B)
            found, _ = loops[name](program, values, [], None)
            check(found, run_steps(program, values, [], None)[0])


@needs_compiler
@pytest.mark.parametrize(("sizes", "reversed"), [(s, i % 2 == 1) for i, s in enumerate(SIZES)])
def test_lanes_share_a_group(sizes: tuple[int, int], reversed: bool) -> None:
    program = draw(sum(sizes), *sizes, "bf16")
    T, B = 3, Groups(*sizes).rows + 1
    values = draw_values(program, T, B)
    found = run_by_fibers(program, values, T, B, reversed)
    check(found, run_steps(program, values, [], None)[0])


HEADS = {"heads": 2, "keys": 16, "values": 16}


@pytest.mark.parametrize("name", ["delta_net", "gated_delta_net"])
def test_what_heads_normalise_is_in_registers(name: str) -> None:
    made = plan(getattr(cells, name).bind(8, 32, HEADS), torch.bfloat16, recompute="functions")
    for program in (made.inference, made.forward, made.backward):
        assert any(find_groups(each) for each in make_row_programs(program).values())


@pytest.mark.skipif(nvrtc.obstacle() is not None, reason=str(nvrtc.obstacle()))
@pytest.mark.parametrize("dtype", ["f64", "bf16"])
def test_their_kernels_compile(dtype: str) -> None:
    for sizes in ((8, 128), (3, 33)):
        compile_cuda("recurrent", emit_cuda(draw(0, *sizes, dtype), whole=True).text, "sm_90")


def test_what_relates_groups_is_not_taken_apart() -> None:
    def lay_out(*axes: tuple[int, ...]) -> Any:
        return Layout((2, 3), axes[:-1], axes[-1]).attrs

    def row(n: int, rate: Any = "step") -> Value:
        return Value(Type(rate, (n,), "f32"))

    x, made = row(6, "sequence"), row(6)
    for op in (
        Op("einsum", (made,), row(3), lay_out((0, 1), (1,))),
        Op("arrange", (made,), row(6), lay_out((0, 1), (1, 0))),
        Op("slice", (made,), row(3), (0, 3)),
        Op("sum", (made,), row(1)),
    ):
        summed = Op("einsum", (made,), row(2), lay_out((0, 1), (0,)))
        program = Program(
            name="related",
            params=(),
            sequences=(("x", x),),
            states=(),
            step=(Group((Op("exp", (x,), made), summed, op)),),
            results=(),
            yields=(Yield("out", op.result, row(op.result.type.size, "sequence")),),
        )
        assert find_groups(program) is None, op.kind


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["f64", "f32", "bf16", "f16"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_gpu_is_exact(sizes: tuple[int, int], dtype: str) -> None:
    from hoconv.recurrent.runtime.cuda import CudaLoop

    for seed in range(4):
        program = draw(seed, *sizes, dtype)
        values = draw_values(program, 3, 70)
        on_gpu = {v: t.cuda() for v, t in values.items()}
        found, _ = CudaLoop(program, recorded=True)(program, on_gpu, [], None)
        exact = run_steps(program, values, [], None)[0]
        check({v: t.cpu() for v, t in found.items()}, exact)
