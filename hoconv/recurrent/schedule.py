"""The passes that run on a cell by its schedule, in order."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from hoconv.recurrent.codegen.matrix.chunks import emit_chunks
from hoconv.recurrent.codegen.matrix.kernel import emit_matrix
from hoconv.recurrent.frontend.cell import BoundCell
from hoconv.recurrent.frontend.trace import Declaration, Trace, trace
from hoconv.recurrent.ir.program import Group, Program, flat
from hoconv.recurrent.ladder import reaches
from hoconv.recurrent.match import CudnnLayer, fastest, match
from hoconv.recurrent.passes.accumulate import accumulate
from hoconv.recurrent.passes.combine import combine
from hoconv.recurrent.passes.dtypes import infer_dtypes
from hoconv.recurrent.passes.fuse import fuse
from hoconv.recurrent.passes.gradient.reverse import differentiate
from hoconv.recurrent.passes.gradient.saved import Recompute, make_again
from hoconv.recurrent.passes.hoisting.delay import delay
from hoconv.recurrent.passes.hoisting.hoist import hoist
from hoconv.recurrent.passes.hoisting.products import move_products
from hoconv.recurrent.passes.hoisting.sink import sink
from hoconv.recurrent.passes.mask import mask
from hoconv.recurrent.passes.matrix.columns import find_columns
from hoconv.recurrent.passes.matrix.epilogue import move_epilogue
from hoconv.recurrent.passes.matrix.normal import normalize
from hoconv.recurrent.passes.matrix.prepare import prepare
from hoconv.recurrent.passes.matrix.separate import separate
from hoconv.recurrent.passes.parts import take_parts
from hoconv.recurrent.passes.reset import reset
from hoconv.recurrent.passes.simplify import simplify


@dataclass(frozen=True, eq=False)
class Plan:
    """The programs of a layer in one direction. Each is compiled when it is first read.

    Attributes:
        schedule: the name of the schedule.
        declarations: the parameters of the cell.
        common: the passes that all programs share, in order: name and program after the pass.
        recompute: what the gradient computes again, rather than read what is saved.
    """

    schedule: str
    declarations: tuple[Declaration, ...]
    common: tuple[tuple[str, Program], ...]
    recompute: Recompute = "cheap"

    @property
    def definition(self) -> Program:
        """The program with inferred dtypes, without optimisation: autograd differentiates it."""
        return dict(self.common)["infer dtypes"]

    @functools.cached_property
    def inference(self) -> Program:
        """The program for calls that need no gradient."""
        if isinstance(self.matrices, str):
            return self._fuse(self._loop)
        moved = move_epilogue(self.matrices, self._chunked)
        assert isinstance(moved, Program)
        return self._fuse(moved)

    @functools.cached_property
    def forward(self) -> Program:
        """The program that also returns what `backward` reads."""
        return self._fuse(self._gradient[0])

    @functools.cached_property
    def backward(self) -> Program:
        """The gradient of `forward`."""
        return self._fuse(self._gradient[1])

    @functools.cached_property
    def cudnn(self) -> CudnnLayer | None:
        """The call of cuDNN that a GPU runs instead of the programs, if it is at least as fast."""
        traced = self.common[0][1]
        if self.schedule != "auto" or self.recompute == "all" or not fastest(self.definition):
            return None
        return match(traced)

    @property
    def recorded(self) -> bool:
        """Returns whether CUDA graphs record chunks of steps; otherwise kernels are launched one by
        one."""
        return reaches(self.schedule, "graph")

    @property
    def persistent(self) -> bool:
        """Returns whether one kernel keeps the weights on the chip, where it can."""
        return reaches(self.schedule, "persistent")

    @property
    def stages(self) -> tuple[tuple[str, Program], ...]:
        """The program after each pass, by the pass's name, in order."""
        fused = [("fuse", self.inference)] if reaches(self.schedule, "fused") else []
        gradient = ("gradient", self._gradient[1]), ("fuse the gradient", self.backward)
        return (*self.common, *fused, *gradient)

    @functools.cached_property
    def _loop(self) -> Program:
        return self.common[-1][1] if isinstance(self.matrices, str) else self.matrices

    @functools.cached_property
    def matrices(self) -> Program | str:
        """The loop as a GPU runs it where its states are matrices of independent columns; in words
        why it does not."""
        if self.recompute == "cheap" or not self.recorded:
            return "it is not for a GPU"
        loop = self.common[-1][1]
        prepared = prepare(normalize(loop) if self._chunked else loop, self._chunked)
        if isinstance(prepared, str):
            return prepared
        moved = move_epilogue(prepared, self._chunked)
        reason = moved if isinstance(moved, str) else emit_matrix(moved)
        return reason if isinstance(reason, str) else prepared

    @functools.cached_property
    def unchunked(self) -> str:
        """Why a GPU cannot take the steps in chunks, in words; empty where it can, once they only
        load and write rows."""
        prepared = prepare(normalize(self.common[-1][1]), rows=True)
        moved = prepared if isinstance(prepared, str) else move_epilogue(prepared, rows=True)
        source = moved if isinstance(moved, str) else emit_chunks(moved)
        return source if isinstance(source, str) else ""

    @property
    def _chunked(self) -> bool:
        return not self.unchunked

    @functools.cached_property
    def matrix_gradient(self) -> tuple[Program, Program] | str:
        """Forward and backward of such a loop, where those of its gradient are, too; else in words
        why not."""
        if isinstance(self.matrices, str):
            return self.matrices
        forward, backward = differentiate(self.matrices, self.recompute, sparse=True)
        backward = move_products(backward)
        loaded = prepare(backward, rows=True) if self._chunked else backward
        moved = loaded if isinstance(loaded, str) else move_epilogue(loaded, self._chunked)
        if isinstance(moved, str):
            return moved
        columns = find_columns(separate(moved))
        if isinstance(columns, str):
            return columns
        forward, backward = trim(forward, accumulate(moved, columns.late), self.recompute)
        forward = move_epilogue(forward, self._chunked)
        for program in (forward, backward):
            reason = program if isinstance(program, str) else emit_matrix(program)
            if isinstance(reason, str):
                return reason
        assert isinstance(forward, Program)
        return forward, backward

    @functools.cached_property
    def _gradient(self) -> tuple[Program, Program]:
        if not isinstance(self.matrix_gradient, str):
            return self.matrix_gradient
        forward, backward = differentiate(self._loop, self.recompute)
        return trim(forward, accumulate(backward), self.recompute)

    def _fuse(self, program: Program) -> Program:
        if reaches(self.schedule, "hoisted"):
            program = move_products(program)
        if not reaches(self.schedule, "fused"):
            return program
        # On a CPU, layers of all sizes have the same loops, which wheels bring: parts depend on
        # sizes.
        if self.recompute == "cheap":
            return fuse(program)
        fused = fuse(program)
        scans = isinstance(self.matrices, str) and all(isinstance(i, Group) for i in fused.step)
        return take_parts(fused, scans)


