"""Draws random cells from the whole language; a seed always gives the same cell.

A cell has values of four sorts: rows, which depend on x or a state; values of two or three axes,
which do, too; learned values, which depend on parameters alone; and conditions. A tame cell keeps
its values moderate. A wild cell also has constants such as infinity and NaN, and may use a value of
the wrong sort: such a cell is refused.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable
from typing import Any

from hoconv import recurrent as rnn
from hoconv.recurrent.frontend.cell import BoundCell, Cell
from hoconv.recurrent.ir.functions import FUNCTIONS, Function

_SIZES = (1, 2, 3, 4, 6)
_SHAPES = ((2, 3), (3, 2), (1, 3), (2, 1), (1, 1), (2, 2, 3), (1, 2, 2), (3, 1, 2))
_INPUTS = (0, 0, 0, 1, 2)  # beside x
_LETTERS = "abcdef"
# Shares of the states that have several axes, and of the draws that make such a value.
_SHAPED = 0.25
_WILD_NUMBERS = (float("inf"), float("-inf"), float("nan"), 1e400, 1e300, 0.0, -0.0)
_DELAYED = 0.15  # the share of the states whose next values depend on the inputs alone
# Shares of a wild cell's draws: of values of a wrong sort, and among numbers of wild ones.
_MISTAKES = 0.02
_WILD = 0.3


def random_cell(seed: int, wild: bool = False) -> BoundCell:
    """Draws a cell of up to two inputs beside x, and one to four states, of several sizes."""
    draw = random.Random(seed)

    def draw_shape() -> tuple[int, ...]:
        return draw.choice(_SHAPES) if draw.random() < _SHAPED else (draw.choice(_SIZES),)

    sizes = {f"s{i}": draw_shape() for i in range(draw.choice((1, 2, 2, 3, 4)))}
    count = draw.randint(4, 18)
    inputs = {f"i{i}": draw_shape() for i in range(draw.choice(_INPUTS))}
    arguments = ", ".join(("x", *inputs, *sizes))

    def function(*rows: Any) -> Any:
        # A generator for every call, so that calls on symbols and on tensors draw the same.
        draws = random.Random(seed + 1000), random.Random(seed + 2000)
        return _Body(*draws, rows, wild).run(sizes, count)

    # A cell needs an argument for each state, with its name.
    scope: dict[str, Any] = {"function": function}
    exec(f"def random_{seed}({arguments}):\n    return function({arguments})", scope)
    cell: Cell = rnn.cell(state=sizes, inputs=inputs)(scope[f"random_{seed}"])
    return cell.bind(3, 4, {})


def _size(value: Any) -> int:
    return value.shape[-1]


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(value.shape[1:])


def _fits(shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Returns whether a value of the other shape is repeated to this one, or has it."""
    return len(shape) == len(other) and all(n in (1, m) for m, n in zip(shape, other, strict=True))


def _list_functions() -> list[Function]:
    """Lists the functions of the language whose operands are all numbers."""
    return [f for f in FUNCTIONS.values() if f.doc and set(f.operands.values()) == {"number"}]


def _call(function: Function, a: Any, b: Any) -> Any:
    """Calls a function of one or two values within its domain."""
    x = a if function.domain is None else function.domain(rnn, a)
    return getattr(rnn, function.name)(*(x, b)[: len(function.operands)])


