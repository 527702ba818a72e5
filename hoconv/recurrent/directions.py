"""Runs both directions of a layer at once, where one kernel keeps the weights of both on a GPU.

torch.compile, torch.export and torch.func see an op for each direction (ops.py).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hoconv.dispatch.registration import call_one_by_one, is_plain, without_autocast
from hoconv.recurrent.ops import (
    RUNS,
    Call,
    Inputs,
    differentiate_again,
    read_backward,
)
from hoconv.recurrent.plans import find_plan

if TYPE_CHECKING:
    from hoconv.recurrent.compiled_plan import CompiledPlan


def run_directions(impl: str, calls: Sequence[Call]) -> list[list[Tensor]]:
    """Runs a layer in one direction or in both; returns the output and final states of each.

    Args:
        impl: ``"reference"``, ``"cpp"`` or ``"cuda"``.
        calls: of the same sequence. The first begins with its first step, the second with its last.
    """
    if impl == "cuda" and len(calls) == 2:
        which = "forward" if any(call.program == "forward" for call in calls) else "inference"
        if made := _find_plan(calls, which):
            return _run_together(made, calls, which)
    return [RUNS[impl](call) for call in calls]


def _find_plan(calls: Sequence[Call], which: str) -> CompiledPlan | None:
    """The plan of the first direction, if one kernel runs both."""
    tensors = [
        t for call in calls for t in (call.x, *call.constants, *call.states, *call.parameters)
    ]
    if not is_plain(tensors):
        return None
    made = find_plan(calls[0].plan)
    return made if made.keeps_weights(which, calls[0].x, len(calls)) else None


def _run_together(made: CompiledPlan, calls: Sequence[Call], which: str) -> list[list[Tensor]]:
    inputs = [call.inputs for call in calls]
    if which == "inference":
        found = _run(made, which, inputs)
    else:
        counts = tuple(map(len, inputs[0][:3]))
        tensors = [t for each in inputs for group in each[:3] for t in group]
        results = _BothDirections.apply(made, counts, [each.seed for each in inputs], *tensors)
        found = _halve(results)
    return [call.select(each) for call, each in zip(calls, found, strict=True)]


def _run(made: CompiledPlan, which: str, inputs: Sequence[Inputs]) -> list[list[Tensor]]:
    """Runs a program in both directions; returns what the op of each returns."""
    with without_autocast(inputs[0].sequences[0].device.type):  # programs choose their dtypes
        hosts = zip(made.hosts_of_both(which), inputs, strict=True)
        started = [host.start(*each) for host, each in hosts]
        written = made.cuda_loop(which).run_together([next(steps) for steps in started])
        return [steps.send(each) for steps, each in zip(started, written, strict=True)]


class _BothDirections(torch.autograd.Function):
    """The program ``forward`` in both directions, with the gradients that the op has."""

    @staticmethod
    def forward(
        ctx: Any, made: CompiledPlan, counts: Sequence[int], seeds: Sequence[Tensor | None],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.made, ctx.counts = made, counts
        found = _run(made, "forward", _group(tensors, counts, seeds))
        results = [t for of in found for t in of[: len(of) - counts[1]]]
        ctx.save_for_backward(*seeds, *tensors, *results)
        ctx.set_materialize_grads(False)
        return tuple(t for of in found for t in of)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        found = call_one_by_one(functools.partial(_differentiate, ctx), grads)
        return None, None, None, *found


def _differentiate(ctx: Any, *grads: Tensor | None) -> list[Tensor | None]:
    """The gradients of all tensors that both directions were given."""
    made, (n_sequences, n_states, n_parameters) = ctx.made, ctx.counts
    n = 2 * sum(ctx.counts)
    every = ctx.saved_tensors  # once: a checkpoint computes them anew
    seeds, saved = every[:2], every[2:]
    inputs = _group(saved[:n], ctx.counts, seeds)
    given = [(of[0], of[len(of) - n_states :]) for of in _halve(grads)]
    if torch.is_grad_enabled():
        with without_autocast(saved[0].device.type):
            again = [
                differentiate_again(made, definition, each, *of)
                for definition, each, of in zip(made.both("definition"), inputs, given)
            ]
        found = [
            [*d_inputs, *d_parameters, *d_states] for d_inputs, d_states, d_parameters in again
        ]
    else:
        read = [
            read_backward(made.text, each, results, *of)
            for each, results, of in zip(inputs, _halve(saved[n:]), given)
        ]
        found = _run(made, "backward", read)
    gradients: list[Tensor | None] = []
    n = 1 + len(made.plan.definition.constants)
    for of in found:
        d_inputs, rest = of[:n], of[n:]
        gradients += [*d_inputs, *[None] * (n_sequences - n)]
        gradients += [*rest[n_parameters:], *rest[:n_parameters]]
    return gradients


def _group(
    tensors: Sequence[Tensor], counts: Sequence[int], seeds: Sequence[Tensor | None]
) -> list[Inputs]:
    """The inputs of each direction, of tensors in their order."""
    n, m, _ = counts
    return [
        Inputs(of[:n], of[n : n + m], of[n + m :], seed)
        for of, seed in zip(_halve(tensors), seeds, strict=True)
    ]


def _halve(items: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    return items[: len(items) // 2], items[len(items) // 2 :]
