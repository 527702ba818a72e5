"""Registers of a thread of a cluster, for its features of its rows, and loops over these.

B batch, t the time step that is computed, r a row of the cluster, row the same row in the batch,
j a feature, unit the same feature in the block, n features of a vector, p a pair of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from hoconv.recurrent.codegen.cluster.layout import ClusterLayout
from hoconv.recurrent.codegen.expressions import TYPES
from hoconv.recurrent.codegen.storage import Storage
from hoconv.recurrent.ir.program import Value

# The rates of values that are loaded before the first step: those of parameters and constants.
LOADED_ONCE = ("once", "constant")


class Threads:
    """The registers of a kernel's threads.

    Attributes:
        declared: the declarations of registers.
        once: of the loops over vectors of n: what loads registers before the first step.
    """

    def __init__(self, layout: ClusterLayout, storage: Storage) -> None:
        self.layout, self.storage = layout, storage
        self.shared, self.loops = layout.shared, layout.loops
        self.wide = TYPES[layout.wide]
        self.names: dict[Value, str] = {}
        self.declared: dict[str, str] = {}
        self.once: dict[int, dict[str, str]] = {n: {} for n in self.loops}

    def name(self, value: Value) -> str:
        """The start of the names of a value's registers."""
        return self.names.setdefault(value, f"v{len(self.names)}")

    def register(self, value: Value, n: int) -> str:
        """The register of a value in the loop over vectors of n."""
        name = f"{self.name(value)}_{n}"
        if value.type.rate in LOADED_ONCE:
            self.once[n].setdefault(name, self.load(value, "t", f"{name}[p]"))
        return self.declare(TYPES[self.layout.register_dtype(value)], name, n)

    def following(self, value: Value, n: int) -> str:
        """The register of what the first phase of the next step reads of a sequence."""
        return self.declare(TYPES[value.type.dtype], f"{self.name(value)}_{n}_next", n)

    def typed(self, value: Value, n: int) -> str:
        """The value in its own dtype: parts of products are in the dtype of sums."""
        name, own = self.register(value, n), TYPES[value.type.dtype]
        return f"{own}({name})" if value in self.shared.parts else name

    def declare(self, own: str, name: str, n: int) -> str:
        """Declares a register of a type for each pair of a row and one of n features."""
        self.declared[name] = f"{own} {name}[{self.layout.pairs(n)}];"
        return f"{name}[p]"

    def loops_of(self, value: Value) -> Sequence[int]:
        """The loops in which a value may have a register: all if it has one feature."""
        return self.loops if value.type.size == 1 else (value.type.size,)

    def load(self, value: Value, step: str, to: str) -> str:
        """A statement that reads a value of a step from the memory of the call."""
        source, start = self.shared.loads.get(value, (value, 0))
        at = {"once": "", "constant": f"row * {source.type.size} + "}
        rows = at.get(source.type.rate, f"({step} * B + row) * {source.type.size} + ")
        buffer = self.storage.homes[source].buffer
        return f"{to} = c.{buffer.name}[{rows}{feature(value)} + {start}];"

    # Loops

    def loop(self, n: int, body: Iterable[str], stores: Iterable[str] = ()) -> list[str]:
        """A loop over the rows and features of a thread, of vectors of n.

        Args:
            body: is computed for all threads, of values of one feature for all of the warps that
                have a row; those beyond the last row or feature repeat another.
            stores: what only a thread does that has a row and feature of its own.
        """
        stores = [f"  {line}" for line in stores]
        body = [*body, *(("if (owns) {", *stores, "}") if stores else ())]
        if not body:
            return []
        warps = -(-self.layout.shape.rows // 32)
        return [
            *([f"if (thread < {32 * warps})"] if n == 1 else ["#pragma unroll"]),
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
        """Returns where the rows and features of a thread are, of vectors of n."""
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


def feature(value: Value) -> str:
    """The feature that a thread has of a value, in the loop over its features."""
    return "0" if value.type.size == 1 else "j"
