"""The definition of a recurrent layer in one direction: the cell, called at every time step.

B batch, I input size, T time steps, n features.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hoconv.recurrent.frontend.cell import BoundCell
from hoconv.recurrent.frontend.frame import Frame, Init, Map, Row
from hoconv.recurrent.ir import evaluate, random


class _Step(Frame):
    """One time step on tensors.

    Products are computed in the dtype of the parameters, everything else in float32 at least.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        hidden_size: int,
        dtype: torch.dtype,
        batch: int,
        step: int,
        training: bool,
        seed: Tensor | None,
    ) -> None:
        self.training = training
        self.parameters = parameters
        self.hidden_size = hidden_size
        self.dtype = dtype
        self.batch = batch
        self.at = step
        self.seed = seed
        self.draws = 0

    def linear(self, map: Map, operands: tuple[Row, ...]) -> Row:
        name = self.prefix + map.name
        weight = self.parameters[f"weight_{name}"]
        added = self.parameters[f"bias_{name}"] if map.bias else None
        rows = [operand.flatten(1) for operand in operands]
        parts = weight.split([row.shape[1] for row in rows], 1)
        result: Row = 0.0
        for row, part in zip(rows, parts, strict=True):
            result = result + evaluate.linear(row, part, added).to(self.dtype)
            added = None
        return result if map.shape is None else result.unflatten(1, map.shape)

    def parameter(self, name: str, shape: tuple[int, ...], init: Init, learned: bool) -> Row:
        return self.parameters[name].to(self.dtype).reshape(1, *shape)

    def keep(self, probability: float, shape: tuple[int, ...]) -> Row:
        assert self.seed is not None
        self.draws += 1
        size, at = math.prod(shape), self.draws - 1
        kept = random.keep(probability, at, size, self.batch, self.at, self.seed)
        return kept.unflatten(1, shape)

    def apply(self, kind: str, *operands: Row | float) -> Row:
        return evaluate.elementwise(kind, *operands, dtype=self.dtype)


def recurrent(
    cell: BoundCell,
    x: Tensor,
    states: Sequence[Tensor],
    parameters: Mapping[str, Tensor],
    *,
    constants: Sequence[Tensor] = (),
    valid: Tensor | None = None,
    reset: Tensor | None = None,
    training: bool = False,
    seed: Tensor | None = None,
    reverse: bool = False,
) -> tuple[Tensor, list[Tensor]]:
    """Runs a cell over a sequence.

    Args:
        x: (T, B, I), and the other inputs beside it.
        states: (B, n) of each state, before the first step; of one with axes, its features.
        constants: (1, B, n) of each constant of the cell.
        parameters: by the names that the cell declares, in the dtype of x; weights, and rows.
        valid: (T, B, 1) bool: where it is false the states stay as they are and the output is 0.
        reset: (T, B, 1) bool: where it is true the step begins with states of zero.
        training: whether dropout and zoneout draw.
        seed: int64 scalar on the device of x, of the random masks, where there are any.
        reverse: whether the first step is the last of x.

    Returns:
        The outputs (T, B, n), and the states (B, n) after the last step; in the dtype of x. States
        are kept in float32 at least from step to step.
    """
    T, B = x.shape[:2]
    dtype = evaluate.accumulate_dtype(x.dtype)
    now = [
        state.to(dtype).unflatten(1, shape)
        for state, shape in zip(states, cell.state_shapes.values(), strict=True)
    ]
    beside = [
        each[0].to(dtype).unflatten(1, shape)
        for each, shape in zip(constants, cell.constant_shapes.values(), strict=True)
    ]
    outputs: list[Tensor] = []
    read = x.unbind()  # the gradient of x[t] would be as large as x, at every step
    for t in reversed(range(T)) if reverse else range(T):
        frame = _Step(parameters, cell.hidden_size, dtype, B, t, training, seed)
        begin = now if reset is None else [_where(reset[t], 0.0, state) for state in now]
        output, following, _ = cell.step(frame, read[t].to(dtype), begin, beside)
        if valid is None:
            now = list(following.values())
        else:
            now = [_where(valid[t], b, a) for a, b in zip(now, following.values())]
            output = torch.where(valid[t], output, 0.0)
        outputs.append(output.to(x.dtype))
    if reverse:
        outputs.reverse()
    # Copies: a cell may return x or a state of before as it is.
    return torch.stack(outputs), [state.to(x.dtype, copy=True).flatten(1) for state in now]


def _where(condition: Tensor, a: Tensor | float, b: Tensor) -> Tensor:
    """Chooses by row; the condition is (B, 1)."""
    return torch.where(condition.view(-1, *(1,) * (b.dim() - 1)), a, b)
