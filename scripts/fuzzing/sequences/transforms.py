"""Calls under the transforms of torch.func."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fuzzing.sequences.calls import (
    Call,
    Results,
    flatten,
    gradients,
    is_noisy,
    named,
)
from fuzzing.sequences.layers import Arguments


def functional(layer: nn.Module, call: Call) -> Results:
    """Other parameters by functional_call, and their gradients."""
    given = call.arguments()
    others = {n: (p.detach() * 1.1).requires_grad_(p.requires_grad)
              for n, p in layer.named_parameters()}  # fmt: skip
    torch.manual_seed(call.seed)
    outputs = flatten(functional_call(layer, others, given.args, given.kwargs))
    leaves = {f"d_{n}": t for n, t in (given.leaves | others).items() if t.requires_grad}
    return named(outputs) | gradients(outputs, leaves, call.cotangents(outputs))


def _scalar(layer: nn.Module, call: Call, given: Arguments) -> Callable[..., Tensor]:
    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        torch.manual_seed(call.seed)
        outputs = flatten(functional_call(layer, parameters, (x, *given.args[1:]), given.kwargs))
        cotangents = call.cotangents(outputs)
        return sum(((o * c).sum() for o, c in zip(outputs, cotangents, strict=True)),
                   outputs[0].new_zeros(()))  # fmt: skip

    return loss


def _own_parameters(layer: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach() for n, p in layer.named_parameters()}


def func_grad(layer: nn.Module, call: Call) -> Results:
    given = call.arguments()
    parameters = _own_parameters(layer)
    found: Any = torch.func.grad(_scalar(layer, call, given), (0, 1))(
        parameters, given.args[0].detach()
    )
    of_parameters, of_x = found
    return {"d_x": of_x, **{f"d_{n}": g for n, g in of_parameters.items()}}


def func_jvp(layer: nn.Module, call: Call) -> Results:
    given = call.arguments()
    parameters = _own_parameters(layer)
    tangents = dict(zip(parameters, call.cotangents([*parameters.values()], "t"), strict=True))
    x = given.args[0].detach()
    value, tangent, *_ = torch.func.jvp(
        _scalar(layer, call, given), (parameters, x), (tangents, call.cotangents([x], "x")[0])
    )
    return {"value": value, "tangent": tangent}


def func_vmap(layer: nn.Module, call: Call) -> Results:
    if is_noisy(layer):  # vmap draws other numbers
        return func_loop(layer, call)
    given = call.arguments()
    x = given.args[0].detach()
    xs = torch.stack((x, x * 0.5))

    def one(x: Tensor) -> tuple[Tensor, ...]:
        torch.manual_seed(call.seed)
        return tuple(flatten(layer(x, *given.args[1:], **given.kwargs)))

    outputs = torch.vmap(one, randomness="same")(xs)
    return named([*outputs])


def func_loop(layer: nn.Module, call: Call) -> Results:
    given = call.arguments()
    x = given.args[0].detach()
    parts = []
    for scaled in (x, x * 0.5):
        torch.manual_seed(call.seed)
        parts.append(flatten(layer(scaled, *given.args[1:], **given.kwargs)))
    return named([torch.stack(pair) for pair in zip(*parts, strict=True)])


def func_vmap_grad(layer: nn.Module, call: Call) -> Results:
    if is_noisy(layer):
        return func_loop_grad(layer, call)
    given = call.arguments()
    x = given.args[0].detach()
    xs = torch.stack((x, x * 0.5))
    gradient = torch.func.grad(_scalar(layer, call, given), 0)
    found = torch.vmap(gradient, (None, 0), randomness="same")(_own_parameters(layer), xs)
    return {f"d_{n}": g for n, g in found.items()}


def func_loop_grad(layer: nn.Module, call: Call) -> Results:
    given = call.arguments()
    x = given.args[0].detach()
    gradient = torch.func.grad(_scalar(layer, call, given), 0)
    one, two = (gradient(_own_parameters(layer), x) for x in (x, x * 0.5))
    return {f"d_{n}": torch.stack((g, two[n])) for n, g in one.items()}
