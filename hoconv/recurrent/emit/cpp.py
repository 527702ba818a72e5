"""A program's time loop as C++: products by PyTorch, everything else by generated kernels.

B batch, T time steps, n features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hoconv.recurrent.emit.expressions import TYPES
from hoconv.recurrent.emit.kernels import KernelWriter, Target, memories, pointer
from hoconv.recurrent.emit.loops import Kernel, lower
from hoconv.recurrent.emit.storage import Buffer, Place, Storage, place
from hoconv.recurrent.ir import Group, Op, Program

# Elements that are worth waking a thread for.
_GRAIN = 1 << 14
_DTYPES = {"f64": "float64", "f32": "float32", "bf16": "bfloat16", "f16": "float16"}


class _Simd(Target):
    def loop(self, size: int, sums: Sequence[tuple[Op, str]], body: Sequence[str]) -> list[str]:
        signs = {"sum": "+", "max": "max"}
        clauses = "".join(f" reduction({signs[op.kind]} : {name})" for op, name in sums)
        return [
            f"#pragma omp simd{clauses}",
            f"for (int64_t j = 0; j < {size}; ++j) {{",
            *(f"  {line}" for line in body),
            "}",
        ]

    def scalars(self, body: Sequence[str]) -> list[str]:
        return list(body)

    def section_end(self) -> list[str]:
        return []


@dataclass(frozen=True, eq=False)
class Source:
    """A time loop in C++.

    Attributes:
        text: of ``int hoconv_run(T, B, seed, buffers, scratch)``, which returns 0, or 1 where
            PyTorch failed; `buffers` are pointers in the order of the storage's.
        storage: what the buffers are.
        scratch_bytes: how many each row needs.
    """

    text: str
    storage: Storage
    scratch_bytes: int


def emit_cpp(program: Program) -> Source:
    """The source of a program's time loop."""
    storage = place(program)
    kernels: dict[Group, Kernel] = {}
    made = {op.result for item in storage.items if isinstance(item, Group) for op in item.ops}
    products = {item.result for item in storage.items if isinstance(item, Op)}
    copies = [
        v for v, places in storage.stores.items()
        if v not in made and len(places) > (v in products)
    ]  # fmt: skip
    last = storage.items[-1]
    for item in storage.items:
        if isinstance(item, Group):
            kernels[item] = lower(item, storage, copies if item is last else ())
    items = [
        i for i in storage.items if isinstance(i, Op) or kernels[i].first or kernels[i].sections
    ]
    lines = ['#include "recurrent/loop.h"', "", "namespace {", "using namespace hoconv::recurrent;"]
    lines += ["", "// The rows of the present step.", "struct Step {", "  int64_t t, seed;"]
    lines += [f"  {TYPES[b.type.dtype]}* {name};" for b, name in _pointers(storage)]
    lines += ["  char* scratch;", "};"]
    names: dict[Group, str] = {}
    for item in items:
        if isinstance(item, Group):
            names[item] = f"kernel{len(names)}"
            lines += ["", *_kernel(names[item], kernels[item])]
    lines += ["}  // namespace", "", *_loop(program, storage, items, names, kernels)]
    most = max((k.scratch_bytes for k in kernels.values()), default=0)
    return Source("\n".join(lines) + "\n", storage, most)


def _pointers(storage: Storage) -> list[tuple[Buffer, str]]:
    """Of each buffer: its present rows, and of a state's those that come after."""
    found = []
    for buffer in storage.buffers:
        found.append((buffer, buffer.name))
        if buffer.kind in ("state", "history"):
            found.append((buffer, f"{buffer.name}_after"))
    return found


