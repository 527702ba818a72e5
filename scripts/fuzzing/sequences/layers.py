"""The layers that sequences are run on, and their arguments.

B batch, T time steps.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import hoconv
from fuzzing.draw import Draw
from hoconv import recurrent as rnn
from hoconv.recurrent.cells import elman
from hoconv.tools.testing.random_cells import random_cell

_REPEATED = 0.75  # the share of calls with the first shape of the case
_SIDES, _FEW = (3, 4, 5, 6, 7, 8), (0, 1, 1, 2, 3)
_IMAGE = ((2, 4, 5, 6), _FEW, (4,), _SIDES, _SIDES)
_SEQUENCE = ((2, 4, 6), _FEW, (4,), (1, 2, 3, 5, 9))
_ROWS = ((4, 3), _FEW, (3,))
# So few that their compiled loops are found in the cache. The outputs of each depend on the input:
# a full backward hook of PyTorch is not called where autograd knows that they do not, which it does
# for the reference alone. None has inputs beside x.
_RANDOM_CELLS = (2, 4, 5, 6, 8)


class Arguments(NamedTuple):
    """The arguments of one call, and those that gradients are taken of."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: dict[str, Tensor]
    text: str


@dataclass(frozen=True)
class Kind:
    """A kind of layer.

    Attributes:
        options: of the constructor, and the values to draw from.
        settings: attribute -> the values that a sequence may set it to.
        shape: that of most inputs, then the sizes to draw from; empty for a recurrent layer.
        cells: of a recurrent layer that is given one, each with its own options.
    """

    type: Any
    options: dict[str, tuple[Any, ...]]
    settings: dict[str, tuple[Any, ...]]
    shape: tuple[tuple[int, ...], ...] = ()
    cells: tuple[tuple[rnn.Cell, dict[str, Any]], ...] = ()
    dtype: torch.dtype = torch.float64


