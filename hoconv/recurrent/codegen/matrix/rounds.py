"""Divides steps into rounds, at whose beginnings the threads of a block wait for each other.

What a round reads of sequences, they load a round ahead to registers, and store in shared memory.
There they also add the sums of warps over columns, and keep states of a gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from hoconv.recurrent.codegen.expressions import TYPES
from hoconv.recurrent.codegen.matrix.steps import Read, Steps
from hoconv.recurrent.codegen.single_kernel import indent
from hoconv.recurrent.ir.program import BYTES, Op, Program
from hoconv.recurrent.passes.matrix.columns import Columns
from hoconv.recurrent.passes.matrix.tiling import Tiling

# Of a round: forward, of a gradient, and where a gradient only replays.
_MOST_STEPS, _MOST_GRADIENT_STEPS, REPLAYED_STEPS = 8, 8, 16
_ALIGNMENT = 16  # bytes, of what threads read at once


def _align(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT


class Rounds(Steps):
    """Writes what comes between the rounds of a kernel, which may use so much shared memory.

    Attributes:
        steps_of_round: as many as there is shared memory for.
        shared_bytes: that these need.
    """

    def __init__(
        self, program: Program, columns: Columns, tiling: Tiling, most_shared_bytes: int
    ) -> None:
        super().__init__(program, columns, tiling)
        self.steps_of_round, self.shared_bytes = self._fit(most_shared_bytes)

    def _fit(self, most: int) -> tuple[int, int]:
        steps = _MOST_GRADIENT_STEPS if self.program.replays else _MOST_STEPS
        while steps > 1 and self._lay_out(steps)[1] > most:
            steps -= 1
        return steps, max(self._lay_out(steps)[1], self._lay_out_replay()[1])

    def _lay_out_replay(self) -> tuple[dict[object, int], int]:
        """As `_lay_out`, of the steps that a gradient only replays."""
        return self._place_reads(self._of(self.replay), REPLAYED_STEPS)

    def _place_reads(self, reads: Iterable[Read], steps: int) -> tuple[dict[object, int], int]:
        places: dict[object, int] = {}
        at = 0
        for read in reads:
            places[read] = at
            at += _align(steps * self._pitch(read.value) * BYTES[read.value.type.dtype])
        return places, at

    def _lay_out(self, steps: int) -> tuple[dict[object, int], int]:
        """Where everything is in shared memory, in bytes, and how much that is."""
        places, at = self._place_reads(self.reads.values(), steps)

        def add(key: object, count: int) -> None:
            nonlocal at
            places[key] = at
            at += _align(count)

        for each in self.sums:
            number = BYTES[each.source.type.dtype] * self.tiling.warps
            add(each, steps * self._pitch(each.source) * number)
        for op in self.shared:
            number = 2 * BYTES[op.result.type.dtype] * self.tiling.warps
            add(op, self._pitch(op.result) * number)
        for each in self.program.replays:
            number = BYTES[each.value.type.dtype] * self.tiling.threads
            add(each, (steps - 1) * self._elements(each.value) * number)
        return places, at

    def _write_places(self) -> Iterable[str]:
        """Names the places in shared memory, and what is on its way there."""
        places, _ = self._lay_out(self.steps_of_round)
        yield from self._declare_reads(places, "ROUND")
        for i, each in enumerate(self.sums):
            own = TYPES[each.source.type.dtype]
            yield f"{own}* const sums{i} = reinterpret_cast<{own}*>(shared + {places[each]});"
        for i, each in enumerate(self.program.replays):
            own = TYPES[each.value.type.dtype]
            yield f"{own}* const kept{i} = reinterpret_cast<{own}*>(shared + {places[each]});"
        for op in self.shared:
            own, name = TYPES[op.result.type.dtype], f"{self._name(op.result)}_parts"
            yield f"{own}* const {name} = reinterpret_cast<{own}*>(shared + {places[op]});"

    def _declare_reads(self, places: Mapping[object, int], steps: str) -> Iterable[str]:
        """Names the places of what so many steps read."""
        for read in self.reads.values():
            if read in places:
                own, given = TYPES[read.value.type.dtype], TYPES[read.buffer.type.dtype]
                at = f"reinterpret_cast<{own}*>(shared + {places[read]})"
                pitch, count = self._pitch(read.value), self._count(read.value)
                yield f"{own}* const {self._name(read.value)}_shared = {at};"
                yield f"Staged<{given}, {own}, {steps}, {count}, {pitch}, THREADS> {read.name};"

    def _load(self, ops: Sequence[Op], begin: str, end: str, steps: str = "ROUND") -> list[str]:
        """Writes the loads of the round that begins at a step."""
        lines = []
        for read in self._of(ops):
            size, value = read.buffer.type.size, read.value
            axes = self._strides(value)
            keys, columns = self.columns.keys, self.columns.columns
            at = [str(read.offset), self._head(value)]
            apart, count = axes.get(keys, 1), str(self._count(value))
            if columns in axes:
                at.append(f"slab * SLAB * {axes[columns]}")
                apart, count = axes[columns], "width"
            first, step = "(first * B + row)", f"step * {size}"
            if read.buffer.kind == "constant":
                first, step = "row", "0"
            lines.append(
                f"{read.name}.load(call.{read.buffer.name} + {first} * {size} + "
                f"{' + '.join(at)}, {step}, {apart}, left, {count});"
            )
        if not lines:
            return []
        backwards = self.program.reverse != bool(self.program.replays)
        return [
            "{",
            f"  const int64_t next = {begin};",
            f"  const int64_t first = {'T - 1 - next' if backwards else 'next'};",
            f"  const int64_t step = {'-B' if backwards else 'B'};",
            f"  const int left = static_cast<int>(min({end} - next, int64_t{{{steps}}}));",
            *indent(2, lines),
            "}",
        ]

    def _exchange(self, ops: Sequence[Op], written: str) -> list[str]:
        """Writes what threads of a block do together before a round: they write the sums of the
        last round, if there was one, and store what they have loaded."""
        return [
            "__syncthreads();",
            *(self._write_sums(written) if written else ()),
            *(f"{r.name}.store({self._name(r.value)}_shared);" for r in self._of(ops)),
            "__syncthreads();",
        ]

    def _flush(self, begin: str) -> list[str]:
        return ["__syncthreads();", *self._write_sums(begin)] if self.sums else []

    def _write_sums(self, begin: str) -> list[str]:
        """Adds the sums of warps over columns, of the round that began at a step."""
        if not self.sums:
            return []
        lines = []
        backwards = self.program.reverse != bool(self.program.replays)
        for i, each in enumerate(self.sums):
            source, buffer = each.source, self.written[each]
            size, parts = source.type.size, self.parts[each]
            strides, at = self._strides(source), self._head(source)
            apart = strides.get(self.columns.keys, 1)
            own = TYPES[source.type.dtype]
            lines.append(
                f"write_sums<{own}, {self._count(source)}, {self._pitch(source)}, WARPS, THREADS>("
                f"call.{buffer.name} + ((first * B + row) * {parts} + {self._part(each)}) * {size} "
                f"+ {at}, step * {parts * size}, {apart}, count, sums{i});"
            )
        # A gradient's round ends with its segment.
        end = "min(T, (last / SEGMENT + 1) * SEGMENT)" if self.program.replays else "T"
        return [
            f"if (const int64_t last = {begin}; last >= 0) {{",
            f"  const int64_t first = {'T - 1 - last' if backwards else 'last'};",
            f"  const int64_t step = {'-B' if backwards else 'B'};",
            f"  const int count = static_cast<int>(min({end} - last, int64_t{{ROUND}}));",
            *indent(2, lines),
            "}",
        ]
