"""Resets states within a sequence: a step may begin with states of zero."""

from __future__ import annotations

from dataclasses import replace

from hoconv.recurrent.frontend.functions import where
from hoconv.recurrent.frontend.symbol import Builder, Symbol
from hoconv.recurrent.ir.program import Program, Type, Value, flat
from hoconv.recurrent.passes.rewrite import replace_outputs, substitute


def reset(program: Program) -> Program:
    """Makes the program read ``reset`` (T, B, 1) bool: where it is true, the states that the step
    reads are 0."""
    begins = Value(Type("sequence", (1,), "bool"), "reset")
    builder = Builder()
    read = {
        s.value: where(Symbol(builder, begins), 0.0, Symbol(builder, s.value)).value
        for s in program.states
    }
    step = tuple(substitute(op, read) for op in flat(program.step))
    return replace(
        replace_outputs(program, read),
        sequences=(*program.sequences, ("reset", begins)),
        step=(*builder.ops, *step),
    )