def make(kind: Kind, draw: Draw, impl: str, device: str) -> tuple[Any, str]:
    """Draws a layer of a kind; returns it, and how it was made."""
    options = {name: draw.choice(values) for name, values in kind.options.items()}
    if options.get("padding") == "same" and "stride" in options:
        options["stride"] = 1
    if kind.cells:
        cell, own = draw.choice(kind.cells)
        options = {"cell": cell, **options, **copy.deepcopy(own)}
    layer = kind.type(**options, impl=impl).to(device, kind.dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(draw.values(*parameter.shape) * 0.7)
    words = (f"{name}={getattr(value, 'name', value)!r}" for name, value in options.items())
    return layer, f"{kind.type.__name__}({', '.join(words)}, impl={impl!r})"


def arguments(kind: Kind, draw: Draw, layer: Any) -> Arguments:
    """Draws the arguments of a call."""
    if not kind.shape:
        return _of_recurrent(kind, draw, layer)
    first, *sizes = kind.shape
    x = _leaf(kind, draw, layer, *(first if draw.chance(_REPEATED) else map(draw.choice, sizes)))
    return Arguments((x,), {}, {"x": x}, _say(x))


def _of_recurrent(kind: Kind, draw: Draw, layer: Any) -> Arguments:
    T, B = (4, 3) if draw.chance(_REPEATED) else (draw.integer(1, 6), draw.choice(_FEW))
    form = "batch" if draw.chance(0.8) else draw.choice(("single", "packed"))
    ordered = (B, T) if layer.batch_first and form != "packed" else (T, B)
    ordered = (T,) if form == "single" else ordered
    x = _leaf(kind, draw, layer, *ordered, layer.input_size)
    given: Any = x
    leaves, kwargs, text = {"x": x}, {}, [_say(x)]
    lengths = [draw.integer(1, T) for _ in range(B)]
    if form == "packed" and B:
        given = pack_padded_sequence(x, torch.tensor(lengths), enforce_sorted=False)
        text.append(f"packed {lengths}")
    others = not draw.chance(0.75)
    if others and draw.chance(0.6):
        for name, shape in layer.runs[0][0].state_shapes.items():
            batch = () if form == "single" else (B,)
            leaves[name] = _leaf(kind, draw, layer, len(layer.runs), *batch, *shape)
        _, *states = leaves.values()
        kwargs["state"] = tuple(states) if len(states) > 1 else states[0]
        text.append("state")
    if others and form == "batch" and draw.chance(0.3):
        kwargs["lengths"] = lengths if draw.chance(0.5) else torch.tensor(lengths, dtype=torch.long)
        text.append(f"lengths {lengths}")
    elif others and form != "packed" and draw.chance(0.3):
        mask = torch.rand(ordered, generator=draw.generator()) < 0.3
        kwargs["reset"] = mask.to(draw.device)
        text.append("reset")
    return Arguments((given,), kwargs, leaves, ", ".join(text))


class Subclassed(Tensor):
    """A subclass of tensors that changes nothing."""


def _leaf(kind: Kind, draw: Draw, layer: nn.Module, *shape: int) -> Tensor:
    """Draws an input: mostly contiguous, at times with other strides, at times of a subclass."""
    first = next(layer.parameters(), None)
    dtype = kind.dtype if first is None or not first.is_floating_point() else first.dtype
    values = draw.values(*shape).to(draw.device, dtype)
    values = draw.layout(values) if draw.chance(0.3) else values
    values = values.as_subclass(Subclassed) if draw.chance(0.03) else values
    return values.requires_grad_() if draw.chance(0.8) else values


def _say(x: Tensor) -> str:
    strides = "" if x.is_contiguous() else f" strides {x.stride()}"
    free = "" if x.requires_grad else ", no gradient"
    return f"{type(x).__name__} {tuple(x.shape)}{strides}{free}"


@rnn.cell(state={"h": "hidden_size", "memory": "slots"})
def own(x, h, memory, *, slots=2, p=0.1, factors=(0.5,)):
    """A cell with noise, with a state of another size, and with an option that is a list."""
    where = rnn.softmax(rnn.linear("where", x, h, size=slots))
    memory = memory + where * (rnn.linear("what", x, h, size=1) - memory)
    h = rnn.zoneout(rnn.tanh(rnn.linear("h", x, h, memory)), h, p)
    for factor in factors:
        h = h * factor
    return h, dict(h=h, memory=memory)


_BOTH = (True, False)
_OF_RECURRENT = {"dropout": (0.0, 0.5), "batch_first": _BOTH, "recompute": (False, False, True),
                 "schedule": ("auto", "auto", "fused")}  # fmt: skip
_RECURRENT = {"input_size": (4,), "hidden_size": (4,), "num_layers": (1, 1, 2),
              "bidirectional": (False,) * 7 + (True,), "dropout": (0.0, 0.0, 0.4),
              "batch_first": (False, False, True),
              "recompute": (False,) * 9 + (True,)}  # fmt: skip
_OF_CONV1D = {"padding": ("causal", "same"), "softmax": _BOTH, "weight_dropout": (0.0, 0.5)}
_CONV1D = _OF_CONV1D | {"channels": (4,), "kernel_size": (1, 2, 3, 5), "heads": (1, 2, 4),
                        "weight_dropout": (0.0, 0.0, 0.3), "bias": _BOTH}  # fmt: skip
_APPROX = {"multiplier": ("mbm16", "exact", "mitchell16"),
           "gradient": ("approx", "ste", "analytic", ("ste", "approx"))}  # fmt: skip

KINDS = {
    "HighOrderConv2d": Kind(
        hoconv.HighOrderConv2d,
        {"channels": (4,), "kernel_size": (1, 2, 3, 3, 5),
         "generator_kernel_size": (1, 3, 3), "groups": (1, 1, 2), "bias": (True, True, False),
         "dilation": (1, 1, 2), "normalize": (None, "softmax"), "residual": _BOTH},
        {"dilation": (1, 2, 3), "normalize": (None, "softmax"), "residual": _BOTH},
        _IMAGE,
    ),
    "DynamicConv1d": Kind(
        hoconv.DynamicConv1d, _CONV1D | {"generator_bias": _BOTH}, _OF_CONV1D, _SEQUENCE,
    ),
    "LightweightConv1d": Kind(hoconv.LightweightConv1d, _CONV1D, _OF_CONV1D, _SEQUENCE),
    "ApproxLinear": Kind(
        hoconv.ApproxLinear,
        {"in_features": (3,), "out_features": (4,), "bias": _BOTH, **_APPROX},
        {"in_features": (2, 3), "out_features": (4, 5), **_APPROX},
        _ROWS, dtype=torch.float32,
    ),
    "ApproxConv2d": Kind(
        hoconv.ApproxConv2d,
        {"in_channels": (4,), "out_channels": (4,), "kernel_size": (3,), "stride": (1, 2),
         "padding": (0, 1, "same"), "dilation": (1, 2), "groups": (1, 2), "bias": _BOTH,
         "padding_mode": ("zeros", "zeros", "circular"), **_APPROX},
        {"stride": ((1, 1), (2, 1)), "padding": ((0, 0), (1, 2), "same", "valid"),
         "dilation": ((1, 1), (1, 2)), "groups": (1, 2, 4), "in_channels": (2, 4),
         "kernel_size": ((3, 3), (2, 2)), "padding_mode": ("zeros", "circular"), **_APPROX},
        _IMAGE, dtype=torch.float32,
    ),
    "LSTM": Kind(
        rnn.LSTM, _RECURRENT | {"bias": (True, True, False), "proj_size": (0,) * 9 + (2,)},
        _OF_RECURRENT,
    ),
    "GRU": Kind(rnn.GRU, _RECURRENT | {"bias": (True, True, False)}, _OF_RECURRENT),
} | {
    name: Kind(rnn.RNN, _RECURRENT, _OF_RECURRENT, cells=cells)
    for name, cells in {
        "ready": ((elman, {}), (rnn.peephole_lstm, {}), (rnn.layernorm_lstm, {})),
        "own": ((own, {}), (own, {"slots": 3, "p": 0.3, "factors": [0.5, 1.5]})),
        "random": tuple((random_cell(n).cell, {}) for n in _RANDOM_CELLS),
    }.items()
}  # fmt: skip
