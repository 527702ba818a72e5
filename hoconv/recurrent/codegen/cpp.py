"""Writes the time loop of a program in C++.

No row of a batch depends on another. So each thread takes some rows through all steps, and no step
starts threads or waits for one. What it works on stays in the caches of its core. Where the weights
are used too seldom to pack them, or the rows are too few for the threads, threads share each step
instead, and PyTorch multiplies.

B batch, T time steps, i the number of steps already done, t the time step that is computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hoconv.recurrent.codegen.expressions import TYPES, reduction
from hoconv.recurrent.codegen.kernels import KernelWriter, LoopNest, Target
from hoconv.recurrent.codegen.loops import Kernel
from hoconv.recurrent.codegen.sizes import NAME, as_constants, size
from hoconv.recurrent.codegen.steps import LoweredSteps, lower_steps, offset, pointers, row_pointers
from hoconv.recurrent.codegen.storage import Buffer, Location, Storage
from hoconv.recurrent.ir.axes import Layout, layout
from hoconv.recurrent.ir.program import Op, Program

HEADER = '#include "recurrent/loop.h"'
# The least number of statements, counted over features and rows, that is worth another thread.
_GRAIN = 1 << 14
# Of memory, in bytes: the widest vector register.
ALIGNMENT = 64
_DTYPES = {"f64": "float64", "f32": "float32", "bf16": "bfloat16", "f16": "float16"}


class _Simd(Target):
    def loop(self, count: int, sums: Sequence[tuple[Op, str]], body: Sequence[str]) -> list[str]:
        clauses = "".join(f" reduction({reduction(op).openmp} : {name})" for op, name in sums)
        return [
            f"#pragma omp simd{clauses}",
            f"for (int64_t j = 0; j < {size(count)}; ++j) {{",
            *(f"  {line}" for line in body),
            "}",
        ]

    def nest(self, nest: LoopNest) -> list[str]:
        axes, (first, *others) = nest.axes, nest.places
        inner = _choose_inner(axes)
        outer = [axis for axis in axes.result if axis != inner]
        reduced = [axis for axis in axes.reduced if axis != inner]
        at = f"{first}[{nest.index(axes.result)}]"

        def simd(clause: str, statement: str) -> list[str]:
            line = f"for (int64_t i{inner} = 0; i{inner} < {size(axes.sizes[inner])}; ++i{inner})"
            return [f"#pragma omp simd{clause}", line, f"  {statement}"]

        if inner in axes.reduced:
            value = nest.product()
            total = simd(f" reduction({nest.openmp} : total)",
                         f"total = {nest.combine.format('total', value)};")  # fmt: skip
            total = _nested(axes, reduced, total)
            body = ["{", f"  {nest.own} total = {nest.initial};", *(f"  {line}" for line in total)]
            body += [f"  {at} = total;", "}"]
        elif axes.reduced:
            body = simd("", f"{at} = {nest.initial};")
            body += _nested(
                axes, reduced, simd("", f"{at} = {nest.combine.format(at, nest.product())};")
            )
        else:
            body = simd("", f"{at} = {nest.product()};")
        count = size(axes.count(axes.result))
        copies = [f"std::copy_n({first}, {count}, {other});" for other in others]
        return [*_nested(axes, outer, body), *copies]

    def scalars(self, body: Sequence[str]) -> list[str]:
        return list(body)

    def barrier(self) -> list[str]:
        return []


def _choose_inner(axes: Layout) -> int:
    """The axis of the innermost loop: one along which most of what is read and written is
    contiguous, and nothing lies apart."""

    def contiguous(axis: int) -> tuple[bool, int, bool]:
        strides = [axes.strides(of).get(axis, 0) for of in (*axes.operands, axes.result)]
        return max(strides) <= 1, strides.count(1), axis in axes.result

    return max(range(len(axes.sizes)), key=contiguous)


def _nested(axes: Layout, over: Sequence[int], body: Sequence[str]) -> list[str]:
    """Loops over some axes, the first outermost."""
    lines = []
    for depth, axis in enumerate(over):
        loop = f"for (int64_t i{axis} = 0; i{axis} < {size(axes.sizes[axis])}; ++i{axis}) {{"
        lines.append("  " * depth + loop)
    lines += ["  " * len(over) + line for line in body]
    return [*lines, *("  " * depth + "}" for depth in reversed(range(len(over))))]


@dataclass(frozen=True, eq=False)
class CppSource:
    """A time loop in C++.

    Attributes:
        name: of the function.
        marked: the text of ``int <name>(T, B, seed, buffers, strides, packed, rows, sizes,
            numbers)``, which returns 0, or 1 where PyTorch failed; `buffers` are pointers in the
            order of the storage's, `strides` the rows' and the columns' of its strided buffers. It
            needs :data:`HEADER`. Its sizes are marked, and its name is
            :data:`hoconv.recurrent.codegen.sizes.NAME`.
        storage: the layout of the buffers.
        packed_bytes: the bytes of memory for packed matrices, a multiple of :data:`ALIGNMENT`.
        row_bytes: likewise the bytes of memory that each row needs.
    """

    name: str
    marked: str
    storage: Storage
    packed_bytes: int
    row_bytes: int

    @property
    def text(self) -> str:
        """The text for one layer, which reads neither `sizes` nor `numbers`."""
        return as_constants(self.marked).replace(NAME, self.name)


def emit_cpp(program: Program, name: str) -> CppSource:
    """Writes the time loop of a program as a C++ function of this name."""
    steps = lower_steps(program, keeps_states=True)
    products = _products(steps)
    scratch = max([steps.scratch_bytes, *(_aligned(p.widened_bytes) for p in products.values())])
    lines = [f"namespace {NAME}_step {{", "using namespace hoconv::recurrent;", "namespace {"]
    lines += ["", "// The rows of the present step.", "struct Step {", "  int64_t t, seed;"]
    lines += ["  const int64_t* sizes;", "  const double* numbers;"]
    lines += [f"  {TYPES[b.type.dtype]}* {name};" for b, _, name in pointers(steps.storage)]
    lines += ["  char* scratch;", "};"]
    inner, row_bytes = {}, scratch
    for buffer in steps.storage.inner:
        inner[buffer] = row_bytes
        row_bytes += _aligned(buffer.type.row_bytes * (1 + (buffer.kind == "state")))
    for kernel_name, kernel in steps.kernels.values():
        lines += ["", *_write_kernel(kernel_name, kernel, scratch)]
    lines += ["}  // namespace", "", *_write_loop(program, steps, products, scratch, inner)]
    lines.append(f"}}  // namespace {NAME}_step")
    packed = sum(p.packed_bytes for p in products.values())
    return CppSource(name, "\n".join(lines) + "\n", steps.storage, packed, row_bytes)


@dataclass(frozen=True)
class _Product:
    """A product of a step, and the packed matrix by which it multiplies.

    Attributes:
        name: the variable of the packed matrix.
        start: of the packed matrix, in bytes from that of the first.
        weight, bias: the buffers that it is packed from.
    """

    op: Op
    name: str
    start: int
    weight: Buffer
    bias: Buffer | None

    @property
    def inner(self) -> int:
        return self.op.values[0].type.size

    @property
    def columns(self) -> int:
        return self.op.result.type.size

    @property
    def own(self) -> str:
        """The type of the weight."""
        return TYPES[self.weight.type.dtype]

    @property
    def torch_dtype(self) -> str:
        return f"aoti_torch_dtype_{_DTYPES[self.weight.type.dtype]}()"

    def strides(self, storage: Storage) -> tuple[int, int]:
        """Returns where its row and column strides are among those of the strided buffers."""
        row = 2 * storage.strided.index(self.weight)
        return (row + 1, row) if self.op.kind == "linear" else (row, row + 1)

    @property
    def _wide_bytes(self) -> int:
        """Of a number, as it is multiplied."""
        return 8 if self.weight.type.dtype == "f64" else 4

    @property
    def packed_bytes(self) -> int:
        """Each row is padded to two or more of the widest vectors; the first row is the bias."""
        return (self.inner + 1) * max(2 * ALIGNMENT, _aligned(self.columns * self._wide_bytes))

    @property
    def widened_bytes(self) -> int:
        """Of a row of the operand, where products are in another dtype."""
        return 0 if self.weight.type.dtype in ("f32", "f64") else self.inner * self._wide_bytes


def _products(steps: LoweredSteps) -> dict[Op, _Product]:
    found: dict[Op, _Product] = {}
    start, homes = 0, steps.storage.homes
    for op in steps.items:
        if isinstance(op, Op):
            _, weight, *bias = (homes[v].buffer for v in op.values)
            found[op] = _Product(op, f"by{len(found)}", start, weight, *bias or [None])
            start += found[op].packed_bytes
    return found


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


def _write_kernel(name: str, kernel: Kernel, scratch_bytes: int) -> list[str]:
    return [
        f"void {name}(const Step& s, int64_t begin, int64_t end) {{",
        "  [[maybe_unused]] const int64_t t = s.t, seed = s.seed;",
        "  [[maybe_unused]] const int64_t* const sizes = s.sizes;",
        "  [[maybe_unused]] const double* __restrict__ const numbers = s.numbers;",
        "  for (int64_t row = begin; row < end; ++row) {",
        *(f"    {line}" for line in row_pointers(kernel, scratch_bytes)),
        *(f"    {line}" for line in KernelWriter(_Simd()).row(kernel)),
        "  }",
        "}",
    ]


def _write_loop(
    program: Program,
    steps: LoweredSteps,
    products: Mapping[Op, _Product],
    scratch_bytes: int,
    inner: Mapping[Buffer, int],
) -> list[str]:
    storage = steps.storage
    start = {
        buffer: f"static_cast<{TYPES[buffer.type.dtype]}*>(buffers[{i}])"
        for i, buffer in enumerate(storage.buffers)
    }
    start |= {
        buffer: f"reinterpret_cast<{TYPES[buffer.type.dtype]}*>(rows + B * {size(bytes)})"
        for buffer, bytes in inner.items()
    }
    lines = [
        f'extern "C" int {NAME}([[maybe_unused]] int64_t T, int64_t B, int64_t seed,',
        "    void** buffers, [[maybe_unused]] const int64_t* strides,",
        "    [[maybe_unused]] char* packed, char* rows, const int64_t* sizes,",
        "    const double* numbers) {",
        "  const auto at = [&](int64_t i) {",
        f"    [[maybe_unused]] const int64_t t = {'T - 1 - i' if program.reverse else 'i'};",
        "    Step s;",
        "    s.t = t, s.seed = seed, s.scratch = rows, s.sizes = sizes, s.numbers = numbers;",
    ]
    lines += [
        f"    s.{pointer} = {start[buffer]}{offset(buffer, after, program.reverse)};"
        for buffer, after, pointer in pointers(storage)
    ]
    lines += ["    return s;", "  };", *_write_ends(program, storage, start)]
    strides = {
        product: ", ".join(f"strides[{i}]" for i in product.strides(storage))
        for product in products.values()
    }
    if products:
        values = sum(p.inner * p.columns for p in products.values())
        lines.append(f"  if (shares_steps(T, B, {size(values)})) {{")
        lines += [
            f"    const Matrix {p.name}({start[p.weight]}, {size(p.inner)}, {size(p.columns)}, "
            f"{apart}, {p.torch_dtype});"
            for p, apart in strides.items()
        ]
        lines += ["    enter(0, B);", "    for (int64_t i = 0; i < T; ++i) {"]
        lines.append("      const Step s = at(i);")
        for item in steps.items:
            lines += (
                _share_product(products[item], storage)
                if isinstance(item, Op)
                else _share_kernel(*steps.kernels[item])
            )
        lines += ["    }", "    leave(0, B);", "    return 0;", "  }"]
    for p, apart in strides.items():
        bias = start[p.bias] if p.bias else "nullptr"
        lines += [
            f"  const Packed<{p.own}> {p.name}(packed + {size(p.start)}, {size(p.inner)}, "
            f"{size(p.columns)});",
            f"  if (!{p.name}.pack({start[p.weight]}, {apart}, {bias})) return 1;",
        ]
    lines += [
        f"  const int64_t grain = {_grain(steps, products)};",
        "  const bool done = for_rows(B, grain, [&](int64_t begin, int64_t end) {",
        "    enter(begin, end);",
        "    for (int64_t i = 0; i < T; ++i) {",
        "      const Step s = at(i);",
    ]
    for item in steps.items:
        if isinstance(item, Op):
            lines += _write_product(products[item], storage, scratch_bytes)
        else:
            lines.append(f"      {steps.kernels[item][0]}(s, begin, end);")
    lines += ["    }", "    leave(begin, end);", "  });"]
    return [*lines, "  return done ? 0 : 1;", "}"]


def _write_ends(program: Program, storage: Storage, start: Mapping[Buffer, str]) -> list[str]:
    """Functions that read the states of some rows before the first step, and write the last."""
    read, write = [], []
    for own, first, last in zip(storage.initial, storage.first, storage.last, strict=True):
        n, row = last.type.size, 2 * storage.strided.index(first)
        apart = f"strides[{row}], strides[{row + 1}]"
        read += [
            f"    copy_rows(s.{each.name}, {start[first]}, begin, end, {size(n)}, {apart});"
            for each in own
        ]
        after = f"s.{own[0].name}_after"
        write.append(f"    copy_rows({start[last]}, {after}, begin, end, {size(n)}, {size(n)}, 1);")
    if not read:
        return ["  const auto enter = [](int64_t, int64_t) {};", "  const auto leave = enter;"]
    rows = "[&](int64_t begin, int64_t end)"
    return [
        f"  const auto enter = {rows} {{", "    const Step s = at(0);", *read, "  };",
        f"  const auto leave = {rows} {{", "    const Step s = at(T - 1);", *write, "  };",
    ]  # fmt: skip


def _share_kernel(name: str, kernel: Kernel) -> list[str]:
    grain = max(1, _GRAIN // max(1, _statements(kernel)))
    call = f"[&](int64_t begin, int64_t end) {{ {name}(s, begin, end); }}"
    return [f"      if (!for_rows(B, {size(grain)}, {call})) return 1;"]


def _share_product(product: _Product, storage: Storage) -> list[str]:
    out, x = (_start(storage.homes[v]) for v in (product.op.result, product.op.values[0]))
    bias = f"s.{product.bias.name}" if product.bias else "nullptr"
    sizes = f"B, {size(product.inner)}, {size(product.columns)}, {product.torch_dtype}"
    return [
        f"      if (!multiply<{product.own}>({out}, {x}, {product.name}, {bias},",
        f"              {sizes}))",
        "        return 1;",
    ]


def _statements(kernel: Kernel) -> int:
    loops = (n * len(each) for section in kernel.sections for n, each in section.loops.items())
    nests = (math.prod(layout(n.op).sizes) for section in kernel.sections for n in section.nests)
    return sum(loops) + sum(nests)


def _grain(steps: LoweredSteps, products: Mapping[Op, _Product]) -> str:
    """The least number of rows that is worth another thread."""
    work = sum(_statements(kernel) for _, kernel in steps.kernels.values())
    work += sum(p.inner * p.columns for p in products.values())
    return f"{_GRAIN} / ({size(max(1, work))} * (T + 1)) + 1"


def _write_product(product: _Product, storage: Storage, scratch_bytes: int) -> list[str]:
    out, x = (_rows(storage.homes[v]) for v in (product.op.result, product.op.values[0]))
    scratch = f"s.scratch + begin * {size(scratch_bytes)}"
    return [f"      multiply({out}, {x}, {product.name}, end - begin, {scratch});"]


def _start(at: Location) -> str:
    return f"s.{at.buffer.name}{'_after' * at.after}"


def _rows(at: Location) -> str:
    return f"{_start(at)} + begin * {size(at.buffer.type.size)}"