def _kernel(name: str, kernel: Kernel) -> list[str]:
    lines = [
        f"void {name}(const Step& s, int64_t begin, int64_t end) {{",
        "  [[maybe_unused]] const int64_t t = s.t, seed = s.seed;",
        "  for (int64_t row = begin; row < end; ++row) {",
    ]
    for memory in memories(kernel):
        own, n = TYPES[memory.type.dtype], memory.type.size
        if memory.place is None:
            start = f"s.scratch + row * {kernel.scratch_bytes} + {memory.scratch}"
            at = f"reinterpret_cast<{own}*>({start})"
        elif memory.place.buffer.kind == "once":
            at = f"s.{pointer(memory)}"
        else:
            at = f"s.{pointer(memory)} + row * {n}"
        lines.append(f"    {own}* __restrict {pointer(memory)} = {at};")
    lines += [f"    {line}" for line in KernelWriter(_Simd()).row(kernel)]
    return [*lines, "  }", "}"]


def _loop(
    program: Program,
    storage: Storage,
    items: Sequence[Op | Group],
    names: dict[Group, str],
    kernels: dict[Group, Kernel],
) -> list[str]:
    lines = [
        'extern "C" int hoconv_run(int64_t T, int64_t B, int64_t seed, void** buffers,',
        "                          char* scratch) {",
    ]
    index = {buffer: i for i, buffer in enumerate(storage.buffers)}
    for item in items:
        if isinstance(item, Op):
            buffer = storage.homes[item.values[1]].buffer
            rows, columns = buffer.type.shape
            shape = f"{columns}, {rows}, 1, {columns}" if item.kind == "linear" else (
                f"{rows}, {columns}, {columns}, 1"
            )  # fmt: skip
            dtype = f"aoti_torch_dtype_{_DTYPES[buffer.type.dtype]}()"
            name = f"by_{buffer.name}"
            lines.append(f"  const Matrix {name}(buffers[{index[buffer]}], {shape}, {dtype});")
    lines.append("  for (int64_t i = 0; i < T; ++i) {")
    lines.append(f"    const int64_t t = {'T - 1 - i' if program.reverse else 'i'};")
    lines += ["    Step s;", "    s.t = t, s.seed = seed, s.scratch = scratch;"]
    for buffer, name in _pointers(storage):
        at = _at(buffer, name.endswith("_after"), program.reverse)
        own = TYPES[buffer.type.dtype]
        lines.append(f"    s.{name} = static_cast<{own}*>(buffers[{index[buffer]}]){at};")
    for item in items:
        if isinstance(item, Op):
            lines += _product(item, storage)
        else:
            size = sum(n * len(s) for x in kernels[item].sections for n, s in x.loops.items())
            lines.append(
                f"    if (!for_rows(B, {max(1, _GRAIN // max(1, size))}, [&](int64_t begin, "
                f"int64_t end) {{ {names[item]}(s, begin, end); }})) return 1;"
            )
    return [*lines, "  }", "  return 0;", "}"]


def _at(buffer: Buffer, after: bool, reverse: bool) -> str:
    """The offset of a step's rows."""
    rows = f"B * {buffer.type.size}"
    match buffer.kind:
        case "sequence":
            return f" + t * {rows}"
        case "state":
            return f" + (i + {int(after)}) % 2 * {rows}"
        case "history":
            following = "(t + T) % (T + 1)" if reverse else "(t + 1)"
            return f" + {following if after else 't'} * {rows}"
    return ""


def _product(op: Op, storage: Storage) -> list[str]:
    x, weight, *bias = op.values
    by = storage.homes[weight].buffer
    out, operand = _variable(storage.homes[op.result]), _variable(storage.homes[x])
    added = f"s.{storage.homes[bias[0]].buffer.name}" if bias else "nullptr"
    own = TYPES[by.type.dtype]
    return [
        f"    if (!multiply<{own}>({out}, {operand}, by_{by.name}, {added}, B, {x.type.size}, "
        f"{op.result.type.size}, aoti_torch_dtype_{_DTYPES[by.type.dtype]}()))",
        "      return 1;",
    ]


def _variable(at: Place) -> str:
    return f"s.{at.buffer.name}{'_after' * at.after}"
