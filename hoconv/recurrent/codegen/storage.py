"""Where the values of a program's steps are kept.

A value that leaves the kernel that makes it has a home in memory, from which everything else reads
it. A state has room for two steps, or, where what the steps read of it is saved, for all: then
nothing is copied to save it. A target may ask for homes that stay where they are from step to step:
a saved state is then written to both.

B batch, T time steps, n features.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hoconv.recurrent.ir.kinds import is_rowwise
from hoconv.recurrent.ir.program import Group, Op, Program, Type, Value, Yield

Kind = Literal["once", "sequence", "step", "state", "history"]


@dataclass(frozen=True, eq=False)
class Buffer:
    """Memory that a run is given.

    Attributes:
        name: an identifier.
        kind: ``once``, shaped as its type; ``sequence``, (T, B, n); ``step``, (B, n); ``state``,
            (2, B, n), of which steps take turns; ``history``, (T + 1, B, n): a state before step
            t in row t, and after the last step in row T.
        type: of its elements and features.
    """

    name: str
    kind: Kind
    type: Type

    def shape(self, T: int, B: int) -> tuple[int, ...]:
        """The shape of the tensor that it is, of T steps and B rows."""
        leading = {"sequence": (T, B), "step": (B,), "state": (2, B), "history": (T + 1, B)}
        return (*leading.get(self.kind, ()), *self.type.shape)


@dataclass(frozen=True)
class Place:
    """Rows in a buffer at the present step: those of a state before it, or `after` it."""

    buffer: Buffer
    after: bool = False


@dataclass(frozen=True, eq=False)
class Storage:
    """The buffers of a program's steps.

    Attributes:
        items: the step, everything but products in groups. The last group may be empty: it copies.
        homes: where a value is read from; parameters, sequences and states have one, too.
        stores: where the step writes a value, the home first.
        params, sequences, states, yields: buffers, in the order of the program's. A state and a
            yield may share one.
        initial: of each state: the buffers that hold it before the first step.
        temporaries: the other buffers, one for each value that is read by another item.
    """

    items: tuple[Op | Group, ...]
    homes: Mapping[Value, Place]
    stores: Mapping[Value, Sequence[Place]]
    params: tuple[Buffer, ...]
    sequences: tuple[Buffer, ...]
    states: tuple[Buffer, ...]
    yields: tuple[Buffer, ...]
    initial: tuple[tuple[Buffer, ...], ...]
    temporaries: tuple[Buffer, ...]

    @functools.cached_property
    def buffers(self) -> tuple[Buffer, ...]:
        """All of them, each once."""
        found = (*self.params, *self.sequences, *self.states, *self.yields, *self.temporaries)
        return tuple(dict.fromkeys(found))


def place(program: Program, fixed: Collection[Value] = ()) -> Storage:
    """Finds a home for every value that needs one.

    Args:
        fixed: values whose home is to be at the same address at every step, or, of a state, at
            every other one.
    """
    items = [
        item if isinstance(item, Group) or not is_rowwise(item.kind) else Group((item,))
        for item in program.step
    ]
    params = tuple(Buffer(f"param{i}", "once", p.value.type) for i, p in enumerate(program.params))
    sequences = tuple(
        Buffer(f"read{i}", "once" if v.type.rate == "once" else "sequence", v.type)
        for i, (_, v) in enumerate(program.sequences)
    )
    before = tuple(
        Buffer(f"made{i}", "once" if v.type.rate == "once" else "sequence", v.type)
        for i, v in enumerate(program.made_before)
    )
    saved = _saved_states(program)
    still = {s.value for s in program.states if s.value in fixed or s.next in fixed}
    states = tuple(
        Buffer(f"state{i}", "history" if s.value in saved.keys() - still else "state", s.value.type)
        for i, s in enumerate(program.states)
    )
    of_state = dict(zip((s.value for s in program.states), states))
    yields = tuple(
        of_state[y.source]
        if saved.get(y.source) is y and y.source not in still
        else Buffer(
            f"written{i}", "history" if saved.get(y.source) is y else "sequence", y.sequence.type
        )
        for i, y in enumerate(program.yields)
    )
    given = (*(p.value for p in program.params), *(v for _, v in program.sequences),
             *program.made_before)  # fmt: skip
    homes = {v: Place(b) for v, b in zip(given, (*params, *sequences, *before))}
    homes |= {s.value: Place(b) for s, b in zip(program.states, states)}

    stores: dict[Value, list[Place]] = defaultdict(list)
    kept: dict[Value, Buffer] = {}
    for each, buffer in zip(program.yields, yields):
        if buffer.kind == "history":
            kept[each.source] = buffer
        else:
            stores[each.source].append(Place(buffer))
    initial = tuple(
        tuple(dict.fromkeys((buffer, kept.get(state.value, buffer))))
        for state, buffer in zip(program.states, states)
    )
    for state, own in zip(program.states, initial):
        stores[state.next] += [Place(buffer, after=True) for buffer in own]

    readers: dict[Value, set[int]] = defaultdict(set)  # by their places among the items
    for i, item in enumerate(items):
        for value in _read(item):
            readers[value].add(i)
    temporaries = []
    for i, item in enumerate(items):
        for made in _results(item):
            elsewhere = bool(readers[made] - {i})
            if made in fixed:
                stores[made].sort(key=lambda place: place.buffer.kind != "state")
                homeless = [p.buffer.kind for p in stores[made][:1]] != ["state"]
            else:
                homeless = elsewhere and not stores[made]
            if homeless:
                temporaries.append(Buffer(f"step{len(temporaries)}", "step", made.type))
                stores[made].insert(0, Place(temporaries[-1]))
            if stores[made]:
                homes[made] = stores[made][0]
    items.append(Group(()))
    return Storage(tuple(items), homes, stores, params, (*sequences, *before), states, yields,
                   initial, tuple(temporaries))  # fmt: skip


def _saved_states(program: Program) -> dict[Value, Yield]:
    """Of each state that is written to a sequence as a step reads it: which yield does."""
    states = {s.value for s in program.states}
    return {y.source: y for y in program.yields if y.source in states}


def _results(item: Op | Group) -> list[Value]:
    return [op.result for op in (item.ops if isinstance(item, Group) else (item,))]


def _read(item: Op | Group) -> set[Value]:
    return {v for op in (item.ops if isinstance(item, Group) else (item,)) for v in op.values}
