"""Groups the reductions of rows that blocks exchange together, so that all threads take part.

Threads share the rows and vectors of a group. What all groups of an exchange reduce a row to lies
side by side, and travels in vectors of 16 bytes.

n features of a vector.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from hoconv.recurrent.ir.program import BYTES, Op, Value
from hoconv.recurrent.passes.cluster.distribute import Distribution
from hoconv.recurrent.passes.cluster.sums import SPREAD

# Lanes that reduce a row of a vector together: many, unless threads then take turns.
_LANES = (8, 4)
_PUSHED_BYTES = 16


@dataclass(frozen=True, eq=False)
class ReductionGroup:
    """Reductions of vectors of one size by ops of one kind.

    Attributes:
        name: of the array of the block's own features, (vectors, rows, stride).
        op: one of the ops. A ``spread`` stands for itself and the sum of the same vector.
        vectors: what is reduced.
        column: where the results of the first vector lie; those of the others follow.
    """

    name: str
    op: Op
    vectors: tuple[Value, ...]
    column: int

    @property
    def width(self) -> int:
        """The results of a vector: the sum and the spread, or one."""
        return 2 if self.op.kind == SPREAD else 1

    @property
    def size(self) -> int:
        """n."""
        return self.vectors[0].type.size

    def lanes(self, rows: int, threads: int) -> int:
        """The lanes that reduce a row of a vector together."""
        jobs = len(self.vectors) * rows
        return next((n for n in _LANES if n * jobs <= threads), _LANES[-1])


@dataclass(frozen=True, eq=False)
class Reductions:
    """The results of the reductions of rows in one exchange.

    Attributes:
        groups: of all reductions.
        columns: where the result of each lies in a row of results.
        stride: the length of such a row.
    """

    groups: tuple[ReductionGroup, ...]
    columns: dict[Value, int]
    stride: int


def find_reductions(shared: Distribution, wide: str) -> dict[int, Reductions]:
    """The reductions of each exchange that has any.

    Args:
        wide: the dtype of their results.
    """
    spreads = [shared.made[v] for v in shared.reductions if shared.made[v].kind == SPREAD]
    with_spread = {op.values[1] for op in spreads}
    by_exchange: dict[int, dict[tuple[str, int], list[Op]]] = defaultdict(lambda: defaultdict(list))
    for result, exchange in shared.reductions.items():
        op = shared.made[result]
        if result not in with_spread:
            by_exchange[exchange][op.kind, op.values[0].type.size].append(op)
    return {exchange: _lay_out(exchange, kinds, wide) for exchange, kinds in by_exchange.items()}


def _lay_out(exchange: int, kinds: dict[tuple[str, int], list[Op]], wide: str) -> Reductions:
    groups: list[ReductionGroup] = []
    columns: dict[Value, int] = {}
    for ops in kinds.values():
        vectors = tuple(op.values[0] for op in ops)
        name = f"rows{exchange}_{len(groups)}"
        groups.append(ReductionGroup(name, ops[0], vectors, len(columns)))
        for op in ops:
            for result in (*op.values[1:], op.result):  # the sum first
                columns[result] = len(columns)
    each = _PUSHED_BYTES // BYTES[wide]
    return Reductions(tuple(groups), columns, -(-len(columns) // each) * each)
