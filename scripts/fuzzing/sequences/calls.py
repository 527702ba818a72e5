"""The ways to call a layer: how its outputs come about, and what is derived from them.

Results are by name: tensors, None for no gradient, and words."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.utils import prune
from torch.nn.utils.rnn import PackedSequence
from torch.utils.checkpoint import checkpoint

from fuzzing.draw import Draw
from fuzzing.sequences.layers import Arguments

Results = dict[str, Any]


class Call:
    """One call of a layer. Each is of the same arguments, which are drawn anew."""

    def __init__(self, layer: Any, draw_arguments: Callable[[], Arguments], seed: int) -> None:
        self.layer, self.draw_arguments, self.seed = layer, draw_arguments, seed
        self.given = draw_arguments()
        self.parameters: dict[str, Tensor] = dict(layer.named_parameters())

    def run(self, x: Any = None, parameters: dict[str, Tensor] | None = None) -> list[Tensor]:
        """Calls the layer, also with another input or with other parameters."""
        args = (self.given.args[0] if x is None else x, *self.given.args[1:])
        torch.manual_seed(self.seed)
        if parameters is None:
            return flatten(self.layer(*args, **self.given.kwargs))
        return flatten(functional_call(self.layer, parameters, args, self.given.kwargs))

    def leaves(self) -> dict[str, Tensor]:
        named = {**self.given.leaves, **self.parameters}
        return {f"d_{name}": t for name, t in named.items() if t.requires_grad}

    def cotangents(self, outputs: list[Tensor], key: Any = 1) -> list[Tensor]:
        generator = Draw(self.seed, "cotangents", key).generator()
        return [
            torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o.device, o.dtype)
            for o in outputs
        ]

    def gradients(
        self, outputs: list[Tensor], cotangents: list[Tensor], leaves: Any = None, **options: Any
    ) -> Results:
        leaves = leaves or self.leaves()
        used = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if o.requires_grad]
        if not used or not leaves:
            return {}
        some, their = zip(*used, strict=True)
        found = torch.autograd.grad(some, [*leaves.values()], their, allow_unused=True, **options)
        return dict(zip(leaves, found, strict=True))

    def is_noisy(self) -> bool:
        """Returns whether it draws random numbers, of which two threads would each get some."""
        of, runs = vars(self.layer), getattr(self.layer, "runs", None)
        draws = runs and runs[0][0].name.startswith(("random", "own"))
        return of["training"] and (draws or of.get("dropout") or of.get("weight_dropout"))


def flatten(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, PackedSequence):
        return [result.data]
    return [t for part in result for t in flatten(part)]


def _under(name: str, results: Results) -> Results:
    return {f"{name} {key}": value for key, value in results.items()}


@dataclass(frozen=True)
class Way:
    """A way to get outputs, or to derive something from them.

    Attributes:
        run: makes a context of outputs for a call; or takes a call and outputs, returns results.
        plain: another with the same results without what this one is about; itself where None.
        alone: whether the results do not define those of another implementation.
        packed: whether it takes a PackedSequence: PyTorch does not everywhere, nor in all versions.
        refused: a part of the text of an error that is PyTorch's own.
    """

    run: Callable[..., Any]
    weight: float
    plain: Way | None = None
    alone: bool = False
    packed: bool = True
    refused: str | None = None


OUTPUTS: dict[str, Way] = {}
DERIVED: dict[str, Way] = {}


def _add(ways: dict[str, Way], weight: float, **options: Any) -> Callable[[Any], Way]:
    def add(run: Callable[..., Any]) -> Way:
        made = contextlib.contextmanager(run) if ways is OUTPUTS else run
        return ways.setdefault(run.__name__, Way(made, weight, **options))

    return add


_outputs, _derived = functools.partial(_add, OUTPUTS), functools.partial(_add, DERIVED)


def results(outputs: Way, derived: Way, call: Call) -> Results:
    """Calls the layer, and returns the outputs and what is derived from them."""
    with outputs.run(call) as made:
        found: Results = {f"output {i}": o.detach().clone() for i, o in enumerate(made)}
        found |= {f"output {i}'s gradient": str(o.requires_grad) for i, o in enumerate(made)}
        return found | derived.run(call, made)


# How outputs come about


@_outputs(25)
def plain(call: Call):
    yield call.run()


@_outputs(5)
def no_grad(call: Call):
    with torch.inference_mode() if call.seed % 2 else torch.no_grad():
        yield call.run()


@_outputs(1.5)
def autocast(call: Call):
    device = next(iter(call.given.leaves.values())).device.type
    with torch.autocast(device, torch.bfloat16), torch.set_grad_enabled(call.seed % 3 > 0):
        outputs = call.run()
    yield outputs


@_outputs(2)
def functional(call: Call):
    """Other parameters, by functional_call."""
    call.parameters = {n: (p.detach() * 1.1).requires_grad_(p.requires_grad)
                       for n, p in call.parameters.items()}  # fmt: skip
    yield call.run(parameters=call.parameters)


@_outputs(1.4, plain=plain, packed=False)
def checkpointed(call: Call):
    first, *others = call.given.args
    # The reentrant checkpoint has no gradient where the input needs none.
    reentrant = first.requires_grad and call.seed % 2 > 0
    torch.manual_seed(call.seed)
    yield flatten(
        checkpoint(lambda x: tuple(flatten(call.layer(x, *others, **call.given.kwargs))), first,
                   use_reentrant=reentrant)
    )  # fmt: skip


@_outputs(1, alone=True)
def saved_hooks(call: Call):
    """Hooks that change what they saved: a call which ignores them gives other gradients."""
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: t.clone(), lambda t: t * 0 if t.is_floating_point() else t
    ):
        outputs = call.run()
    yield outputs


@_outputs(2, alone=True)
def changed(call: Call):
    """Tensors change in place before backward: a parameter, the inputs, or the outputs."""
    outputs = call.run()
    sets = [[p] for p in call.parameters.values()] + [[*call.given.leaves.values()], outputs]
    chosen = Draw(call.seed, "changed").choice(sets)
    before = [t.detach().clone() for t in chosen]
    with torch.no_grad():
        _ = [t.mul_(1.5) for t in chosen]
    try:
        yield outputs
    finally:
        with torch.no_grad():
            _ = [t.copy_(values) for t, values in zip(chosen, before, strict=True)]


@_outputs(0.7, plain=plain)
def settings_changed(call: Call):
    """Attributes change between forward and backward: the backward pass is of the call before."""
    layer, outputs = call.layer, call.run()
    for name in getattr(layer, "fixed", ()):
        with contextlib.suppress(AttributeError):
            setattr(layer, name, "changed")
            raise AssertionError(f"{name} was changed")
    names = ("impl", "residual", "recompute", "softmax", "gradient", "dilation", "training")
    others = {"impl": "auto", "gradient": "ste", "dilation": 1}
    new = {n: others.get(n, not getattr(layer, n)) for n in names if n in vars(layer)}
    with mock.patch.multiple(layer, **new):
        yield outputs


# What is derived from them


@_derived(6)
def nothing(call: Call, outputs: list[Tensor]) -> Results:
    return {}


@_derived(9)
def backward(call: Call, outputs: list[Tensor], around: Any = None) -> Results:
    call.layer.zero_grad()
    used = [(o, c) for o, c in zip(outputs, call.cotangents(outputs)) if o.requires_grad]
    if used:
        with around or contextlib.nullcontext():
            some, their = zip(*used, strict=True)
            torch.autograd.backward(some, their)
    found = {n: t.grad if t.grad is None else t.grad.clone() for n, t in call.leaves().items()}
    call.layer.zero_grad()
    return found


@_derived(0.08, plain=backward, packed=False)
def compiled_autograd(call: Call, outputs: list[Tensor]) -> Results:
    torch._dynamo.reset()
    try:
        compiler = torch.compile(backend="eager", dynamic=False)
        around = importlib.import_module("torch._dynamo.compiled_autograd")._enable(compiler)
        return backward.run(call, outputs, around)
    finally:
        torch._dynamo.reset()


@_derived(5)
def twice(call: Call, outputs: list[Tensor]) -> Results:
    found = call.gradients(outputs, call.cotangents(outputs), retain_graph=True)
    return found | _under("second", call.gradients(outputs, call.cotangents(outputs, 2)))


@_derived(2)
def double(call: Call, outputs: list[Tensor]) -> Results:
    cotangents = [c.requires_grad_() for c in call.cotangents(outputs)]
    leaves = call.leaves() | {f"d_cotangent {i}": c for i, c in enumerate(cotangents)}
    first = call.gradients(outputs, cotangents, create_graph=True)
    # Zeros for those that an implementation leaves out, so that all get the same cotangents.
    grads = [torch.zeros_like(leaves[k]) if g is None else g for k, g in first.items()]
    second = call.gradients(grads, call.cotangents(grads, 2), leaves) if grads else {}
    return first | _under("second", second)


def _one_by_one(call: Call, outputs: list[Tensor]) -> Results:
    one = call.gradients(outputs, call.cotangents(outputs), retain_graph=True)
    two = call.gradients(outputs, call.cotangents(outputs, 2))
    return {k: None if v is None else torch.stack((v, two[k])) for k, v in one.items()}


# The gradient of circular padding has no batched form for an empty batch.
@_derived(1, plain=Way(_one_by_one, 0), refused="Tensor.as_strided")
def batched(call: Call, outputs: list[Tensor]) -> Results:
    pairs = zip(call.cotangents(outputs), call.cotangents(outputs, 2), strict=True)
    both = [torch.stack(pair) for pair in pairs]
    return call.gradients(outputs, both, is_grads_batched=True)


def _loss(call: Call) -> Callable[[dict[str, Tensor], Tensor], Tensor]:
    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        outputs = call.run(x, parameters)
        products = zip(outputs, call.cotangents(outputs), strict=True)
        return sum(((o * c).sum() for o, c in products), outputs[0].new_zeros(()))

    return loss


def _at(call: Call) -> tuple[dict[str, Tensor], Tensor]:
    return {n: p.detach() for n, p in call.parameters.items()}, call.given.args[0].detach()


@_derived(0.7, packed=False)
def func_jvp(call: Call, outputs: list[Tensor]) -> Results:
    parameters, x = _at(call)
    tangents = dict(zip(parameters, call.cotangents([*parameters.values()], "t"), strict=True))
    at, along = (parameters, x), (tangents, call.cotangents([x], "x")[0])
    value, tangent, *_ = torch.func.jvp(_loss(call), at, along)
    return {"value": value, "tangent": tangent}


def _mapped(call: Call, apply: Callable[..., Results]) -> Results:
    """Returns outputs, and gradients by ``torch.func.grad``, for two inputs."""
    parameters, x = _at(call)
    gradient: Any = torch.func.grad(_loss(call), (0, 1))

    def function(x: Tensor) -> Results:
        of_parameters, of_x = gradient(parameters, x)
        outputs = {f"mapped {i}": o for i, o in enumerate(call.run(x))}
        return outputs | {"d x": of_x} | _under("d", of_parameters)

    return apply(function, torch.stack((x, x * 0.5)))


def _loop(function: Callable[[Tensor], Results], inputs: Tensor) -> Results:
    one, two = map(function, inputs)
    return {name: torch.stack((t, two[name])) for name, t in one.items()}


# PyTorch has no full backward hooks under torch.func.
@_derived(2, plain=Way(lambda call, _: _mapped(call, _loop), 0), packed=False,
          refused="hooks.py:")  # fmt: skip
def func_vmap(call: Call, outputs: list[Tensor]) -> Results:
    if call.is_noisy():  # vmap draws other numbers
        return _mapped(call, _loop)
    return _mapped(call, lambda function, xs: torch.vmap(function, randomness="same")(xs))


def _in_threads(call: Call, count: int) -> Results:
    enabled = torch.is_grad_enabled()

    def work(number: int) -> Results:
        other = Call(call.layer, call.draw_arguments, call.seed)
        with torch.set_grad_enabled(enabled):
            return _under(str(number), twice.run(other, other.run()))

    with ThreadPoolExecutor(count) as pool:
        return {k: v for found in pool.map(work, range(4)) for k, v in found.items()}


@_derived(0.7, plain=Way(lambda call, _: _in_threads(call, 1), 0))
def threads(call: Call, outputs: list[Tensor]) -> Results:
    # A pruned tensor is an attribute that each call of a module sets: threads take each other's.
    alone = call.is_noisy() or prune.is_pruned(call.layer)
    return _in_threads(call, 1 if alone else 2)
