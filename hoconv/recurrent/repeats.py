"""Calls of a recurrent layer that are like an earlier one run without its checks.

B batch, I input size, T time steps, n features of a state.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hoconv.recurrent.ir.evaluate import accumulate_dtype
from hoconv.recurrent.ops import Inputs, compiled_op
from hoconv.recurrent.plans import find_plan
from hoconv.recurrent.runtime.clusters import current_stream, use
from hoconv.recurrent.runtime.compiled_host import CompiledHost
from hoconv.recurrent.runtime.zeros import make_zeros
from hoconv.registration import Repeats

_kept: weakref.WeakKeyDictionary[nn.Module, Repeats] = weakref.WeakKeyDictionary()


class Setting(NamedTuple):
    """The attributes of a layer that may change between its calls."""

    training: bool
    impl: str
    schedule: str
    recompute: bool
    batch_first: bool
    dropout: float


class Ran(NamedTuple):
    """What ran in one layer: the last arguments of the op."""

    plan: str
    program: str
    impl: str


@dataclass(frozen=True, eq=False)
class _Call:
    """A call of a layer that was made.

    Attributes:
        setting: of the layer.
        runs: of each layer: where its parameters begin and end, and what ran.
        hosts: what runs instead of the op, where the call is one of C++ for each layer.
        states: the features of each state.
        dtype: of the states that the op takes.
    """

    setting: Setting
    runs: Sequence[tuple[int, int, Ran]]
    hosts: Sequence[CompiledHost]
    states: Sequence[int]
    dtype: torch.dtype


def repeat(
    layer: nn.Module, setting: Setting, x: Any
) -> tuple[Tensor, Tensor | tuple[Tensor, ...]] | None:
    """Makes a call again that has neither states nor lengths nor resets.

    Returns:
        What the layer returns, or None if no call was like this one.
    """
    if torch.compiler.is_compiling() or (kept := _kept.get(layer)) is None:
        return None
    parameters = layer._parameters
    tensors = [x, *parameters.values()]
    call = kept.find((setting, *parameters), tensors)
    return None if call is None else call(tensors)


def keep(
    layer: nn.Module, setting: Setting, x: Tensor, ran: Sequence[Ran],
    names: Sequence[Sequence[str]], states: Sequence[int],
) -> None:  # fmt: skip
    """Keeps a call that was made, in one direction, without states, lengths, resets and noise.

    Args:
        x: (T, B, I) or, with ``batch_first``, (B, T, I).
        ran, names: in each layer, and the names of its parameters.
        states: the features of each state of a layer.
    """
    tensors: list[Any] = [x, *layer._parameters.values()]
    if (
        torch.compiler.is_compiling()
        or any(each.impl == "reference" for each in ran)
        # In another order, as a parametrization leaves them, or beside others: it is taken by name.
        or [*layer._parameters] != [name for of in names for name in of]
        or len(tensors) == 1
    ):
        return
    batch, steps, sequence = 1, 0, x
    if setting.batch_first:
        batch, steps, sequence = 0, 1, x.transpose(0, 1)
    free = (steps, batch)
    hosts: list[CompiledHost | None] = []
    for each in ran:
        if each.impl == "cuda":
            free = (steps,)  # some batches cuDNN computes, others one kernel
            made = find_plan(each.plan)
            if made.plan.cudnn and not made.keeps_weights(each.program, sequence):
                return
            alone = each.program == "inference"
            hosts.append(
                made.find_compiled("inference", x.shape[batch], x.device) if alone else None
            )
    ends = [*accumulate(map(len, names))]
    call = _Call(
        setting=setting,
        runs=[*zip((0, *ends), ends, ran)],
        hosts=[each for each in hosts if each] if all(hosts) else [],
        states=states,
        dtype=accumulate_dtype(x.dtype),
    )
    kept = _kept.setdefault(layer, Repeats())
    kept.keep((setting, *layer._parameters), tensors, functools.partial(_run, call), *free)


def _run(call: _Call, tensors: list[Tensor]) -> tuple[Tensor, Tensor | tuple[Tensor, ...]]:
    setting, (x, *parameters) = call.setting, tensors
    if setting.batch_first:
        x = x.transpose(0, 1)
    run = _run_host if call.hosts else _run_op
    zeros = {n: make_zeros(x, (x.shape[1], n), call.dtype) for n in dict.fromkeys(call.states)}
    states = [zeros[n] for n in call.states]
    following: list[list[Tensor]] = []
    for i, (first, last, _) in enumerate(call.runs):
        if i and setting.dropout:
            x = F.dropout(x, setting.dropout, setting.training)
        found = run(call, i, Inputs([x], states, parameters[first:last], None))
        x = found[0]
        following.append(found[len(found) - len(states) :])
    final = [
        each[0].unsqueeze(0) if len(each) == 1 else torch.stack(each)
        for each in zip(*following, strict=True)
    ]
    if call.dtype != x.dtype:
        final = [each.to(x.dtype) for each in final]
    if setting.batch_first:
        x = x.transpose(0, 1)
    return x, final[0] if len(final) == 1 else (*final,)


def _run_host(call: _Call, layer: int, tensors: Inputs) -> list[Tensor]:
    """What the op returns, of one call of C++."""
    x, *_ = tensors.sequences
    with torch._C._AutoDispatchBelowAutograd(), use(x.device):
        given = [x, *tensors.states, *tensors.parameters]
        return call.hosts[layer](given, None, current_stream())


def _run_op(call: _Call, layer: int, tensors: Inputs) -> list[Tensor]:
    *_, ran = call.runs[layer]
    return compiled_op.call_plain(ran.program == "forward", *tensors, *ran)
