"""The ways to call a layer, in the modes of autograd. A mode returns results by name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from fuzzing.draw import Draw
from fuzzing.sequences.layers import Arguments

Results = dict[str, Any]  # tensors, None for no gradient, and words


@dataclass(frozen=True)
class Call:
    """One call, which can be repeated: the arguments are drawn anew, and are the same each time."""

    arguments: Callable[[], Arguments]
    seed: int

    def draw(self, *key: Any) -> Draw:
        return Draw(self.seed, *key)

    def run(self, layer: nn.Module, given: Arguments) -> list[Tensor]:
        torch.manual_seed(self.seed)
        return flatten(layer(*given.args, **given.kwargs))

    def cotangents(self, outputs: list[Tensor], *key: Any) -> list[Tensor]:
        generator = self.draw("cotangents", *key).generator()
        return [
            torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o.device, o.dtype)
            for o in outputs
        ]


def flatten(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, PackedSequence):
        return [result.data]
    return [t for part in result for t in flatten(part)]


def named(outputs: list[Tensor]) -> Results:
    found: Results = {}
    for i, output in enumerate(outputs):
        found[f"output {i}"] = output.detach()
        found[f"output {i}'s gradient"] = str(output.requires_grad)
    return found


def leaves_of(layer: nn.Module, given: Arguments) -> dict[str, Tensor]:
    leaves = {f"d_{name}": t for name, t in given.leaves.items() if t.requires_grad}
    parameters = {f"d_{name}": p for name, p in layer.named_parameters() if p.requires_grad}
    return leaves | parameters


def gradients(
    outputs: list[Tensor], leaves: dict[str, Tensor], cotangents: list[Tensor], **options: Any
) -> Results:
    used = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if o.requires_grad]
    if not used or not leaves:
        return {}
    some, their = zip(*used, strict=True)
    found = torch.autograd.grad(some, [*leaves.values()], their, allow_unused=True, **options)
    return dict(zip(leaves, found, strict=True))


def forward(layer: nn.Module, call: Call) -> Results:
    return named(call.run(layer, call.arguments()))


def no_grad(layer: nn.Module, call: Call) -> Results:
    with torch.no_grad():
        return forward(layer, call)


def inference(layer: nn.Module, call: Call) -> Results:
    given = call.arguments()
    with torch.inference_mode():
        outputs = call.run(layer, given)
        return {f"output {i}": o.clone() for i, o in enumerate(outputs)}


def backward(layer: nn.Module, call: Call) -> Results:
    given = call.arguments()
    return differentiate(layer, call, given, call.run(layer, given))


def differentiate(
    layer: nn.Module, call: Call, given: Arguments, outputs: list[Tensor],
    around: contextlib.AbstractContextManager[Any] | None = None,
) -> Results:  # fmt: skip
    layer.zero_grad()
    found = named(outputs)
    cotangents = call.cotangents(outputs)
    used = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if o.requires_grad]
    if used:
        with around or contextlib.nullcontext():
            some, their = zip(*used, strict=True)
            torch.autograd.backward(some, their)
    for name, tensor in leaves_of(layer, given).items():
        found[name] = None if tensor.grad is None else tensor.grad.detach().clone()
    layer.zero_grad()
    return found


def accumulate(layer: nn.Module, call: Call) -> Results:
    """Two calls, whose gradients are added; the second has other arguments of the same shape."""
    found = backward(layer, call)
    return found | {f"again {k}": v for k, v in backward(layer, call).items()}


def grad(layer: nn.Module, call: Call) -> Results:
    given = call.arguments()
    outputs = call.run(layer, given)
    leaves = leaves_of(layer, given)
    return named(outputs) | gradients(outputs, leaves, call.cotangents(outputs))


def retain(layer: nn.Module, call: Call) -> Results:
    given = call.arguments()
    outputs = call.run(layer, given)
    leaves = leaves_of(layer, given)
    found = named(outputs) | gradients(outputs, leaves, call.cotangents(outputs), retain_graph=True)
    more = gradients(outputs, leaves, call.cotangents(outputs, 2))
    return found | {f"second {k}": v for k, v in more.items()}


def double(layer: nn.Module, call: Call) -> Results:
    given = call.arguments()
    outputs = call.run(layer, given)
    leaves = leaves_of(layer, given)
    cotangents = [c.requires_grad_() for c in call.cotangents(outputs)]
    first = gradients(outputs, leaves, cotangents, create_graph=True)
    # Zeros for those that an implementation leaves out, so that all get the same cotangents.
    grads = [torch.zeros_like(leaves[k]) if g is None else g for k, g in first.items()]
    more = leaves | {f"d_cotangent {i}": c for i, c in enumerate(cotangents)}
    second = gradients(grads, more, call.cotangents(grads, 2)) if grads else {}
    return (
        named(outputs)
        | {k: v if v is None else v.detach() for k, v in first.items()}
        | {f"second {k}": v for k, v in second.items()}
    )


def batched(layer: nn.Module, call: Call) -> Results:
    given = call.arguments()
    outputs = call.run(layer, given)
    one, two = call.cotangents(outputs), call.cotangents(outputs, 2)
    both = [torch.stack(pair) for pair in zip(one, two, strict=True)]
    return gradients(outputs, leaves_of(layer, given), both, is_grads_batched=True)


def one_by_one(layer: nn.Module, call: Call) -> Results:
    given = call.arguments()
    outputs = call.run(layer, given)
    leaves = leaves_of(layer, given)
    one = gradients(outputs, leaves, call.cotangents(outputs), retain_graph=True)
    two = gradients(outputs, leaves, call.cotangents(outputs, 2))
    return {k: None if v is None else torch.stack((v, two[k])) for k, v in one.items()}


def is_noisy(layer: Any) -> bool:
    """Whether a call draws random numbers, of which two threads would each get some."""
    draws = hasattr(layer, "runs") and layer.runs[0][0].name.startswith(("random", "leaky"))
    return layer.training and (draws or any(
        getattr(layer, n, 0) for n in ("dropout", "weight_dropout")))  # fmt: skip


def changed_between(layer: nn.Module, call: Call) -> Results:
    """A parameter is changed in place between forward and backward, then back."""
    given = call.arguments()
    outputs = call.run(layer, given)
    parameters = [*layer.parameters()]
    if not parameters:
        return {}
    chosen = call.draw("changed").choice(parameters)
    before = chosen.detach().clone()
    with torch.no_grad():
        chosen.mul_(1.5)
    try:
        return differentiate(layer, call, given, outputs)
    finally:
        layer.zero_grad()
        with torch.no_grad():
            chosen.copy_(before)


def input_changed_between(layer: nn.Module, call: Call) -> Results:
    given = call.arguments()
    outputs = call.run(layer, given)
    with torch.no_grad():
        for tensor in given.leaves.values():
            tensor.mul_(1.5)
    try:
        return differentiate(layer, call, given, outputs)
    finally:
        layer.zero_grad()


def settings_between(layer: Any, call: Call) -> Results:
    """Attributes change between forward and backward: the backward pass is of the call before."""
    given = call.arguments()
    outputs = call.run(layer, given)
    for name in getattr(layer, "fixed", ()):
        with contextlib.suppress(AttributeError):
            setattr(layer, name, None)
            raise AssertionError(f"{name} was changed")
    names = ("impl", "residual", "recompute", "softmax", "gradient", "dilation")
    before = {n: getattr(layer, n) for n in names if n in vars(layer)}
    others = {"impl": "auto", "gradient": "ste", "dilation": before.get("dilation", 1)}
    training = layer.training
    try:
        layer.train(not training)
        for name, value in before.items():
            setattr(layer, name, others.get(name, not value))
        return differentiate(layer, call, given, outputs)
    finally:
        layer.train(training)
        for name, value in before.items():
            setattr(layer, name, value)


def output_changed(layer: nn.Module, call: Call) -> Results:
    """The output is changed in place before backward, as nn.ReLU(inplace=True) does."""
    given = call.arguments()
    outputs = call.run(layer, given)
    return differentiate(layer, call, given, [o.mul_(2.0) for o in outputs])


def detached_twice(layer: nn.Module, call: Call) -> Results:
    """Two graphs alive at once, differentiated in the other order."""
    one, two = call.arguments(), call.arguments()
    first = call.run(layer, one)
    second = call.run(layer, two)
    found = gradients(second, leaves_of(layer, two), call.cotangents(second, 2))
    return found | {f"first {k}": v for k, v in gradients(
        first, leaves_of(layer, one), call.cotangents(first)).items()}  # fmt: skip


def chained(layer: Any, call: Call) -> Results:
    """The final states of a call are the initial ones of the next; both in one graph."""
    given = call.arguments()
    if not hasattr(layer, "runs"):
        return grad(layer, call)
    torch.manual_seed(call.seed)
    _, state = layer(*given.args, **given.kwargs)
    outputs = flatten(layer(given.args[0], state))
    return named(outputs) | gradients(outputs, leaves_of(layer, given), call.cotangents(outputs))


def steps(layer: Any, call: Call) -> Results:
    """A causal convolution over time, step by step."""
    given = call.arguments()
    if not hasattr(layer, "step") or layer._forward_pre_hooks:  # a step is no call: no hooks
        return forward(layer, call)
    x = given.args[0]
    some = max(1, x.shape[2] // 2)
    torch.manual_seed(call.seed)
    y, state = layer.step(x[:, :, :some], layer.initial_state(x.shape[0]))
    outputs = [y]
    for t in range(some, x.shape[2]):
        y, state = layer.step(x[:, :, t], state)
        outputs.append(y)
    return named(outputs) | gradients(outputs, leaves_of(layer, given), call.cotangents(outputs))


def queries(layer: Any, call: Call) -> Results:
    """What a layer says of itself, then a call."""
    repr(layer)
    said = ""
    if hasattr(layer, "explain"):
        said = str(layer.explain())
    if hasattr(layer, "why_unfused"):
        said = str(layer.why_unfused())
    return {"said": str(len(said) > 0)} | forward(layer, call)
