"""Writes kernels that take the steps of a matrix state in chunks (csrc/recurrent/chunks.cuh).

B batch, T time steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hoconv.recurrent.codegen.expressions import TYPES
from hoconv.recurrent.ir.program import BYTES, SEGMENT, Program
from hoconv.recurrent.passes.matrix.linear import Linear, Rows, find_linear

HEADER = '#include "recurrent/chunks.cuh"'
MOST = 128  # keys, and columns
HALVES = ("bf16", "f16")  # which have no more bits of mantissa than TF32
_TILE, _WARP = 16, 32
_SEGMENTS, _PAD, _WIDE_PAD = 4, 4, 8  # as chunks.cuh has them
_SQUARE = SEGMENT + _PAD
_KEYS, _COLUMNS = 32, 64  # of a block, where these are divided among blocks
_SHARED_WARPS = 8  # of most blocks of kernels whose decays are shared
_MOST_HEADS = 65_535 // (MOST // _KEYS * MOST // _COLUMNS)  # in a grid
# Of a multiprocessor, at least, which has registers for all of them; ComputeKeys has many in use.
_THREADS, _KEYS_THREADS = 512, 384
_WORD_BYTES = 16  # that a thread loads at once
OPERANDS = ("q", "k", "v", "d", "p", "c", "d_output", "output", "d_q", "d_k", "d_v", "d_p", "d_d")


@dataclass(frozen=True)
class Block:
    """The blocks of a kernel.

    Attributes:
        count: of a head.
        threads, shared_bytes: of each.
    """

    count: int
    threads: int
    shared_bytes: int


@dataclass(frozen=True, eq=False)
class ChunkSource:
    """The kernels of a program.

    Attributes:
        texts: of each kernel, by its name: a source of its own, with the argument ``Call``: T, B,
            heads; for each operand and result its address, and how far apart steps, rows and heads
            lie; the addresses of the first and the last states, of the states, and their gradients,
            between chunks, of the gradients of the products of pairs, and of what is solved; how
            far apart the parts of blocks of a sum over keys lie.
        linear: the operands and results.
        heads: of a row.
        blocks: of each kernel, in the order of launches. ``run_states`` takes a row of the batch at
            a time, the others a chunk of one.
        solved: the numbers that ``run_solve`` writes for a chunk of a head.
    """

    texts: dict[str, str]
    linear: Linear
    heads: int
    blocks: dict[str, Block]
    solved: int


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
    texts, blocks = _write(linear)
    solved = SEGMENT * (2 * _round_up(keys) + _round_up(columns)) + _round_up(keys)  # as Solved
    return ChunkSource(texts, linear, heads, blocks, solved)


def aligned(linear: Linear, rows: Rows) -> int:
    """Returns how many features of rows lie in a row and are aligned, if their first one is."""
    along = linear.columns if linear.columns in rows.axes else linear.keys
    if rows.stride(along) != 1:
        return 1
    apart = rows.start, rows.value.type.size, along.size, rows.stride(linear.heads)
    return math.gcd(*apart, _WORD_BYTES // BYTES[rows.value.type.dtype])


def _size_states(keys: int, columns: int) -> Block:
    """As ``PassStates``."""
    own, slab = _own(keys), min(_round_up(columns), _COLUMNS)
    shared = own * _SQUARE + SEGMENT * (slab + _WIDE_PAD) + _SEGMENTS * own
    return Block(-(-keys // own) * -(-columns // slab), _SEGMENTS * _WARP, 4 * shared)


def _size_shared_states(keys: int, columns: int) -> Block:
    """As ``PassSharedStates``."""
    own, slab = _own_shared(keys), min(_round_up(columns), _COLUMNS)
    warps = _SHARED_WARPS if own > _KEYS else _SHARED_WARPS // 2
    shared = SEGMENT * (own + slab + 2 * _WIDE_PAD + 2) + 1
    return Block(-(-keys // own) * -(-columns // slab), warps * _WARP, 4 * shared)


def _size_columns(keys: int, columns: int, backward: bool) -> Block:
    """As ``ComputeColumns``."""
    K, V = _round_up(keys), _round_up(columns)
    first, second = max(K, V if backward else 0) + _PAD, V + _WIDE_PAD
    shared = SEGMENT * (first + _SQUARE + second) + _SEGMENTS * K
    return Block(1, _count_threads(K), 4 * shared)


def _size_shared_columns(keys: int, columns: int, backward: bool) -> Block:
    """As ``ComputeSharedColumns``."""
    K, V = _round_up(keys), _round_up(columns)
    first, second = max(K, V if backward else 0) + _PAD, max(K + _PAD, V + _WIDE_PAD)
    shared = SEGMENT * (first + second + 2 * _SQUARE + 2)
    return Block(1, _SHARED_WARPS * _WARP, 4 * shared)


def _size_solve(keys: int, columns: int, backward: bool, shared_decays: bool) -> Block:
    """As ``SolveChunk``."""
    K, V = _round_up(keys), _round_up(columns)
    first = max(SEGMENT * (K + _PAD), K * _SQUARE if backward else 0)
    second = V + _WIDE_PAD
    if shared_decays:
        second = max(second, K + _PAD)
    squares = 2 if backward or shared_decays else 1
    rows = squares * _SQUARE + second + SEGMENT // _SEGMENTS + _PAD + shared_decays
    return Block(1, _count_threads(K), 4 * (first + SEGMENT * rows + _SEGMENTS * K))


def _size_solved_states(keys: int, columns: int) -> Block:
    """As ``PassSolvedStates``."""
    K, slab = _round_up(keys), 32 if columns > 16 else 16
    shared = SEGMENT * (K + _PAD) + K * _SQUARE + (K + SEGMENT) * (slab + _WIDE_PAD) + K
    return Block(-(-columns // slab), _count_threads(K), 4 * shared)


def _size_keys(keys: int, columns: int) -> Block:
    """As ``ComputeKeys``."""
    own, row = _own(keys), _round_up(columns) + _PAD
    first = SEGMENT * max(row, own + _WIDE_PAD + _SQUARE)
    shared = first + SEGMENT * (own + _WIDE_PAD) + own * row + own + 2 * _SEGMENTS * own
    return Block(-(-keys // own), _SEGMENTS * _WARP, 4 * shared)


def _size_shared_keys(keys: int, columns: int) -> Block:
    """As ``ComputeSharedKeys``."""
    own, row = _own_shared(keys), _round_up(columns) + _PAD
    rows = max(row, _SQUARE) + 2 * (own + _WIDE_PAD) + 3 + 2 * _SHARED_WARPS
    shared = SEGMENT * rows + own * row + _SHARED_WARPS
    return Block(-(-keys // own), _SHARED_WARPS * _WARP, 4 * shared)


def _own(keys: int) -> int:
    """Returns the keys of a block, of which some may not be there."""
    return min(_round_up(keys), _KEYS)


def _own_shared(keys: int) -> int:
    """Returns the keys of a block where all keys of a head have the same decays."""
    return next(n for n in (_TILE, 2 * _TILE, 4 * _TILE) if n >= min(keys, 4 * _TILE))


def _count_threads(keys: int) -> int:
    return _SEGMENTS * (64 if keys > 64 else _WARP)


def _round_up(n: int) -> int:
    return -(-n // _TILE) * _TILE


def _choose_kernels(linear: Linear) -> dict[str, tuple[Block, str]]:
    """Chooses the kernels by name: their blocks and types."""
    sizes = linear.keys.size, linear.columns.size
    backward, shared, predicts = linear.backward, linear.shares_decays, linear.solved is not None
    own = "Shared" if shared else ""

    def instance(kernel: str, *flags: bool) -> str:
        arguments = (*map(str, sizes), *(str(flag).lower() for flag in flags))
        return f"{kernel}<{', '.join(arguments)}>"

    blocks: dict[str, tuple[Block, str]] = {}
    if predicts:
        solve = instance("SolveChunk", backward, shared, linear.early)
        blocks["run_solve"] = _size_solve(*sizes, backward, shared), solve
        states = instance("PassSolvedStates", backward)
        blocks["run_states"] = _size_solved_states(*sizes), states
    else:
        states = instance(f"Pass{own}States", backward, linear.early)
        size_states = _size_shared_states if shared else _size_states
        blocks["run_states"] = size_states(*sizes), states
    columns = instance(f"Compute{own}Columns", backward, predicts, linear.early)
    size_columns = _size_shared_columns if shared else _size_columns
    blocks["run_columns"] = size_columns(*sizes, backward), columns
    if backward:
        keys = instance(f"Compute{own}Keys", predicts, linear.early)
        blocks["run_keys"] = (_size_shared_keys if shared else _size_keys)(*sizes), keys
    return blocks


def _write(linear: Linear) -> tuple[dict[str, str], dict[str, Block]]:
    def declare(name: str, rows: Rows | None) -> str:
        if rows is None:
            return f"  Rows<float, 0, 1> {name};"
        along = linear.columns if linear.columns in rows.axes else linear.keys
        of = f"{TYPES[rows.value.type.dtype]}, {rows.stride(along)}, {aligned(linear, rows)}"
        return f"  Rows<{of}> {name};"

    blocks = _choose_kernels(linear)
    begin = [
        HEADER, "", "using namespace hoconv::recurrent;", "",
        "struct Call {",
        f"  static constexpr bool DECAYS = {str('d_d' in linear.writes).lower()};"
        "  // whether their gradients are written",
        f"  static constexpr int HEAD = {linear.state.stride(linear.heads)}, "
        f"KEY = {linear.state.stride(linear.keys)}, "
        f"COLUMN = {linear.state.stride(linear.columns)};  // strides of a state",
        "  int64_t T, B, heads;",
        *(declare(name, linear.find(name)) for name in OPERANDS),
        "  const float* first;", "  float *last, *states, *d_states, *d_products, *solved;",
        "  int64_t part;",
        "};",
    ]  # fmt: skip
    texts = {}
    for name, (block, kernel) in blocks.items():
        threads = _KEYS_THREADS if kernel.startswith("ComputeKeys<") else _THREADS
        least = threads // block.threads
        lines = [
            *begin,
            "",
            f"using Kernel = {kernel};",
            f"static_assert(Kernel::THREADS == {block.threads} && "
            f"Kernel::BYTES == {block.shared_bytes});",
            f'extern "C" __global__ void __launch_bounds__({block.threads}, {least}) '
            f"{name}(const Call call) {{",
            "  extern __shared__ __align__(128) char shared[];",
            "  Kernel::run(call, shared);",
            "}",
        ]
        texts[name] = "\n".join(lines) + "\n"
    return texts, {name: block for name, (block, _) in blocks.items()}
