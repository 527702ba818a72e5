"""Infers the dtype of every value, and inserts casts between different dtypes.

Sequences, parameters and products have the layer's dtype; states and everything else are computed
in float32 at least.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from hoconv.recurrent.ir.evaluate import NAMES, accumulate_dtype
from hoconv.recurrent.ir.kinds import PRODUCTS
from hoconv.recurrent.ir.program import Op, Operand, Param, Program, State, Value, Yield, flat


def infer_dtypes(program: Program, dtype: torch.dtype) -> Program:
    """Types a program whose sequences and parameters have a dtype.

    Args:
        program: a traced one, without groups.
        dtype: float64, float32, bfloat16 or float16.
    """
    narrow, wide = NAMES[dtype], NAMES[accumulate_dtype(dtype)]
    typed: dict[Value, Value] = {}
    casts: dict[tuple[Value, str], Value] = {}

    def give(value: Value, name: str) -> Value:
        name = "bool" if value.type.dtype == "bool" else name
        typed[value] = Value(replace(value.type, dtype=name), value.hint)
        return typed[value]

    def cast(value: Value, name: str, ops: list[Op], in_step: bool = True) -> Value:
        if value.type.dtype in (name, "bool"):
            return value
        if (value, name) not in casts:
            # What a step casts of a sequence is a value of the step.
            outside = value.type.rate in ("sequence", "constant")
            rate = "step" if in_step and outside else value.type.rate
            casts[value, name] = Value(replace(value.type, dtype=name, rate=rate))
            ops.append(Op("cast", (value,), casts[value, name]))
        return casts[value, name]

    def region(given: tuple, ops: list[Op], in_step: bool) -> list[Op]:
        for op in flat(given):
            own = narrow if op.kind in PRODUCTS else wide
            if op.kind == "slice":  # cast after it: that is less, and a load does it
                own = typed[op.values[0]].type.dtype
            inputs: list[Operand] = [
                cast(typed[i], own, ops, in_step) if isinstance(i, Value) else i for i in op.inputs
            ]
            ops.append(Op(op.kind, tuple(inputs), give(op.result, own), op.attrs))
        return ops

    params = tuple(Param(give(p.value, narrow), p.pieces) for p in program.params)
    sequences = tuple((name, give(v, narrow)) for name, v in program.sequences)
    states = [give(s.value, wide) for s in program.states]
    before = region(program.before, [], in_step=False)
    # `cast` appends to the region that reads a parameter first; a cast in the step is moved below.
    step = region(program.step, [], in_step=True)
    following = [cast(typed[s.next], wide, step) for s in program.states]
    written = [cast(typed[y.source], narrow, step) for y in program.yields]
    hoisted = [op for op in step if op.result.type.rate == "once"]
    return replace(
        program,
        params=params,
        sequences=sequences,
        states=tuple(
            State(s.name, value, after)
            for s, value, after in zip(program.states, states, following, strict=True)
        ),
        before=(*before, *hoisted),
        step=tuple(op for op in step if op.result.type.rate != "once"),
        yields=tuple(
            Yield(y.name, source, give(y.sequence, narrow))
            for y, source in zip(program.yields, written, strict=True)
        ),
        results=tuple((name, typed[value]) for name, value in program.results),
    )
