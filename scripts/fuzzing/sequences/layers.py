"""The layers that sequences are run on, their calls, and what they compute in plain PyTorch.

B batch, C channels, D directions, I input size, H hidden size, L layers, T time steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import hoconv
from fuzzing.draw import Draw
from fuzzing.sequences import cells
from hoconv import recurrent as rnn
from hoconv.recurrent.cells import elman
from hoconv.testing.random_cells import random_cell

REPEATED = 0.75  # the share of calls with the first shape of the case, contiguous
CHANNELS, FEATURES = 4, 3  # of an input of a convolution, and of a linear layer


@dataclass
class Arguments:
    """The arguments of one call, and those that gradients are taken of."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    leaves: dict[str, Tensor] = field(default_factory=dict)
    text: str = ""


@dataclass(frozen=True)
class Made:
    """A layer as it was made.

    Attributes:
        text: how it was made.
        dtype: of its parameters.
        settings: attribute -> the values that a sequence may set it to.
        define: computes a call in plain PyTorch; None where only the reference does.
        exact: whether the same bits are expected of all implementations.
    """

    layer: nn.Module
    text: str
    dtype: torch.dtype
    settings: dict[str, tuple[Any, ...]]
    arguments: Callable[[Draw, Made, nn.Module], Arguments]
    define: Callable[..., Any] | None = None
    exact: bool = False


def make(kind: str, draw: Draw, impl: str, device: str) -> Made:
    """Draws a layer of a kind."""
    made = KINDS[kind](draw, impl, device)
    with torch.no_grad():
        for parameter in made.layer.parameters():
            parameter.copy_(draw_normal(draw, *parameter.shape) * 0.7)
    return made


def draw_normal(draw: Draw, *shape: int) -> Tensor:
    return torch.randn(shape, generator=draw.generator(), dtype=torch.float64)


