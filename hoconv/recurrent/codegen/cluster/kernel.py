"""Writes a loop as one CUDA kernel whose blocks keep the weights on the chip for all steps.

The blocks of a cluster, or of a team of two, share some rows of the batch. Each computes a slice of
the features of every vector (passes/cluster/distribute.py, layout.py): a thread has the same
features of the same rows at every step, so that states and what only their own features read stay
in its registers. The order of the steps is an argument: one launch may run both directions of a
layer.

B batch, T time steps, i the number of steps already done, t the time step that is computed, r a row
of the team, row the same row in the batch, j a feature, unit the same feature in the block, n
features of a vector.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from hoconv.recurrent.codegen.cluster.exchanges import Exchanges
from hoconv.recurrent.codegen.cluster.layout import ClusterLayout
from hoconv.recurrent.codegen.cluster.threads import LOADED_ONCE, Threads, feature
from hoconv.recurrent.codegen.expressions import TYPES, expression
from hoconv.recurrent.codegen.storage import Location, Storage, assign_storage
from hoconv.recurrent.ir.program import Group, Value, flat

HEADER = '#include "recurrent/cluster.cuh"'
NAME = "run_cluster"


@dataclass(frozen=True, eq=False)
class ClusterSource:
    """A kernel that runs all steps of `runs` runs at the same time.

    Its argument is a ``Call`` of each run, as of ``CudaSource``, whose third field is `first`: the
    time step to begin with, 0, or T - 1 where the last one is the first.
    """

    text: str
    layout: ClusterLayout
    storage: Storage
    runs: int


@dataclass(frozen=True)
class _Place:
    """The place of neighbouring features: `count` from `first` on, from place `begin` on."""

    begin: int
    first: str
    count: str


def emit_cluster(layout: ClusterLayout, runs: int = 1) -> ClusterSource:
    """Writes a kernel for NVRTC, for so many runs in one launch."""
    return _Writer(layout, runs).source()


class _Writer:
    def __init__(self, layout: ClusterLayout, runs: int) -> None:
        self.layout, self.shared, self.shape = layout, layout.shared, layout.shape
        self.runs = runs
        self.program, self.wide = layout.shared.program, TYPES[layout.wide]
        whole = replace(self.program, step=(Group(tuple(flat(self.program.step))),))
        self.storage = assign_storage(whole, keeps_states=True)
        self.threads = Threads(layout, self.storage)
        self.exchanges = Exchanges(self.threads)

    # What a phase computes

    def compute(self, value: Value, n: int) -> Iterator[str]:
        """The statements that compute a value in the loop over vectors of n."""
        shared, register = self.shared, self.threads.register(value, n)
        if value in shared.loads or value not in shared.made:
            return  # loaded before the phase
        if value.type.size < n:
            if value in shared.scalars:
                yield f"{register} = scalar{shared.scalars.index(value)}[r];"
            return
        op = shared.made[value]
        if value in shared.parts:
            yield from self._read_part(value, n, register)
        elif value in shared.reads:
            gathered, start = shared.reads[value]
            element = self.exchanges.element(gathered, f"({feature(value)} + {start})")
            yield f"{register} = {element};"
        elif value in shared.reductions:
            yield f"{register} = {self.exchanges.whole(value)};"
        else:
            # A cast takes sums of products as they are.
            name = self.threads.register if op.kind == "cast" else self.threads.typed
            names = {v: name(v, n) for v in op.values}
            yield f"{register} = {expression(op, names, feature(value))};"

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
            copy = self.exchanges.copy(
                product.exchange, product.exchange + 1, self.layout.count_partial(product)
            )
            units = self.layout.units(value.type.size)
            first = f"{copy} + {row * self.shape.rows}"
            place = f"sums{index}[{first} + (k * ROWS + r) * {units} + {unit}]"
            yield f"{register} = 0;"
            yield "#pragma unroll"
            yield f"for (int k = 0; k < C; ++k) {register} += {self.wide}({place});"
        if len(product.op.inputs) == 3:
            bias = product.op.values[2]
            name, buffer = f"{self.threads.name(bias)}_{n}_{start}", self.storage.homes[bias].buffer
            given = f"{self.wide}(c.{buffer.name}[{feature(value)} + {start}])"
            self.threads.once[n].setdefault(name, f"{name}[p] = {given};")
            yield f"{register} += {self.threads.declare(self.wide, name, n)};"

    def share(self, value: Value) -> str:
        """Writes a value of one feature to where threads that compute vectors read it."""
        return f"scalar{self.shared.scalars.index(value)}[r] = {self.threads.register(value, 1)};"

    # Memory of the call

    def store(self, phase: int, n: int, late: bool = False) -> Iterator[str]:
        """Writes results of a phase to the sequences of the call.

        Args:
            late: whether those of the step before, which are written when the first exchange of a
                step has begun: what the last phase computes, but not what it loads.
        """
        step, after = ("before", "t") if late else ("t", "after")
        for value, places in self.storage.stores.items():
            for segment in self.shared.segments(value):
                part = segment.value
                if part.type.size == n and self._phase_of(part) == phase:
                    last = phase == self.shared.exchanges and not self._is_loaded(part)
                    for place in places if last == late else ():
                        own = after if place.after else step
                        yield from self._store(part, value, segment.start, place, own)

    def _is_loaded(self, value: Value) -> bool:
        return value in self.shared.loads or value not in self.shared.made

    def _phase_of(self, value: Value) -> int:
        found = (k for k, phase in enumerate(self.shared.phases) if value in phase)
        return next(found, 0)  # the first for a state

    def _store(
        self, part: Value, value: Value, start: int, place: Location, step: str
    ) -> Iterator[str]:
        buffer, n = place.buffer, part.type.size
        if buffer.kind in ("sequence", "history"):
            alone = "if (rank == 0) " if n == 1 else ""
            column = f"({step} * B + row) * {value.type.size} + {feature(part)} + {start}"
            yield f"{alone}c.{buffer.name}[{column}] = {self.threads.typed(part, n)};"

    def load(self, phase: int, n: int) -> Iterator[str]:
        """Loads what a phase reads of sequences; the first phase what the next step reads."""
        for value in self.shared.phases[phase]:
            source, _ = self.shared.loads.get(value, (value, 0))
            if n not in self.threads.loops_of(value) or (
                source is value and value in self.shared.made
            ):
                continue
            if source.type.rate in LOADED_ONCE:
                register = self.threads.register(value, n)
                self.threads.once[n].setdefault(register, self.threads.load(value, "t", register))
            elif phase:
                yield self.threads.load(value, "t", self.threads.register(value, n))
            else:
                yield self.threads.load(value, "following", self.threads.following(value, n))

    def begin(self, n: int) -> Iterator[str]:
        """Reads the initial states."""
        for state, buffer in zip(self.program.states, self.storage.first, strict=True):
            if n in self.threads.loops_of(state.value):
                place = (
                    f"row * c.{buffer.name}_row + {feature(state.value)} * c.{buffer.name}_column"
                )
                yield f"{self.threads.register(state.value, n)} = c.{buffer.name}[{place}];"

    def keep_first(self, n: int) -> Iterator[str]:
        """Writes the initial states that are saved."""
        for state, buffer in zip(self.program.states, self.storage.states, strict=True):
            if buffer.kind == "history":
                yield from self._keep(state.value, f"c.{buffer.name}[(c.first * B + row)", n)

    def end(self, n: int) -> Iterator[str]:
        """Writes the final states."""
        for state, buffer in zip(self.program.states, self.storage.last, strict=True):
            yield from self._keep(state.value, f"c.{buffer.name}[row", n)

    def _keep(self, state: Value, row: str, n: int) -> Iterator[str]:
        if state.type.size == n:
            alone = "if (rank == 0) " if n == 1 else ""
            yield f"{alone}{row} * {n} + {feature(state)}] = {self.threads.register(state, n)};"

    # The kernel

    def phase(self, k: int) -> Iterator[str]:
        """A phase: products whose operands have come, loops, and the exchange after it."""
        ready = self._find_gathered(k - 1)
        for index in ready:
            yield from self.exchanges.multiply(index)
        combined = list(self.exchanges.combine(k - 1))
        yield from combined
        if ready or combined:
            yield "__syncthreads();"
        values = self.shared.phases[k]
        last = k == self.shared.exchanges
        for n in self.threads.loops:
            body = [
                line for v in values if n in self.threads.loops_of(v) for line in self.compute(v, n)
            ]
            scalars = [v for v in values if n == 1 and v in self.shared.scalars]
            stores = [*map(self.share, scalars), *(() if last else self.exchanges.publish(k, n))]
            yield from self.threads.loop(n, body, stores)
            if scalars:
                yield "__syncthreads();"
        if last:
            yield from self._store_all(k)
        else:
            yield from self.exchange(k)

    def _store_all(self, k: int, late: bool = False) -> list[str]:
        return self.threads.all_loops(lambda _: (), lambda n: self.store(k, n, late))

    def _load_all(self, k: int) -> Iterator[str]:
        """Loads what the phase after an exchange reads; in the last one for the next step, too."""
        yield from self.threads.all_loops(lambda n: self.load(k + 1, n), lambda _: ())
        if k + 1 == self.shared.exchanges:
            yield "if (i + 1 < T) {"
            yield from self.threads.all_loops(lambda n: self.load(0, n), lambda _: ())
            yield "}"

    def _find_gathered(self, exchange: int) -> list[int]:
        """The products whose operand is gathered in an exchange."""
        products = enumerate(self.shared.products)
        return [i for i, p in products if p.gathered and p.exchange == exchange]

    def exchange(self, k: int) -> Iterator[str]:
        """The exchange after a phase. What nobody waits for is done while data travels."""
        yield "__syncthreads();"
        yield from self.exchanges.posts(k, reduced=False)
        scattered = [index for index, _ in self.exchanges.scattered(k)]
        looks = list(self.exchanges.look(k))
        if scattered and looks:
            yield from (*self._load_all(k), *looks)
        for index in scattered:
            yield from self.exchanges.multiply_half(index)
        received = list(self.exchanges.receive(k))
        yield from received
        if received:
            yield "__syncthreads();"
        for index in scattered:
            yield from self.exchanges.multiply(index)
        if not all(map(self.layout.pushes_sums, scattered)):
            yield "__syncthreads();"
        yield from self.exchanges.pushes(k)
        reduced = list(self.exchanges.reduce(k))
        yield from reduced
        if reduced:
            yield "__syncthreads();"
        yield from self.exchanges.push_reduced(k)
        yield from self.exchanges.posts(k, reduced=True)
        if not (scattered and looks):
            yield from (*self._load_all(k), *looks)
        yield from self._store_all(k)
        if k == 0:
            last = self._store_all(self.shared.exchanges, late=True)
            yield from ("if (i > 0) {", *last, "}")
        if self.shape.blocks == 1:
            return
        first, *rest = self.exchanges.waits(k) or ["cluster_sync();"]
        yield first
        if rest:  # who gets what is relayed may push for the next round: be ready to count it
            yield "__syncthreads();"
        yield from self.exchanges.relay(k)
        if rest:
            for index in self._find_gathered(k):
                yield from self.exchanges.multiply_half(index)
        yield from rest

    def advance(self, n: int) -> Iterator[str]:
        """Moves the next states, and what was loaded for the next step, to their registers."""
        following = [
            (s.value, s.next) for s in self.program.states if n in self.threads.loops_of(s.value)
        ]
        for value, after in following:
            own = TYPES[value.type.dtype]
            yield f"const {own} {self.threads.name(value)}_after = {self.threads.typed(after, n)};"
        for value, _ in following:
            yield f"{self.threads.register(value, n)} = {self.threads.name(value)}_after;"
        yield from self.take_loaded(n)

    def take_loaded(self, n: int) -> Iterator[str]:
        """Moves what was loaded for the first phase of a step to its registers."""
        for value in self.shared.phases[0]:
            if (
                n in self.threads.loops_of(value)
                and f"{self.threads.name(value)}_{n}_next" in self.threads.declared
            ):
                yield f"{self.threads.register(value, n)} = {self.threads.following(value, n)};"

    def source(self) -> ClusterSource:
        nothing: Callable[[int], Iterable[str]] = lambda _: ()  # noqa: E731
        steps = [line for k in range(self.shared.exchanges + 1) for line in self.phase(k)]
        first = self.threads.all_loops(lambda n: self.load(0, n), nothing)
        first += self.threads.all_loops(self.take_loaded, nothing)
        steps += self.threads.all_loops(self.advance, nothing)
        states = self.threads.all_loops(self.begin, self.keep_first)
        final = self.threads.all_loops(nothing, self.end)
        weights = [line for i in range(len(self.layout.slices)) for line in self._load_weights(i)]
        once = self.threads.all_loops(lambda n: self.threads.once[n].values(), nothing)
        alone, together, team = self.shape.blocks == 1, self.runs > 1, self.shape.clusters > 1
        text = [
            HEADER, "", "using namespace hoconv::recurrent;", "",
            "struct Call {", "  int64_t T, B, first;", "  const int64_t* seed;",
            *(f"  {TYPES[b.type.dtype]}* {b.name};" for b in self.storage.buffers),
            "  char* scratch;",
            *(f"  int64_t {b.name}_row, {b.name}_column;" for b in self.storage.strided),
            "};", f"struct Calls {{ Call of[{self.runs}]; }};", "",
            f"constexpr int C = {self.shape.blocks}, MEMBERS = {self.shape.members};",
            f"constexpr int ROWS = {self.shape.rows}, THREADS = {self.shape.threads};",
            "", 'extern "C" __global__ void __launch_bounds__(THREADS, 1)',
            f"{NAME}(const __grid_constant__ Calls calls) {{",
            *_indent(
                f"const Call& c = calls.of[{'blockIdx.y' if together else '0'}];",
                "extern __shared__ __align__(128) char shared[];",
                "const int64_t T = c.T, B = c.B;",
                "[[maybe_unused]] const int64_t seed = c.seed == nullptr ? 0 : *c.seed;",
                f"const int thread = threadIdx.x, rank = {self._rank()};",
                *(["const int partner = (rank + C) % MEMBERS;"] if team else []),
                "const int64_t first_row = int64_t{blockIdx.x / MEMBERS} * ROWS;",
                "const int rows = B - first_row < ROWS ? int(B - first_row) : ROWS;",
                *self._name_memory(),
                f"for (int at = thread; at < {self.layout.array_bytes // 4}; at += THREADS)",
                "  reinterpret_cast<uint32_t*>(shared)[at] = 0;",
                *(line for n in self.threads.loops for line in self.threads.places(n)),
                *self._declare_products(), *self.threads.declared.values(),
                *weights, *once, *states,
                "if (T > 0) {",
                *_indent("const int64_t following = c.first;", *first),
                "}",
                "__syncthreads();",
                "[[maybe_unused]] Exchanges exchanges;",
                *([] if alone else [
                    "exchanges.start(reinterpret_cast<uint64_t*>(shared), "
                    f"{self.exchanges.count_bytes(0)}, {self.exchanges.count_bytes(1)});",
                    "cluster_sync();",
                ]),
                *(self._start_mail() if team else []),
                "for (int64_t i = 0; i < T; ++i) {",
                *_indent(
                    "[[maybe_unused]] const int64_t t = c.first ? c.first - i : i;",
                    "[[maybe_unused]] const int64_t following = c.first ? t - 1 : t + 1;",
                    "[[maybe_unused]] const int64_t after = i + 1 < T ? following : T;",
                    "[[maybe_unused]] const int64_t before = c.first ? t + 1 : t - 1;",
                    *steps,
                ),
                "}",
                "if (T > 0) {",
                *_indent(
                    "[[maybe_unused]] const int64_t before = c.first ? 0 : T - 1, t = T;",
                    *self._store_all(self.shared.exchanges, late=True),
                ),
                "}",
                *final,
                *([] if alone else ["cluster_sync();  // nobody leaves while others still push"]),
            ),
            "}",
        ]  # fmt: skip
        return ClusterSource("\n".join(text) + "\n", self.layout, self.storage, self.runs)

    def _rank(self) -> str:
        if self.shape.blocks == 1:
            return "0"
        before = "blockIdx.x / C * C % MEMBERS + " if self.shape.clusters > 1 else ""
        return f"{before}cluster_rank()"

    def _start_mail(self) -> Iterator[str]:
        boxes = self.layout.mail_bytes // 16
        for name, block in ("incoming", "blockIdx.x"), ("outgoing", "blockIdx.x - rank + partner"):
            place = f"reinterpret_cast<uint4*>(c.scratch) + int64_t{{{block}}} * {boxes}"
            yield f"uint4* const {name} = {place};"
        yield f"Mail mail = {{incoming, outgoing, {boxes // 2}, 1}};"

    def _name_memory(self) -> Iterator[str]:
        for array in self.layout.arrays:
            own = TYPES[array.dtype]
            start = f"reinterpret_cast<{own}*>(shared + {array.first_byte})"
            yield f"{own}* const {array.name} = {start};"
        at, far = self.layout.array_bytes, 0
        own = f"c.scratch + int64_t{{blockIdx.x}} * {self.layout.own_bytes}"
        if self.shape.clusters > 1:  # mailboxes come first
            own += f" + int64_t{{gridDim.x}} * {self.layout.mail_bytes}"
        if self.layout.room_bytes:
            yield f"char* const room = {own} + {self.layout.far_bytes};"
        for index, each in enumerate(self.layout.slices):
            yield f"uint4* const rest{index} = reinterpret_cast<uint4*>(shared + {at});"
            yield f"uint4* const far{index} = reinterpret_cast<uint4*>({own} + {far});"
            at += each.shared_bytes
            far += each.far_bytes

    def _declare_products(self) -> Iterator[str]:
        for index, (product, each) in enumerate(zip(self.shared.products, self.layout.slices)):
            dtype = TYPES[product.op.values[0].type.dtype]
            sizes = f"{each.rows}, {each.columns}, ROWS, THREADS, {each.splits}"
            sizes += f", {each.held}, {each.kept}"
            name = "Product"
            if not self.layout.tiled:
                name, sizes = "PlainProduct", f"{sizes}, {each.batch}"
            yield f"{name}<{dtype}, {sizes}> product{index};"

    def _load_weights(self, index: int) -> list[str]:
        product = self.shared.products[index]
        k = product.op.values[0].type.size
        segments = [(s.start, s.value.type.size) for s in product.segments]
        parts = [(p.start, p.value.type.size) for p in product.parts]
        if product.gathered:
            row = self._find("m", self._own(parts, "rank"))
            if self.layout.halves(product):
                half = self.layout.gathered_columns(product.gathered)
                columns = self._halves(segments, half, "{} / C * C", self.shape.blocks)
            else:
                columns = self._whole([(0, k)] if product.in_place else segments)
        else:
            row = self._find("m", self._own(parts, "rank / C * C", self.shape.blocks))
            columns = self._halves(segments, self.layout.own_columns(product), "{}")
        column = self._find("k", columns)
        buffer = self.storage.homes[product.op.values[1]].buffer
        strides = f"c.{buffer.name}_row", f"c.{buffer.name}_column"
        if product.op.kind != "linear":
            strides = strides[::-1]
        return [
            f"product{index}.load(c.{buffer.name}, {', '.join(strides)},",
            f"    [=](int m) {{ {row} }},",
            f"    [=](int k) {{ {column} }}, rest{index}, far{index});",
        ]

    def _whole(self, ranges: Sequence[tuple[int, int]]) -> Iterator[_Place]:
        """Returns where all features of ranges lie: each is its start and n."""
        begin = 0
        for start, n in ranges:
            yield _Place(begin, f"{start}", f"{n}u")
            begin += self.layout.width(n)

    def _own(
        self, ranges: Sequence[tuple[int, int]], rank: str, blocks: int = 1, begin: int = 0
    ) -> Iterator[_Place]:
        """Returns where the features of some blocks, the first of which has a rank, lie from
        `begin` on."""
        for start, n in ranges:
            units = self.layout.units(n)
            first = "0" if n == 1 else f"{rank} * {units}"
            count = "1u" if n == 1 else f"unsigned(max(min({blocks * units}, {n} - {first}), 0))"
            yield _Place(begin, f"{start} + {first}", count)
            begin += blocks * units

    def _halves(
        self, ranges: Sequence[tuple[int, int]], half: int, rank: str, blocks: int = 1
    ) -> Iterator[_Place]:
        """The same of a block or its cluster and then, from column `half` on, of its partner's."""
        yield from self._own(ranges, rank.format("rank"), blocks)
        if self.shape.clusters > 1:
            yield from self._own(ranges, rank.format("partner"), blocks, half)

    def _find(self, at: str, places: Iterable[_Place]) -> str:
        """Statements that return the feature at a place; -1 where none is there.

        They do not branch: loads of many places are on their way at the same time.
        """
        lines = ["int found = -1;"]
        for place in places:
            offset = f"{at} - {place.begin}"
            lines.append(
                f"found = unsigned({offset}) < {place.count} ? {place.first} + {offset} : found;"
            )
        return " ".join((*lines, "return found;"))


def _indent(*lines: str) -> Iterator[str]:
    return (f"  {line}" for line in lines)
