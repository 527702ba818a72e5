"""Writes kernels that take the steps of a matrix state in chunks (csrc/recurrent/chunks.cuh).

B batch, T time steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from hoconv.recurrent.codegen.expressions import TYPES
from hoconv.recurrent.ir.program import SEGMENT, Program, Value
from hoconv.recurrent.passes.matrix.linear import Linear, find_linear

HEADER = '#include "recurrent/chunks.cuh"'
MOST = 128  # keys, and columns
HALVES = ("bf16", "f16")  # which have no more bits of mantissa than TF32
_TILE, _SLAB, _WARP = 16, 32, 32
_MOST_HEADS = 65_535 // (MOST // _SLAB)  # in a grid
READ = ("q", "k", "v", "d", "d_output")
WRITTEN = ("output", "d_q", "d_k", "d_v", "d_d")


@dataclass(frozen=True, eq=False)
class ChunkSource:
    """The kernels of a program.

    Attributes:
        text: kernels ``run_states`` and ``run_steps``, with the argument ``Call``: T, B, heads; for
            each operand and result its address, and how far apart steps, rows, heads and features
            lie; the addresses of the first and the last states, and of the states, and their
            gradients, between chunks.
        linear: the operands and results.
        heads, slabs: of a row; of a head, slabs of columns.
        threads: of a block.
        state_bytes, step_bytes: shared memory of a block of each.
    """

    text: str
    linear: Linear
    heads: int
    slabs: int
    threads: int
    state_bytes: int
    step_bytes: int


def emit_chunks(program: Program) -> ChunkSource | str:
    """Writes the kernels of a program; says in words why there are none."""
    dtype = program.sequences[0][1].type.dtype
    if dtype not in HALVES:
        return f"products of {dtype} would be in TF32"
    linear = find_linear(program)
    if isinstance(linear, str):
        return linear
    keys, columns = linear.keys.size, linear.columns.size
    if max(keys, columns) > MOST:
        return f"a state of {keys} x {columns} is larger than {MOST} x {MOST}"
    heads = linear.heads.size if linear.heads else 1
    if heads > _MOST_HEADS:
        return f"{heads} heads are too many"
    K, V = (-(-n // _TILE) * _TILE for n in (keys, columns))
    threads = 256 if K > 64 else 128
    warps, slab = threads // _WARP, min(V, _SLAB)
    # As Chunks and its kernels have them.
    wide = warps * -(-(V // 8) // warps) * 8 + 8
    own, pairs, rows = SEGMENT * (K + 4), SEGMENT * (SEGMENT + 4), SEGMENT * wide
    times = 2 if "d_q" in linear.writes else 1
    step_numbers = times * (own + pairs + rows) + 2 * K * times
    return ChunkSource(
        _write(program, linear, threads), linear, heads, -(-V // slab), threads,
        4 * (SEGMENT * (K + 8 + slab + 8) + 2 * K), 4 * step_numbers,
    )  # fmt: skip


def _write(program: Program, linear: Linear, threads: int) -> str:
    def type_of(value: Value | None) -> str:
        return TYPES[value.type.dtype] if value else "float"

    reads = {name: type_of(linear.reads[name].value if name in linear.reads else None)
             for name in READ}  # fmt: skip
    writes = {name: type_of(linear.writes[name].value if name in linear.writes else None)
              for name in WRITTEN}  # fmt: skip
    backward = "d_q" in linear.writes
    decays = 0
    if "d_d" in linear.writes:
        decays = 2 if linear.keys in linear.reads["d"].axes else 1
    sizes = f"{linear.keys.size}, {linear.columns.size}"
    steps = "compute_gradients" if backward else "compute_outputs"
    kernels = {
        "run_states": f"pass_states<{sizes}, {str(backward).lower()}>(call, shared)",
        "run_steps": f"{steps}<{sizes}>(call, shared)",
    }
    lines = [
        HEADER, "", "using namespace hoconv::recurrent;", "",
        "struct Call {",
        f"  static constexpr int DECAYS = {decays};",
        f"  static constexpr int HEAD = {linear.state.stride(linear.heads)}, "
        f"KEY = {linear.state.stride(linear.keys)}, "
        f"COLUMN = {linear.state.stride(linear.columns)};  // strides of a state",
        "  int64_t T, B, heads;",
        *(f"  Rows<const {of}> {name};" for name, of in reads.items()),
        *(f"  Rows<{of}> {name};" for name, of in writes.items()),
        "  const float* first;", "  float *last, *states, *d_states;",
        "};",
    ]  # fmt: skip
    for name, call in kernels.items():
        lines += [
            "",
            f'extern "C" __global__ void __launch_bounds__({threads}) {name}(const Call call) {{',
            "  extern __shared__ __align__(128) char shared[];",
            f"  {call};",
            "}",
        ]
    return "\n".join(lines) + "\n"
