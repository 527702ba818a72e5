"""What the forward steps save for the backward ones, and what those compute again.

A minimum cut between what only the forward steps know (states, products, costly functions) and
what the backward steps read, weighed by the bytes of a row: everything behind the cut is computed
again by cheap functions from what is saved on it. The construction is that of the min-cut
partitioner of torch.compile (He and Yu, Transcending Runtime-Memory Tradeoffs, 2023).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterable

from hoconv.recurrent.ir.kinds import is_cheap
from hoconv.recurrent.ir.program import Op, Program, Value, flat

_ENDLESS = 1 << 60


def choose_saved(program: Program, needed: Iterable[Value]) -> list[Value]:
    """The values of the steps to save, so that the needed ones can be computed from them.

    Args:
        program: a forward program without groups.
        needed: values of rate ``step``, results of ops or states.
    """
    network = _Network()
    free = {v for _, v in program.sequences}  # kept for the gradients of weights anyway
    ops = list(flat(program.step))
    made_by = {op.result: op for op in ops}
    for value in {v for op in ops for v in (*op.values, op.result)} | set(needed):
        if value.type.rate == "once":
            continue
        cost = 0 if value in free else value.type.row_bytes
        network.connect((value, "in"), (value, "out"), cost)
        op = made_by.get(value)
        if op is None or not is_cheap(op.kind):
            network.connect("forward", (value, "in"), _ENDLESS)
        else:
            for source in op.values:
                network.connect((source, "out"), (value, "in"), _ENDLESS)
    for value in needed:
        network.connect((value, "out"), "backward", _ENDLESS)
    cut = network.cut("forward", "backward")
    saved = [value for value, side in cut if side == "in"]
    order = {value: i for i, value in enumerate([s.value for s in program.states] + [*made_by])}
    return sorted((v for v in saved if v in order), key=order.__getitem__)


def computed_again(program: Program, needed: Iterable[Value], saved: Iterable[Value]) -> list[Op]:
    """The ops of the forward steps that give the needed values, given the saved ones."""
    wanted, known = set(needed), set(saved)
    again = []
    for op in reversed(list(flat(program.step))):
        if op.result in wanted and op.result not in known:
            again.append(op)
            wanted.update(op.values)
    return again[::-1]


class _Network:
    """Maximum flow by shortest augmenting paths (Edmonds and Karp 1972)."""

    def __init__(self) -> None:
        self.capacity: dict[Hashable, dict[Hashable, int]] = defaultdict(dict)

    def connect(self, a: Hashable, b: Hashable, capacity: int) -> None:
        self.capacity[a][b] = capacity
        self.capacity[b].setdefault(a, 0)

    def cut(self, source: Hashable, sink: Hashable) -> list:
        """The nodes before the sink whose only way on is a full edge: the cut nearest to it."""
        while path := self._path(source, sink):
            flow = min(self.capacity[a][b] for a, b in path)
            for a, b in path:
                self.capacity[a][b] -= flow
                self.capacity[b][a] += flow
        reaching = {sink}
        queue = deque(reaching)
        while queue:
            b = queue.popleft()
            for a in self.capacity[b]:
                if a not in reaching and self.capacity[a][b] > 0:
                    reaching.add(a)
                    queue.append(a)
        return [
            a
            for a in self.capacity
            if a not in reaching
            and isinstance(a, tuple)
            and a[1] == "in"
            and (a[0], "out") in reaching
        ]

    def _path(self, source: Hashable, sink: Hashable) -> list[tuple[Hashable, Hashable]]:
        came: dict[Hashable, Hashable] = {source: source}
        queue = deque([source])
        while queue and sink not in came:
            a = queue.popleft()
            for b, left in self.capacity[a].items():
                if left > 0 and b not in came:
                    came[b] = a
                    queue.append(b)
        path, node = [], sink
        while node in came and node != source:
            path.append((came[node], node))
            node = came[node]
        return path if sink in came else []
