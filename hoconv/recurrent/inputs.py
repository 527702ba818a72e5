"""The arguments of a layer's call beside x: inputs, states, lengths and resets.

T time steps, B batch, n features of a state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from hoconv.recurrent.frontend.cell import BoundCell

State = Tensor | tuple[Tensor, ...]


def gather_inputs(
    cell: BoundCell, inputs: Mapping[str, Tensor], x: Tensor, single: bool, batch_first: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Returns a cell's inputs beside x as rows (T, B, n), and its constants as (1, B, n), in their
    order.

    Args:
        x: (T, B, I).
        single: whether inputs are those of one sequence, without B.
        batch_first: whether they are (B, T, ...).

    Raises:
        TypeError: an input is missing, not the cell's, or of another dtype or device than x.
        ValueError: a shape that does not fit.
    """
    name, shapes = cell.name, cell.input_shapes
    if unknown := [given for given in inputs if given not in shapes]:
        listed = ", ".join(shapes) or "none"
        raise TypeError(f"{unknown[0]}: not an input of the cell {name}; beside x it has {listed}")
    if missing := [wanted for wanted in shapes if wanted not in inputs]:
        raise TypeError(f"{missing[0]}: the cell {name} needs this input: a tensor")
    constants = cell.cell.constants
    for given, shape in shapes.items():
        _check(given, inputs[given], x, shape, given in constants, single, batch_first)
    beside = [
        _arrange(inputs[given], single, batch_first) for given in shapes if given not in constants
    ]
    repeated = [
        inputs[given].reshape(1, -1, math.prod(shape)).expand(1, x.shape[1], -1)
        for given, shape in cell.constant_shapes.items()
    ]
    return beside, repeated


def gather_states(
    cell: BoundCell, given: State | None, x: Tensor, runs: int, single: bool
) -> list[list[Tensor]]:
    """Returns the states (B, n) before the first step, of each run.

    Args:
        given: (runs, B, ...) of each state, as a layer takes them; None stands for zeros.
        x: (T, B, I).
        runs: the layers and directions.
        single: whether they are those of one sequence, without B.

    Raises:
        TypeError, ValueError: one is no tensor of floating point, or its shape or device does not
            fit.
    """
    sizes, shapes, batch = cell.state_sizes, cell.state_shapes, x.shape[1]
    if given is None:  # nothing writes to them: all runs share them, and states of one size
        zeros = {n: x.new_zeros(batch, n) for n in dict.fromkeys(sizes.values())}
        return [[zeros[n] for n in sizes.values()]] * runs
    states = list(given) if isinstance(given, tuple | list) else [given]
    if len(states) != len(sizes):
        raise ValueError(f"state: expected {len(sizes)} ({', '.join(sizes)}), got {len(states)}")
    for i, (name, shape) in enumerate(shapes.items()):
        expected = (runs, *shape) if single else (runs, batch, *shape)
        if not isinstance(states[i], Tensor):
            kind = type(states[i]).__name__
            raise TypeError(f"state {name}: expected a tensor of shape {expected}, got {kind}")
        if tuple(states[i].shape) != expected:
            raise ValueError(
                f"state {name}: expected shape {expected}, got {tuple(states[i].shape)}"
            )
        if not states[i].is_floating_point():
            raise TypeError(f"state {name}: expected floating point, got {states[i].dtype}")
        if states[i].device != x.device:
            raise ValueError(
                f"state {name}: expected the device of x, {x.device}, got {states[i].device}"
            )
        if single:
            states[i] = states[i].unsqueeze(1)
        if len(shape) > 1:
            states[i] = states[i].flatten(2)
    return [list(of_run) for of_run in zip(*(s.unbind(0) for s in states), strict=True)]


