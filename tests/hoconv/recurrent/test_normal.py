"""Steps of matrix states, written in many ways: one form of them computes the same."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from hoconv import recurrent as rnn
from hoconv.recurrent.frontend.cell import BoundCell
from hoconv.recurrent.frontend.trace import trace
from hoconv.recurrent.ir.program import Program
from hoconv.recurrent.passes.matrix.linear import Linear, find_linear
from hoconv.recurrent.passes.matrix.normal import normalize
from hoconv.recurrent.passes.matrix.prepare import prepare
from hoconv.recurrent.schedule import plan
from hoconv.tools.testing.cells import run_program

SIZES = [(2, 4, 3), (2, 2, 2), (1, 3, 4), (2, 1, 3), (3, 3, 1)]  # heads, keys and values
SEEDS = range(150)
RECOGNISED = 0.55


class Writer:
    """Writes the next state of a step at random, in a form that has one key of what is written, or
    in any.

    Args:
        x: the step's input.
        S: the state.
        sizes: heads, keys and values.
        strays: whether it may leave the form.
    """

    def __init__(
        self, seed: int, x: Any, S: Any, sizes: tuple[int, int, int], strays: bool
    ) -> None:
        self.random = random.Random(seed)
        self.x, self.S, self.strays = x, S, strays
        self.heads, self.keys, self.values = sizes
        self.names = 0
        self.k = self.row(self.heads, self.keys)

    def row(self, *size: int) -> Any:
        """Returns a row of a size, small enough for states not to grow."""
        self.names += 1
        return 0.5 * rnn.tanh(rnn.linear(f"row_{self.names}", self.x, size=size))

    def parameter(self, *size: int) -> Any:
        self.names += 1
        return rnn.parameter(f"parameter_{self.names}", size)

    def factor(self) -> Any:
        """Returns what scales a matrix: a number, a row of heads or of keys, or a parameter."""
        ways = [
            lambda: 0.5,
            lambda: self.row(self.heads)[..., None, None],
            lambda: self.row(self.heads, 1)[..., None],
            lambda: self.row(self.heads, self.keys)[..., None],
            lambda: 1 - self.row(1)[..., None, None],
            lambda: 0.5 * rnn.tanh(self.parameter(self.heads, 1, 1)),
        ]
        return self.random.choice(ways)()

    def gate(self, *axes: None) -> Any:
        return self.row(self.random.choice([1, self.heads]))[..., *axes] > 0

    def matrix(self, depth: int) -> Any:
        """Returns the state, decayed, and outer products."""
        if depth == 0:
            return self.S
        ways = [self.scaled, self.grown, self.grown, self.masked, self.negative]
        return self.random.choice(ways)(depth - 1)

    def scaled(self, depth: int) -> Any:
        if self.random.random() < 1 / 5:
            return rnn.einsum("hk,hkv->hkv", self.row(self.heads, self.keys), self.matrix(depth))
        if self.random.random() < 1 / 5:
            return rnn.einsum("hkv,h->hkv", self.matrix(depth), self.row(self.heads))
        factors = [self.factor(), self.matrix(depth)]
        self.random.shuffle(factors)
        return factors[0] * factors[1]

    def grown(self, depth: int) -> Any:
        terms = [self.matrix(depth), self.outer(depth)]
        if self.random.random() < 1 / 3:
            return terms[0] - terms[1]
        self.random.shuffle(terms)
        return terms[0] + terms[1]

    def masked(self, depth: int) -> Any:
        return rnn.where(self.gate(None, None), self.matrix(depth), self.S)

    def negative(self, depth: int) -> Any:
        once = -self.matrix(depth)
        return -once

    def outer(self, depth: int) -> Any:
        if self.strays and self.random.random() < 1 / 8:  # the same for all keys
            return self.row(self.heads, self.values)[..., None, :]
        k = (
            self.row(self.heads, self.keys)
            if self.strays and self.random.random() < 1 / 4
            else self.k
        )
        v = self.vector(depth)
        if self.random.random() < 1 / 2:
            return rnn.einsum("hk,hv->hkv", k, v)
        pair = [k[..., None], v[..., None, :]]
        self.random.shuffle(pair)
        return pair[0] * pair[1]

    def vector(self, depth: int) -> Any:
        """Returns a value, less what the state has for a key, scaled."""
        v = self.row(self.heads, self.values)
        if depth == 0:
            return v
        draw = self.random.random()
        if draw < 1 / 5:
            return self.row(self.heads, 1) * self.vector(depth - 1)
        if draw < 2 / 5:
            return rnn.where(self.gate(None), self.vector(depth - 1), 0.0)
        if draw < 1 / 2 and self.strays:
            return rnn.tanh(self.vector(depth - 1))
        return self.random.choice([v - self.read(depth), self.read(depth) + v, v])

    def read(self, depth: int) -> Any:
        matrix = self.matrix(0) if self.random.random() < 1 / 2 else self.scaled(0)
        if self.random.random() < 1 / 2:
            return rnn.einsum("hkv,hk->hv", matrix, self.row(self.heads, self.keys))
        return rnn.reshape(
            rnn.sum(self.row(self.heads, self.keys)[..., None] * matrix, -2),
            self.heads,
            self.values,
        )


def bind(seed: int, strays: bool) -> BoundCell:
    sizes = SIZES[seed % len(SIZES)]

    @rnn.cell(state={"S": ("heads", "keys", "values")})
    def written(x: Any, S: Any, *, heads: int, keys: int, values: int) -> Any:
        writer = Writer(seed, x, S, sizes, strays)
        following, q = writer.grown(3), writer.row(heads, keys)
        read = S if seed % 4 == 3 else following
        return rnn.einsum("hkv,hk->hv", read, q), dict(S=following)

    heads, keys, values = sizes
    options = {"heads": heads, "keys": keys, "values": values}
    return written.bind(5, heads * values, options)


@pytest.mark.parametrize("strays", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_the_form_computes_what_steps_do(masked: bool, strays: bool) -> None:
    for seed in SEEDS:
        cell = bind(seed, strays)
        program = plan(cell, torch.float64, masked=masked, recompute="functions").common[-1][1]
        torch.manual_seed(seed)
        parameters = {
            d.name: torch.randn(d.read_shape, dtype=torch.float64)
            for d in trace(cell).declarations
        }  # fmt: skip
        T, B = 6, 3
        x, S = torch.randn(T, B, 5).double(), torch.randn(B, cell.state_sizes["S"]).double()
        given = {"x": x, **({"valid": torch.rand(T, B, 1) > 0.3} if masked else {})}
        expected, found = (
            run_program(each, given, {"S": S}, parameters, None, None)
            for each in (program, normalize(program))
        )
        for name, t in expected.items():
            torch.testing.assert_close(found[name], t, rtol=1e-11, atol=1e-11, msg=f"{seed} {name}")


def is_recognised(seed: int) -> bool:
    program = plan(bind(seed, strays=False), torch.float64, recompute="functions").common[-1][1]
    prepared = prepare(normalize(program), rows=True)
    return isinstance(prepared, Program) and isinstance(find_linear(prepared), Linear)


def test_most_ways_of_writing_a_step_are_recognised() -> None:
    large = [seed for seed in SEEDS if min(SIZES[seed % len(SIZES)][1:]) > 1]
    assert sum(map(is_recognised, large)) >= RECOGNISED * len(large)
