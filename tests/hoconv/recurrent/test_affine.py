"""Tests the proof that steps are affine in their states."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hoconv import recurrent as rnn
from hoconv.recurrent import cells
from hoconv.recurrent.frontend.symbol import Builder, Symbol
from hoconv.recurrent.ir.program import Operand, Program, Value, flat
from hoconv.recurrent.passes.affine import AffineSteps, find_affine
from hoconv.recurrent.schedule import plan
from tests.hoconv.recurrent.affine_cells import NEAR_MISSES, affine_cell
from tests.hoconv.recurrent.support import cell_case
from tests.hoconv.recurrent.test_compiler import check_loops

CUT_APART = "where of one state but not of another"
HEADS = {"heads": 2, "keys": 3, "values": 4}
# Of each published cell: its options, and what is said of its states.
PUBLISHED: dict[str, tuple[dict[str, Any], str]] = {
    "min_gru": ({}, "affine in h, feature by feature"),
    "min_lstm": ({}, "affine in h, feature by feature"),
    "rg_lru": ({}, "affine in h, feature by feature"),
    "mamba": ({"states": 2}, "affine in h, feature by feature"),
    "gla": (HEADS, "affine in S, feature by feature"),
    "retnet": (HEADS, "affine in S, feature by feature"),
    "hgrn2": (HEADS, "affine in S, feature by feature"),
    "mamba2": (HEADS, "affine in S, feature by feature"),
    "lru": ({"states": 3}, "affine in re, im, feature by feature"),
    "delta_net": (HEADS, "affine in S, but einsum mixes features"),
    "gated_delta_net": (HEADS, "affine in S, but einsum mixes features"),
    "rwkv7": (HEADS, "affine in S, but einsum mixes features"),
    "mlstm": (HEADS, "not affine: maximum of what depends on m"),
    "lstm": ({}, "not affine: sigmoid of what depends on h"),
    "gru": ({}, "not affine: sigmoid of what depends on h"),
    "elman": ({}, "not affine: tanh of what depends on h"),
    "minimal_gated": ({}, "not affine: sigmoid of what depends on h"),
    "slstm": ({}, "not affine: softplus of what depends on h"),
    "block_gru": ({"blocks": 2}, "not affine: "),
    "sru": ({}, "not affine: sigmoid of what depends on c"),
    "indrnn": ({}, "not affine: relu of what depends on h"),
    "tied_rhn": ({}, "not affine: "),
    "cornn": ({}, "not affine: tanh of what depends on y, z"),
    "lif": ({}, "not affine: mul of what depends on v, s"),
    "gru_d": ({}, "not affine: sigmoid of what depends on h, last"),
    "attention": ({"slots": 2, "width": 4}, "not affine: "),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_explain_says_what_a_published_cell_is(name: str) -> None:
    options, said = PUBLISHED[name]
    assert f"  next states: {said}" in rnn.RNN(getattr(cells, name), 4, 4, **options).explain()


def of(seed: int, **arguments: Any) -> tuple[Program, ...]:
    made = plan(affine_cell(seed, **arguments), torch.float32, training=True)
    return made.inference, made.forward, made.backward


@pytest.mark.parametrize("states", [1, 2, 3])
def test_random_affine_cells_and_their_gradients_are_found(states: int) -> None:
    for seed in range(60):
        for program in of(seed, states=states):
            found = find_affine(program)
            assert isinstance(found, AffineSteps), found
            assert not found.mixing


@pytest.mark.parametrize("miss", NEAR_MISSES)
def test_a_near_miss_is_not_affine_and_its_gradient_is(miss: str) -> None:
    for seed in range(20):
        inference, forward, backward = of(seed, states=1 + seed % 2, miss=miss)
        assert isinstance(find_affine(inference), str)
        assert isinstance(find_affine(forward), str)
        gradient = find_affine(backward)
        assert isinstance(gradient, AffineSteps) or (seed % 2 and gradient == CUT_APART)


def by_affine(program: Program) -> Program:
    """The program, whose next states are computed by what says how they are affine."""
    found = find_affine(program)
    assert isinstance(found, AffineSteps), found
    builder = Builder("step", program.states[0].value.type.dtype)

    def symbol(operand: Operand) -> Any:
        return Symbol(builder, operand) if isinstance(operand, Value) else operand

    nexts: dict[Value, Value] = {}
    for state, row, offset in zip(found.states, found.matrix, found.offset, strict=True):
        total: Any = symbol(state.value) * 0.0
        for factor, by in zip(row, found.states, strict=True):
            total = total + symbol(by.value) * symbol(factor)
        total = total + symbol(offset)
        if found.cut is not None:
            repeated = symbol(state.value) * 0.0 + symbol(offset)
            total = builder.apply("where", found.cut, repeated, total)
        nexts[state.value] = total.value
    return replace(
        program,
        before=(*program.before, *found.before, *builder.before),
        step=(*flat(program.step), *found.ops, *builder.ops),
        states=tuple(replace(s, next=nexts.get(s.value, s.next)) for s in program.states),
    )


@pytest.mark.parametrize("states", [1, 2])
@pytest.mark.parametrize("options", [{}, {"masked": True, "resets": True}, {"reverse": True}])
def test_what_is_found_gives_the_next_states(states: int, options: dict[str, bool]) -> None:
    if states == 2 and options.get("masked"):
        return  # not found: a state may keep its value where another is infinite
    cases = [cell_case(affine_cell(seed, states), **options) for seed in range(25)]
    check_loops(cases, "auto", lambda programs: {}, by_affine)


ALONE = "affine in h, feature by feature; no step reads c"


@pytest.mark.parametrize(
    ("output", "following", "said"),
    [
        ("h", "h=0.5 * h + x, c=rnn.tanh(h)", ALONE),
        ("h", "h=x + 0.5 * h, c=x * x", ALONE),
        ("h", "h=x, c=x * x", "no step reads c"),  # h is known before the loop
        ("h * c", "h=x, c=h", "none in the loop"),
        ("x", "h=x, c=x * x", "no step reads h, c"),
        ("h * c", "h=c + 0.5 * h, c=h", "affine in h, c, feature by feature"),
        ("h", "h=h + one, c=c + x, one=one * 0.5", "affine in h, c, one, but add mixes features"),
        ("h", "h=h, c=c, one=one * rnn.sum(c)", "not affine: mul of what depends on c, one"),
    ],
)
def test_explain_says_of_which_states_it_speaks(output: str, following: str, said: str) -> None:
    states = {"h": 4, "c": 4} | ({"one": 1} if "one" in following else {})
    scope: dict[str, Any] = {"rnn": rnn}
    exec(f"def f(x, {', '.join(states)}):\n    return {output}, dict({following})", scope)
    layer = rnn.RNN(rnn.cell(state=states)(scope["f"]), 4, 4)
    assert f"  next states: {said}\n" in layer.explain()


def test_states_that_are_cut_off_apart_are_not_scanned() -> None:
    made = plan(affine_cell(0, 2), torch.float32, masked=True)
    assert find_affine(made.forward) == CUT_APART


def test_an_infinite_state_ends_where_a_condition_cuts_it_off() -> None:
    """By a condition, and not by a factor of 0, which would make NaN of it."""

    @rnn.cell(state=("h",))
    def cut(x: Any, h: Any) -> Any:
        h = rnn.where(x > 0, 0.0, h) * x + x
        return h, dict(h=h)

    found = find_affine(plan(cut.bind(4, 4, {}), torch.float32).inference)
    assert isinstance(found, AffineSteps)
    assert found.cut is not None
