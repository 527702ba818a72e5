"""Calls of a layer that are like an earlier one: one guard of PyTorch's checks all their tensors.

On small tensors a call takes as long as its Python, most of which looks at the tensors one by one
and chooses what runs. Both are known when a call has been made once.

B batch, I input size, T time steps, n features of a state.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._dynamo.guards import TensorGuards

from hoconv.recurrent.ir.evaluate import accumulate_dtype
from hoconv.recurrent.ops import Inputs, compiled_op
from hoconv.recurrent.plans import find_plan
from hoconv.recurrent.runtime.clusters import current_stream, use
from hoconv.recurrent.runtime.compiled_host import CompiledHost
from hoconv.recurrent.runtime.zeros import make_zeros
from hoconv.registration import is_transformed, records_gradients

# Calls of a layer that are kept; the one that was made first is dropped first.
_MOST_KEPT = 8
_kept: weakref.WeakKeyDictionary[nn.Module, tuple[_Kept, ...]] = weakref.WeakKeyDictionary()


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
class _Kept:
    """A call of a layer that was made.

    Attributes:
        setting, modes: what it depends on besides tensors.
        names: of the layer's parameters.
        guard: whether x and the parameters are as they were, but for T, and B where it may differ.
        runs: of each layer: where its parameters begin and end, and what ran.
        hosts: what runs instead of the op, where the call is one of C++ for each layer.
        states: the features of each state.
        dtype: of the states that the op takes.
        differentiable: whether autograd records the call.
    """

    setting: Setting
    modes: tuple[bool, ...]
    names: tuple[str, ...]
    guard: TensorGuards
    runs: Sequence[tuple[int, int, Ran]]
    hosts: Sequence[CompiledHost]
    states: Sequence[int]
    dtype: torch.dtype
    differentiable: bool


def repeat(
    layer: nn.Module, setting: Setting, x: Any
) -> tuple[Tensor, Tensor | tuple[Tensor, ...]] | None:
    """Makes a call again that has neither states nor lengths nor resets.

    Returns:
        What the layer returns, or None if no call was like this one.
    """
    if not _is_plain(x) or (kept := _kept.get(layer)) is None or not x.numel():
        return None
    described, parameters = (setting, _modes()), layer._parameters
    for each in kept:
        if (each.setting, each.modes) == described and each.names == (*parameters,):
            tensors: list[Any] = [*parameters.values()]
            if each.guard.check(x, *tensors):
                return _run(each, x, tensors)
    return None


def keep(
    layer: nn.Module, setting: Setting, x: Tensor, ran: Sequence[Ran], counts: Sequence[int],
    states: Sequence[int],
) -> None:  # fmt: skip
    """Keeps a call that was made, in one direction, without states, lengths, resets and noise.

    Args:
        x: (T, B, I) or, with ``batch_first``, (B, T, I).
        ran, counts: in each layer, and the number of its parameters, which are in this order.
        states: the features of each state of a layer.
    """
    tensors: list[Any] = [*layer._parameters.values()]
    if (
        not _is_plain(x)
        or not {Tensor, nn.Parameter}.issuperset(map(type, tensors))
        or len({*map(id, tensors)}) < len(tensors)  # which a guard refuses
        or any(each.impl == "reference" for each in ran)
        or sum(counts) != len(tensors)
    ):
        return
    batch, steps = 1, x
    if setting.batch_first:
        batch, steps = 0, x.transpose(0, 1)
    B = x.shape[batch]
    sizes: list[Any] = [None, None, x.shape[2]]
    hosts: list[CompiledHost | None] = []
    for each in ran:
        if each.impl == "cuda":
            sizes[batch] = B  # some batches cuDNN computes, others one kernel
            made = find_plan(each.plan)
            if made.plan.cudnn and not made.keeps_weights(each.program, steps):
                return
            if each.program == "inference":
                hosts.append(made.find_compiled("inference", B, x.device))
    every = [x, *tensors]
    all_sizes: Any = [sizes, *([*t.shape] for t in tensors)]
    any_strides: Any = [[None] * t.dim() for t in every]
    guard = TensorGuards(*every, dynamic_dims_sizes=all_sizes, dynamic_dims_strides=any_strides)
    ends = [*accumulate(counts)]
    made = _Kept(
        setting=setting,
        modes=_modes(),
        names=(*layer._parameters,),
        guard=guard,
        runs=[*zip((0, *ends), ends, ran)],
        hosts=[each for each in hosts if each is not None] if all(hosts) else [],
        states=states,
        dtype=accumulate_dtype(x.dtype),
        differentiable=ran[0].program == "forward",
    )
    _kept[layer] = (made, *_kept.get(layer, ())[: _MOST_KEPT - 1])


def _modes() -> tuple[bool, ...]:
    return torch.is_inference_mode_enabled(), records_gradients()


def _is_plain(x: Any) -> bool:
    """Whether nothing asks for more than the kernel and autograd, as far as x and modes say."""
    return (
        type(x) is Tensor
        and not is_transformed()
        and not torch._C._is_any_autocast_enabled()
        and not torch._C._len_torch_function_stack()
        and not torch._C._len_torch_dispatch_stack()
    )


def _run(
    call: _Kept, x: Tensor, parameters: list[Tensor]
) -> tuple[Tensor, Tensor | tuple[Tensor, ...]]:
    setting = call.setting
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


def _run_host(call: _Kept, layer: int, tensors: Inputs) -> list[Tensor]:
    """What the op returns, of one call of C++."""
    x, *_ = tensors.sequences
    with torch._C._AutoDispatchBelowAutograd(), use(x.device):
        given = [x, *tensors.states, *tensors.parameters]
        return call.hosts[layer](given, None, current_stream())


def _run_op(call: _Kept, layer: int, tensors: Inputs) -> list[Tensor]:
    *_, ran = call.runs[layer]
    return compiled_op.call_plain(call.differentiable, *tensors, *ran)