def _drawn(draw: Draw, options: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    return {name: draw.choice(values) for name, values in options.items()}


def _written(name: str, options: dict[str, Any], *args: Any) -> str:
    words = [repr(a) if not isinstance(a, rnn.Cell) else a.name for a in args]
    return f"{name}({', '.join([*words, *(f'{k}={v!r}' for k, v in options.items())])})"


class Subclassed(Tensor):
    """A subclass of tensors that changes nothing."""


def tensor_of(draw: Draw, made: Made, layer: nn.Module, *shape: int) -> Tensor:
    """Draws an input: mostly contiguous, at times with other strides, at times of a subclass."""
    first = next(layer.parameters(), None)
    dtype = made.dtype if first is None or not first.is_floating_point() else first.dtype
    values = draw_normal(draw, *shape).to(draw.device, dtype)
    if draw.chance(0.3):
        values = draw.layout(values)
    if draw.chance(0.03):
        values = values.as_subclass(Subclassed)
    return values


def leaf(draw: Draw, value: Tensor) -> Tensor:
    return value.requires_grad_() if draw.chance(0.8) else value


# Convolutions


def _image(draw: Draw, made: Made, layer: Any) -> Arguments:
    B, H, W = (2, 5, 6) if draw.chance(REPEATED) else (
        draw.choice((0, 1, 1, 2, 3)), draw.integer(3, 8), draw.integer(3, 8))  # fmt: skip
    shape = (B, CHANNELS, H, W) if not made.exact or draw.chance(0.9) else (CHANNELS, H, W)
    x = leaf(draw, tensor_of(draw, made, layer, *shape))
    return Arguments((x,), {}, {"x": x}, _say("x", x))


def _say(name: str, x: Tensor) -> str:
    kind = "" if type(x) is Tensor else f" {type(x).__name__}"
    strided = "" if x.is_contiguous() else f" strides {x.stride()}"
    free = "" if x.requires_grad else ", no gradient"
    return f"{name} {tuple(x.shape)}{kind}{strided}{free}"


def _sequence(draw: Draw, made: Made, layer: Any) -> Arguments:
    B, T = (2, 6) if draw.chance(REPEATED) else (draw.choice((0, 1, 1, 2, 3)), draw.integer(1, 9))
    x = leaf(draw, tensor_of(draw, made, layer, B, CHANNELS, T))
    return Arguments((x,), {}, {"x": x}, _say("x", x))


def _rows(draw: Draw, made: Made, layer: nn.Module) -> Arguments:
    before = (4,) if draw.chance(REPEATED) else draw.choice(((), (0,), (1,), (2, 3)))
    x = leaf(draw, tensor_of(draw, made, layer, *before, FEATURES))
    return Arguments((x,), {}, {"x": x}, _say("x", x))


def define_high_order(layer: Any, x: Tensor) -> Tensor:
    """Computes a HighOrderConv2d from its documentation, its generator called as a module."""
    k, G, d = layer.kernel_size, layer.groups, layer.dilation
    taps = layer.generator(x)
    B, _, H, W = x.shape
    taps = taps.reshape(B, k * k, G, H, W)
    taps = taps.softmax(1) if layer.normalize else taps
    before = d * (k - 1) // 2
    after = d * (k - 1) - before
    padded = F.pad(x, (before, after, before, after))
    out = torch.zeros_like(x)
    for i in range(k * k):
        dy, dx = d * (i // k), d * (i % k)
        window = padded[:, :, dy : dy + H, dx : dx + W]
        out = out + window * taps[:, i].repeat_interleave(x.shape[1] // G, 1)
    return x + out if layer.residual else out


def _define_conv1d(layer: Any, x: Tensor, taps: Tensor) -> Tensor:
    """Applies taps (B or 1, H, K, T or 1)."""
    K, H, T = layer.kernel_size, layer.heads, x.shape[2]
    taps = taps.softmax(2) if layer.softmax else taps
    if layer.training and layer.weight_dropout:
        taps = F.dropout(taps, layer.weight_dropout)
    before = K - 1 if layer.padding == "causal" else (K - 1) // 2
    padded = F.pad(x, (before, K - 1 - before))
    out = torch.zeros_like(x)
    for j in range(K):
        out = out + padded[:, :, j : j + T] * taps[:, :, j].repeat_interleave(x.shape[1] // H, 1)
    return out if layer.bias is None else out + layer.bias[:, None]


def define_dynamic(layer: Any, x: Tensor) -> Tensor:
    """Computes a DynamicConv1d from its documentation, its generator called as a module."""
    B, _, T = x.shape
    taps = layer.generator(x.transpose(1, 2)).reshape(B, T, layer.heads, layer.kernel_size)
    return _define_conv1d(layer, x, taps.permute(0, 2, 3, 1))


def define_lightweight(layer: Any, x: Tensor) -> Tensor:
    """Computes a LightweightConv1d from its documentation."""
    taps = layer.weight.reshape(1, layer.heads, layer.kernel_size, 1)
    return _define_conv1d(layer, x, taps)


def _high_order(draw: Draw, impl: str, device: str) -> Made:
    options = _drawn(draw, {
        "kernel_size": (1, 2, 3, 3, 5), "generator_kernel_size": (1, 3, 3), "groups": (1, 1, 2),
        "bias": (True, True, False), "dilation": (1, 1, 2), "normalize": (None, "softmax"),
        "residual": (False, True)})  # fmt: skip
    layer = hoconv.HighOrderConv2d(CHANNELS, **options, impl=impl).to(device, torch.float64)
    settings = {"dilation": (1, 2, 3), "normalize": (None, "softmax"), "residual": (False, True),
                "impl": ("auto", "reference", impl)}  # fmt: skip
    return Made(layer, _written("HighOrderConv2d", options, 4), torch.float64,
                settings, _image, define_high_order)  # fmt: skip


def _conv1d(draw: Draw, impl: str, device: str, dynamic: bool) -> Made:
    options = _drawn(draw, {
        "heads": (1, 2, 4), "padding": ("causal", "same"), "softmax": (True, False),
        "weight_dropout": (0.0, 0.0, 0.3), "bias": (False, True)})  # fmt: skip
    if dynamic:
        options["generator_bias"] = draw.chance(0.5)
    K = draw.choice((1, 2, 3, 5))
    make = hoconv.DynamicConv1d if dynamic else hoconv.LightweightConv1d
    layer = make(CHANNELS, K, **options, impl=impl).to(device, torch.float64)
    settings = {"padding": ("causal", "same"), "softmax": (True, False),
                "weight_dropout": (0.0, 0.5), "impl": ("auto", "reference", impl)}  # fmt: skip
    define = define_dynamic if dynamic else define_lightweight
    return Made(layer, _written(make.__name__, options, 4, K), torch.float64,
                settings, _sequence, define)  # fmt: skip


_APPROX = {
    "multiplier": ("mbm16", "exact", "mitchell16"),
    "gradient": ("approx", "ste", "analytic", ("ste", "approx")),
}


def _approx_linear(draw: Draw, impl: str, device: str) -> Made:
    options = _drawn(draw, {"bias": (True, False), **_APPROX})
    layer = hoconv.ApproxLinear(FEATURES, 4, **options, impl=impl).to(device)
    settings = {"in_features": (2, 3), "out_features": (4, 5), **_APPROX,
                "impl": ("auto", "reference", impl)}  # fmt: skip
    return Made(layer, _written("ApproxLinear", options, 3, 4), torch.float32,
                settings, _rows, None, exact=True)  # fmt: skip


def _approx_conv(draw: Draw, impl: str, device: str) -> Made:
    options = _drawn(draw, {
        "stride": (1, 2), "padding": (0, 1, "same"), "dilation": (1, 2), "groups": (1, 2),
        "bias": (True, False), "padding_mode": ("zeros", "zeros", "circular"),
        **_APPROX})  # fmt: skip
    if options["padding"] == "same":
        options["stride"] = 1
    layer = hoconv.ApproxConv2d(CHANNELS, 4, 3, **options, impl=impl).to(device)
    settings = {"stride": ((1, 1), (2, 1)), "padding": ((0, 0), (1, 2), "same", "valid"),
                "dilation": ((1, 1), (1, 2)), "groups": (1, 2, 4), "in_channels": (2, 4),
                "kernel_size": ((3, 3), (2, 2)), "padding_mode": ("zeros", "circular"), **_APPROX,
                "impl": ("auto", "reference", impl)}  # fmt: skip
    return Made(layer, _written("ApproxConv2d", options, 4, 4, 3),
                torch.float32, settings, _image, None, exact=True)  # fmt: skip


# Recurrent layers


def _steps(draw: Draw, made: Made, layer: Any) -> Arguments:
    repeated = draw.chance(REPEATED)
    T, B = (4, 3) if repeated else (draw.integer(1, 6), draw.choice((0, 1, 1, 2, 3)))
    form = "batch" if draw.chance(0.8) else draw.choice(("single", "packed"))
    single, packed, first = form == "single", form == "packed", layer.batch_first
    ordered = (B, T) if first and not packed else (T, B)
    x = leaf(draw, tensor_of(draw, made, layer, *((T,) if single else ordered),
                             layer.input_size))  # fmt: skip
    leaves, text = {"x": x}, [_say("x", x)]
    given: Any = x
    lengths = [draw.integer(1, T) for _ in range(B)]
    if packed and B:
        given = pack_padded_sequence(x, torch.tensor(lengths), enforce_sorted=False)
        text.append(f"packed {lengths}")
    kwargs: dict[str, Any] = {}
    alone = draw.chance(0.75)
    if not alone and draw.chance(0.6):
        states = []
        for name, n in layer.runs[0][0].state_sizes.items():
            batch = () if single else (B,)
            states.append(leaf(draw, tensor_of(draw, made, layer, len(layer.runs), *batch, n)))
            leaves[name] = states[-1]
        kwargs["state"] = tuple(states) if len(states) > 1 else states[0]
        text.append("state")
    if not alone and not packed and not single and draw.chance(0.3):
        kwargs["lengths"] = lengths if draw.chance(0.5) else torch.tensor(lengths, dtype=torch.long)
        text.append(f"lengths {lengths}")
    if not alone and not packed and "lengths" not in kwargs and draw.chance(0.3):
        mask = torch.rand((T,) if single else ordered, generator=draw.generator()) < 0.3
        kwargs["reset"] = mask.to(draw.device)
        text.append("reset")
    return Arguments((given,), kwargs, leaves, ", ".join(text))


def _made_recurrent(
    layer: Any, text: str, impl: str, device: str, define: Callable[..., Any] | None = None
) -> Made:
    settings = {"dropout": (0.0, 0.5), "batch_first": (False, True),
                "schedule": ("auto", "auto", "fused"), "recompute": (False, False, True),
                "impl": ("auto", "reference", impl)}  # fmt: skip
    return Made(layer.to(device), text, torch.float64, settings, _steps, define)


def _shared_options(draw: Draw) -> dict[str, Any]:
    return _drawn(draw, {
        "num_layers": (1, 1, 2), "bidirectional": (False,) * 7 + (True,),
        "dropout": (0.0, 0.0, 0.4), "batch_first": (False, False, True),
        "recompute": (False,) * 9 + (True,),
    })  # fmt: skip


def _lstm(draw: Draw, impl: str, device: str) -> Made:
    options: dict[str, Any] = _shared_options(draw) | {
        "bias": draw.chance(0.9),
        "proj_size": 2 * draw.chance(0.1),
    }
    layer = rnn.LSTM(4, 4, **options, impl=impl, dtype=torch.float64)
    define = None if options["proj_size"] else define_lstm
    return _made_recurrent(layer, _written("rnn.LSTM", options, 4, 4), impl, device, define)


def _gru(draw: Draw, impl: str, device: str) -> Made:
    options: dict[str, Any] = _shared_options(draw) | {"bias": draw.chance(0.9)}
    layer = rnn.GRU(4, 4, **options, impl=impl, dtype=torch.float64)
    return _made_recurrent(layer, _written("rnn.GRU", options, 4, 4), impl, device, define_gru)


def _ready(draw: Draw, impl: str, device: str) -> Made:
    cell = draw.choice((elman, rnn.peephole_lstm, rnn.layernorm_lstm))
    options = _shared_options(draw)
    layer = rnn.RNN(cell, 4, 4, **options, impl=impl, dtype=torch.float64)
    return _made_recurrent(layer, _written("rnn.RNN", options, cell, 4, 4), impl, device)


def _own(draw: Draw, impl: str, device: str) -> Made:
    cell, given = draw.choice(cells.CELLS)
    options: dict[str, Any] = _shared_options(draw) | {k: v() for k, v in given.items()}
    if "input_size" in cell.states.values():
        options["num_layers"] = 1  # the states of all layers have the same sizes
    layer = rnn.RNN(cell, 3, 4, **options, impl=impl, dtype=torch.float64)
    return _made_recurrent(layer, _written("rnn.RNN", options, cell, 3, 4), impl, device)


# So few that their compiled loops are found in the cache. The outputs of each depend on the input:
# a full backward hook of PyTorch is not called where autograd knows that they do not, which it does
# for the reference alone.
RANDOM_CELLS = (1, 2, 3, 6, 8)


def _random(draw: Draw, impl: str, device: str) -> Made:
    seed = draw.choice(RANDOM_CELLS)
    cell = random_cell(seed).cell
    options = _shared_options(draw)
    layer = rnn.RNN(cell, 3, 4, **options, impl=impl, dtype=torch.float64)
    text = _written("rnn.RNN", options, cell, 3, 4)
    return _made_recurrent(layer, text, impl, device)


def define_lstm(layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Computes an rnn.LSTM from its documentation, step by step."""

    def step(value: Callable[..., Tensor], x: Tensor, h: Tensor, c: Tensor) -> list[Tensor]:
        i, f, g, o = (value(name, x, h) for name in "ifgo")
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return [o.sigmoid() * c.tanh(), c]

    return _define_recurrent(layer, step, 2, *args, **kwargs)


def define_gru(layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Computes an rnn.GRU step by step."""

    def step(value: Callable[..., Tensor], x: Tensor, h: Tensor) -> list[Tensor]:
        r, z = value("r", x, h).sigmoid(), value("z", x, h).sigmoid()
        n = (value("n", x) + r * value("m", h)).tanh()
        return [(1 - z) * n + z * h]

    return _define_recurrent(layer, step, 1, *args, **kwargs)


def _define_recurrent(
    layer: Any, step: Callable[..., list[Tensor]], count: int, x: Any, state: Any = None,
    lengths: Any = None, reset: Tensor | None = None,
) -> Any:  # fmt: skip
    if isinstance(x, PackedSequence) or x.dim() == 2:
        raise NotImplementedError
    x = x.transpose(0, 1) if layer.batch_first else x
    reset = reset.transpose(0, 1) if reset is not None and layer.batch_first else reset
    T, B = x.shape[:2]
    ends = [T] * B if lengths is None else [int(n) for n in lengths]
    states = () if state is None else state if isinstance(state, tuple) else (state,)
    finals: list[list[Tensor]] = []
    directions = 1 + layer.bidirectional
    for at in range(layer.num_layers):
        if at and layer.dropout:
            x = F.dropout(x, layer.dropout, layer.training)
        outputs = []
        for direction in range(directions):
            run, suffix = at * directions + direction, f"_l{at}" + "_reverse" * direction
            rows = []
            for b in range(B):
                begin = [s[run, b] for s in states] or [x.new_zeros(layer.hidden_size)] * count
                rows.append(_define_row(layer, step, x[:, b], begin, ends[b], suffix, direction,
                                        None if reset is None else reset[:, b]))  # fmt: skip
            outputs.append(torch.stack([out for out, _ in rows], 1))
            finals.append([torch.stack([final[n] for _, final in rows]) for n in range(count)])
        x = torch.cat(outputs, 2)
    last = tuple(torch.stack([f[n] for f in finals]) for n in range(count))
    return (x.transpose(0, 1) if layer.batch_first else x), last if count > 1 else last[0]


def _define_row(
    layer: Any, step: Callable[..., list[Tensor]], x: Tensor, state: list[Tensor], end: int,
    suffix: str, reverse: int, reset: Tensor | None,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    def value(name: str, *operands: Tensor) -> Tensor:
        weight = getattr(layer, f"weight_{name}{suffix}")
        product = torch.cat(operands) @ weight.T
        bias = f"bias_{name}{suffix}"
        return product + getattr(layer, bias) if hasattr(layer, bias) else product

    outputs: dict[int, Tensor] = {}
    for t in reversed(range(end)) if reverse else range(end):
        # Backwards in time, a sequence begins where the next one in time does.
        if reset is not None and (reset[t] if not reverse else t + 1 < end and reset[t + 1]):
            state = [torch.zeros_like(s) for s in state]
        state = step(value, x[t], *state)
        outputs[t] = state[0]
    padding = torch.zeros_like(state[0])
    return torch.stack([outputs.get(t, padding) for t in range(len(x))]), state


KINDS: dict[str, Callable[[Draw, str, str], Made]] = {
    "HighOrderConv2d": _high_order,
    "DynamicConv1d": lambda *a: _conv1d(*a, dynamic=True),
    "LightweightConv1d": lambda *a: _conv1d(*a, dynamic=False),
    "ApproxLinear": _approx_linear,
    "ApproxConv2d": _approx_conv,
    "LSTM": _lstm,
    "GRU": _gru,
    "ready": _ready,
    "own": _own,
    "random": _random,
}
