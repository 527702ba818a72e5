"""Replaces the layers of a model by approximate ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from hoconv.ops.approx.gradients import Gradient
from hoconv.ops.approx.layers.approximate import ApproxConv2d, ApproxLinear
from hoconv.ops.approx.sources.find import AnyMultiplier, find

_KINDS = {
    nn.Conv2d: ApproxConv2d,
    ApproxConv2d: ApproxConv2d,
    nn.Linear: ApproxLinear,
    ApproxLinear: ApproxLinear,
}


@dataclass
class Conversion:
    """What :func:`convert` did.

    Attributes:
        model: the model.
        replaced: name -> multiplier, of layers that are approximate now.
        left: name -> why, of other layers with matrices of weights. Products of two tensors that no
            layer makes, as in attention, are not listed.
    """

    model: nn.Module
    replaced: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        rows = {**self.replaced, **{name: f"left: {why}" for name, why in self.left.items()}}
        width = max(map(len, rows), default=0)
        return "\n".join(f"{name:{width}}  {what}" for name, what in sorted(rows.items()))


def convert(
    model: nn.Module,
    multipliers: AnyMultiplier | Mapping[str, AnyMultiplier | None],
    *,
    skip_first: bool = False,
    gradient: Gradient | None = None,
    impl: str = "auto",
) -> Conversion:
    """Replaces convolutions and linear layers of a model, in place, by approximate ones.

    Parameters stay the same objects, so that an optimizer keeps them, and tied weights stay tied.
    Replaced are layers of exactly the types :class:`torch.nn.Conv2d`, :class:`torch.nn.Linear`,
    :class:`hoconv.ApproxConv2d` and :class:`hoconv.ApproxLinear`. Left are subclasses of these,
    which may compute anything, and layers with hooks or parametrizations, or not in float32.

    Args:
        model: any model. If it is one of these layers itself, `model` of the result is its
            replacement.
        multipliers: a multiplier, as :class:`hoconv.ApproxConv2d` takes it, for all layers; or
            pattern -> multiplier, or None to leave layers as they are. A pattern, as of
            :mod:`fnmatch`, fits a layer if it fits its name or that of a module around it:
            ``"features.*"``, ``"classifier"``. The first one that fits counts.
        skip_first: leave the first layer, in the order of the model's modules.
        gradient, impl: as for :class:`hoconv.ApproxConv2d`, of all replaced layers.

    Raises:
        ValueError: a pattern fits no layer; an argument that the layers refuse.
    """
    patterns = multipliers if isinstance(multipliers, Mapping) else {"*": multipliers}
    found = {pattern: None if each is None else find(each) for pattern, each in patterns.items()}
    done = Conversion(model)
    layers = dict(_layers(model))
    for pattern in patterns:
        if not any(_fits(pattern, name) for name in layers):
            names = ", ".join(layers) or "none"
            raise ValueError(f"multipliers: {pattern!r} fits no layer; layers are {names}")
    made: dict[nn.Module, nn.Module] = {}
    for number, (name, layer) in enumerate(layers.items()):
        pattern = next((pattern for pattern in patterns if _fits(pattern, name)), None)
        obstacle = _obstacle(layer)
        if number == 0 and skip_first:
            obstacle = "the first layer"
        if pattern is None or (multiplier := found[pattern]) is None:
            done.left[name] = "no pattern fits" if pattern is None else f"{pattern!r} is None"
        elif obstacle:
            done.left[name] = obstacle
        else:
            if layer not in made:
                made[layer] = _make(layer, multiplier, gradient, impl)
            done.replaced[name] = str(multiplier)
    for name in done.replaced:  # after all errors
        parent, _, own = name.rpartition(".")
        if name:
            setattr(model.get_submodule(parent), own, made[layers[name]])
        else:
            done.model = made[layers[name]]
    return done


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields modules that have a matrix of weights, or are to be replaced, by every name."""
    for name, module in model.named_modules(remove_duplicate=False):
        own = module.named_parameters(recurse=False)
        if isinstance(module, nn.Conv2d | nn.Linear) or any(
            n.endswith("weight") and p.dim() > 1 for n, p in own
        ):
            yield name, module


def _fits(pattern: str, name: str) -> bool:
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[: n + 1]), pattern) for n in range(len(parts)))


def _obstacle(layer: nn.Module) -> str | None:
    """Returns why a layer cannot be replaced."""
    kind = type(layer).__name__
    if parametrize.is_parametrized(layer):
        return "it has parametrizations"
    if type(layer) not in _KINDS:
        plain = next((base for base in (nn.Conv2d, nn.Linear) if isinstance(layer, base)), None)
        return (
            f"{kind} may not compute what {plain.__name__} does"
            if plain
            else f"there is no approximate {kind}"
        )
    hooks = (name for name, value in vars(layer).items() if name.endswith("_hooks") and value)
    if name := next(hooks, None):
        return f"it has {name.strip('_').replace('_', ' ')}"
    assert isinstance(layer, nn.Conv2d | nn.Linear)
    return None if layer.weight.dtype == torch.float32 else f"its weight is {layer.weight.dtype}"


def _make(
    layer: nn.Module, multiplier: AnyMultiplier, gradient: Gradient | None, impl: str
) -> nn.Module:
    options: Any = {"multiplier": multiplier, "gradient": gradient, "impl": impl}
    made: ApproxConv2d | ApproxLinear
    with torch.random.fork_rng(devices=[]):  # its own parameters are drawn, and go
        if isinstance(layer, nn.Conv2d):
            names = ("kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")
            options |= {name: getattr(layer, name) for name in names}
            has_bias = layer.bias is not None
            made = ApproxConv2d(layer.in_channels, layer.out_channels, bias=has_bias, **options)
        else:
            assert isinstance(layer, nn.Linear)
            made = ApproxLinear(
                layer.in_features, layer.out_features, layer.bias is not None, **options
            )
    made.to(layer.weight.device)
    for name in ("weight", "bias"):
        made.register_parameter(name, getattr(layer, name))
    return made.train(layer.training)
