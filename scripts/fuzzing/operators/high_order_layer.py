"""The high-order layer: the function and the module.

B batch, C channels, G groups of channels, H height, W width, k kernel size, s the generator's.
"""

from __future__ import annotations

import torch
from torch import Tensor

import hoconv
from fuzzing.cases import Call
from fuzzing.draw import Draw
from fuzzing.operators import high_order_conv2d
from fuzzing.operators.high_order_conv2d import DTYPES, Axis, dilated, dtype_for, sizes
from fuzzing.programs import Program
from fuzzing.windows import gather_taps
from hoconv.dispatch.declaration import find


def definition(
    x: Tensor, weight: Tensor, bias: Tensor | None, k: int, dilation: int, softmax: bool,
    residual: bool,
) -> Tensor:  # fmt: skip
    """``high_order_conv2d(x, conv2d(x, weight, bias, padding="same"))``: channel i * G + g of the
    generator's output is tap i of group g; softmax over the taps; x is added if `residual`."""
    s = weight.shape[2]
    offsets = [i - (s - 1) // 2 for i in range(s)]
    windows = gather_taps(x, offsets, offsets)  # (B, C, s, s, H, W)
    generated = (windows[:, None] * weight[None, ..., None, None]).sum((2, 3, 4))
    if bias is not None:
        generated = generated + bias[:, None, None]
    taps = generated.unflatten(1, (k * k, weight.shape[0] // (k * k)))  # (B, k * k, G, H, W)
    if softmax:
        taps = taps.softmax(1)
    window = Axis(k, dilation)
    out = high_order_conv2d.definition(x, taps.transpose(0, 1), window, window)
    return x + out if residual else out


def draw(draw: Draw, program: Program, invalid: bool) -> Call:
    B, C, G, H, W, k = sizes(draw)
    s = draw.choice((1, 2, 3) if draw.tiny else (1, 1, 2, 3, 3, 4, 5, 7))
    while not draw.tiny and B * C * H * W * k * k * G * s * s > 300_000:
        k, s, H = max(1, k - 2), max(1, s - 2), max(1, H // 2)
    dtype, dilation = dtype_for(draw, program), dilated(draw)
    # PyTorch's convolution may skip the zeros around the image, which times infinity are NaN, and
    # in 16 bits its results for infinities vary. In gradients a compensated sum makes NaN of them.
    special = program.name == "forward" and s == 1 and dtype in DTYPES[:2] and draw.chance(0.5)
    x = draw.tensor(B, C, H, W, dtype=dtype, special=special)
    scale = (max(C, 1) * s * s) ** -0.5
    weight = draw.tensor(k * k * G, C, s, s, dtype=dtype, scale=scale)
    bias = draw.tensor(k * k * G, dtype=dtype) if draw.chance(0.6) else None
    softmax, residual = draw.chance(0.4), draw.chance(0.3)
    options = {
        "kernel_size": k, "dilation": dilation, "normalize": "softmax" if softmax else None,
        "residual": residual,
    }  # fmt: skip
    fault = ""
    if invalid:
        fault, x, weight, bias, options = _faulty(draw, x, weight, bias, options)
    as_module = not invalid and C > 0 and draw.chance(0.4)
    tensors = [t for t in (x, weight, bias) if t is not None]
    module = None
    if as_module:
        module = hoconv.HighOrderConv2d(
            C, k, generator_kernel_size=s, groups=G, bias=bias is not None, dilation=dilation,
            normalize="softmax" if softmax else None, residual=residual,
        ).to(draw.device, dtype)  # fmt: skip

    def function(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, impl: str) -> Tensor:
        if module is None:
            return hoconv.high_order_layer(x, weight, bias, **options, impl=impl)
        module.impl = impl
        parameters = {"generator.weight": weight}
        if bias is not None:
            parameters["generator.bias"] = bias
        return torch.func.functional_call(module, parameters, (x,))

    def exact(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return definition(x, weight, bias, k, dilation, softmax, residual)

    return Call(
        function, exact, tensors, f"s={s} G={G} {options} {'module' if as_module else ''}", dtype,
        find("high_order_layer").tolerances, invalid=fault, like_input=True,
        special=False,
    )  # fmt: skip


def _faulty(draw: Draw, x: Tensor, weight: Tensor, bias: Tensor | None, options: dict) -> tuple:
    fault = draw.choice(
        ("dilation", "kernel_size", "normalize", "channels", "outputs", "bias", "dtype", "square",
         "no kernel", "dimensions")
    )  # fmt: skip
    outputs, C, s, _ = weight.shape
    if fault == "dilation":
        options = options | {"dilation": draw.choice((0, -2, False, 2.0, "1", None))}
    elif fault == "kernel_size":
        options = options | {"kernel_size": draw.choice((0, -1, 32, 3.0, True, None, "3"))}
    elif fault == "normalize":
        options = options | {"normalize": draw.choice(("Softmax", True, 1, "mean"))}
    elif fault == "channels":
        weight = weight.new_ones(outputs, C + 1, s, s)
    elif fault == "outputs":
        k = options["kernel_size"]
        bias = None
        weight = weight.new_ones(draw.choice((0, k * k * (C + 1))), C, s, s)
        if weight.shape[0] and C == 0:
            weight = weight.new_ones(0, C, s, s)
    elif fault == "bias":
        bias = weight.new_ones(draw.choice(((outputs + 1,), (outputs, 1), ())))
    elif fault == "dtype":
        weight = weight.to(draw.choice([d for d in DTYPES if d != weight.dtype]))
    elif fault == "square":
        weight = weight.new_ones(outputs, C, s, s + 1)
    elif fault == "no kernel":
        weight = weight.new_ones(outputs, C, 0, 0)
    else:
        x = x.unsqueeze(0) if draw.chance(0.5) else x[0] if x.shape[0] else x.sum(0)
    return fault, x, weight, bias, options
