"""Replaces the layers of a model by approximate ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrize

from hoconv.ops.approx.accumulators import AnyAccumulator
from hoconv.ops.approx.gradients import Gradient
from hoconv.ops.approx.layers.approximate import (
    ApproxConv2d,
    ApproxLinear,
    ApproxMatmul,
    Projection,
)
from hoconv.ops.approx.layers.attention import ApproxMultiheadAttention
from hoconv.ops.approx.layers.quantization import Observed, Quantizer, WeightScales
from hoconv.ops.approx.sources.find import AnyMultiplier, find
from hoconv.ops.approx.tables import OfIntegers

# What is replaced -> PyTorch's class that computes the same exactly.
_KINDS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv2d: nn.Conv2d,
    ApproxConv2d: nn.Conv2d,
    nn.Linear: nn.Linear,
    ApproxLinear: nn.Linear,
    NonDynamicallyQuantizableLinear: nn.Linear,  # the last one of attention
    nn.MultiheadAttention: nn.MultiheadAttention,
    ApproxMultiheadAttention: nn.MultiheadAttention,
    ApproxMatmul: ApproxMatmul,
}
# The tensors and modules that they have.
_TENSORS = {
    nn.Conv2d: {"weight", "bias", "quantizer"},
    nn.Linear: {"weight", "bias", "quantizer"},
    nn.MultiheadAttention: {
        "in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias",
        "bias_k", "bias_v", "query", "key", "value", "scores", "mix", "out_proj",
    },
    ApproxMatmul: {"quantizer"},
}  # fmt: skip
# Modules that read the weights of their layers, at least sometimes, where others call the layer.
_READERS = {"MultiheadAttention", "TransformerEncoderLayer", "ShiftedWindowAttention"}


@dataclass
class Conversion:
    """A converted model: which of its layers are approximate, and why others are not.

    Attributes:
        model: the model that :func:`convert` was given, or the replacement of a layer by itself.
        replaced: name -> multiplier, of layers that are approximate now.
        left: name -> why, of other layers with weights. Products of two tensors that no layer
            makes are not listed, and those of attention are part of it.
    """

    model: nn.Module
    replaced: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        rows = {**self.replaced, **{name: f"left: {why}" for name, why in self.left.items()}}
        width = max(map(len, rows), default=0)
        names = [name for name, _ in self.model.named_modules(remove_duplicate=False)]
        return "\n".join(f"{name:{width}}  {rows[name]}" for name in names if name in rows)


def convert(
    model: nn.Module,
    multipliers: AnyMultiplier | Mapping[str, AnyMultiplier | None],
    *,
    skip_first: bool = False,
    gradient: Gradient | None = None,
    observer: Observed = "moving_average",
    momentum: float = 0.01,
    weight_scales: WeightScales = "tensor",
    learn_scales: bool = False,
    accumulator: AnyAccumulator = None,
    impl: str = "auto",
) -> Conversion:
    """Replaces convolutions, linear layers and attention of a model, in place, by approximate ones.

    Parameters stay the same objects, so that an optimizer keeps them, and tied weights stay tied;
    learned scales are new ones, for an optimizer that is made afterwards.
    Replaced are layers of exactly the types :class:`torch.nn.Conv2d`, :class:`torch.nn.Linear`,
    :class:`torch.nn.MultiheadAttention`, whose `out_proj` is a layer of its own, and the
    approximate ones, :class:`hoconv.ApproxMatmul` among them. Left are subclasses of these, which
    may compute anything; layers with hooks, parametrizations, a `forward` or tensors of their own,
    or not in float32; and those of modules of PyTorch and torchvision that read weights of their
    layers without calling these. Another module that does so computes as before.

    Args:
        model: any model. If it is one of these layers itself, `model` of the result is its
            replacement.
        multipliers: a multiplier, as :class:`hoconv.ApproxConv2d` takes it, for all layers; or
            pattern -> multiplier, or None to leave layers as they are. A pattern, as of
            :mod:`fnmatch`, fits a layer if it fits its name or that of a module around it:
            ``"features.*"``, ``"classifier"``. The first one that fits counts; of a layer with
            several names, for the first name.
        skip_first: leave the first layer, in the order of the model's modules.
        gradient, impl: as for :class:`hoconv.ApproxConv2d`, of all replaced layers. One that was
            approximate gets them too, and has to see the range of its input again.
        observer, momentum, weight_scales, learn_scales, accumulator: as for
            :class:`hoconv.approx.TableConv2d`, of multipliers of integers.

    Raises:
        ValueError: a pattern fits no layer; an argument that the layers refuse.
        TypeError: `model` is not a module; a pattern is not a string.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    patterns = multipliers if isinstance(multipliers, Mapping) else {"*": multipliers}
    if multipliers is None or not patterns:
        raise ValueError("multipliers: expected a multiplier, or patterns with some; got none")
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"multipliers: expected patterns that are strings, got {pattern!r}")
    found = {pattern: None if each is None else find(each) for pattern, each in patterns.items()}
    options: Any = {
        "observer": observer, "momentum": momentum, "weight_scales": weight_scales,
        "learn_scales": learn_scales, "accumulator": accumulator,
    }  # fmt: skip
    if not any(isinstance(multiplier, OfIntegers) for multiplier in found.values()):
        _check_defaults(options)
    layers = _layers(model)
    names = [name for each in layers.values() for name in each]
    if not names:
        raise ValueError("model: it has no layers with weights, and no products of tensors")
    for pattern in patterns:
        if not any(_fits(pattern, name) for name in names):
            raise ValueError(
                f"multipliers: {pattern!r} fits no layer; layers are {', '.join(names)}"
            )
    done = Conversion(model)
    made: dict[str, nn.Module] = {}
    for number, (layer, own_names) in enumerate(layers.items()):
        pattern = next((pattern for pattern in patterns if _fits(pattern, own_names[0])), None)
        multiplier = None if pattern is None else found[pattern]
        if multiplier is None:
            why = "no pattern fits" if pattern is None else f"{pattern!r} is None"
        elif number == 0 and skip_first:
            why = "the first layer"
        else:
            why = _obstacle(layer) or _reader_of(model, own_names, made)
        if why or multiplier is None:
            done.left |= dict.fromkeys(own_names, str(why))
            continue
        replacement = _make(layer, multiplier, gradient, impl)
        for part in replacement.modules():
            if isinstance(part, Quantizer):
                part.configure(**options)
        made |= dict.fromkeys(own_names, replacement)
        done.replaced |= dict.fromkeys(own_names, str(multiplier))
    for name, layer in made.items():  # after all errors
        parent, _, own = name.rpartition(".")
        if name:
            setattr(done.model.get_submodule(parent), own, layer)
        else:
            done.model = layer
    for module in done.model.modules():
        if isinstance(module, nn.TransformerEncoder) and any(
            isinstance(part, ApproxMultiheadAttention) for part in module.modules()
        ):
            module.use_nested_tensor = False  # which a kernel of PyTorch's attention takes
    return done


