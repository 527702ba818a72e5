"""Assigns memory to the values of a program's steps.

A value that another kernel or product reads has a home: the location from which they read it.
A state has a buffer of two steps, which take turns (double buffering). A state that is saved for
the gradient has a buffer of all steps instead, so that saving it copies nothing. A target may ask
for homes at fixed addresses; a saved state then has both buffers, and is stored twice. A loop that
keeps its states itself reads the first and writes the last ones in buffers of their own.

B batch, T time steps, n features.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hoconv.recurrent.ir.kinds import PRODUCTS, is_rowwise
from hoconv.recurrent.ir.program import Group, Op, Program, Type, Value, Yield, count_segments, flat

Kind = Literal["once", "constant", "sequence", "step", "state", "history", "sparse"]


@dataclass(frozen=True, eq=False)
class Buffer:
    """A tensor that the time loop reads or writes.

    Attributes:
        name: an identifier.
        kind: ``once``, of the type's shape; ``constant``, (1, B, n); ``sequence``, (T, B, n);
            ``step``, (B, n); ``state``, (2, B, n), double buffered; ``history``, (T + 1, B, n):
            entry t is the state before step t, entry T the state after the last step; ``sparse``,
            the entries alone at which a segment of steps begins, in the order of the steps.
        type: dtype and features.
    """

    name: str
    kind: Kind
    type: Type

    def shape(self, T: int, B: int) -> tuple[int, ...]:
        """The shape of the tensor for T steps and B rows."""
        features = self.type.shape
        match self.kind:
            case "once":
                return features
            case "constant":
                return (1, B, *features)
            case "sequence":
                return (T, B, *features)
            case "step":
                return (B, *features)
            case "state":
                return (2, B, *features)
            case "history":
                return (T + 1, B, *features)
            case "sparse":
                return (count_segments(T), B, *features)


@dataclass(frozen=True)
class Location:
    """The rows of a buffer that the present step uses; of a state, those before or `after` it."""

    buffer: Buffer
    after: bool = False


@dataclass(frozen=True, eq=False)
class Storage:
    """The buffers of a program's steps.

    Attributes:
        items: the products of the step, and all other ops in groups. The last group may be empty;
            its kernel stores what no other kernel stores.
        homes: the location that readers use; parameters, sequences and states have one, too.
        stores: the locations to which the step writes a value, the home first.
        params, sequences, states, yields: buffers, in the order of the program's. A state and a
            yield may share one.
        initial: the buffers that hold each state before the first step.
        first, last: where the loop keeps the states: the buffers from which they are read before
            the first step, and to which they are written after the last.
        temporaries: the other buffers, one for each value that is read by another item.
        inner: the buffers that the loop itself has memory for.
        strided: the buffers of two dimensions whose tensors need not be contiguous.
    """

    items: tuple[Op | Group, ...]
    homes: Mapping[Value, Location]
    stores: Mapping[Value, Sequence[Location]]
    params: tuple[Buffer, ...]
    sequences: tuple[Buffer, ...]
    states: tuple[Buffer, ...]
    yields: tuple[Buffer, ...]
    initial: tuple[tuple[Buffer, ...], ...]
    first: tuple[Buffer, ...]
    last: tuple[Buffer, ...]
    temporaries: tuple[Buffer, ...]
    inner: tuple[Buffer, ...]
    strided: tuple[Buffer, ...]

    @functools.cached_property
    def buffers(self) -> tuple[Buffer, ...]:
        """All buffers that are tensors of their own, each once."""
        found = (*self.params, *self.sequences, *self.first, *self.last, *self.states, *self.yields,
                 *self.temporaries)  # fmt: skip
        return tuple(buffer for buffer in dict.fromkeys(found) if buffer not in self.inner)


def assign_storage(
    program: Program,
    fixed: Collection[Value] = (),
    keeps_states: bool = False,
) -> Storage:
    """Assigns a home to every value that needs one.

    Args:
        fixed: values whose home must have the same address at every step; of a state, at every
            second step.
        keeps_states: whether the loop keeps states and temporaries in memory of its own, and copies
            weights there, which need not be contiguous.
    """
    items = [
        item if isinstance(item, Group) or not is_rowwise(item.kind) else Group((item,))
        for item in program.step
    ]
    params = tuple(Buffer(f"param{i}", "once", p.value.type) for i, p in enumerate(program.params))
    sequences = tuple(
        Buffer(f"read{i}", _find_kind(v), v.type) for i, (_, v) in enumerate(program.sequences)
    )
    before = tuple(
        Buffer(f"made{i}", _find_kind(v), v.type) for i, v in enumerate(program.made_before)
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
    homes = {v: Location(b) for v, b in zip(given, (*params, *sequences, *before))}
    homes |= {s.value: Location(b) for s, b in zip(program.states, states)}

    stores: dict[Value, list[Location]] = defaultdict(list)
    kept: dict[Value, Buffer] = {}
    for each, buffer in zip(program.yields, yields):
        if buffer.kind == "history":
            kept[each.source] = buffer
        else:
            stores[each.source].append(Location(buffer))
    initial = tuple(
        tuple(dict.fromkeys((buffer, kept.get(state.value, buffer))))
        for state, buffer in zip(program.states, states)
    )
    for state, own in zip(program.states, initial):
        stores[state.next] += [Location(buffer, after=True) for buffer in own]

    readers: dict[Value, set[int]] = defaultdict(set)  # by the index of the item
    for i, item in enumerate(items):
        for value in _read(item):
            readers[value].add(i)
    temporaries = []
    for i, item in enumerate(items):
        for made in _results(item):
            elsewhere = bool(readers[made] - {i})
            if made in fixed:
                stores[made].sort(key=lambda location: location.buffer.kind != "state")
                homeless = [p.buffer.kind for p in stores[made][:1]] != ["state"]
            else:
                homeless = elsewhere and not stores[made]
            if homeless:
                temporaries.append(Buffer(f"step{len(temporaries)}", "step", made.type))
                stores[made].insert(0, Location(temporaries[-1]))
            if stores[made]:
                homes[made] = stores[made][0]
    items.append(Group(()))
    first, last = (
        tuple(Buffer(f"{name}{i}", "step", s.value.type) for i, s in enumerate(program.states))
        if keeps_states
        else ()
        for name in ("first", "last")
    )
    weights = [op.values[1] for op in flat(program.step) if op.kind in PRODUCTS]
    read = dict.fromkeys(homes[v].buffer for v in weights) if keeps_states else ()
    inner = [b for b in (*states, *temporaries) if keeps_states and b.kind in ("state", "step")]
    return Storage(tuple(items), homes, stores, params, (*sequences, *before), states, yields,
                   initial, first, last, tuple(temporaries), tuple(inner),
                   (*read, *first))  # fmt: skip


def _find_kind(value: Value) -> Kind:
    """The kind of buffer of a value that is given before the loop."""
    rate = value.type.rate
    return "sequence" if rate == "step" else rate


def _saved_states(program: Program) -> dict[Value, Yield]:
    """The states that a yield writes as the step reads them, with the yield."""
    states = {s.value for s in program.states}
    return {y.source: y for y in program.yields if y.source in states}


def _results(item: Op | Group) -> list[Value]:
    return [op.result for op in (item.ops if isinstance(item, Group) else (item,))]


def _read(item: Op | Group) -> set[Value]:
    return {v for op in (item.ops if isinstance(item, Group) else (item,)) for v in op.values}