def read_lengths(lengths: Tensor | Sequence[int], x: Tensor) -> Tensor:
    """Returns whether a step of x (T, B, I) is within its sequence: (T, B, 1)."""
    T, B = x.shape[:2]
    if not isinstance(lengths, Tensor | Sequence):
        raise TypeError(f"lengths: expected {B} ints, as many as sequences, got {lengths!r}")
    if isinstance(lengths, Tensor):
        steps = lengths
    else:  # an empty list says nothing of its dtype
        steps = torch.tensor(lengths, device="cpu", dtype=None if len(lengths) else torch.int64)
    numbers = not (steps.is_floating_point() or steps.is_complex() or steps.dtype == torch.bool)
    if steps.shape != (B,) or not numbers:
        raise ValueError(
            f"lengths: expected {B} ints, as many as sequences, got {steps.dtype} of shape "
            f"{tuple(steps.shape)}"
        )
    on_host = steps.device.type == "cpu"
    if on_host and not torch.compiler.is_compiling() and ((steps < 1) | (steps > T)).any():
        raise ValueError(f"lengths: expected 1 to the {T} steps of x, got {steps.tolist()}")
    return (torch.arange(T, device=x.device)[:, None] < steps.to(x.device)).unsqueeze(2)


def read_reset(reset: Tensor, x: Tensor, single: bool, batch_first: bool) -> Tensor:
    """Returns whether a sequence begins at a step of x (T, B, I): (T, B, 1)."""
    if not isinstance(reset, Tensor) or reset.dtype != torch.bool:
        got = reset.dtype if isinstance(reset, Tensor) else type(reset).__name__
        raise TypeError(f"reset: expected a tensor of bool, got {got}; compare it with 0")
    T, B = x.shape[:2]
    shape = (T,) if single else (B, T) if batch_first else (T, B)
    if reset.shape != shape:
        raise ValueError(
            f"reset: expected shape {shape}, one for each step of x, got {tuple(reset.shape)}"
        )
    if reset.device != x.device:
        raise ValueError(f"reset: expected the device of x, {x.device}, got {reset.device}")
    if single:
        return reset[:, None, None]
    return (reset.t() if batch_first else reset).unsqueeze(2)


def find_ends(begins: Tensor, valid: Tensor | None) -> Tensor:
    """Returns whether a sequence ends at a step (T, B, 1), as the next one begins at the following
    step.

    Nothing ends at the last step: backwards in time, that one begins with the initial state.
    """
    ends = (begins if valid is None else begins & valid).roll(-1, 0)
    ends[-1] = False
    return ends


def pack_like(packed: PackedSequence, outputs: Tensor, lengths: Tensor) -> PackedSequence:
    """Packs outputs (T, B, n) in the order of the packed input."""
    order = packed.sorted_indices
    if order is not None:
        outputs, lengths = outputs.index_select(1, order), lengths[order.to(lengths.device)]
    data = pack_padded_sequence(outputs, lengths).data
    return PackedSequence(data, packed.batch_sizes, order, packed.unsorted_indices)


def _check(
    name: str, given: object, x: Tensor, shape: tuple[int, ...], constant: bool, single: bool,
    batch_first: bool,
) -> None:  # fmt: skip
    T, B = x.shape[:2]
    if constant:
        allowed = [(1, *shape), shape if single else (B, *shape)]
        laid_out = "the same at every step"
    else:
        leading = (T,) if single else (B, T) if batch_first else (T, B)
        allowed = [(*leading, *shape)]
        laid_out = "laid out as x is"
    if not isinstance(given, Tensor) or given.shape not in allowed:
        got = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
        raise ValueError(f"{name}: expected a tensor of shape {allowed[-1]}, {laid_out}, got {got}")
    if given.dtype != x.dtype or given.device != x.device:
        raise TypeError(
            f"{name}: expected {x.dtype} on {x.device}, as x is, got {given.dtype} on "
            f"{given.device}"
        )


def _arrange(given: Tensor, single: bool, batch_first: bool) -> Tensor:
    if single:
        given = given.unsqueeze(1)
    elif batch_first:
        given = given.transpose(0, 1)
    return given.flatten(2)
