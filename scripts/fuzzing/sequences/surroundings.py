"""Calls under checkpoints, hooks of saved tensors, modes, threads, autocast and compilers."""

from __future__ import annotations

import importlib
import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import prune
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fuzzing.sequences.calls import (
    Call,
    Results,
    backward,
    differentiate,
    flatten,
    gradients,
    is_noisy,
    leaves_of,
    named,
)


def _checkpointed(layer: nn.Module, call: Call, reentrant: bool) -> Results:
    given = call.arguments()
    if reentrant and not given.args[0].requires_grad:
        return backward(layer, call)  # this checkpoint then has no gradient by design
    torch.manual_seed(call.seed)

    def run(*args: Any) -> tuple[Tensor, ...]:
        return tuple(flatten(layer(*args, **given.kwargs)))

    outputs = [*checkpoint(run, *given.args, use_reentrant=reentrant)]
    return differentiate(layer, call, given, outputs)


def checkpoint_reentrant(layer: nn.Module, call: Call) -> Results:
    return _checkpointed(layer, call, True)


def checkpoint_plain(layer: nn.Module, call: Call) -> Results:
    return _checkpointed(layer, call, False)


def saved_hooks(layer: nn.Module, call: Call) -> Results:
    given = call.arguments()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        outputs = call.run(layer, given)
    return differentiate(layer, call, given, outputs)


def saved_hooks_changing(layer: nn.Module, call: Call) -> Results:
    """Hooks that change what they saved: a call which ignores them gives other gradients."""
    given = call.arguments()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: t.clone(), lambda t: t * 0 if t.is_floating_point() else t
    ):
        outputs = call.run(layer, given)
    return differentiate(layer, call, given, outputs)


class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Counting(TorchDispatchMode):
    """Counts the ops that it sees."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def dispatch_mode(layer: nn.Module, call: Call) -> Results:
    given = call.arguments()
    with _Dispatch():
        outputs = call.run(layer, given)
        return differentiate(layer, call, given, outputs)


def dispatch_mode_seen(layer: nn.Module, call: Call) -> Results:
    """A call must not become invisible to a mode."""
    given = call.arguments()
    with _Counting() as mode:
        outputs = call.run(layer, given)
    return named(outputs) | {"sees ops": str(mode.count > 0)}


def meta(layer: nn.Module, call: Call) -> Results:
    given = call.arguments()
    parameters = {n: p.detach().to("meta") for n, p in layer.named_parameters()}
    kwargs = {k: v.to("meta") if isinstance(v, Tensor) else v for k, v in given.kwargs.items()}
    if isinstance(kwargs.get("state"), tuple):
        kwargs["state"] = tuple(s.to("meta") for s in kwargs["state"])
    outputs = flatten(functional_call(layer, parameters, (given.args[0].to("meta"),), kwargs))
    return {f"output {i}": f"{tuple(o.shape)} {o.dtype} {o.device}" for i, o in enumerate(outputs)}


def threads(layer: nn.Module, call: Call) -> Results:
    # A pruned tensor is an attribute that each call of a module sets: threads take each other's.
    if is_noisy(layer) or prune.is_pruned(layer):
        return no_threads(layer, call)
    found: dict[int, Results | BaseException] = {}

    enabled = torch.is_grad_enabled()

    def work(index: int) -> None:
        torch.set_grad_enabled(enabled)
        try:
            for _ in range(3):
                given = call.arguments()
                outputs = flatten(layer(*given.args, **given.kwargs))
                found[index] = named(outputs) | gradients(
                    outputs, leaves_of(layer, given), call.cotangents(outputs)
                )
        except BaseException as error:
            found[index] = error

    workers = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    results: Results = {}
    for i in range(2):
        of = found[i]
        if isinstance(of, BaseException):
            raise of
        results |= {f"thread {i}: {k}": v for k, v in of.items()}
    return results


def no_threads(layer: nn.Module, call: Call) -> Results:
    results: Results = {}
    for i in range(2):
        given = call.arguments()
        outputs = call.run(layer, given)
        of = named(outputs) | gradients(outputs, leaves_of(layer, given), call.cotangents(outputs))
        results |= {f"thread {i}: {k}": v for k, v in of.items()}
    return results


def autocast(layer: nn.Module, call: Call) -> Results:
    given = call.arguments()
    device = next(iter(given.leaves.values())).device.type
    with torch.autocast(device, torch.bfloat16), torch.set_grad_enabled(call.seed % 3 > 0):
        outputs = call.run(layer, given)
    return differentiate(layer, call, given, outputs)


def compiled(layer: nn.Module, call: Call) -> Results:
    given = call.arguments()
    torch._dynamo.reset()
    try:
        function = torch.compile(layer, backend="eager", dynamic=False)
        torch.manual_seed(call.seed)
        outputs = flatten(function(*given.args, **given.kwargs))
        return differentiate(layer, call, given, outputs)
    finally:
        torch._dynamo.reset()


def compiled_autograd(layer: nn.Module, call: Call) -> Results:
    given = call.arguments()
    outputs = call.run(layer, given)
    torch._dynamo.reset()
    try:
        compiler = torch.compile(backend="eager", dynamic=False)
        around = importlib.import_module("torch._dynamo.compiled_autograd")._enable(compiler)
        return differentiate(layer, call, given, outputs, around)
    finally:
        torch._dynamo.reset()
