"""The dynamic 1-D convolution: the function, and its two layers, at once or step by step.

B batch, C channels, H heads, K taps, T time steps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import hoconv
from fuzzing.cases import Call
from fuzzing.draw import Draw
from fuzzing.operators.high_order_conv2d import DTYPES, dtype_for
from fuzzing.programs import Program
from fuzzing.windows import gather_shifted
from hoconv.dispatch.declaration import find


def definition(x: Tensor, weight: Tensor, padding: int) -> Tensor:
    """``out[b, c, t] = sum over j of weight[b, h(c), j, t] * x[b, c, t + j - padding]`` with
    ``h(c) = c // (C / H)``; x is zero outside; weight is (B or 1, H, K, T or 1)."""
    _, H, K, _ = weight.shape
    windows = gather_shifted(x, 2, [j - padding for j in range(K)])  # (B, C, K, T)
    return (windows * weight.repeat_interleave(x.shape[1] // H, 1)).sum(2)


def draw(draw: Draw, program: Program, invalid: bool) -> Call:
    H, C = draw.groups()
    K = draw.choice((1, 2, 3) if draw.tiny else (1, 2, 3, 3, 4, 5, 7, 8, 15, 16, 31, 40, 131))
    B, T = draw.batch(), draw.length()
    dtype = dtype_for(draw, program)
    form = draw.choice(("function", "function", "light", "dynamic"))
    if form != "function" and not invalid and C > 0:
        return _layer(draw, form, draw.tensor(B, C, T, dtype=dtype), H, K)
    x = draw.tensor(B, C, T, dtype=dtype, special=_special(draw, program))
    weight = draw.tensor(
        draw.choice((1, B)), H, K, draw.choice((1, T)), dtype=dtype, special=_special(draw, program)
    )
    padding = draw.choice((0, K - 1, (K - 1) // 2, draw.integer(0, K - 1)))
    fault, options = "", {"padding": padding}
    if invalid:
        fault, x, weight, options = _faulty(draw, x, weight, options)

    def function(x: Tensor, weight: Tensor, impl: str) -> Tensor:
        return hoconv.dynamic_conv1d(x, weight, **options, impl=impl)

    return Call(
        function, lambda x, weight: definition(x, weight, padding), [x, weight], str(options),
        dtype, find("dynamic_conv1d").tolerances, invalid=fault,
    )  # fmt: skip


def _special(draw: Draw, program: Program) -> bool:
    return program.name in ("forward", "backward") and draw.chance(0.25)


def _layer(draw: Draw, form: str, x: Tensor, H: int, K: int) -> Call:
    """Draws a layer: its weights are parameters, or a linear map of each step's input."""
    C, T, dtype = x.shape[1], x.shape[2], x.dtype
    padding = draw.choice(("causal", "same"))
    softmax, bias = draw.chance(0.6), draw.chance(0.4)
    generator_bias = form == "dynamic" and draw.chance(0.4)
    # A causal layer may compute the sequence in parts, split at these steps.
    splits = [0, T]
    if padding == "causal" and T and draw.chance(0.4):
        splits = sorted({0, T, draw.integer(0, T), draw.integer(0, T)})
    options: dict[str, Any] = {"heads": H, "padding": padding, "softmax": softmax, "bias": bias}
    if form == "light":
        module = hoconv.LightweightConv1d(C, K, **options)
    else:
        module = hoconv.DynamicConv1d(C, K, **options, generator_bias=generator_bias)
    module = module.to(draw.device, dtype)
    names = ["weight" if form == "light" else "generator.weight"]
    shapes = [(H, K) if form == "light" else (H * K, C)]
    if generator_bias:
        names, shapes = [*names, "generator.bias"], [*shapes, (H * K,)]
    if bias:
        names, shapes = [*names, "bias"], [*shapes, (C,)]
    parameters = [draw.tensor(*shape, dtype=dtype, scale=C**-0.5) for shape in shapes]
    steps = _Steps(module, splits)

    def function(x: Tensor, *parameters: Tensor, impl: str) -> Tensor:
        module.impl = impl
        named = {f"module.{n}": p for n, p in zip(names, parameters, strict=True)}
        return torch.func.functional_call(steps, named, (x,))

    def exact(x: Tensor, *parameters: Tensor) -> Tensor:
        given = dict(zip(names, parameters, strict=True))
        if form == "light":
            weight = given["weight"][None, :, :, None]
        else:
            weight = torch.einsum("kc,bct->bkt", given["generator.weight"], x)
            if generator_bias:
                weight = weight + given["generator.bias"][:, None]
            weight = weight.unflatten(1, (H, K))
        if softmax:
            weight = weight.softmax(2)
        out = definition(x, weight, K - 1 if padding == "causal" else (K - 1) // 2)
        return out + given["bias"][:, None] if bias else out

    # A layer rounds the weights that it generates and normalises; in a call of the operator they
    # are exact. The gradient of a softmax is a difference of rounded numbers.
    steps_rounded = 8 if softmax else 4
    tolerances = {d: t * steps_rounded for d, t in find("dynamic_conv1d").tolerances.items()}
    what = f"{form} heads={H} K={K} {padding} softmax={softmax} splits={splits} {names}"
    return Call(function, exact, [x, *parameters], what, dtype, tolerances, casts=False)


class _Steps(torch.nn.Module):
    """Calls a layer with the parts of a sequence."""

    def __init__(self, module: Any, splits: list[int]) -> None:
        super().__init__()
        self.module: Any = module
        self.splits = splits

    def forward(self, x: Tensor) -> Tensor:
        if len(self.splits) == 2:
            return self.module(x)
        state, parts = self.module.initial_state(x.shape[0]), []
        for first, last in zip(self.splits, self.splits[1:], strict=False):
            part = x[..., first:last]
            out, state = self.module.step(part[..., 0] if last - first == 1 else part, state)
            parts.append(out.unsqueeze(2) if last - first == 1 else out)
        return torch.cat(parts, 2)


def _faulty(draw: Draw, x: Tensor, weight: Tensor, options: dict) -> tuple:
    fault = draw.choice(("padding", "batch", "steps", "heads", "taps", "dtype", "dimensions"))
    batch, H, K, steps = weight.shape
    (B, C, T) = x.shape
    if fault == "padding":
        options = {"padding": draw.choice((-1, K, True, 0.0, None, "same"))}
    elif fault == "batch":
        weight = weight.new_ones(B + 2, H, K, steps)
    elif fault == "steps":
        weight = weight.new_ones(batch, H, K, T + 2)
    elif fault == "heads":
        weight = weight.new_ones(batch, draw.choice((0, C + 1)) if C else 0, K, steps)
    elif fault == "taps":
        weight = weight.new_ones(batch, H, 0, steps)
    elif fault == "dtype":
        weight = weight.to(draw.choice([d for d in DTYPES if d != weight.dtype]))
    else:
        x = x.unsqueeze(0) if draw.chance(0.5) else x[0] if B else x.sum(0)
    return fault, x, weight, options
