"""Writes the trace of a cell as text, and reads it back.

The text is an argument of the torch op and says all about the cell: an exported program runs in a
process that has never imported the cell. Cells with equal texts share a plan.

n features, m features of a result.
"""

from __future__ import annotations

import json
from typing import Any

from hoconv.recurrent.frontend.symbol import Builder, Symbol
from hoconv.recurrent.frontend.trace import Declaration, Trace
from hoconv.recurrent.ir.kinds import is_known
from hoconv.recurrent.ir.program import (
    Operand,
    Param,
    Piece,
    Program,
    State,
    Type,
    Value,
    Yield,
    flat,
)

# The version of the format below and of the meaning of ops: exported programs outlive the code.
_VERSION = 1
_SUFFIX = " forward"  # at the end of the name of a traced program


def to_text(trace: Trace) -> str:
    """Writes the name of the cell, and the trace as JSON.

    An operand is an int, the number of a value, or a float, a constant.
    """
    program = trace.program
    (_, x), *_ = program.sequences
    given = [p.value for p in program.params] + [x] + [s.value for s in program.states]
    given += [value for _, value in program.constants]
    constants = [(name, value.type.size) for name, value in program.constants]
    ops = [*flat(program.before), *flat(program.step)]
    numbers = {value: i for i, value in enumerate([*given, *(op.result for op in ops)])}

    def number(operand: Operand) -> int | float:
        return numbers[operand] if isinstance(operand, Value) else operand

    document = json.dumps(
        {
            "version": _VERSION,
            "declarations": [[d.name, d.read_shape, None] for d in trace.declarations],
            "params": [
                [p.value.hint, p.value.type.shape, p.pieces[0].parameter, p.pieces[0].columns]
                for p in program.params
            ],
            "x": x.type.size,
            "states": [[s.name, s.value.type.size, number(s.next)] for s in program.states],
            "ops": [[op.kind, [*map(number, op.inputs)], op.attrs] for op in ops],
            "output": number(program.yields[0].source),
            **({"constants": constants} if constants else {}),
        },
        separators=(",", ":"),
    )
    return f"{program.name.removesuffix(_SUFFIX)} {document}"


def from_text(text: str) -> Trace:
    """Reads the trace from a text.

    Raises:
        ValueError: a text of another version of hoconv, or with an op that this one does not have.
    """
    name, _, written = text.partition(" ")
    document: dict[str, Any] = json.loads(written)
    if document["version"] != _VERSION:
        raise ValueError(
            f"this recurrent cell was exported by another version of hoconv (form "
            f"{document['version']}, here {_VERSION}): export it again"
        )
    params = tuple(
        Param(Value(Type("once", tuple(shape)), hint), (Piece(parameter, _columns(columns)),))
        for hint, shape, parameter, columns in document["params"]
    )
    x = Value(Type("sequence", (document["x"],)), "x")
    states = [Value(Type("step", (size,)), name) for name, size, _ in document["states"]]
    constants = [
        (name, Value(Type("constant", (size,)), name))
        for name, size in document.get("constants", ())
    ]
    values = [*(p.value for p in params), x, *states, *(value for _, value in constants)]
    builder = Builder()
    for kind, operands, attrs in document["ops"]:
        if not is_known(kind):
            raise ValueError(
                f"this recurrent cell was exported by another version of hoconv, which has the op "
                f"{kind!r}: load it there, or export it again here"
            )
        inputs = [Symbol(builder, values[o]) if isinstance(o, int) else o for o in operands]
        values.append(builder.apply(kind, *inputs, attrs=tuple(attrs)).value)
    source = values[document["output"]]
    sequence = Value(Type("sequence", source.type.shape), "output")
    program = Program(
        name=name + _SUFFIX,
        params=params,
        sequences=(("x", x), *constants),
        states=tuple(
            State(name, value, values[after])
            for (name, _, after), value in zip(document["states"], states, strict=True)
        ),
        before=tuple(builder.before),
        step=tuple(builder.ops),
        yields=(Yield("output", source, sequence),),
        results=(("output", sequence),),
    )
    return Trace(
        program,
        tuple(Declaration(n, tuple(s), row=len(s) == 1) for n, s, _ in document["declarations"]),
    )


def _columns(columns: list[int] | None) -> tuple[int, int] | None:
    return None if columns is None else (columns[0], columns[1])
