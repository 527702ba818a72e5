"""Writes a loop whose states are matrices of independent columns as one CUDA kernel.

A block computes a slab of columns of one head of a row (csrc/recurrent/matrix.cuh). Its threads
keep the states in registers and take all steps. They wait for each other once a round of steps:
what the next round reads of sequences is then on its way from memory.

A gradient reads the states before its steps, of which those at the beginning of segments are
saved. It replays a segment twice. The first time it keeps the states before rounds, in global
memory; these steps take so little time that what they read has to be on its way for more of them.
Then, from the last round to the first, it replays the round, keeps the states before each step in
shared memory, where a thread reads what it has written itself, and takes the steps of the gradient.

B batch, T time steps, i the number of steps of the sequence before a step, t its time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hoconv.recurrent.codegen.expressions import TYPES
from hoconv.recurrent.codegen.matrix.rounds import REPLAYED_STEPS, Rounds
from hoconv.recurrent.codegen.single_kernel import indent
from hoconv.recurrent.codegen.storage import Storage
from hoconv.recurrent.ir.program import (
    BYTES,
    SEGMENT,
    Program,
    Yield,
    find_operands,
    flat,
)
from hoconv.recurrent.passes.matrix.columns import (
    Columns,
    find_columns,
    find_sums,
)
from hoconv.recurrent.passes.matrix.separate import separate
from hoconv.recurrent.passes.matrix.tiling import Tiling, choose_tiling

HEADER = '#include "recurrent/matrix.cuh"'
LEAST_SHARED_BYTES = 64 * 1024  # of a block on any GPU
# Steps, so that one does not wait for all sums of the one before. A gradient's have enough to do.
_UNROLL, _UNROLL_GRADIENT = 4, 1
_MOST_BLOCKS = 65_535  # of a row, in a grid


@dataclass(frozen=True, eq=False)
class MatrixSource:
    """A kernel that keeps matrix states in registers.

    Attributes:
        text: a kernel ``run_matrix`` with the argument ``Call``, which
            :func:`hoconv.recurrent.runtime.workspace.describe_call` describes. Its grid is
            (B, `blocks`).
        storage: the buffers.
        blocks: of a row of the batch.
        threads, shared_bytes: of a block.
        scratch_bytes: of a block.
        parts: the yields that blocks write in parts, which are to be added, with the number of
            parts.
        tiling: how a matrix is divided.
    """

    text: str
    storage: Storage
    blocks: int
    threads: int
    shared_bytes: int
    scratch_bytes: int
    parts: tuple[tuple[Yield, int], ...]
    tiling: Tiling


def emit_matrix(program: Program, shared_bytes: int = LEAST_SHARED_BYTES) -> MatrixSource | str:
    """Writes the kernel of a program; says in words why there is none.

    Args:
        shared_bytes: that a block may use.
    """
    program = separate(program)
    columns = find_columns(program)
    if isinstance(columns, str):
        return columns
    wide = max((s.value.type.dtype for s in program.states), key=BYTES.__getitem__)
    tiling = choose_tiling(
        columns.keys.size, columns.columns.size, BYTES[wide], whole=bool(columns.shared)
    )
    if isinstance(tiling, str):
        return tiling
    if reason := _find_obstacle(program, columns):
        return reason
    heads = columns.heads.size if columns.heads else 1
    if heads * tiling.slabs > _MOST_BLOCKS:
        return f"{heads} heads of {tiling.slabs} slabs are too many"
    kernel = _Kernel(program, columns, tiling, shared_bytes)
    if kernel.shared_bytes > shared_bytes:
        return f"a step needs {kernel.shared_bytes} bytes of shared memory"
    return kernel.write()


def _find_obstacle(program: Program, columns: Columns) -> str:
    """Says which values a block cannot keep, read or write; empty where there are none."""
    matrix = {columns.keys, columns.columns}
    ops = list(flat(program.step))
    replayed = {r.value for r in program.replays}
    sums = find_sums(ops, columns)
    for value in {v for op in ops for v in op.values if v.type.rate == "sequence"}:
        if value not in replayed and matrix <= {*columns.axes(value)}:
            return "a step reads a matrix of the sequence"
    for each in program.yields:
        if each.source.type.rate != "step":
            return "a step writes what it reads"
        if matrix <= {*columns.axes(each.source)} and not each.sparse:
            return "every step writes a matrix"
        if each.source in columns.late and each.source not in sums:
            return "a step computes with a sum over columns"
    if columns.shared & find_operands(ops, [r.next for r in program.replays]):
        return "a state is computed again from a sum over columns"
    if any(r.next.type.rate != "step" and r.next not in replayed for r in program.replays):
        return "a state is what a step reads"
    if any(s.next.type.rate != "step" for s in program.states):
        return "a state is what a step reads"
    if program.replays and any(y.sparse for y in program.yields):
        return "a gradient saves states"
    return ""


class _Kernel(Rounds):
    def write(self) -> MatrixSource:
        """Writes the kernel."""
        tiling, storage = self.tiling, self.storage
        rounds = -(-SEGMENT // self.steps_of_round)
        kept = sum(
            self._elements(r.value) * BYTES[r.value.type.dtype] for r in self.program.replays
        )
        loop = self._write_gradient() if self.program.replays else self._write_forward()
        strides = [f"{b.name}_strides[2]" for b in storage.strided]
        unroll = _UNROLL_GRADIENT if self.program.replays else _UNROLL
        full = str(tiling.padded_slab * tiling.slabs == tiling.columns).lower()
        lines = [
            HEADER, "", "using namespace hoconv::recurrent;", "",
            f"constexpr int KEYS = {tiling.keys}, LANES = {tiling.lanes}, ROWS = {tiling.rows}, "
            f"VECTOR = {tiling.vector}, COLUMNS = {tiling.own};",
            f"constexpr int WARPS = {tiling.warps}, THREADS = {tiling.threads}, "
            f"SLAB = {tiling.slab}, SLABS = {tiling.slabs}, ROUND = {self.steps_of_round}, "
            f"REPLAYED = {REPLAYED_STEPS}, SEGMENT = {SEGMENT}, UNROLL = {unroll};",
            "",
            "struct Call {", "  int64_t T, B, begin;", "  const int64_t* seed;",
            *(f"  {TYPES[b.type.dtype]}* {b.name};" for b in storage.buffers),
            "  char* scratch;",
            *(f"  int64_t {each};" for each in strides),
            "};", "",
            'extern "C" __global__ void __launch_bounds__(THREADS) run_matrix(const Call call) {',
            "  extern __shared__ __align__(128) char shared[];",
            "  const int64_t T = call.T, B = call.B, row = blockIdx.x;",
            "  [[maybe_unused]] const int64_t seed = call.seed == nullptr ? 0 : *call.seed;",
            "  const int head = blockIdx.y / SLABS, slab = blockIdx.y % SLABS;",
            f"  const int width = min(SLAB, {tiling.columns} - slab * SLAB);",
            f"  const Place<KEYS, LANES, ROWS, VECTOR, COLUMNS, {full}> at(width);",
            *indent(2, self._write_constants(), self._write_states(), self._write_places(), loop,
                    self._write_final()),
            "}",
        ]  # fmt: skip
        parts = tuple((y, n) for y, n in self.parts.items() if n > 1)
        return MatrixSource(
            "\n".join(lines) + "\n", storage, self.heads * tiling.slabs, tiling.threads,
            self.shared_bytes, kept * rounds * tiling.threads, parts, tiling,
        )  # fmt: skip

    def _write_constants(self) -> Iterable[str]:
        for value, buffer in self.constants.items():
            guard = self._guard(value)
            given = f"call.{buffer}[{self._feature(value)}]"
            yield self._declare(value)
            if guard:
                yield from self._for_each(value, f"if ({guard}) {self._element(value)} = {given};")
            else:
                yield f"{self._name(value)} = {given};"

    def _write_states(self) -> Iterable[str]:
        """Declares the states, and reads them before the first step."""
        first = zip(self.program.states, self.storage.first, strict=True)
        for state, buffer in first:
            given = (
                f"call.{buffer.name}[row * call.{buffer.name}_strides[0] + "
                f"({self._feature(state.value)}) * call.{buffer.name}_strides[1]]"
            )
            yield from self._read_elements(state.value, given)
        yield from map(self._declare, self.replayed)

    def _write_forward(self) -> list[str]:
        t = "T - 1 - i" if self.program.reverse else "i"
        load = self._load(self.step, "begin + ROUND", "T")
        return [
            *self._load(self.step, "0", "T"),
            "for (int64_t begin = 0; begin < T; begin += ROUND) {",
            *indent(2, self._exchange(self.step, "begin - ROUND")),
            *indent(2, load),
            "  const int steps = static_cast<int>(T - begin < ROUND ? T - begin : ROUND);",
            "#pragma unroll UNROLL",
            "  for (int d = 0; d < steps; ++d) {",
            f"    [[maybe_unused]] const int64_t i = begin + d, t = {t};",
            *indent(4, self._write_step()),
            "  }",
            "}",
            *self._flush("T > 0 ? (T - 1) / ROUND * ROUND : -1"),
        ]

    def _write_gradient(self) -> list[str]:
        # The gradient's steps run backwards, those that it replays do not.
        t = "i" if self.program.reverse else "T - 1 - i"
        scratch, at = [], 0
        for each in self.program.replays:
            own, size = TYPES[each.value.type.dtype], self._elements(each.value)
            scratch.append((each, own, at))
            at += size * BYTES[each.value.type.dtype] * self.tiling.threads

        def keep(m: str, store: bool) -> Iterable[str]:
            yield f"char* const to = scratch + {m} * {at};"
            for each, own, place in scratch:
                count = self._elements(each.value)
                name = f"reinterpret_cast<{own}(&)[{count}]>({self._name(each.value)})"
                call = "put" if store else "get"
                yield f"{call}_own<THREADS>(reinterpret_cast<{own}*>(to + {place}), {name});"

        rounds = -(-SEGMENT // self.steps_of_round)
        checkpoints = []
        for each in self.program.replays:
            buffer = self.buffers[each.value]
            given = f"call.{buffer.name}[((from / SEGMENT) * B + row) * {buffer.type.size} + "
            given += f"{self._feature(each.value)}]"
            checkpoints += self._read_elements(each.value, given, declare=False)
        return [
            f"char* const scratch = call.scratch + (row * gridDim.y + blockIdx.y) * {at * rounds};",
            "int64_t written = -1;",
            "for (int64_t from = T > 0 ? (T - 1) / SEGMENT * SEGMENT : -1; from >= 0; "
            "from -= SEGMENT) {",
            "  const int64_t end = T - from < SEGMENT ? T : from + SEGMENT;",
            "  const int rounds = static_cast<int>((end - from + ROUND - 1) / ROUND);",
            *indent(2, checkpoints),
            "  const int64_t last = from + (rounds - 1) * ROUND;",
            *indent(2, self._load(self.step, "last", "end")),
            "  {",
            *indent(4, self._declare_reads(self._lay_out_replay()[0], "REPLAYED")),
            *indent(4, self._load(self.replay, "from", "last", "REPLAYED")),
            "    for (int64_t begin = from; begin < last; begin += REPLAYED) {",
            "      const int steps = static_cast<int>(min(last - begin, int64_t{REPLAYED}));",
            *indent(6, self._exchange(self.replay, "")),
            *indent(6, self._load(self.replay, "begin + REPLAYED", "last", "REPLAYED")),
            "      for (int d = 0; d < steps; ++d) {",
            f"        [[maybe_unused]] const int64_t i = begin + d, t = {t};",
            "        if ((i - from) % ROUND == 0) {",
            *indent(10, keep("(i - from) / ROUND", store=True)),
            "        }",
            *indent(8, self._write_replay()),
            "      }",
            "    }",
            "  }",
            "  for (int m = rounds - 1; m >= 0; --m) {",
            "    const int64_t begin = from + m * ROUND;",
            "    const int steps = static_cast<int>(end - begin < ROUND ? end - begin : ROUND);",
            "    if (m < rounds - 1) {",
            *indent(6, keep("m", store=False)),
            "    }",
            *indent(4, self._exchange(self.step, "written")),
            "    written = begin;",
            "    if (m > 0) {",
            *indent(6, self._load(self.step, "begin - ROUND", "end")),
            "    }",
            "#pragma unroll UNROLL",
            "    for (int d = 0; d < steps - 1; ++d) {",
            f"      [[maybe_unused]] const int64_t i = begin + d, t = {t};",
            *indent(6, self._keep_step(store=True)),
            *indent(6, self._write_replay()),
            "    }",
            "#pragma unroll UNROLL",
            "    for (int d = steps - 1; d >= 0; --d) {",
            f"      [[maybe_unused]] const int64_t i = begin + d, t = {t};",
            "      if (d + 1 < steps) {",
            *indent(8, self._keep_step(store=False)),
            "      }",
            *indent(6, self._write_step()),
            "    }",
            "  }",
            *indent(2, self._flush("written")),
            "  written = -1;",
            "}",
        ]

    def _keep_step(self, store: bool) -> Iterable[str]:
        """Stores the states before a step in shared memory, or loads them."""
        for i, each in enumerate(self.program.replays):
            count = self._elements(each.value)
            call = "put" if store else "get"
            own = TYPES[each.value.type.dtype]
            name = f"reinterpret_cast<{own}(&)[{count}]>({self._name(each.value)})"
            yield f"{call}_own<THREADS>(kept{i} + d * {count} * THREADS, {name});"

    def _write_final(self) -> Iterable[str]:
        for state, buffer in zip(self.program.states, self.storage.last, strict=True):
            guard = self._guard(state.value)
            store = (
                f"call.{buffer.name}[row * {buffer.type.size} + {self._feature(state.value)}] = "
            )
            store += f"{self._element(state.value)};"
            store = f"if ({guard}) {store}" if guard else store
            yield f"if ({self._writer(state.value)}) {{"
            yield from indent(2, self._for_each(state.value, store))
            yield "}"
