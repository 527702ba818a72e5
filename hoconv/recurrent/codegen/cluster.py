"""Writes a loop as one CUDA kernel whose blocks keep the weights on the chip for all steps.

The blocks of a cluster share some rows of the batch. Each computes a slice of the features of every
vector (passes/distribute.py): a thread has the same features of the same rows at every step, so
that states and what only their own features read stay in its registers.

B batch, T time steps, i the number of steps already done, t the time step that is computed, r a row
of the cluster, row the same row in the batch, j a feature, unit the same feature in the block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from hoconv.recurrent.codegen.expressions import TYPES, expression, initial, reduced
from hoconv.recurrent.codegen.steps import offset
from hoconv.recurrent.codegen.storage import Location, Storage, assign_storage
from hoconv.recurrent.ir.program import BYTES, Group, Program, Value, flat
from hoconv.recurrent.passes.distribute import (
    COLUMNS,
    Gathered,
    SharedProduct,
    distribute,
    sizes,
)

HEADER = '#include "recurrent/cluster.cuh"'
NAME = "run_cluster"
# Features of a block: whole vectors of 16 bytes, so that pushes are wide.
_UNITS = 8
_TILE = 16  # rows of the weights in a tile of the tensor cores
_BARRIERS = 16  # bytes
# Elements between rows in shared memory: rows begin in different banks.
_PADDING = {"bf16": 8, "f16": 8, "f32": 4, "f64": 2}


@dataclass(frozen=True)
class ClusterShape:
    """How a kernel is laid out: blocks of a cluster, its rows of the batch, warps of a block."""

    blocks: int
    rows: int
    warps: int

    @property
    def threads(self) -> int:
        """The threads of a block."""
        return 32 * self.warps


@dataclass(frozen=True, eq=False)
class ClusterSource:
    """A kernel that runs all steps; its argument is a ``Call``, as of ``CudaSource``.

    Attributes:
        exchanges: how often the blocks of a cluster wait for each other in a step.
        register_bytes: the weights that a block holds in registers.
        weight_bytes: all weights that a block holds.
        shared_bytes: the shared memory of a block.
        pushed_bytes: what a block gets from others in a step.
        tile_products: the products of a warp by tensor cores in a step, 16 x 8 x 16 each.
        plain_products: the multiply-adds of a thread in a step, without tensor cores.
        pairs: the rows and features of a thread, of the longest vector.
    """

    text: str
    shape: ClusterShape
    storage: Storage
    exchanges: int
    register_bytes: int
    weight_bytes: int
    shared_bytes: int
    pushed_bytes: int
    tile_products: int
    plain_products: int
    pairs: int


def emit_cluster(program: Program, shape: ClusterShape) -> ClusterSource:
    """Writes the kernel of a program that :func:`refuse` does not refuse, for NVRTC."""
    return _Writer(program, shape).source()


@dataclass(frozen=True)
class _Layout:
    """How a product's slice of the weights lies in a block.

    Attributes:
        rows, columns: of the slice, padded.
        splits, held, each, slices: as SPLIT, HELD, EACH and SLICES or TURNS of ``Product``.
        rest_bytes: what lies in shared memory.
        register_bytes: what lies in registers.
    """

    rows: int
    columns: int
    splits: int
    held: int
    each: int
    slices: int
    rest_bytes: int
    register_bytes: int


class _Writer:
    def __init__(self, program: Program, shape: ClusterShape) -> None:
        self.program, self.shape = program, shape
        self.shared = distribute(program, shape.blocks)
        # What products and sums are computed in.
        self.wide = program.states[0].value.type.dtype
        self.tiled = any(p.op.values[0].type.dtype != self.wide for p in self.shared.products)
        whole = replace(program, step=(Group(tuple(flat(program.step))),))
        self.storage = assign_storage(whole)
        self.sizes = sizes(self.shared)
        self.loops = (1, *self.sizes)
        self.names: dict[Value, str] = {}
        self.declared: dict[str, str] = {}
        self.bytes = _BARRIERS
        self.pushed = 0
        self.memory: list[str] = []
        self.layouts = self._lay_out()
        self.once: dict[int, list[str]] = {n: [] for n in self.loops}
        self.constants: set[str] = set()

    # Sizes

    def units(self, n: int) -> int:
        """The features of a block, of vectors of n."""
        return 1 if n == 1 else _round(-(-n // self.shape.blocks), _UNITS)

    def pairs(self, n: int) -> int:
        """The rows and features of a thread, of vectors of n."""
        return -(-self.units(n) * self.shape.rows // self.shape.threads)

    def _columns(self, product: SharedProduct) -> int:
        values = [s.value.type.size for s in product.segments]
        if product.gathered is None:
            return _round(sum(map(self.units, values)), COLUMNS)
        if product.op.values[0] is not product.segments[0].value and len(values) == 1:
            return _round(product.op.values[0].type.size, COLUMNS)
        return _round(sum(map(self.width, values)), COLUMNS)

    def width(self, n: int) -> int:
        """The columns of a vector of n in a gathered row, all blocks' features."""
        return _UNITS if n == 1 else self.units(n) * self.shape.blocks

    def _rows(self, product: SharedProduct) -> int:
        own = self.units if product.gathered else self.width
        return _round(sum(own(p.value.type.size) for p in product.parts), _TILE)

    def _lay_out(self) -> list[_Layout]:
        warps, most = self.shape.warps, max(map(self.pairs, self.loops))
        budget = {8: 160, 12: 112, 16: 80}.get(warps, 160) - 16 * min(most, 4)
        found = []
        for product in self.shared.products:
            m, k = self._rows(product), self._columns(product)
            if not self.tiled:
                splits = _power(4 * self.shape.threads // m, 8)
                each, slices = -(-m * splits // self.shape.threads), k // 4 // splits
                bytes_ = 4 * BYTES[self.wide] * each * self.shape.threads
                registers = each * BYTES[self.wide]
            else:
                tiles = m // _TILE
                splits = 1
                while 2 * splits * tiles <= warps and k // COLUMNS % (2 * splits) == 0:
                    splits *= 2
                each, slices = -(-tiles * splits // warps), k // COLUMNS // splits
                registers, bytes_ = 8 * each, 1024 * each * warps
            held = max(0, min(slices, budget // registers))
            budget -= held * registers
            found.append(
                _Layout(m, k, splits, held, each, slices, (slices - held) * bytes_, held * bytes_)
            )
        return found

    # Shared memory

    def allocate(self, name: str, type_: str, count: int, bytes_: int) -> None:
        """Declares an array in shared memory."""
        self.memory.append(
            f"{type_}* const {name} = reinterpret_cast<{type_}*>(shared + {self.bytes});"
        )
        self.bytes += _round(count * bytes_, 16)

    # Registers

    def name(self, value: Value) -> str:
        return self.names.setdefault(value, f"v{len(self.names)}")

    def register(self, value: Value, n: int) -> str:
        """The register of a value in the loop over vectors of n."""
        name = f"{self.name(value)}_{n}"
        if value.type.rate == "once":
            self._load_once(value, n, name)
        kind = TYPES[self.wide] if value in self.shared.parts else TYPES[value.type.dtype]
        self.declared[name] = f"{kind} {name}[{self.pairs(n)}];"
        return f"{name}[p]"

    def typed(self, value: Value, n: int) -> str:
        """The value in its own dtype: parts of products are in float32."""
        name, own = self.register(value, n), TYPES[value.type.dtype]
        return f"{own}({name})" if value in self.shared.parts else name

    def _load_once(self, value: Value, n: int, name: str) -> None:
        if name not in self.constants:
            self.constants.add(name)
            place = self.storage.homes[value].buffer.name
            self.once[n].append(f"{name}[p] = c.{place}[{'0' if value.type.size == 1 else 'j'}];")

    def _load(self, value: Value, n: int, step: str, to: str) -> str:
        source, start = self.shared.loads.get(value, (value, 0))
        buffer = self.storage.homes[source].buffer
        size, feature = source.type.size, "0" if value.type.size == 1 else "j"
        rows = "" if source.type.rate == "once" else f"({step} * B + row) * {size} + "
        return f"{to} = c.{buffer.name}[{rows}{feature} + {start}];"

    # Loops

    def loop(self, n: int, body: Iterable[str], stores: Iterable[str] = ()) -> list[str]:
        """A loop over the rows and features of a thread, of vectors of n.

        Args:
            body: is computed for all threads; those beyond the last row or feature repeat another.
            stores: what only a thread does that has a row and feature of its own.
        """
        stores = [f"  {line}" for line in stores]
        body = [*body, *(("if (owns) {", *stores, "}") if stores else ())]
        if not body:
            return []
        return [
            "#pragma unroll",
            f"for (int p = 0; p < {self.pairs(n)}; ++p) {{",
            f"  [[maybe_unused]] const int r = r_{n}[p], unit = unit_{n}[p];",
            f"  [[maybe_unused]] const int64_t row = first_row + r, j = j_{n}[p];",
            f"  [[maybe_unused]] const bool owns = owns_{n}[p];",
            *(f"  {line}" for line in body),
            "}",
        ]

    def _places(self, n: int) -> list[str]:
        """Where the rows and features of a thread are, of vectors of n."""
        units, pairs = self.units(n), self.pairs(n)
        first = "0" if n == 1 else f"rank * {units}"
        return [
            f"int r_{n}[{pairs}], unit_{n}[{pairs}], j_{n}[{pairs}];",
            f"bool owns_{n}[{pairs}];",
            "#pragma unroll",
            f"for (int p = 0; p < {pairs}; ++p) {{",
            f"  const int at = thread + p * THREADS, r = at / {units}, unit = at % {units};",
            f"  const int last = {'0' if n == 1 else f'max(min({units}, {n} - {first}) - 1, 0)'};",
            f"  owns_{n}[p] = r < rows && {first} + unit < {n} && unit <= last;",
            f"  r_{n}[p] = min(r, rows - 1), unit_{n}[p] = min(unit, last);",
            f"  j_{n}[p] = min({first} + unit_{n}[p], {n - 1});",
            "}",
        ]

    def _of(self, value: Value) -> Sequence[int]:
        """The loops in which a value has a register: all if it has one feature."""
        return self.loops if value.type.size == 1 else (value.type.size,)

    def compute(self, value: Value, n: int) -> Iterator[str]:
        """The statements that compute a value in the loop over vectors of n."""
        shared, register = self.shared, self.register(value, n)
        if value in shared.loads or value not in shared.made:
            return  # loaded before the phase
        op = shared.made[value]
        if value in shared.parts:
            yield from self._read_part(value, n, register)
        elif value in shared.reads:
            gathered, start = shared.reads[value]
            feature = "0" if value.type.size == 1 else "j"
            yield f"{register} = {self._place(gathered, f'({feature} + {start})', True)};"
        elif value in shared.reductions:
            index = list(shared.reductions).index(value)
            parity = self._parity(
                shared.reductions[value] + 1,
                shared.reductions[value],
                self.shape.blocks * self.shape.rows,
            )
            yield f"{register} = {initial(op)};"
            one = f"reduced{index}[{parity}k * ROWS + r]"
            yield f"for (int k = 0; k < C; ++k) {register} = {reduced(op, register, one)};"
        else:
            cast, feature = op.kind == "cast", "0" if value.type.size == 1 else "j"
            names = {v: self.register(v, n) if cast else self.typed(v, n) for v in op.values}
            yield f"{register} = {expression(op, names, feature)};"

    def _read_part(self, value: Value, n: int, register: str) -> Iterator[str]:
        product, start = self.shared.parts[value]
        index = self.shared.products.index(product)
        layout = self.layouts[index]
        column = self._part_column(product, value)
        alone = value.type.size == 1
        unit, feature = ("0", "0") if alone else ("unit", "j")
        if product.gathered:
            splits = layout.splits if self.tiled else 1
            terms = [
                f"y{index}[({s} * ROWS + r) * {layout.rows + 4} + {column} + {unit}]"
                for s in range(splits)
            ]
            yield f"{register} = {' + '.join(terms)};"
        else:
            size = self.units(n)
            parity = self._parity(product.exchange + 1, product.exchange, self._slots(product))
            first = f"{parity}{column * self.shape.rows}"
            place = f"sums{index}[{first} + (k * ROWS + r) * {size} + {unit}]"
            yield f"{register} = 0;"
            yield "#pragma unroll"
            yield f"for (int k = 0; k < C; ++k) {register} += {place};"
        if len(product.op.inputs) == 3:
            bias, wide = product.op.values[2], TYPES[self.wide]
            name = f"{self.name(bias)}_{n}_{start}"
            if name not in self.constants:
                self.constants.add(name)
                self.declared[name] = f"{wide} {name}[{self.pairs(n)}];"
                buffer = self.storage.homes[bias].buffer.name
                self.once[n].append(f"{name}[p] = {wide}(c.{buffer}[{start} + {feature}]);")
            yield f"{register} += {name}[p];"

    def _slots(self, product: SharedProduct) -> int:
        """The numbers that all blocks push to one."""
        return self.shape.rows * sum(self.width(p.value.type.size) for p in product.parts)

    def _part_column(self, product: SharedProduct, value: Value) -> int:
        """The first row of a part among the block's rows of the weights, or among all sums."""
        own = self.units if product.gathered else self.width
        before = 0
        for part in product.parts:
            if part.value is value:
                return before
            before += own(part.value.type.size)
        raise KeyError(value)

    def _parity(self, last_read: int, exchange: int, count: int) -> str:
        """The offset of the copy that this step uses, of memory that others write for the next."""
        if last_read - exchange < self.shared.exchanges:
            return ""
        return f"i % 2 * {count} + "

    def _copies(self, last_read: int, exchange: int) -> int:
        return 2 if self._parity(last_read, exchange, 1) else 1

    # Gathered vectors

    def stride(self, gathered: Gathered) -> int:
        """The elements of a gathered row."""
        row = _round(sum(self.width(s.value.type.size) for s in gathered.segments), COLUMNS)
        return row + _PADDING.get(gathered.dtype, 16)

    def _base(self, gathered: Gathered, index: int) -> int:
        return sum(self.width(s.value.type.size) for s in gathered.segments[:index])

    def _gathered(self, gathered: Gathered) -> str:
        """The pointer to this step's rows of a gathered vector."""
        index = self.shared.gathered.index(gathered)
        parity = self._parity(
            gathered.last_read, gathered.exchange, self.shape.rows * self.stride(gathered)
        )
        return f"(gathered{index} + {parity}0)" if parity else f"gathered{index}"

    def _place(self, gathered: Gathered, feature: str, read: bool) -> str:
        """A feature of a row of a gathered vector."""
        column = ""
        for index, segment in reversed(list(enumerate(gathered.segments))):
            base = self._base(gathered, index) - segment.start
            own = f"{feature} + {base}" if base else feature
            end = segment.start + segment.value.type.size
            column = f"{feature} < {end} ? {own} : {column}" if column else own
        return f"{self._gathered(gathered)}[r * {self.stride(gathered)} + ({column})]"

    def publish(self, phase: int, n: int) -> Iterator[str]:
        """Writes what others read of the loop over vectors of n to shared memory."""
        for gathered in self.shared.gathered:
            if gathered.exchange != phase:
                continue
            for index, segment in enumerate(gathered.segments):
                if segment.value.type.size == n:
                    column = self._base(gathered, index)
                    column = str(column) if n == 1 else f"{column} + rank * {self.units(n)} + unit"
                    place = f"{self._gathered(gathered)}[r * {self.stride(gathered)} + {column}]"
                    yield f"{place} = {self.typed(segment.value, n)};"
        for index, product in enumerate(self.shared.products):
            if product.gathered or product.exchange != phase:
                continue
            before = 0
            for segment in product.segments:
                size = segment.value.type.size
                if size == n:
                    stride = self._operand_stride(index)
                    place = f"x{index}[r * {stride} + {before} + unit]"
                    yield f"{place} = {self.typed(segment.value, n)};"
                before += self.units(size)
        for index, (value, exchange) in enumerate(self.shared.reductions.items()):
            operand = self.shared.made[value].values[0]
            if exchange == phase and operand.type.size == n:
                count = self.shape.rows * self.units(n)
                place = f"rows{index}[i % 2 * {count} + r * {self.units(n)} + unit]"
                yield f"{place} = {self.register(operand, n)};"

    def _operand_stride(self, index: int) -> int:
        dtype = self.shared.products[index].op.values[0].type.dtype
        return self.layouts[index].columns + _PADDING[dtype]

    # Memory of the call

    def store(self, phase: int, n: int) -> Iterator[str]:
        """Writes results of a phase to the sequences of the call."""
        for value, places in self.storage.stores.items():
            for place in places:
                for segment in self.shared.segments(value):
                    if self._stored_at(segment.value) == phase and segment.value.type.size == n:
                        yield from self._store(
                            segment.value, value.type.size, segment.start, place, n
                        )

    def _stored_at(self, value: Value) -> int:
        found = [k for k, phase in enumerate(self.shared.phases) if value in phase]
        return found[0] if found else 0  # a state

    def _store(self, value: Value, size: int, start: int, place: Location, n: int) -> Iterator[str]:
        buffer = place.buffer
        if buffer.kind not in ("sequence", "history"):
            return
        rows = offset(buffer, place.after, self.program.reverse)
        feature = str(start) if n == 1 else f"j + {start}"
        alone = "if (rank == 0) " if n == 1 else ""
        yield f"{alone}(c.{buffer.name}{rows})[row * {size} + {feature}] = {self.typed(value, n)};"

    def load(self, phase: int, n: int) -> Iterator[str]:
        """Loads what a phase reads of sequences; the first phase what the next step reads."""
        for value in self.shared.phases[phase]:
            if n in self._of(value) and (
                value in self.shared.loads or value not in self.shared.made
            ):
                if self.shared.loads.get(value, (value, 0))[0].type.rate == "once":
                    self._load_once_slice(value, n)
                    continue
                register = self.register(value, n)
                if phase:
                    yield self._load(value, n, "t", register)
                else:
                    following = f"{self.name(value)}_{n}_next"
                    own = TYPES[value.type.dtype]
                    self.declared[following] = f"{own} {following}[{self.pairs(n)}];"
                    yield self._load(value, n, "following", f"{following}[p]")

    def _load_once_slice(self, value: Value, n: int) -> None:
        register = self.register(value, n)
        if register not in self.constants:
            self.constants.add(register)
            self.once[n].append(self._load(value, n, "t", register))

    # The kernel

    def phase(self, k: int) -> Iterator[str]:
        """A phase: products whose operands have come, loops, and the exchange after it."""
        shared = self.shared
        products = [
            (i, p) for i, p in enumerate(shared.products) if p.gathered and p.exchange == k - 1
        ]
        for index, product in products:
            assert product.gathered is not None
            x = f"{self._gathered(product.gathered)} + {product.column}"
            strides = f"{self.stride(product.gathered)}, {self.layouts[index].rows + 4}"
            yield f"product{index}.multiply<{strides}>({x}, y{index}, rest{index});"
        if products:
            yield "__syncthreads();"
        for n in self.loops:
            values = [v for v in shared.phases[k] if n in self._of(v)]
            body = [line for value in values for line in self.compute(value, n)]
            yield from self.loop(n, body, self.publish(k, n) if k < shared.exchanges else ())
        if k < shared.exchanges:
            yield from self.exchange(k)
        else:
            for n in self.loops:
                yield from self.loop(n, (), self.store(k, n))

    def exchange(self, k: int) -> Iterator[str]:
        """The exchange after a phase. What nobody waits for is done while data travels."""
        shared, shape = self.shared, self.shape
        yield "__syncthreads();"
        scattered = [
            (i, p) for i, p in enumerate(shared.products) if not p.gathered and p.exchange == k
        ]
        for index, _ in scattered:
            strides = f"{self._operand_stride(index)}, {self.layouts[index].rows + 4}"
            yield f"product{index}.multiply<{strides}>(x{index}, y{index}, rest{index});"
        if scattered:
            yield "__syncthreads();"
        pushes, expected = [], 0
        for gathered in shared.gathered:
            if gathered.exchange != k or shape.blocks == 1:
                continue
            for i, segment in enumerate(gathered.segments):
                n, bytes_ = segment.value.type.size, BYTES[gathered.dtype]
                if n > 1:
                    units = self.units(n)
                    given = f"C, THREADS, ROWS, {units}, {self.stride(gathered)}"
                    start = (
                        f"{self._gathered(gathered)} + {self._base(gathered, i)} + rank * {units}"
                    )
                    pushes.append(f"push_rows<{given}>(exchanges, {start});")
                    expected += (shape.blocks - 1) * shape.rows * units * bytes_
        for index, product in scattered:
            layout = self.layouts[index]
            splits = layout.splits if self.tiled else 1
            for part in product.parts:
                units, column = (
                    self.units(part.value.type.size),
                    self._part_column(product, part.value),
                )
                parity = self._parity(k + 1, k, self._slots(product))
                given = f"C, THREADS, ROWS, {units}, {layout.rows + 4}, {splits}"
                to = f"sums{index} + {parity}{column * shape.rows}"
                pushes.append(f"push_sums<{given}>(exchanges, y{index} + {column}, {to});")
                expected += shape.blocks * shape.rows * units * BYTES[self.wide]
        for index, (value, at) in enumerate(shared.reductions.items()):
            if at != k:
                continue
            op = shared.made[value]
            n = op.values[0].type.size
            units, count = self.units(n), shape.rows * self.units(n)
            own, wide = f"min({units}, {n} - rank * {units})", TYPES[self.wide]
            parity = self._parity(k + 1, k, shape.blocks * shape.rows)
            combine = f"[]({wide} a, {wide} b) {{ return {reduced(op, 'a', 'b')}; }}"
            yield f"{wide} reduced_rows{index}[ROUNDS<THREADS, ROWS>];"
            yield (
                f"reduce_rows<THREADS, ROWS, {units}>(reduced_rows{index}, "
                f"rows{index} + i % 2 * {count}, {own}, {initial(op)}, {combine});"
            )
            pushes.append(
                f"push_reduced<C, THREADS, ROWS>(exchanges, reduced_rows{index}, "
                f"reduced{index} + {parity}0);"
            )
            expected += shape.blocks * shape.rows * BYTES[self.wide]
        alone = shape.blocks == 1
        self.pushed += expected
        if not alone and expected:
            yield f"exchanges.expect({expected});"
        yield from pushes
        for n in self.loops:
            yield from self.loop(n, (), self.store(k, n))
        last = k + 1 == shared.exchanges
        for n in self.loops:
            yield from self.loop(n, self.load(k + 1, n))
        if last:
            yield "if (i + 1 < T) {"
            for n in self.loops:
                yield from self.loop(n, self.load(0, n))
            yield "}"
        if alone:
            if any(push.startswith("push") for push in pushes):
                yield "__syncthreads();"
        else:
            yield "exchanges.wait();" if expected else "cluster_sync();"

    def advance(self, n: int) -> Iterator[str]:
        """Moves the next states, and what was loaded for the next step, to their registers."""
        following = [(s.value, s.next) for s in self.program.states if n in self._of(s.value)]
        for value, after in following:
            own = TYPES[value.type.dtype]
            yield f"const {own} {self.name(value)}_after = {self.typed(after, n)};"
        for value, _ in following:
            yield f"{self.register(value, n)} = {self.name(value)}_after;"
        for value in self.shared.phases[0]:
            name = f"{self.name(value)}_{n}_next"
            if n in self._of(value) and name in self.declared:
                yield f"{self.register(value, n)} = {name}[p];"

    def begin(self, n: int) -> Iterator[str]:
        """Reads the initial states."""
        for state, (buffer, *_) in zip(self.program.states, self.storage.initial, strict=True):
            if n in self._of(state.value):
                reverse = buffer.kind == "history" and self.program.reverse
                row = "((T - 1) * B + row)" if reverse else "row"
                feature = "0" if state.value.type.size == 1 else "j"
                place = f"c.{buffer.name}[{row} * {state.value.type.size} + {feature}]"
                yield f"{self.register(state.value, n)} = {place};"

    def end(self, n: int) -> Iterator[str]:
        """Writes the final states."""
        for state, buffers in zip(self.program.states, self.storage.initial, strict=True):
            for buffer in buffers:
                if buffer.kind == "state" and state.value.type.size == n:
                    alone = "if (rank == 0) " if n == 1 else ""
                    place = f"c.{buffer.name}[(T % 2 * B + row) * {n} + j]"
                    yield f"{alone}{place} = {self.register(state.value, n)};"

    def source(self) -> ClusterSource:
        self._declare_memory()
        steps = [line for k in range(self.shared.exchanges + 1) for line in self.phase(k)]
        first = [line for n in self.loops for line in self.loop(n, self.load(0, n))]
        moved = [line for n in self.loops for line in self.loop(n, self.advance(n))]
        states = [line for n in self.loops for line in self.loop(n, self.begin(n))]
        final = [line for n in self.loops for line in self.loop(n, (), self.end(n))]
        start = [line for n in self.loops for line in self.loop(n, self._first(n))]
        zeroed = self.bytes
        rests, weights = [], []
        for index, layout in enumerate(self.layouts):
            rests.append(
                f"uint4* const rest{index} = reinterpret_cast<uint4*>(shared + {self.bytes});"
            )
            self.bytes += layout.rest_bytes
            weights += self._load_weights(index)
        once = [line for n in self.loops for line in self.loop(n, self.once[n])]
        alone = self.shape.blocks == 1
        reverse = self.program.reverse
        following = f"const int64_t following = {'T - 1' if reverse else '0'};"
        text = [
            HEADER, "", "using namespace hoconv::recurrent;", "",
            "struct Call {", "  int64_t T, B, begin;", "  const int64_t* seed;",
            *(f"  {TYPES[b.type.dtype]}* {b.name};" for b in self.storage.buffers),
            "  char* scratch;", "};", "",
            f"constexpr int C = {self.shape.blocks}, ROWS = {self.shape.rows};",
            f"constexpr int THREADS = {self.shape.threads};",
            "", f'extern "C" __global__ void __launch_bounds__(THREADS, 1) {NAME}(const Call c) {{',
            *_indent(
                "extern __shared__ __align__(128) char shared[];",
                "const int64_t T = c.T, B = c.B;",
                "[[maybe_unused]] const int64_t seed = c.seed == nullptr ? 0 : *c.seed;",
                f"const int thread = threadIdx.x, rank = {'0' if alone else 'cluster_rank()'};",
                "const int64_t first_row = int64_t{blockIdx.x / C} * ROWS;",
                "const int rows = B - first_row < ROWS ? int(B - first_row) : ROWS;",
                *self.memory, *rests,
                f"for (int at = thread; at < {zeroed // 4}; at += THREADS)",
                "  reinterpret_cast<uint32_t*>(shared)[at] = 0;",
                *(line for n in self.loops for line in self._places(n)),
                *self._declare(),
                *weights, *once, *states,
                "if (T > 0) {", *_indent(following, *first, *start), "}",
                "__syncthreads();",
                "Exchanges exchanges;",
                *([] if alone else [
                    "exchanges.start(reinterpret_cast<uint64_t*>(shared));", "cluster_sync();"
                ]),
                "for (int64_t i = 0; i < T; ++i) {",
                *_indent(
                    f"[[maybe_unused]] const int64_t t = {'T - 1 - i' if reverse else 'i'};",
                    f"[[maybe_unused]] const int64_t following = t {'-' if reverse else '+'} 1;",
                    *steps, *moved,
                ),
                "}",
                *final,
                *([] if alone else ["cluster_sync();  // nobody leaves while others still push"]),
            ),
            "}",
        ]  # fmt: skip
        return ClusterSource(
            "\n".join(text) + "\n", self.shape, self.storage, self.shared.exchanges,
            sum(layout.register_bytes for layout in self.layouts),
            sum(layout.register_bytes + layout.rest_bytes for layout in self.layouts), self.bytes,
            self.pushed, *self._count_products(), max(map(self.pairs, self.loops)),
        )  # fmt: skip

    def _count_products(self) -> tuple[int, int]:
        """The tile products of a warp, and the plain products of a thread."""
        tiles = -(-self.shape.rows // 8)
        each = sum(layout.each * layout.slices for layout in self.layouts)
        return (2 * each * tiles, 0) if self.tiled else (0, 4 * each * self.shape.rows)

    def _first(self, n: int) -> Iterator[str]:
        for value in self.shared.phases[0]:
            name = f"{self.name(value)}_{n}_next"
            if n in self._of(value) and name in self.declared:
                yield f"{self.register(value, n)} = {name}[p];"

    def _declare(self) -> list[str]:
        kinds = []
        for index, product in enumerate(self.shared.products):
            layout = self.layouts[index]
            dtype = TYPES[product.op.values[0].type.dtype]
            sizes = f"{layout.rows}, {layout.columns}, ROWS, THREADS, {layout.splits}"
            given = f"{dtype}, {sizes}, {layout.held}"
            kinds.append(f"Product<{given}> product{index};")
        return [*kinds, *self.declared.values()]

    def _declare_memory(self) -> None:
        rows, shared = self.shape.rows, self.shared
        for index, gathered in enumerate(shared.gathered):
            own = TYPES[gathered.dtype]
            copies = self._copies(gathered.last_read, gathered.exchange)
            count = copies * rows * self.stride(gathered)
            self.allocate(f"gathered{index}", own, count, BYTES[gathered.dtype])
        wide, bytes_ = TYPES[self.wide], BYTES[self.wide]
        for index, product in enumerate(shared.products):
            layout, dtype = self.layouts[index], product.op.values[0].type.dtype
            splits = layout.splits if self.tiled else 1
            self.allocate(f"y{index}", wide, splits * rows * (layout.rows + 4), bytes_)
            if product.gathered is None:
                count = rows * self._operand_stride(index)
                self.allocate(f"x{index}", TYPES[dtype], count, BYTES[dtype])
                copies = self._copies(product.exchange + 1, product.exchange)
                self.allocate(f"sums{index}", wide, copies * self._slots(product), bytes_)
        for index, (value, exchange) in enumerate(shared.reductions.items()):
            n = shared.made[value].values[0].type.size
            self.allocate(f"rows{index}", wide, 2 * rows * self.units(n), bytes_)
            copies = self._copies(exchange + 1, exchange)
            self.allocate(f"reduced{index}", wide, copies * self.shape.blocks * rows, bytes_)

    def _load_weights(self, index: int) -> list[str]:
        product = self.shared.products[index]
        weight = product.op.values[1]
        buffer = self.storage.homes[weight].buffer.name
        m, k = product.op.result.type.size, product.op.values[0].type.size
        segments = [(s.start, s.value.type.size) for s in product.segments]
        if (
            product.gathered
            and product.segments[0].value is not product.op.values[0]
            and len(segments) == 1
        ):
            segments = [(0, k)]  # part of a gathered vector
        parts = [(p.start, p.value.type.size) for p in product.parts]
        strides = f"{k}, 1" if product.op.kind == "linear" else f"1, {m}"
        row = self._find(parts, "m", not product.gathered)
        column = self._find(segments, "k", bool(product.gathered))
        return [
            f"product{index}.load(c.{buffer}, {strides}, [=](int m) {{ return {row}; }},",
            f"    [=](int k) {{ return {column}; }}, rest{index});",
        ]

    def _find(self, ranges: Sequence[tuple[int, int]], at: str, whole: bool) -> str:
        """The feature at a place of the ranges, each a block's slice or `whole`; -1 for padding."""
        found, before = "-1", 0
        lines = []
        for start, n in ranges:
            width = self.width(n) if whole else self.units(n)
            feature = (
                f"{at} - {before}"
                if whole or n == 1
                else f"rank * {self.units(n)} + {at} - {before}"
            )
            lines.append((before + width, feature, start, n))
            before += width
        for end, feature, start, n in reversed(lines):
            found = f"{at} < {end} ? ({feature} < {n} ? {start} + {feature} : -1) : {found}"
        return found


def _indent(*lines: str) -> Iterator[str]:
    return (f"  {line}" for line in lines)


def _round(number: int, to: int) -> int:
    return -(-number // to) * to


def _power(number: int, most: int) -> int:
    """The largest power of two up to a number; at least 1, at most `most`."""
    found = 1
    while found * 2 <= min(number, most):
        found *= 2
    return found
