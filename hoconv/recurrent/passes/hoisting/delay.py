"""Takes states out of the loop whose next values depend on no state, as the last input does.

What the steps read of such a state is a sequence: its next values, one step later, after the
initial state. So what reads no other state is hoisted.
"""

from __future__ import annotations

from dataclasses import replace

from hoconv.recurrent.ir.kinds import DELAY
from hoconv.recurrent.ir.program import (
    Delay,
    Op,
    Operand,
    Program,
    State,
    Type,
    Value,
    find_operands,
    flat,
    step_outputs,
)
from hoconv.recurrent.passes.hoisting.hoist import find_stateless, move_before
from hoconv.recurrent.passes.rewrite import replace_outputs, substitute
from hoconv.recurrent.passes.simplify import simplify


def delay(program: Program) -> Program:
    """Makes sequences of the states that the steps read and whose next values depend on no other
    state; then also of those whose next values are such a state."""
    found = _find(program)
    if found is None:
        return program
    return delay(simplify(_take_out(program, *found)))


def _find(program: Program) -> tuple[State, Value] | None:
    """Finds a state to take out, and its next values within a sequence."""
    free = find_stateless(program)
    made = {op.result: op for op in flat(program.step)}
    for state in program.states:
        keeps = _find_mask(program, state, made.get(state.next))
        following: Operand = keeps.inputs[1] if keeps else state.next
        if not isinstance(following, Value):
            continue
        known = following in free or following.type.rate == "sequence"
        read = {v for op in made.values() if op is not keeps for v in op.values}
        if known and state.value in read.union(step_outputs(program)):
            return state, following
    return None


def _find_mask(program: Program, state: State, op: Op | None) -> Op | None:
    """Returns the op that makes a next state if it keeps the state past the end of a sequence."""
    valid = dict(program.sequences).get("valid")
    if op is None or op.kind != "where" or valid is None:
        return None
    return op if (op.inputs[0], op.inputs[2]) == (valid, state.value) else None


def _take_out(program: Program, state: State, following: Value) -> Program:
    program, moved = move_before(program, find_operands(flat(program.step), {following}))
    valid = [v for name, v in program.sequences if name == "valid"]
    shape, dtype = state.value.type.shape, state.value.type.dtype
    whole = Value(Type("sequence", shape, dtype), state.value.hint)
    op = Op(DELAY, (moved.get(following, following), state.value, *valid), whole)
    program = replace(
        program,
        before=(*program.before, op),
        step=tuple(substitute(each, {state.value: whole}) for each in flat(program.step)),
        states=tuple(s for s in program.states if s.value is not state.value),
        delays=(*program.delays, Delay(state.name, state.value, whole)),
    )
    return replace_outputs(program, {state.value: whole})
