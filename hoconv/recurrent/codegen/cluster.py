"""Writes a loop as one CUDA kernel whose blocks keep the weights on the chip for all steps.

The blocks of a cluster share some rows of the batch. Each computes a slice of the features of every
vector (passes/distribute.py, cluster_layout.py): a thread has the same features of the same rows at
every step, so that states and what only their own features read stay in its registers.

B batch, T time steps, i the number of steps already done, t the time step that is computed, r a row
of the cluster, row the same row in the batch, j a feature, unit the same feature in the block, n
features of a vector.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from hoconv.recurrent.codegen.cluster_layout import ClusterLayout
from hoconv.recurrent.codegen.expressions import TYPES, expression, initial, reduced
from hoconv.recurrent.codegen.steps import offset
from hoconv.recurrent.codegen.storage import Location, Storage, assign_storage
from hoconv.recurrent.ir.program import Group, Op, Value, flat
from hoconv.recurrent.passes.distribute import Gathered, SharedProduct
from hoconv.recurrent.passes.sums import SPREAD

HEADER = '#include "recurrent/cluster.cuh"'
NAME = "run_cluster"


@dataclass(frozen=True, eq=False)
class ClusterSource:
    """A kernel that runs all steps; its argument is a ``Call``, as of ``CudaSource``."""

    text: str
    layout: ClusterLayout
    storage: Storage


def emit_cluster(layout: ClusterLayout) -> ClusterSource:
    """Writes a kernel for NVRTC."""
    return _Writer(layout).source()


class _Writer:
    def __init__(self, layout: ClusterLayout) -> None:
        self.layout, self.shared, self.shape = layout, layout.shared, layout.shape
        self.program, self.loops = layout.shared.program, layout.loops
        self.wide = TYPES[layout.wide]
        whole = replace(self.program, step=(Group(tuple(flat(self.program.step))),))
        self.storage = assign_storage(whole, keeps_states=True)
        self.names: dict[Value, str] = {}
        # The declarations of registers, and what is loaded into some before the first step.
        self.declared: dict[str, str] = {}
        self.once: dict[int, dict[str, str]] = {n: {} for n in self.loops}

    # Registers

    def name(self, value: Value) -> str:
        return self.names.setdefault(value, f"v{len(self.names)}")

    def register(self, value: Value, n: int) -> str:
        """The register of a value in the loop over vectors of n."""
        name = f"{self.name(value)}_{n}"
        if value.type.rate == "once":
            self.once[n].setdefault(name, self._load(value, "t", f"{name}[p]"))
        own = self.wide if value in self.shared.parts else TYPES[value.type.dtype]
        return self._declare(own, name, n)

    def following(self, value: Value, n: int) -> str:
        """The register of what the first phase of the next step reads of a sequence."""
        return self._declare(TYPES[value.type.dtype], f"{self.name(value)}_{n}_next", n)

    def typed(self, value: Value, n: int) -> str:
        """The value in its own dtype: parts of products are in the dtype of sums."""
        name, own = self.register(value, n), TYPES[value.type.dtype]
        return f"{own}({name})" if value in self.shared.parts else name

    def _declare(self, own: str, name: str, n: int) -> str:
        self.declared[name] = f"{own} {name}[{self.layout.pairs(n)}];"
        return f"{name}[p]"

    def loops_of(self, value: Value) -> Sequence[int]:
        """The loops in which a value has a register: all if it has one feature."""
        return self.loops if value.type.size == 1 else (value.type.size,)

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
            f"for (int p = 0; p < {self.layout.pairs(n)}; ++p) {{",
            f"  [[maybe_unused]] const int r = r_{n}[p], unit = unit_{n}[p];",
            f"  [[maybe_unused]] const int64_t row = first_row + r, j = j_{n}[p];",
            f"  [[maybe_unused]] const bool owns = owns_{n}[p];",
            *(f"  {line}" for line in body),
            "}",
        ]

    def all_loops(
        self, body: Callable[[int], Iterable[str]], stores: Callable[[int], Iterable[str]]
    ) -> list[str]:
        """The loops over vectors of all sizes."""
        return [line for n in self.loops for line in self.loop(n, body(n), stores(n))]

    def places(self, n: int) -> list[str]:
        """Where the rows and features of a thread are, of vectors of n."""
        units, pairs = self.layout.units(n), self.layout.pairs(n)
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

    # What a phase computes

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
            yield f"{register} = {self._element(gathered, f'({_feature(value)} + {start})')};"
        elif value in shared.reductions:
            yield f"{register} = {self._whole(value)}[r];"
        else:
            # A cast takes sums of products as they are.
            name = self.register if op.kind == "cast" else self.typed
            names = {v: name(v, n) for v in op.values}
            yield f"{register} = {expression(op, names, _feature(value))};"

    def _read_part(self, value: Value, n: int, register: str) -> Iterator[str]:
        product, start = self.shared.parts[value]
        index = self.shared.products.index(product)
        row = self.layout.part_row(product, value)
        unit = "0" if value.type.size == 1 else "unit"
        if product.gathered:
            stride = self.layout.slices[index].stride
            sums = (
                f"y{index}[({s} * ROWS + r) * {stride} + {row} + {unit}]"
                for s in range(self.layout.count_sums(index))
            )
            yield f"{register} = {' + '.join(sums)};"
        else:
            copy = self._copy(
                product.exchange, product.exchange + 1, self.layout.count_partial(product)
            )
            units = self.layout.units(value.type.size)
            first = f"{copy} + {row * self.shape.rows}"
            yield f"{register} = 0;"
            yield "#pragma unroll"
            yield (
                f"for (int k = 0; k < C; ++k) "
                f"{register} += sums{index}[{first} + (k * ROWS + r) * {units} + {unit}];"
            )
        if len(product.op.inputs) == 3:
            bias = product.op.values[2]
            name, buffer = f"{self.name(bias)}_{n}_{start}", self.storage.homes[bias].buffer
            given = f"{self.wide}(c.{buffer.name}[{_feature(value)} + {start}])"
            self.once[n].setdefault(name, f"{name}[p] = {given};")
            yield f"{register} += {self._declare(self.wide, name, n)};"

    def _copy(self, exchange: int, last_read: int, count: int) -> str:
        """The first element of this step's copy of what is pushed in an exchange."""
        return f"i % 2 * {count}" if self.layout.copies(exchange, last_read) == 2 else "0"

    # What blocks exchange

    def _gathered(self, gathered: Gathered) -> str:
        """The first element of this step's rows of a gathered vector."""
        index = self.shared.gathered.index(gathered)
        count = self.shape.rows * self.layout.gathered_stride(gathered)
        return f"gathered{index} + {self._copy(gathered.exchange, gathered.last_read, count)}"

    def _element(self, gathered: Gathered, feature: str) -> str:
        """A feature of row r of a gathered vector."""
        column = ""
        for index, segment in reversed(list(enumerate(gathered.segments))):
            own = f"{feature} + {self.layout.segment_column(gathered, index) - segment.start}"
            end = segment.start + segment.value.type.size
            column = f"{feature} < {end} ? {own} : {column}" if column else own
        stride = self.layout.gathered_stride(gathered)
        return f"({self._gathered(gathered)})[r * {stride} + ({column})]"

    def publish(self, phase: int, n: int) -> Iterator[str]:
        """Writes what others read of the loop over vectors of n to shared memory."""
        layout, shared = self.layout, self.shared
        unit = "" if n == 1 else f" + rank * {layout.units(n)} + unit"
        for gathered in shared.gathered:
            for index, segment in enumerate(gathered.segments):
                if gathered.exchange == phase and segment.value.type.size == n:
                    column = f"{layout.segment_column(gathered, index)}{unit}"
                    place = f"r * {layout.gathered_stride(gathered)} + {column}"
                    value = self.typed(segment.value, n)
                    yield f"({self._gathered(gathered)})[{place}] = {value};"
        for index, product in self._scattered(phase):
            before = 0
            for segment in product.segments:
                if segment.value.type.size == n:
                    place = f"r * {layout.operand_stride(index)} + {before} + unit"
                    yield f"x{index}[{place}] = {self.typed(segment.value, n)};"
                before += layout.units(segment.value.type.size)
        for index, op in self._reduced(phase):
            if op.values[0].type.size == n and op.kind != SPREAD:
                place = f"i % 2 * {self._count_units(n)} + r * {layout.units(n)} + unit"
                yield f"rows{index}[{place}] = {self.register(op.values[0], n)};"

    def _scattered(self, exchange: int) -> list[tuple[int, SharedProduct]]:
        """The products of which blocks add up partial results in an exchange."""
        found = enumerate(self.shared.products)
        return [(i, p) for i, p in found if p.gathered is None and p.exchange == exchange]

    def _reduced(self, exchange: int) -> list[tuple[int, Op]]:
        """The reductions of rows in an exchange."""
        found = enumerate(self.shared.reductions.items())
        return [(i, self.shared.made[value]) for i, (value, at) in found if at == exchange]

    def _count_units(self, n: int) -> int:
        return self.shape.rows * self.layout.units(n)

    def _multiply(self, index: int, x: str, x_stride: int) -> str:
        strides = f"{x_stride}, {self.layout.slices[index].stride}"
        return f"product{index}.multiply<{strides}>({x}, y{index}, rest{index}, far{index});"

    def _pushes(self, k: int) -> Iterator[str]:
        """What a block sends in an exchange."""
        layout, shared = self.layout, self.shared
        for gathered in shared.gathered if self.shape.blocks > 1 else ():
            for index, segment in enumerate(gathered.segments):
                n = segment.value.type.size
                if gathered.exchange == k and n > 1:
                    units = layout.units(n)
                    given = f"C, THREADS, ROWS, {units}, {layout.gathered_stride(gathered)}"
                    column = f"{layout.segment_column(gathered, index)} + rank * {units}"
                    start = f"{self._gathered(gathered)} + {column}"
                    yield f"push_rows<{given}>(exchanges, {start});"
        for index, product in self._scattered(k):
            copy = self._copy(k, k + 1, layout.count_partial(product))
            for part in product.parts:
                row = layout.part_row(product, part.value)
                sizes = f"{layout.units(part.value.type.size)}, {layout.slices[index].stride}"
                given = f"C, THREADS, ROWS, {sizes}, {layout.count_sums(index)}"
                to = f"sums{index} + {copy} + {row * self.shape.rows}"
                yield f"push_sums<{given}>(exchanges, y{index} + {row}, {to});"
        for index, op in self._reduced(k):
            to = self._parts(op.result)
            yield f"push_reduced<C, THREADS, ROWS>(exchanges, totals{index}, {to});"

    def _reduce(self, k: int) -> Iterator[str]:
        """Reduces a block's own features of rows, before any is sent: they do not wait in turn."""
        values = list(self.shared.reductions)
        for index, op in self._reduced(k):
            n = op.values[0].type.size
            units = self.layout.units(n)
            own = f"min({units}, {n} - rank * {units})"
            rows = f"rows{values.index(op.values[1]) if op.kind == SPREAD else index}"
            given = f"totals{index}, {rows} + i % 2 * {self._count_units(n)}, {own}"
            yield f"{self.wide} totals{index}[ROUNDS<THREADS, ROWS>];"
            if op.kind == SPREAD:
                yield f"spread_rows<THREADS, ROWS, {units}>({given});"
                continue
            given += f", {initial(op)}, {self._function(op)}"
            yield f"reduce_rows<THREADS, ROWS, {units}>({given});"

    def _combine(self, k: int) -> Iterator[str]:
        """Combines what blocks have reduced their own features of rows to in an exchange."""
        values = list(self.shared.reductions)
        for index, op in self._reduced(k) if self.shape.blocks > 1 else ():
            parts, whole = self._parts(op.result), self._whole(op.result)
            if op.kind == SPREAD:
                x, total = op.values
                sizes = f"C, THREADS, ROWS, {self.layout.units(x.type.size)}, {x.type.size}"
                given = f"totals{values.index(total)}, {parts}, {self._parts(total)}, {whole}"
                yield f"combine_spreads<{sizes}>({given});"
                continue
            given = f"totals{index}, {parts}, {whole}, {initial(op)}, {self._function(op)}"
            yield f"combine_rows<C, THREADS, ROWS>({given});"

    def _parts(self, value: Value) -> str:
        """What each block has reduced its own features of each row to in this step."""
        index, exchange = list(self.shared.reductions).index(value), self.shared.reductions[value]
        copy = self._copy(exchange, exchange + 1, self.shape.blocks * self.shape.rows)
        return f"(reduced{index} + {copy})"

    def _whole(self, value: Value) -> str:
        """What each row is reduced to in this step."""
        if self.shape.blocks == 1:
            return self._parts(value)
        return f"whole{list(self.shared.reductions).index(value)}"

    def _function(self, op: Op) -> str:
        return f"[]({self.wide} a, {self.wide} b) {{ return {reduced(op, 'a', 'b')}; }}"

    # Memory of the call

    def store(self, phase: int, n: int) -> Iterator[str]:
        """Writes results of a phase to the sequences of the call."""
        for value, places in self.storage.stores.items():
            for segment in self.shared.segments(value):
                if segment.value.type.size == n and self._phase_of(segment.value) == phase:
                    for place in places:
                        yield from self._store(segment.value, value, segment.start, place)

    def _phase_of(self, value: Value) -> int:
        found = (k for k, phase in enumerate(self.shared.phases) if value in phase)
        return next(found, 0)  # the first for a state

    def _store(self, part: Value, value: Value, start: int, place: Location) -> Iterator[str]:
        buffer, n = place.buffer, part.type.size
        if buffer.kind in ("sequence", "history"):
            rows = offset(buffer, place.after, self.program.reverse)
            alone = "if (rank == 0) " if n == 1 else ""
            feature = f"row * {value.type.size} + {_feature(part)} + {start}"
            yield f"{alone}(c.{buffer.name}{rows})[{feature}] = {self.typed(part, n)};"

    def load(self, phase: int, n: int) -> Iterator[str]:
        """Loads what a phase reads of sequences; the first phase what the next step reads."""
        for value in self.shared.phases[phase]:
            source, _ = self.shared.loads.get(value, (value, 0))
            if n not in self.loops_of(value) or (source is value and value in self.shared.made):
                continue
            if source.type.rate == "once":
                register = self.register(value, n)
                self.once[n].setdefault(register, self._load(value, "t", register))
            elif phase:
                yield self._load(value, "t", self.register(value, n))
            else:
                yield self._load(value, "following", self.following(value, n))

    def _load(self, value: Value, step: str, to: str) -> str:
        source, start = self.shared.loads.get(value, (value, 0))
        rows = "" if source.type.rate == "once" else f"({step} * B + row) * {source.type.size} + "
        buffer = self.storage.homes[source].buffer
        return f"{to} = c.{buffer.name}[{rows}{_feature(value)} + {start}];"

    def begin(self, n: int) -> Iterator[str]:
        """Reads the initial states."""
        for state, buffer in zip(self.program.states, self.storage.first, strict=True):
            if n in self.loops_of(state.value):
                place = (
                    f"row * c.{buffer.name}_row + {_feature(state.value)} * c.{buffer.name}_column"
                )
                yield f"{self.register(state.value, n)} = c.{buffer.name}[{place}];"

    def keep_first(self, n: int) -> Iterator[str]:
        """Writes the initial states that are saved."""
        for state, buffer in zip(self.program.states, self.storage.states, strict=True):
            if buffer.kind == "history":
                row = "((T - 1) * B + row)" if self.program.reverse else "row"
                yield from self._keep(state.value, f"c.{buffer.name}[{row}", n)

    def end(self, n: int) -> Iterator[str]:
        """Writes the final states."""
        for state, buffer in zip(self.program.states, self.storage.last, strict=True):
            yield from self._keep(state.value, f"c.{buffer.name}[row", n)

    def _keep(self, state: Value, row: str, n: int) -> Iterator[str]:
        if state.type.size == n:
            alone = "if (rank == 0) " if n == 1 else ""
            yield f"{alone}{row} * {n} + {_feature(state)}] = {self.register(state, n)};"

    # The kernel

    def phase(self, k: int) -> Iterator[str]:
        """A phase: products whose operands have come, loops, and the exchange after it."""
        ready = [
            (index, product.gathered, product.column)
            for index, product in enumerate(self.shared.products)
            if product.gathered and product.exchange == k - 1
        ]
        for index, gathered, column in ready:
            x = f"{self._gathered(gathered)} + {column}"
            yield self._multiply(index, x, self.layout.gathered_stride(gathered))
        combined = list(self._combine(k - 1))
        yield from combined
        if ready or combined:
            yield "__syncthreads();"
        values = self.shared.phases[k]
        last = k == self.shared.exchanges
        yield from self.all_loops(
            lambda n: (
                line for v in values if n in self.loops_of(v) for line in self.compute(v, n)
            ),
            lambda n: () if last else self.publish(k, n),
        )
        if last:
            yield from self.all_loops(lambda _: (), lambda n: self.store(k, n))
        else:
            yield from self.exchange(k)

    def exchange(self, k: int) -> Iterator[str]:
        """The exchange after a phase. What nobody waits for is done while data travels."""
        yield "__syncthreads();"
        scattered = self._scattered(k)
        for index, _ in scattered:
            yield self._multiply(index, f"x{index}", self.layout.operand_stride(index))
        if scattered:
            yield "__syncthreads();"
        yield from self._reduce(k)
        pushes = list(self._pushes(k))
        yield from pushes
        yield from self.all_loops(lambda n: self.load(k + 1, n), lambda n: self.store(k, n))
        if k + 1 == self.shared.exchanges:
            yield "if (i + 1 < T) {"
            yield from self.all_loops(lambda n: self.load(0, n), lambda _: ())
            yield "}"
        if self.shape.blocks > 1:
            waits = self.layout.expected_bytes(k)
            yield f"exchanges.wait({self._count_bytes(k, 2)});" if waits else "cluster_sync();"
        elif pushes:
            yield "__syncthreads();"

    def _count_bytes(self, exchange: int, ahead: int) -> int:
        """The bytes of the exchange so many ahead, of those that have any; 0 of none."""
        all_bytes = list(map(self.layout.expected_bytes, range(self.shared.exchanges)))
        counted = [k for k, bytes in enumerate(all_bytes) if bytes]
        before = sum(k < exchange for k in counted)
        return all_bytes[counted[(before + ahead) % len(counted)]] if counted else 0

    def advance(self, n: int) -> Iterator[str]:
        """Moves the next states, and what was loaded for the next step, to their registers."""
        following = [(s.value, s.next) for s in self.program.states if n in self.loops_of(s.value)]
        for value, after in following:
            own = TYPES[value.type.dtype]
            yield f"const {own} {self.name(value)}_after = {self.typed(after, n)};"
        for value, _ in following:
            yield f"{self.register(value, n)} = {self.name(value)}_after;"
        yield from self.take_loaded(n)

    def take_loaded(self, n: int) -> Iterator[str]:
        """Moves what was loaded for the first phase of a step to its registers."""
        for value in self.shared.phases[0]:
            if n in self.loops_of(value) and f"{self.name(value)}_{n}_next" in self.declared:
                yield f"{self.register(value, n)} = {self.following(value, n)};"

    def source(self) -> ClusterSource:
        nothing: Callable[[int], Iterable[str]] = lambda _: ()  # noqa: E731
        steps = [line for k in range(self.shared.exchanges + 1) for line in self.phase(k)]
        first = self.all_loops(lambda n: self.load(0, n), nothing)
        first += self.all_loops(self.take_loaded, nothing)
        steps += self.all_loops(self.advance, nothing)
        states = self.all_loops(self.begin, self.keep_first)
        final = self.all_loops(nothing, self.end)
        weights = [line for i in range(len(self.layout.slices)) for line in self._load_weights(i)]
        once = self.all_loops(lambda n: self.once[n].values(), nothing)
        alone, reverse = self.shape.blocks == 1, self.program.reverse
        text = [
            HEADER, "", "using namespace hoconv::recurrent;", "",
            "struct Call {", "  int64_t T, B, begin;", "  const int64_t* seed;",
            *(f"  {TYPES[b.type.dtype]}* {b.name};" for b in self.storage.buffers),
            "  char* scratch;",
            *(f"  int64_t {b.name}_row, {b.name}_column;" for b in self.storage.strided),
            "};", "",
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
                *self._name_memory(),
                f"for (int at = thread; at < {self.layout.array_bytes // 4}; at += THREADS)",
                "  reinterpret_cast<uint32_t*>(shared)[at] = 0;",
                *(line for n in self.loops for line in self.places(n)),
                *self._declare_products(), *self.declared.values(),
                *weights, *once, *states,
                "if (T > 0) {",
                *_indent(f"const int64_t following = {'T - 1' if reverse else '0'};", *first),
                "}",
                "__syncthreads();",
                "[[maybe_unused]] Exchanges exchanges;",
                *([] if alone else [
                    "exchanges.start(reinterpret_cast<uint64_t*>(shared), "
                    f"{self._count_bytes(0, 0)}, {self._count_bytes(0, 1)});",
                    "cluster_sync();",
                ]),
                "for (int64_t i = 0; i < T; ++i) {",
                *_indent(
                    f"[[maybe_unused]] const int64_t t = {'T - 1 - i' if reverse else 'i'};",
                    f"[[maybe_unused]] const int64_t following = t {'-' if reverse else '+'} 1;",
                    *steps,
                ),
                "}",
                *final,
                *([] if alone else ["cluster_sync();  // nobody leaves while others still push"]),
            ),
            "}",
        ]  # fmt: skip
        return ClusterSource("\n".join(text) + "\n", self.layout, self.storage)

    def _name_memory(self) -> Iterator[str]:
        for array in self.layout.arrays:
            own = TYPES[array.dtype]
            start = f"reinterpret_cast<{own}*>(shared + {array.first_byte})"
            yield f"{own}* const {array.name} = {start};"
        at, far = self.layout.array_bytes, 0
        own = f"c.scratch + int64_t{{blockIdx.x}} * {self.layout.far_bytes}"
        for index, each in enumerate(self.layout.slices):
            yield f"uint4* const rest{index} = reinterpret_cast<uint4*>(shared + {at});"
            yield f"uint4* const far{index} = reinterpret_cast<uint4*>({own} + {far});"
            at += each.shared_bytes
            far += each.far_bytes

    def _declare_products(self) -> Iterator[str]:
        for index, (product, each) in enumerate(zip(self.shared.products, self.layout.slices)):
            dtype = TYPES[product.op.values[0].type.dtype]
            sizes = f"{each.rows}, {each.columns}, ROWS, THREADS, {each.splits}"
            yield f"Product<{dtype}, {sizes}, {each.held}, {each.kept}> product{index};"

    def _load_weights(self, index: int) -> list[str]:
        product = self.shared.products[index]
        k = product.op.values[0].type.size
        segments = [(s.start, s.value.type.size) for s in product.segments]
        parts = [(p.start, p.value.type.size) for p in product.parts]
        row = self._find(parts, "m", whole=not product.gathered)
        column = self._find([(0, k)] if product.in_place else segments, "k",
                            whole=bool(product.gathered))  # fmt: skip
        buffer = self.storage.homes[product.op.values[1]].buffer
        strides = f"c.{buffer.name}_row", f"c.{buffer.name}_column"
        if product.op.kind != "linear":
            strides = strides[::-1]
        return [
            f"product{index}.load(c.{buffer.name}, {', '.join(strides)},",
            f"    [=](int m) {{ return {row}; }},",
            f"    [=](int k) {{ return {column}; }}, rest{index}, far{index});",
        ]

    def _find(self, ranges: Sequence[tuple[int, int]], at: str, whole: bool) -> str:
        """The feature at a place among ranges, of each a block's own part or the whole; else -1."""
        ends, end = [], 0
        for start, n in ranges:
            own = "" if whole or n == 1 else f"rank * {self.layout.units(n)} + "
            feature = f"{own}{at} - {end}"
            end += self.layout.width(n) if whole else self.layout.units(n)
            ends.append((end, f"({feature} < {n} ? {start} + {feature} : -1)"))
        found = "-1"
        for end, feature in reversed(ends):
            found = f"{at} < {end} ? {feature} : {found}"
        return found


def _feature(value: Value) -> str:
    return "0" if value.type.size == 1 else "j"


def _indent(*lines: str) -> Iterator[str]:
    return (f"  {line}" for line in lines)
