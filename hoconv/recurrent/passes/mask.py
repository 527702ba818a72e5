"""Masks steps past the end of a sequence: its states stay as they are, its outputs are 0."""

from __future__ import annotations

from dataclasses import replace

from hoconv.recurrent.frontend.functions import where
from hoconv.recurrent.frontend.symbol import Builder, Symbol
from hoconv.recurrent.ir.program import Program, State, Type, Value, Yield


def mask(program: Program) -> Program:
    """Makes the program read ``valid`` (T, B, 1) bool and mask the steps where it is false."""
    valid = Value(Type("sequence", (1,), "bool"), "valid")
    builder = Builder()
    inside = Symbol(builder, valid)

    def kept(state: State) -> State:
        following = where(inside, Symbol(builder, state.next), Symbol(builder, state.value))
        return State(state.name, state.value, following.value)

    def zeroed(each: Yield) -> Yield:
        source = where(inside, Symbol(builder, each.source), 0.0)
        return Yield(each.name, source.value, each.sequence)

    states = tuple(kept(state) for state in program.states)
    yields = tuple(zeroed(each) for each in program.yields)
    return replace(
        program,
        sequences=(*program.sequences, ("valid", valid)),
        states=states,
        yields=yields,
        step=(*program.step, *builder.ops),
    )
