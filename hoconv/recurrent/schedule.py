"""From a cell to its schedule: which passes run, in which order.

The rungs of the ladder each add one thing to the one before, so that its worth can be measured:

- ``naive``: every op by itself, every step;
- ``combined``: products of one operand are one product;
- ``fused``: what is between products is one kernel;
- ``hoisted``: what depends on the input alone is computed for all steps before the loop;
- ``graph``: the whole loop is one call;
- ``auto``: the fastest plan, with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from hoconv.recurrent.cell import BoundCell
from hoconv.recurrent.ir import Program, flat
from hoconv.recurrent.match import Library, match
from hoconv.recurrent.passes.accumulate import accumulate
from hoconv.recurrent.passes.combine import combine
from hoconv.recurrent.passes.dtypes import infer_dtypes
from hoconv.recurrent.passes.fuse import fuse
from hoconv.recurrent.passes.gradient import differentiate
from hoconv.recurrent.passes.hoist import hoist
from hoconv.recurrent.passes.mask import mask
from hoconv.recurrent.passes.simplify import simplify
from hoconv.recurrent.passes.sink import sink
from hoconv.recurrent.trace import trace

SCHEDULES = ("naive", "combined", "fused", "hoisted", "graph", "auto")


@dataclass(frozen=True, eq=False)
class Plan:
    """What a layer in one direction computes.

    Attributes:
        schedule: the rung.
        inference: where no gradient is wanted.
        forward: returns what the gradient needs, too.
        backward: the gradient of `forward`.
        stages: the program after each pass, by the pass's name, in order.
        library: what a GPU runs instead of the programs, where that is at least as fast.
    """

    schedule: str
    inference: Program
    forward: Program
    backward: Program
    stages: tuple[tuple[str, Program], ...]
    library: Library | None


def plan(
    cell: BoundCell,
    dtype: torch.dtype,
    schedule: str = "auto",
    *,
    training: bool = False,
    masked: bool = False,
    reverse: bool = False,
) -> Plan:
    """Compiles a cell to a rung.

    Args:
        dtype: of sequences and parameters.
        schedule: one of :data:`SCHEDULES`.
        training: whether dropout and zoneout draw.
        masked: whether the sequences have lengths: the program reads ``valid`` (T, B, 1) bool.
        reverse: whether the first step is the last of the sequence.

    Raises:
        CellError: a cell that is outside of the language.
    """
    rung = SCHEDULES.index(schedule)
    stages: list[tuple[str, Program]] = []

    def stage(name: str, program: Program) -> Program:
        stages.append((name, program))
        return program

    program = stage("trace", replace(trace(cell, training).program, reverse=reverse))
    library = match(program) if schedule == "auto" and not masked else None
    if library and not library.fastest(dtype, cell.hidden_size):
        library = None
    if masked:
        program = stage("mask", mask(program))
    program = stage("infer dtypes", infer_dtypes(program, dtype))
    program = stage("simplify", simplify(program))
    if rung >= SCHEDULES.index("hoisted"):
        program = stage("hoist", hoist(program))
    if rung >= SCHEDULES.index("combined"):
        program = stage("combine", combine(program))
    if rung >= SCHEDULES.index("hoisted"):
        program = stage("sink", sink(program))
    forward, backward = differentiate(program)
    fused = fuse if rung >= SCHEDULES.index("fused") else lambda p: p
    forward, backward = trim(forward, accumulate(backward))
    inference = stage("fuse", fused(program)) if rung >= SCHEDULES.index("fused") else program
    stage("gradient", backward)
    forward, backward = fused(forward), stage("fuse the gradient", fused(backward))
    return Plan(schedule, inference, forward, backward, tuple(stages), library)


def trim(forward: Program, backward: Program) -> tuple[Program, Program]:
    """Passes from the one to the other only what the gradient reads."""
    regions = (*backward.before, *backward.step, *backward.after)
    read = {v for op in flat(regions) for v in op.values}
    read |= {v for _, v in backward.results} | {s.next for s in backward.states}
    read |= {y.source for y in backward.yields}
    sequences = tuple(
        (name, v) for name, v in backward.sequences if v in read or name in ("x", "d_output")
    )
    names = {name for name, _ in sequences} | {"output"}
    results = tuple((name, v) for name, v in forward.results if name in names)
    return simplify(replace(forward, results=results)), replace(backward, sequences=sequences)
