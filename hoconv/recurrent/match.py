"""Finds cells that cuDNN can compute, whatever their names, parameters and options are called.

A program matches if it equals that of a ready LSTM, GRU or tanh cell, whose equations are those of
torch.nn, up to the order of the operands of sums and products.

B batch, T time steps, n features.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hoconv.recurrent import cells
from hoconv.recurrent.cells import gated
from hoconv.recurrent.frontend.cell import Cell
from hoconv.recurrent.frontend.trace import trace
from hoconv.recurrent.ir.evaluate import DTYPES
from hoconv.recurrent.ir.program import Operand, Piece, Program, Value, flat
from hoconv.recurrent.passes.dtypes import infer_dtypes
from hoconv.recurrent.passes.simplify import simplify

# Up to this hidden size, and in float32, cuDNN keeps the weights on the chip.
SMALL = 192


@dataclass(frozen=True)
class _Known:
    """A function of PyTorch, the cell that it computes, and its gates.

    Attributes:
        gates: for each block of rows of PyTorch's weights, the names of the cell's linear maps of
            x and of h.
    """

    function: str
    cell: Cell
    gates: tuple[tuple[str, str], ...]
    options: tuple[dict[str, bool], ...] = ({}, {"bias": False})


_KNOWN = (
    _Known("lstm", cells.lstm, gated.LSTM_GATES),
    _Known("gru", cells.gru, gated.GRU_GATES),
    _Known("rnn_tanh", cells.elman, (("h", "h"),), ({},)),
)
_MODES = {"rnn_tanh": 1, "lstm": 2, "gru": 3}  # cuDNN's numbers


@dataclass(frozen=True)
class CudnnLayer:
    """A layer in one direction as a call of PyTorch, which calls cuDNN on a GPU.

    Attributes:
        function: the name of the function in torch.
        order: for each state of the function, the index of the cell's state.
        weights: for x and for h, the pieces of parameters that are the blocks of the weight.
        biases: likewise; None for a block without a bias, empty without any.
    """

    function: str
    order: tuple[int, ...]
    weights: tuple[tuple[Piece, ...], ...]
    biases: tuple[tuple[Piece | None, ...], ...]

    @functools.cached_property
    def _edges(self) -> dict[str, set[int]]:
        """Returns where the pieces of each parameter begin and end."""
        edges: dict[str, set[int]] = {}
        for piece in itertools.chain(*self.weights):
            if piece.columns is not None:
                edges.setdefault(piece.parameter, set()).update(piece.columns)
        return edges

    def run(
        self, x: Tensor, states: list[Tensor], parameters: Mapping[str, Tensor], reverse: bool
    ) -> list[Tensor]:
        """The output (T, B, n) and the final states (B, n) of x (T, B, I) and initial states."""

        # Split, not sliced: the gradients of slices would be filled with zeros and added.
        columns = {name: _split(parameters[name], edges) for name, edges in self._edges.items()}

        def block(piece: Piece) -> Tensor:
            if piece.columns is None:
                return parameters[piece.parameter]
            return columns[piece.parameter][piece.columns]

        def blocks(pieces: tuple[Piece | None, ...]) -> Tensor:
            n = states[0].shape[1]
            if not any(pieces):
                return x.new_zeros(len(pieces) * n)
            return torch.cat([block(piece) if piece else x.new_zeros(n) for piece in pieces])

        flat = [blocks(pieces) for pieces in (*self.weights, *self.biases)]
        if x.is_cuda:
            with torch.no_grad():  # contiguous in memory, which cuDNN requires
                torch._cudnn_rnn_flatten_weight(  # pyright: ignore[reportPrivateImportUsage]
                    flat, len(flat), x.shape[2], _MODES[self.function], states[0].shape[1], 0, 1,
                    False, False,
                )  # fmt: skip
        given = [states[i][None].contiguous() for i in self.order]
        output, *final = getattr(torch._VF, self.function)(
            x.flip(0) if reverse else x, given if self.function == "lstm" else given[0], flat,
            bool(self.biases), 1, 0.0, torch.is_grad_enabled(), False, False,
        )  # fmt: skip
        following = [final[self.order.index(i)][0] for i in range(len(states))]
        return [output.flip(0) if reverse else output, *following]


def _split(parameter: Tensor, edges: set[int]) -> dict[tuple[int, int], Tensor]:
    """Returns the columns of a parameter from each edge to the next."""
    cuts = list(itertools.pairwise(sorted({0, *edges, parameter.shape[1]})))
    return dict(zip(cuts, parameter.split([b - a for a, b in cuts], 1), strict=True))


def fastest(program: Program) -> bool:
    """Returns whether cuDNN is at least as fast as our kernels, by the measurements in
    docs/results.

    Args:
        program: a program with inferred dtypes.
    """
    (_, x), *more = program.sequences
    return not more and x.type.dtype == "f32" and program.states[0].value.type.size <= SMALL


def match(program: Program) -> CudnnLayer | None:
    """The call of cuDNN that computes a traced program; None if there is none."""
    if [name for name, _ in program.sequences] != ["x"]:
        return None
    program = _normal(program)
    (_, x), = program.sequences  # fmt: skip
    for known in _KNOWN:
        if len(known.cell.states) != len(program.states):
            continue
        for options in known.options:
            sizes = x.type.size, program.states[0].value.type.size
            template = _normal(trace(known.cell.bind(*sizes, options)).program)
            if bound := _same(template, program):
                return _library(known, template, program, bound)
    return None


def _normal(program: Program) -> Program:
    return simplify(infer_dtypes(program, DTYPES["f64"]))


def _same(template: Program, program: Program) -> dict[Value, Value] | None:
    """Maps each value of a template to the equal value of a program; None if they differ."""
    made = [{op.result: op for op in flat(p.step)} for p in (template, program)]
    roles = [
        {p.value: "param" for p in each.params}
        | {v: "sequence" for _, v in each.sequences}
        | {s.value: "state" for s in each.states}
        for each in (template, program)
    ]

    def unify(a: Operand, b: Operand, bound: dict[Value, Value]) -> dict[Value, Value] | None:
        if not isinstance(a, Value) or not isinstance(b, Value):
            return bound if a == b else None
        if a in bound:
            return bound if bound[a] is b else None
        bound = {**bound, a: b}
        if roles[0].get(a) != roles[1].get(b) or a.type != b.type:
            return None
        if a in roles[0]:
            return bound
        first, second = made[0][a], made[1][b]
        if (first.kind, first.attrs) != (second.kind, second.attrs):
            return None
        swapped = [second.inputs[::-1]] if first.kind in ("add", "mul") else []
        for inputs in (second.inputs, *swapped):
            if found := _all(unify, first.inputs, inputs, bound):
                return found
        return None

    bound = unify(template.yields[0].source, program.yields[0].source, {})
    following = {s.value: s.next for s in program.states}
    for state in template.states:
        if bound is None or state.value not in bound:
            return None
        bound = unify(state.next, following[bound[state.value]], bound)
    return bound


def _all(unify: Callable, first: tuple, second: tuple, bound: dict) -> dict | None:
    """Unifies operands pair by pair."""
    if len(first) != len(second):
        return None
    for a, b in zip(first, second):
        bound = unify(a, b, bound)
        if bound is None:
            return None
    return bound


def _library(
    known: _Known, template: Program, program: Program, bound: dict[Value, Value]
) -> CudnnLayer:
    pieces = {p.value: p.pieces[0] for p in program.params}
    of = {p.value.hint: pieces[bound[p.value]] for p in template.params if p.value in bound}
    values = [s.value for s in program.states]
    own = [f"{h}.1" if h == x else f"{h}.0" for x, h in known.gates]
    added = [None if h == x else of.get(f"{h}.bias") for x, h in known.gates]
    biases = tuple(of.get(f"{x}.bias") for x, _ in known.gates)
    return CudnnLayer(
        known.function,
        tuple(values.index(bound[s.value]) for s in template.states),
        (tuple(of[f"{x}.0"] for x, _ in known.gates), tuple(of[name] for name in own)),
        (biases, tuple(added)) if any(biases) else (),
    )