class _Body:
    """The body of a random cell, run once; on symbols and on tensors it draws the same.

    Args:
        draw: of everything but the states that `delay` draws.
    """

    def __init__(self, draw: random.Random, delay: random.Random, rows: Any, wild: bool) -> None:
        self.draw = draw
        self.delay = delay
        self.wild = wild
        self.given = list(rows)
        self.rows: list[Any] = [v for v in rows if len(_shape(v)) == 1]
        self.shaped: list[Any] = [v for v in rows if len(_shape(v)) > 1]
        self.learned: list[Any] = []
        self.conditions: list[Any] = []
        self.names = itertools.count()

    def run(self, sizes: dict[str, tuple[int, ...]], count: int) -> Any:
        given = len(self.rows)
        self.learned.append(self.make_parameter(4))
        for _ in range(count):
            if self.draw.random() < _SHAPED:
                self.add_shaped()
                continue
            self.draw.choice((self.add_row, self.add_row, self.add_learned, self.add_condition))()
        inputs, before = self.given[: -len(sizes)], self.given[-len(sizes) :]
        states = {
            name: self.make_from_inputs(inputs, shape)
            if self.delay.random() < _DELAYED
            else self.next_state(state, shape)
            for state, (name, shape) in zip(before, sizes.items(), strict=True)
        }
        output = self.draw.choice(self.rows[given:] or self.rows)
        if self.shaped and self.draw.random() < 0.3:
            output = self.draw.choice(self.shaped)
        if self.draw.random() < 0.8:
            first = next(iter(states.values()))
            row = rnn.reshape(output, math.prod(_shape(output)))
            output = row + rnn.sum(rnn.reshape(first, math.prod(_shape(first))))
        return output, states

    # Operands that fit a value

    def pick_row(self) -> Any:
        return self.draw.choice(self.rows)

    def pick_fitting(self, value: Any) -> Any:
        """Picks a row or a learned value whose size fits that of a value."""
        found = [v for v in (*self.rows, *self.learned) if _size(v) in (1, _size(value))]
        return self.draw.choice(found) if found else value

    def draw_number(self) -> float:
        if self.wild and self.draw.random() < _WILD:
            return self.draw.choice(_WILD_NUMBERS)
        return self.draw.choice((0.5, 2.0, -1.0))

    def draw_partner(self, value: Any) -> Any:
        """Draws the other operand of an operator."""
        if self.wild and self.conditions and self.draw.random() < _MISTAKES:
            return self.draw.choice(self.conditions)
        kind = self.draw.random()
        if kind < 0.15:
            return self.draw_number()
        if kind < 0.3:
            return self.make_parameter(self.draw.choice((1, value)))
        return self.pick_fitting(value)

    def make_condition(self, value: Any) -> Any:
        """Picks or makes a condition whose size fits that of a value."""
        if self.wild and self.draw.random() < _MISTAKES:
            return value
        found = [c for c in self.conditions if _size(c) in (1, _size(value))]
        if found and self.draw.random() < 0.7:
            return self.draw.choice(found)
        return self.compare(value, self.pick_fitting(value))

    def compare(self, a: Any, b: Any) -> Any:
        return self.draw.choice(
            (
                lambda: a < b,
                lambda: a <= b,
                lambda: a > b,
                lambda: a >= self.draw_number(),
                lambda: a == b,
                lambda: a != self.draw_number(),
            )
        )()

    # Learned values

    def make_parameter(self, like: Any) -> Any:
        return rnn.parameter(f"p{next(self.names)}", like)

    def make_linear(self, size: int) -> Any:
        operands = [self.pick_row() for _ in range(self.draw.choice((1, 2, 2, 3)))]
        bias = self.draw.random() < 0.6
        return rnn.linear(f"w{next(self.names)}", *operands, size=size, bias=bias)

    # New values

    def add_row(self) -> None:
        row = self.make_row(self.pick_row())
        if self.draw.random() < 0.1:  # a common subexpression
            a, b = self.pick_row(), self.pick_row()
            if _size(a) == _size(b):
                row = (a * b + 1) / (1 + (a * b) * (a * b))
        self.rows.append(row)

    def add_learned(self) -> None:
        p = self.draw.choice(self.learned) if self.draw.random() < 0.5 else None
        p = self.make_parameter(self.draw.choice(_SIZES)) if p is None else p
        others = [q for q in self.learned if _size(q) in (1, _size(p))]
        q = self.draw.choice(others) if others else p
        self.learned.append(self.combine(p, q, self.learned))

    def add_condition(self) -> None:
        value = self.draw.choice((*self.rows, *self.learned))
        c = self.make_condition(value)
        d = self.make_condition(value)
        self.conditions.append(
            self.draw.choice(
                (
                    lambda: c & d,
                    lambda: c | ~d,
                    lambda: ~c,
                    lambda: self.compare(value, self.draw_partner(value)),
                    lambda: rnn.cat(c, self.make_condition(self.pick_row())),
                    lambda: c[:, : (_size(c) + 1) // 2],
                    lambda: rnn.chunk(c, _size(c))[-1],
                )
            )()
        )

    def make_row(self, a: Any) -> Any:
        """Makes a row from a row."""
        b = self.draw_partner(a)
        makers: tuple[Callable[[], Any], ...] = (
            lambda: self.make_linear(self.draw.choice(_SIZES)),
            lambda: self.make_linear(_size(a)),
            lambda: rnn.tanh(a * b),
            lambda: a + b,
            lambda: b - a,
            lambda: a * self.pick_fitting(a),
            lambda: rnn.minimum(a, b),
            lambda: rnn.where(self.make_condition(a), a, b),
            lambda: rnn.where(self.make_condition(a), self.draw_number(), a),
            lambda: rnn.dropout(a, 0.3),
            lambda: rnn.zoneout(rnn.tanh(a), a, 0.3),
            lambda: self.call_cell(a),
        )
        if self.draw.random() < 0.5:
            return self.combine(a, self.pick_fitting(a), self.rows)
        return self.draw.choice(makers)()

    def call_cell(self, state: Any) -> Any:
        """Runs a step of a cell within the cell."""
        cell = self.draw.choice((rnn.gru, rnn.elman, rnn.minimal_gated))
        name, x = f"c{next(self.names)}", self.pick_row()
        return cell(name, x, state, hidden_size=_size(state))[0]

    # Values of several axes

    def add_shaped(self) -> None:
        made = self.make_shaped()
        (self.shaped if len(_shape(made)) > 1 else self.rows).append(made)

    def make_shaped(self) -> Any:
        """Makes a value of several axes, or a row of one."""
        if not self.shaped or self.draw.random() < 0.25:
            shape = self.draw.choice(_SHAPES)
            names = f"w{next(self.names)}", f"p{next(self.names)}"
            made = rnn.tanh(rnn.linear(names[0], self.pick_row(), size=shape))
            if self.draw.random() < 0.5:
                return made
            thin = tuple(self.draw.choice((1, n)) for n in shape)
            return made * rnn.parameter(names[1], thin)
        a = self.draw.choice(self.shaped)
        shape = _shape(a)
        partners = [v for v in self.shaped if _fits(shape, _shape(v)) or _fits(_shape(v), shape)]
        b = self.draw.choice(partners)
        axis = self.draw.randrange(1, 1 + len(shape))
        whole = (slice(None),) * axis
        half = (shape[axis - 1] + 1) // 2
        one = self.draw.randrange(shape[axis - 1])
        return self.draw.choice(
            (
                *(functools.partial(_call, function, a, b) for function in _list_functions()
                  if function.name not in ("sum", "max")),
                lambda: a * b,
                lambda: a - b,
                lambda: a * self.draw_number(),
                lambda: rnn.tanh(self.contract(a, self.draw.choice(self.shaped))),
                lambda: rnn.tanh(self.contract(a, self.pick_row())),
                lambda: self.contract(a),
                lambda: rnn.sum(a, axis=axis),
                lambda: rnn.max(a, axis=axis - len(shape) - 1),
                lambda: rnn.mean(a, axis=axis),
                lambda: rnn.softmax(a, axis=axis),
                lambda: rnn.normalize(a + 0.1, axis=axis, eps=0.1),
                lambda: rnn.where(a > b, a, 0.5),
                lambda: rnn.where(~(a <= b), b, a),
                lambda: rnn.dropout(a, 0.3),
                lambda: rnn.zoneout(rnn.tanh(a), a, 0.3),
                lambda: rnn.reshape(a, math.prod(shape)),
                lambda: rnn.reshape(a, *reversed(shape)),
                lambda: a[*whole, half - 1 :],
                lambda: a[*whole, :half],
                lambda: a[*whole, one],
                lambda: a[*whole, None] if len(shape) < 3 else a[..., one % shape[-1]],
                lambda: rnn.cat(a, a[*whole, :half], axis=axis),
                lambda: rnn.chunk(a, shape[axis - 1], axis=axis)[one],
                lambda: rnn.cumsum(a, axis=axis) * 0.5,
                lambda: rnn.roll(a, 1, axis=axis) + rnn.pad(a, 1, axis=axis)[*whole, 1:],
                lambda: rnn.logsumexp(a, axis=axis),
            )
        )()  # fmt: skip

    def contract(self, *values: Any) -> Any:
        """Draws an einsum of one or two values, of axes that they may share."""
        sizes: dict[str, int] = {}
        parts = []
        for value in values:
            part = ""
            for n in _shape(value):
                same = [x for x in sizes if sizes[x] == n and x not in part]
                shared = same and self.draw.random() < 0.7
                letter = self.draw.choice(same) if shared else _LETTERS[len(sizes)]
                sizes[letter] = n
                part += letter
            parts.append(part)
        count = self.draw.randint(1, min(3, len(sizes)))
        result = "".join(self.draw.sample(sorted(sizes), count))
        return rnn.einsum(f"{','.join(parts)}->{result}", *values)

    def combine(self, a: Any, b: Any, beside: list[Any]) -> Any:
        """Makes a value from values of one sort: from rows, or from learned values."""
        return self.draw.choice(
            (
                *(functools.partial(_call, function, a, b) for function in _list_functions()),
                lambda: -a,
                lambda: a - b,
                lambda: a * b + b * a[:, :1],  # rounded in one of several ways
                lambda: a / (1 + rnn.abs(a)),
                lambda: b / rnn.sqrt(1 + rnn.sum(a * a)),
                lambda: rnn.gelu(a),
                lambda: rnn.silu(a),
                lambda: rnn.maximum(a, self.draw_number()),
                lambda: rnn.where((a > 0.1) | ~(a <= b), a, 0.5),
                lambda: rnn.where(rnn.max(a) > b, b, rnn.sum(a)),
                lambda: rnn.clamp(a, -0.5, 0.7),
                lambda: rnn.mean(a * a),
                lambda: a - rnn.mean(a),
                lambda: a - rnn.max(a),
                lambda: rnn.softmax(a),
                lambda: rnn.layer_norm(f"n{next(self.names)}", a, eps=0.1),
                lambda: rnn.cat(a, self.draw.choice(beside)),
                lambda: rnn.cat(b, a, b),
                lambda: a[:, _size(a) // 2 :],
                lambda: a[:, : (_size(a) + 1) // 2],
                lambda: rnn.chunk(a, _size(a))[0],
                lambda: a**3 * 0.1,
                lambda: a % (1 + rnn.abs(b)),
                lambda: rnn.straight_through(rnn.where(a > b, 1.0, 0.0), a),
                lambda: rnn.cumsum(a) * 0.5,
                lambda: rnn.roll(a, 1) + rnn.pad(a, 1)[:, 1:],
                lambda: rnn.logsumexp(a),
                lambda: rnn.rms_norm(f"n{next(self.names)}", a, eps=0.1),
                lambda: rnn.group_norm(f"n{next(self.names)}", a, _size(a), eps=0.1),
            )
        )()

    def next_state(self, state: Any, shape: tuple[int, ...]) -> Any:
        """Returns the next value of a state: mostly a new value, sometimes an existing one."""
        existing = [v for v in (*self.rows, *self.shaped) if _shape(v) == shape]
        kind = self.draw.random()
        if kind < 0.1:
            return state
        if kind < 0.2 and existing:
            return self.draw.choice(existing)
        return rnn.tanh(rnn.reshape(self.make_linear(math.prod(shape)), *shape))

    def make_from_inputs(self, inputs: list[Any], shape: tuple[int, ...]) -> Any:
        """Returns a next state that depends on no state: an input, or a function of one."""
        fitting = [v for v in inputs if _shape(v) == shape]
        if fitting and self.delay.random() < 0.7:
            return self.delay.choice(fitting)
        size, name = math.prod(shape), f"w{next(self.names)}"
        made = rnn.linear(name, self.delay.choice(inputs), size=size)
        return rnn.tanh(rnn.reshape(made, *shape))
