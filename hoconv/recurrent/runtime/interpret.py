"""Runs a program, after any pass, op by op in PyTorch. Passes and generated code are tested by it.

B batch, T time steps, n features.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from hoconv.recurrent.ir import axes, evaluate, random
from hoconv.recurrent.ir.evaluate import DTYPES, in_dtype
from hoconv.recurrent.ir.kinds import DELAY
from hoconv.recurrent.ir.program import Group, Op, Program, Value, flat

Tensors = dict[Value, Tensor]


@dataclass(frozen=True, eq=False)
class LoopRun:
    """The arguments of a :class:`Loop`."""

    program: Program
    values: Tensors
    initial: list[Tensor]
    seed: Tensor | None


class Loop(Protocol):
    """Runs all steps of a program."""

    @property
    def groups(self) -> Mapping[Group, tuple[Program, Loop]]:
        """Of groups before and after the loop that need not run op by op: their programs
        (passes/rows.py), and what runs these.
        """
        ...

    def __call__(
        self, program: Program, values: Tensors, initial: list[Tensor], seed: Tensor | None
    ) -> tuple[Tensors, list[Tensor]]:
        """Returns the sequences that the steps write, and the states after the last step.

        Args:
            values: the tensors that exist before the loop.
            initial: (B, n) of each state.
            seed: int64 scalar, of the random masks.
        """
        ...


GroupLoops = Mapping[Group, tuple[Program, Loop]]


def interpret(
    program: Program,
    params: Sequence[Tensor],
    sequences: Mapping[str, Tensor],
    states: Mapping[str, Tensor],
    seed: Tensor | None = None,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Runs a program op by op; autograd records every op.

    Args:
        params: the tensors of ``program.params``, see :mod:`hoconv.recurrent.runtime.packing`.
        sequences: what the program reads, by name: (T, B, n); (n,) if made of parameters alone.
        states: (B, n) before the first step, by name.
        seed: int64 scalar, of the random masks.

    Returns:
        The program's results, and the states after the last step, by name.
    """
    values: Tensors = {p.value: t for p, t in zip(program.params, params, strict=True)}
    values |= {value: sequences[name] for name, value in program.sequences}
    values |= {
        d.initial: in_dtype(states[d.name], DTYPES[d.initial.type.dtype]) for d in program.delays
    }
    like = next(iter(states.values()))
    ends = _compute(program, program.before, values, like.device)
    initial = [
        in_dtype(states[s.name], DTYPES[s.value.type.dtype])
        if s.total is None
        else like.new_zeros((), dtype=DTYPES[s.value.type.dtype]).expand(
            like.shape[0], s.value.type.size
        )
        for s in program.states
    ]
    written, final = run_steps(program, values, initial, seed)
    values |= written
    last = dict(zip(program.states, final, strict=True))
    values |= {s.total: state[None] for s, state in last.items() if s.total is not None}
    ends |= _compute(program, program.after, values, like.device)
    results = {name: values[value] for name, value in program.results}
    found = {s.name: state for s, state in last.items() if s.total is None}
    found |= {d.name: ends[d.value] for d in program.delays}
    return results, {name: found[name] for name in states}


def _compute(
    program: Program, region: Iterable[Op | Group], values: Tensors, device: torch.device
) -> Tensors:
    """Adds the results of ops to the values; returns the last state of each that is delayed."""
    ends: Tensors = {}
    for op in flat(region):
        operands: list[Any] = [values[i] if isinstance(i, Value) else i for i in op.inputs]
        if op.kind == DELAY:
            T, _ = count_steps(program, values)
            values[op.result], ends[op.result] = evaluate.delay(
                *operands, steps=T, reverse=program.reverse
            )
        else:
            values[op.result] = evaluate_op(op, operands, device)
    return ends


def count_steps(program: Program, values: Tensors) -> tuple[int, int]:
    """T and B, the time steps and rows of the sequences that the program reads."""
    T, B, _ = next(values[v].shape for _, v in program.sequences if v.type.rate == "sequence")
    return T, B


def run_group(program: Program, loop: Loop, values: Tensors) -> Tensors | None:
    """Runs a group's program for the rows of all steps; returns what it writes, if it could."""
    whole = [v for _, v in program.sequences if v.type.rate == "sequence"]
    if not whole or len({values[v].shape[:-1] for v in whole}) > 1 or values[whole[0]].dim() != 3:
        return None
    T, B, _ = values[whole[0]].shape
    if T * B == 0:
        return None
    given = values | {v: values[v].reshape(1, T * B, v.type.size) for v in whole}
    written, _ = loop(program, given, [], None)
    return {value: tensor.view(T, B, -1) for value, tensor in written.items()}


def run_steps(
    program: Program, values: Tensors, initial: list[Tensor], seed: Tensor | None
) -> tuple[Tensors, list[Tensor]]:
    """Runs all steps of a program op by op, as a :class:`Loop` does."""
    (T, B), device = count_steps(program, values), values[program.sequences[0][1]].device
    written: dict[Value, list[Any]] = {y.sequence: [None] * T for y in program.yields}
    now = initial
    for t in reversed(range(T)) if program.reverse else range(T):
        local = dict(zip((s.value for s in program.states), now))

        def at_step(operand: Any, t: int = t, local: Tensors = local) -> Any:
            if not isinstance(operand, Value) or operand.type.rate == "step":
                return local[operand] if isinstance(operand, Value) else operand
            tensor = values[operand]
            rate = operand.type.rate
            return tensor[t] if rate == "sequence" else tensor[0] if rate == "constant" else tensor

        for op in flat(program.step):
            if op.kind == "keep":
                assert seed is not None, "a program with random masks needs a seed"
                probability, site, size = op.attrs
                local[op.result] = random.keep(probability, int(site), int(size), B, t, seed)
            else:
                local[op.result] = evaluate_op(op, [at_step(i) for i in op.inputs], device, B)
        for each in program.yields:
            written[each.sequence][t] = at_step(each.source)
        now = [at_step(s.next) for s in program.states]
    return {sequence: torch.stack(each) for sequence, each in written.items()}, now


def evaluate_op(
    op: Op, operands: list[Any], device: torch.device, batch: int | None = None
) -> Tensor:
    """An op on rows: (B, n) of a step, (T, B, n) of whole sequences.

    Args:
        batch: the rows of a step.
    """
    dtype = DTYPES[op.result.type.dtype]
    match op.kind:
        case "linear":
            return evaluate.linear(*operands)
        case "linear_t":
            return evaluate.linear(operands[0], operands[1].mT)
        case "outer":
            return evaluate.outer(*operands)
        case "total":
            return operands[0].sum((0, 1), dtype=dtype)
        case "sum_steps":
            return operands[0].sum(0, keepdim=True, dtype=dtype)
        case "slice":
            start, stop = op.attrs
            return operands[0][..., int(start) : int(stop)]
        case "cat":
            return evaluate.cat(operands)
        case "arrange" | "einsum" | "largest":
            return axes.evaluate(op.kind, axes.layout(op), operands)
        case "cast":
            return operands[0].to(dtype)
        case "fill":
            value, size = op.attrs
            rows = () if op.result.type.rate == "once" else (batch or 1,)
            return torch.full((*rows, int(size)), value, dtype=dtype, device=device)
    constants = next((o.dtype for o in operands if isinstance(o, Tensor) and o.is_floating_point()),
                     dtype)  # fmt: skip
    return evaluate.elementwise(op.kind, *operands, dtype=constants)