def plan(
    cell: BoundCell,
    dtype: torch.dtype,
    schedule: str = "auto",
    *,
    training: bool = False,
    masked: bool = False,
    resets: bool = False,
    reverse: bool = False,
    recompute: Recompute = "cheap",
) -> Plan:
    """Compiles a cell by a schedule.

    Args:
        training: whether dropout and zoneout draw.
        dtype, schedule, masked, resets, reverse, recompute: as in :func:`plan_trace`.

    Raises:
        CellError: the cell leaves the language.
    """
    traced = trace(cell, training)
    return plan_trace(
        traced, dtype, schedule,
        masked=masked, resets=resets, reverse=reverse, recompute=recompute,
    )  # fmt: skip


def plan_trace(
    traced: Trace,
    dtype: torch.dtype,
    schedule: str,
    *,
    masked: bool = False,
    resets: bool = False,
    reverse: bool = False,
    recompute: Recompute = "cheap",
) -> Plan:
    """Compiles the trace of a cell by a schedule.

    Args:
        dtype: of sequences and parameters.
        schedule: one of :data:`hoconv.recurrent.SCHEDULES`.
        masked: whether the sequences have lengths: the program reads ``valid`` (T, B, 1) bool.
        resets: whether states are reset: the program reads ``reset`` (T, B, 1) bool.
        reverse: whether the first step is the last of the sequence.
        recompute: what the gradient computes again, rather than read what is saved.
    """
    common = [("trace", replace(traced.program, reverse=reverse))]

    def then(name: str, run: Callable[[Program], Program]) -> None:
        common.append((name, run(common[-1][1])))

    if resets:
        then("reset", reset)
    if masked:  # after the resets: past its end a sequence keeps its states
        then("mask", mask)
    then("infer dtypes", lambda program: infer_dtypes(program, dtype))
    then("simplify", simplify)
    if reaches(schedule, "hoisted"):
        then("delay", delay)
        then("hoist", hoist)
    if reaches(schedule, "combined"):
        then("combine", combine)
    if reaches(schedule, "hoisted"):
        then("sink", sink)
    return Plan(schedule, traced.declarations, tuple(common), recompute)


def trim(forward: Program, backward: Program, recompute: Recompute) -> tuple[Program, Program]:
    """Drops results of `forward`, and sequences of `backward`, that `backward` need not read."""
    if recompute == "functions":
        backward = make_again(forward, backward)
    regions = (*backward.before, *backward.step, *backward.after)
    read = {v for op in flat(regions) for v in op.values}
    read |= backward.returned | {s.next for s in backward.states}
    read |= {y.source for y in backward.yields}
    sequences = tuple(
        (name, v)
        for name, v in backward.sequences
        if v in read or name in ("x", "d_output") or (name, v) in backward.constants
    )
    names = {name for name, _ in sequences} | {"output"}
    results = tuple((name, v) for name, v in forward.results if name in names)
    return simplify(replace(forward, results=results)), replace(backward, sequences=sequences)
