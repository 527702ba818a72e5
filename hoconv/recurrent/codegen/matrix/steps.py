"""Writes the statements of a step, whose values are in registers of threads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hoconv.recurrent.codegen.expressions import TYPES, expression
from hoconv.recurrent.codegen.matrix.storage import assign
from hoconv.recurrent.codegen.matrix.values import Values
from hoconv.recurrent.codegen.single_kernel import indent
from hoconv.recurrent.codegen.storage import Buffer
from hoconv.recurrent.ir.kinds import BY_AXES
from hoconv.recurrent.ir.program import Op, Program, Value, Yield
from hoconv.recurrent.passes.matrix.columns import Columns
from hoconv.recurrent.passes.matrix.tiling import Tiling


@dataclass(frozen=True, eq=False)
class Read:
    """A part of a sequence that every step reads.

    Attributes:
        value: what the steps call it.
        buffer, offset: the sequence, and the first feature.
        name: of the member that loads it.
    """

    value: Value
    buffer: Buffer
    offset: int
    name: str


class Steps(Values):
    """Writes the steps of a program, and those that a gradient replays.

    Attributes:
        storage: the buffers of what steps read and write.
        replayed: the sequences whose values are replayed.
        reads, constants: what steps read of sequences and of parameters.
        step, replay: the ops of a step, and of one that is replayed.
        sums: the yields that a block adds over its columns.
        shared: the sums over columns that all threads of a block get.
    """

    def __init__(self, program: Program, columns: Columns, tiling: Tiling) -> None:
        super().__init__(program, columns, tiling)
        self.made = {op.result: op for op in self.ops}
        self.replayed = dict.fromkeys(r.value for r in program.replays)
        self.storage = assign(program, self.parts)
        sequences = (*(v for _, v in program.sequences), *program.made_before)
        self.buffers = dict(zip(sequences, self.storage.sequences, strict=True))
        self.buffers |= zip((p.value for p in program.params), self.storage.params, strict=True)
        self.written = dict(zip(program.yields, self.storage.yields, strict=True))
        self.reads: dict[Value, Read] = {}
        self.constants: dict[Value, str] = {}
        outputs = [*(s.next for s in program.states), *(y.source for y in program.yields)]
        self.step = self._select(outputs)
        self.replay = self._select([r.next for r in program.replays])
        self.sums = [y for y in program.yields if self._sums_lanes(y)]
        self.shared = [op for op in self.ops if op.result in columns.shared]

    def _select(self, wanted: Sequence[Value]) -> list[Op]:
        """The ops that compute some values; loads of sequences are none."""
        needed, found = dict.fromkeys(wanted), []
        for op in reversed(self.ops):
            if op.result in needed:
                if self._read(op.result):
                    continue
                found.append(op)
                needed |= dict.fromkeys(op.values)
        for value in needed:
            if value not in self.made:
                self._read(value)
        return found[::-1]

    def _read(self, value: Value) -> bool:
        """Returns whether a value is read from a sequence or a parameter, and notes it."""
        if value in self.reads or value in self.constants or value in self.replayed:
            return value not in self.replayed
        found = self._find_source(value)
        if found is None:
            return False
        buffer, offset = found
        if buffer.kind == "once":
            if value in self.made:  # converted in the step
                return False
            self.constants[value] = buffer.name
        else:
            self.reads[value] = Read(value, buffer, offset, f"read{len(self.reads)}_coming")
        return True

    def _find_source(self, value: Value) -> tuple[Buffer, int] | None:
        """The buffer of a value that is read as it is, or cast, or a slice of one."""
        if value in self.buffers and value not in self.replayed:
            return self.buffers[value], 0
        op = self.made.get(value)
        if op is None or op.kind not in ("slice", "cast") or op.values[0] in self.replayed:
            return None
        source = self._find_source(op.values[0])
        if source is None or source[0].kind == "once":
            return None
        if op.kind == "slice":
            return source[0], source[1] + int(op.attrs[0])
        return source

    def _of(self, ops: Sequence[Op]) -> list[Read]:
        """Lists what some ops read of sequences."""
        wanted = {v for op in ops for v in op.values}
        if ops is self.step:
            wanted |= {s.next for s in self.program.states}
            wanted |= {y.source for y in self.program.yields}
        if ops is self.replay:
            wanted |= {r.next for r in self.program.replays}
        return [read for read in self.reads.values() if read.value in wanted]

    def _write_step(self) -> list[str]:
        lines = [*self._write_ops(self.step)]
        for each in self.program.yields:
            lines += self._write_yield(each)
        return lines + self._advance([(s.value, s.next) for s in self.program.states])

    def _write_replay(self) -> list[str]:
        replays = self.program.replays
        return [*self._write_ops(self.replay), *self._advance([(r.value, r.next) for r in replays])]

    def _advance(self, pairs: Sequence[tuple[Value, Value]]) -> list[str]:
        """Writes the next states in the place of those before; those may be each other's."""
        lines: list[str] = []
        before = {value for value, _ in pairs}
        copies: dict[Value, str] = {}
        for value, following in pairs:
            if following in before and following is not value:
                copies[following] = f"{self._name(following)}_old"
                own = TYPES[following.type.dtype]
                lines.append(f"{own} {copies[following]}{self._shape(following)};")
                name = self._element(following).replace(self._name(following), copies[following], 1)
                lines += self._for_each(following, f"{name} = {self._element(following)};")
        for value, following in pairs:
            if following is not value:
                given = self._element(following)
                if following in copies:
                    given = given.replace(self._name(following), copies[following], 1)
                lines += self._for_each(value, f"{self._element(value)} = {given};")
        return lines

    def _write_ops(self, ops: Sequence[Op]) -> Iterable[str]:
        for read in self._of(ops):
            yield from self._write_load(read)
        for op in ops:
            yield self._declare(op.result)
            yield from self._write_op(op)

    def _write_load(self, read: Read) -> list[str]:
        name, pitch = self._name(read.value), self._pitch(read.value)
        from_ = f"{name}_shared + d * {pitch}"
        declared = self._declare(read.value)
        if self._has(read.value, self.columns.keys):
            return [declared, f"at.read_rows({name}, {from_});"]
        index = "[at.first + c]" if self._has(read.value, self.columns.columns) else "[0]"
        given = f"{self._element(read.value)} = ({from_}){index};"
        return [declared, *self._for_each(read.value, given)]

    def _write_op(self, op: Op) -> list[str]:
        if op.kind in BY_AXES or self.columns.summed(op):
            return self._write_by_axes(op)
        given = expression(op, {v: self._element(v) for v in op.values}, self._feature(op.result))
        return self._for_each(op.result, f"{self._element(op.result)} = {given};")

    def _write_by_axes(self, op: Op) -> list[str]:
        product = " * ".join(map(self._element, op.values))
        result, summed = self._element(op.result), self.columns.summed(op)
        own = TYPES[op.result.type.dtype]
        over_columns = self.columns.columns in summed
        if self.columns.keys not in summed and not over_columns:
            return self._for_each(op.result, f"{result} = {product};")
        found = product
        if over_columns:
            found = f"at.template add_columns<{own}>([&](int c) {{ return {found}; }})"
        if self.columns.keys in summed:
            found = f"at.template add_rows<{own}>([&](int r) {{ return {found}; }})"
        lines = self._for_each(op.result, f"{result} = {found};")
        name = self._name(op.result)
        if op.result in self.columns.shared:
            return [*lines, *self._write_shared(op)]
        if over_columns:
            return lines  # lanes are added where it is written
        if not self._loops(op.result):
            return [*lines, f"{name} = at.sum_over_keys({name});"]
        return [*lines, f"at.sum_over_keys({name});"]

    def _write_shared(self, op: Op) -> list[str]:
        """Adds a sum over the columns of a block, for all of its threads."""
        name, pitch = self._name(op.result), self._pitch(op.result)
        memory = f"{name}_parts + i % 2 * {self.tiling.warps * pitch}"
        if self._has(op.result, self.columns.keys):
            return [f"at.template share_rows<WARPS, {pitch}>({memory}, {name});"]
        keys = self.columns.keys in self.columns.summed(op)
        own = f"at.sum_over_keys({name})" if keys else name
        return [f"{name} = at.template share<WARPS>({memory}, {own});"]

    def _write_yield(self, each: Yield) -> list[str]:
        source, buffer = each.source, self.written[each]
        element, feature = self._element(source), self._feature(source)
        if each in self.sums:
            return self._write_sum(self.sums.index(each), each)
        size, parts = source.type.size, self.parts[each]
        time = f"(t * B + row) * {parts} + {self._part(each)}" if parts > 1 else "t * B + row"
        condition = self._writer(source, self.columns.heads in self._summed(source))
        if each.sparse:
            condition = f"i % SEGMENT == 0 && {condition}"
            time = "i / SEGMENT * B + row"
        guard = self._guard(source)
        store = f"call.{buffer.name}[({time}) * {size} + {feature}] = {element};"
        store = f"if ({guard}) {store}" if guard else store
        return [f"if ({condition}) {{", *indent(2, self._for_each(source, store)), "}"]

    def _write_sum(self, i: int, each: Yield) -> list[str]:
        """Adds a sum over the columns of lanes, and writes it to shared memory for each warp."""
        source = each.source
        name, pitch = self._name(source), self._pitch(source)
        to = f"sums{i} + (d * WARPS + at.warp) * {pitch}"
        if self._has(source, self.columns.keys):
            return [f"at.write_rows({to}, {name});"]
        if self.columns.keys in self._summed(source):
            name = f"at.sum_over_keys({name})"
        return [f"at.write({to}, {name});"]
