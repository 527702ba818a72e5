"""Writes the time loop of a program in C++: PyTorch computes products, generated kernels the rest.

B batch, T time steps, i the number of steps already done, t the time step that is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hoconv.recurrent.codegen.expressions import TYPES, reduction
from hoconv.recurrent.codegen.kernels import KernelWriter, Target
from hoconv.recurrent.codegen.loops import Kernel
from hoconv.recurrent.codegen.steps import LoweredSteps, lower_steps, offset, pointers, row_pointers
from hoconv.recurrent.codegen.storage import Location, Storage
from hoconv.recurrent.ir.program import Op, Program

HEADER = '#include "recurrent/loop.h"'
# The least number of statements, counted over features and rows, that is worth another thread.
_GRAIN = 1 << 14
_DTYPES = {"f64": "float64", "f32": "float32", "bf16": "bfloat16", "f16": "float16"}


class _Simd(Target):
    def loop(self, size: int, sums: Sequence[tuple[Op, str]], body: Sequence[str]) -> list[str]:
        clauses = "".join(f" reduction({reduction(op).openmp} : {name})" for op, name in sums)
        return [
            f"#pragma omp simd{clauses}",
            f"for (int64_t j = 0; j < {size}; ++j) {{",
            *(f"  {line}" for line in body),
            "}",
        ]

    def scalars(self, body: Sequence[str]) -> list[str]:
        return list(body)

    def barrier(self) -> list[str]:
        return []


@dataclass(frozen=True, eq=False)
class CppSource:
    """A time loop in C++.

    Attributes:
        text: of ``int <name>(T, B, seed, buffers, scratch)``, which returns 0, or 1 where PyTorch
            failed; `buffers` are pointers in the order of the storage's. It needs :data:`HEADER`.
        storage: the layout of the buffers.
        scratch_bytes: the bytes of scratch memory that each row needs.
    """

    text: str
    storage: Storage
    scratch_bytes: int


def emit_cpp(program: Program, name: str) -> CppSource:
    """Writes the time loop of a program as a C++ function of this name."""
    steps = lower_steps(program)
    lines = [f"namespace {name}_step {{", "using namespace hoconv::recurrent;", "namespace {"]
    lines += ["", "// The rows of the present step.", "struct Step {", "  int64_t t, seed;"]
    lines += [f"  {TYPES[b.type.dtype]}* {name};" for b, _, name in pointers(steps.storage)]
    lines += ["  char* scratch;", "};"]
    for kernel_name, kernel in steps.kernels.values():
        lines += ["", *_write_kernel(kernel_name, kernel)]
    lines += ["}  // namespace", "", *_write_loop(name, program, steps)]
    lines.append(f"}}  // namespace {name}_step")
    return CppSource("\n".join(lines) + "\n", steps.storage, steps.scratch_bytes)


def _write_kernel(name: str, kernel: Kernel) -> list[str]:
    return [
        f"void {name}(const Step& s, int64_t begin, int64_t end) {{",
        "  [[maybe_unused]] const int64_t t = s.t, seed = s.seed;",
        "  for (int64_t row = begin; row < end; ++row) {",
        *(f"    {line}" for line in row_pointers(kernel)),
        *(f"    {line}" for line in KernelWriter(_Simd()).row(kernel)),
        "  }",
        "}",
    ]


def _write_loop(name: str, program: Program, steps: LoweredSteps) -> list[str]:
    storage = steps.storage
    index = {buffer: i for i, buffer in enumerate(storage.buffers)}
    lines = [
        f'extern "C" int {name}(int64_t T, int64_t B, int64_t seed, bool onednn,',
        "    void** buffers, char* scratch) {",
    ]
    for item in steps.items:
        if isinstance(item, Op):
            buffer = storage.homes[item.values[1]].buffer
            rows, columns = buffer.type.shape
            transposed = f"{columns}, {rows}, 1, {columns}"
            shape = transposed if item.kind == "linear" else f"{rows}, {columns}, {columns}, 1"
            dtype = f"aoti_torch_dtype_{_DTYPES[buffer.type.dtype]}()"
            lines.append(
                f"  const Factor<{TYPES[buffer.type.dtype]}> by_{buffer.name}("
                f"buffers[{index[buffer]}], {shape}, {dtype}, onednn, T);"
            )
    lines.append("  for (int64_t i = 0; i < T; ++i) {")
    lines.append(f"    const int64_t t = {'T - 1 - i' if program.reverse else 'i'};")
    lines += ["    Step s;", "    s.t = t, s.seed = seed, s.scratch = scratch;"]
    for buffer, after, name in pointers(storage):
        start = f"static_cast<{TYPES[buffer.type.dtype]}*>(buffers[{index[buffer]}])"
        lines.append(f"    s.{name} = {start}{offset(buffer, after, program.reverse)};")
    for item in steps.items:
        if isinstance(item, Op):
            lines += _write_product(item, storage)
        else:
            lines += _write_call(*steps.kernels[item])
    return [*lines, "  }", "  return 0;", "}"]


def _write_call(name: str, kernel: Kernel) -> list[str]:
    statements = sum(n * len(s) for section in kernel.sections for n, s in section.loops.items())
    grain = max(1, _GRAIN // max(1, statements))
    call = f"[&](int64_t begin, int64_t end) {{ {name}(s, begin, end); }}"
    return [f"    if (!for_rows(B, {grain}, {call})) return 1;"]


def _write_product(op: Op, storage: Storage) -> list[str]:
    x, weight, *bias = op.values
    by = storage.homes[weight].buffer
    out, operand = _variable(storage.homes[op.result]), _variable(storage.homes[x])
    added = f"s.{storage.homes[bias[0]].buffer.name}" if bias else "nullptr"
    dtype = f"aoti_torch_dtype_{_DTYPES[by.type.dtype]}()"
    return [
        f"    if (!multiply<{TYPES[by.type.dtype]}>({out}, {operand}, by_{by.name}, {added}, B, "
        f"{x.type.size}, {op.result.type.size}, {dtype}))",
        "      return 1;",
    ]


def _variable(at: Location) -> str:
    return f"s.{at.buffer.name}{'_after' * at.after}"