def _check_defaults(options: Mapping[str, Any]) -> None:
    """Checks that nobody chose options that no layer would use."""
    for name, default in (Quantizer.configure.__kwdefaults__ or {}).items():
        if options[name] != default:
            raise ValueError(
                f"{name}: expected {default!r} without a multiplier of integers, got "
                f"{options[name]!r}"
            )


def _layers(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Returns the layers of a model, with their names: those with weights, and products of two
    tensors, but for those of attention."""
    layers: dict[nn.Module, list[str]] = {}
    parts: set[nn.Module] = set()
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, ApproxMultiheadAttention):
            parts |= {module.scores, module.mix}
        own = module.named_parameters(recurse=False)
        is_plain = isinstance(module, tuple(_TENSORS)) and module not in parts
        if is_plain or any("weight" in name and p.dim() > 1 for name, p in own):
            layers.setdefault(module, []).append(name)
    return layers


def _reader_of(model: nn.Module, names: Sequence[str], made: Mapping[str, nn.Module]) -> str | None:
    """Returns why a layer cannot be replaced, if the module around it may read its weight."""
    for name in names:
        around, _, own = name.rpartition(".")
        parent = made.get(around) or model.get_submodule(around)
        if isinstance(parent, nn.TransformerEncoderLayer):
            attention = made.get(f"{around}.self_attn".lstrip("."))
            attention = attention or getattr(parent, "self_attn", None)
            # It calls its layers, and reads no weights, where its attention is approximate.
            if own == "self_attn" or isinstance(attention, ApproxMultiheadAttention):
                continue
        if isinstance(parent, ApproxMultiheadAttention):
            continue
        for kind in type(parent).__mro__:
            if kind.__name__ in _READERS and name:
                return f"{kind.__name__} may read its weight without calling it"
    return None


def _fits(pattern: str, name: str) -> bool:
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[: n + 1]), pattern) for n in range(len(parts)))


def _obstacle(layer: nn.Module) -> str | None:
    """Returns why a layer cannot be replaced."""
    kind = type(layer).__name__
    if parametrize.is_parametrized(layer):
        return "it has parametrizations"
    plain = _KINDS.get(type(layer))
    if plain is None:
        plain = next((base for base in _TENSORS if isinstance(layer, base)), None)
        return (
            f"{kind} may not compute what {plain.__name__} does"
            if plain
            else f"there is no approximate {kind}"
        )
    if "forward" in vars(layer):
        return "its forward is one of its own"
    tensors = {*layer._parameters, *layer._buffers, *layer._modules}
    if extra := next(iter(tensors - _TENSORS[plain]), None):
        return f"it has {extra!r}, which a {plain.__name__} has not"
    if hooks := _hooks(layer):
        return f"it has {hooks}"
    if isinstance(layer, nn.MultiheadAttention) and (why := _obstacle_within(layer)):
        return why
    other = (p.dtype for p in layer.parameters(recurse=False) if p.dtype != torch.float32)
    return next((f"it has {dtype} parameters" for dtype in other), None)


def _obstacle_within(layer: nn.MultiheadAttention) -> str | None:
    """Returns why attention cannot be replaced because of its parts."""
    if not isinstance(layer, ApproxMultiheadAttention):  # it does not call its last projection
        why = _obstacle(layer.out_proj)
        return why and f"of its out_proj: {why}"
    for name in ("query", "key", "value", "scores", "mix"):
        part = getattr(layer, name)
        if type(part) not in (Projection, ApproxMatmul):
            return f"its {name} is one of its own"
        if hooks := _hooks(part):
            return f"its {name} has {hooks}"
    return None


def _hooks(module: nn.Module) -> str | None:
    """Returns which hooks a module has, if any."""
    found = (name for name, value in vars(module).items() if name.endswith("_hooks") and value)
    return next((name.strip("_").replace("_", " ") for name in found), None)


def _make(
    layer: nn.Module, multiplier: AnyMultiplier, gradient: Gradient | None, impl: str
) -> nn.Module:
    options: Any = {"multiplier": multiplier, "gradient": gradient, "impl": impl}
    made: nn.Module
    with torch.random.fork_rng(devices=[]):  # its own parameters are drawn, and go
        if isinstance(layer, nn.Conv2d):
            names = ("kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")
            options |= {name: getattr(layer, name) for name in names}
            has_bias = layer.bias is not None
            made = ApproxConv2d(layer.in_channels, layer.out_channels, bias=has_bias, **options)
        elif isinstance(layer, ApproxMatmul):
            made = ApproxMatmul(**options)
        elif isinstance(layer, nn.MultiheadAttention):
            names = ("dropout", "add_zero_attn", "kdim", "vdim", "batch_first")
            options |= {name: getattr(layer, name) for name in names}
            options |= {"add_bias_kv": layer.bias_k is not None}
            has_bias = layer.in_proj_bias is not None
            made = ApproxMultiheadAttention(
                layer.embed_dim, layer.num_heads, bias=has_bias, **options
            )
            made.out_proj = layer.out_proj
        else:
            assert isinstance(layer, nn.Linear)
            made = ApproxLinear(
                layer.in_features, layer.out_features, layer.bias is not None, **options
            )
    for tensor in (*layer.parameters(recurse=False), *layer.buffers()):
        made.to(tensor.device)
        break
    for name, parameter in layer._parameters.items():
        made.register_parameter(name, parameter)
    for name, value in vars(layer).items():  # attributes of a user
        if name not in vars(made) and name not in made._modules:
            setattr(made, name, value)
    return made.train(layer.training)
