"""Verifies that a program is well formed; the tests do so after every pass."""

from __future__ import annotations

from hoconv.recurrent.ir.functions import FUNCTIONS
from hoconv.recurrent.ir.kinds import (
    BY_AXES,
    DELAY,
    LAYOUT,
    PRODUCTS,
    SUMS,
    OperandError,
    check_operands,
    is_boolean,
    is_known,
    result_shape,
)
from hoconv.recurrent.ir.program import Op, Program, Value, flat, step_outputs


class VerificationError(AssertionError):
    """A program is not well formed."""


def verify(program: Program) -> Program:
    """Returns a well-formed program as it is.

    Raises:
        VerificationError: a value that is read before it is made or made twice, a shape, rate or
            dtype that is not the op's, an op in a region where it cannot be.
    """
    known: set[Value] = set()

    def define(value: Value, what: str) -> None:
        if value in known:
            raise VerificationError(f"{what}: made twice\n{program}")
        known.add(value)

    for param in program.params:
        define(param.value, "param")
    for name, value in program.sequences:
        define(value, name)
    for each in program.delays:
        define(each.initial, each.name)
    whole = ("once", "constant", "sequence")
    _region("before", program.before, whole, known, define, program)
    outside = set(known)
    for state in program.states:
        define(state.value, state.name)
    _region("step", program.step, ("step",), known, define, program)
    for value in step_outputs(program):
        if value not in known:
            raise VerificationError(f"a step's output is not made in it\n{program}")
    for state in program.states:
        if (state.value.type.shape, state.value.type.dtype) != (
            state.next.type.shape, state.next.type.dtype,
        ):  # fmt: skip
            raise VerificationError(f"state {state.name}: changes its type\n{program}")
    for each in program.yields:
        shown = (each.source.type.shape, each.source.type.dtype)
        if shown != (each.sequence.type.shape, each.sequence.type.dtype):
            raise VerificationError(f"{each.name}: written as another type\n{program}")
    for each in program.replays:
        if (each.value.type.shape, each.value.type.dtype) != (
            each.next.type.shape, each.next.type.dtype,
        ):  # fmt: skip
            raise VerificationError(f"a state is computed again as another type\n{program}")
    known = outside
    for each in program.yields:
        define(each.sequence, each.name)
    for state in program.states:
        if state.total is not None:
            define(state.total, state.name)
    _region("after", program.after, whole, known, define, program)
    for name, value in (*program.results, *((d.name, d.value) for d in program.delays)):
        if value not in known:
            raise VerificationError(f"result {name}: is not made\n{program}")
    return program


def _region(name: str, items: tuple, rates: tuple, known: set, define, program: Program) -> None:
    for op in flat(items):
        where = f"{op.kind} in {name}"
        if not is_known(op.kind):
            raise VerificationError(f"{where}: no such op\n{program}")
        for value in op.values:
            if value not in known:
                raise VerificationError(f"{where}: reads what is not there\n{program}")
        type_ = op.result.type
        if type_.shape != result_shape(op.kind, op.inputs, op.attrs):
            raise VerificationError(f"{where}: result of another shape\n{program}")
        if type_.rate not in rates or (op.kind in SUMS and name != "after"):
            raise VerificationError(f"{where}: does not belong there\n{program}")
        _check_dtypes(where, op, program)
        define(op.result, where)


def _check_dtypes(where: str, op: Op, program: Program) -> None:
    try:
        check_operands(op.kind, op.inputs)
    except OperandError as error:
        raise VerificationError(f"{where}: {error}\n{program}") from error
    if (op.result.type.dtype == "bool") != is_boolean(op.kind, op.inputs):
        raise VerificationError(f"{where}: result of type {op.result.type}\n{program}")
    read = {v.type.dtype for v in op.values} - {"bool"}
    own = op.result.type.dtype
    if op.kind == "cast" or not read:
        return
    same = op.kind in FUNCTIONS or op.kind in (*PRODUCTS, *LAYOUT, *BY_AXES, DELAY)
    if len(read) > 1 or (same and own not in (*read, "bool")):
        raise VerificationError(f"{where}: {', '.join(read)} to {own}\n{program}")
