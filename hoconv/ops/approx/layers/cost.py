"""How many multiplications a model takes, and what they cost in hardware."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import numbers
import os
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hoconv.ops.approx.layers.approximate import (
    ApproxConv2d,
    Approximate,
    ApproxLinear,
    ApproxMatmul,
    Product,
    Projection,
)
from hoconv.ops.approx.sources.c_functions import CFunction
from hoconv.ops.approx.sources.find import Found, find
from hoconv.ops.approx.tables import LookupTable, OfIntegers

_TRANSPOSED = nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d
_COUNTED = nn.Conv1d, nn.Conv2d, nn.Conv3d, *_TRANSPOSED, nn.Linear, Product
# In figures of a circuit: mW, ns and um2.
_POWER, _DELAY, _AREA = "PDK45_PWR", "PDK45_DELAY", "PDK45_AREA"


@dataclass(frozen=True)
class LayerCost:
    """The multiplications of a layer in a forward pass.

    Attributes:
        name: of the layer in its model; the first one where it has several.
        multiplier: as text; ``"exact"`` of a layer that is not approximate.
        multiplications: how many, in all calls of the layer. A zero of the padding is an operand.
        energy: of all these together, in pJ; None where that of a multiplication is unknown.
        area: of one multiplier, in um2; None where it is unknown.
    """

    name: str
    multiplier: str
    multiplications: int
    energy: float | None
    area: float | None


@dataclass(frozen=True)
class ModelCost:
    """The multiplications of a model's convolutions and linear layers in a forward pass.

    Attributes:
        layers: in the order of the model's modules.
    """

    layers: tuple[LayerCost, ...]

    @property
    def multiplications(self) -> int:
        """The multiplications of all layers together."""
        return sum(each.multiplications for each in self.layers)

    @property
    def unknown(self) -> int:
        """The multiplications whose energy is unknown; `energy` leaves them out."""
        return sum(each.multiplications for each in self.layers if each.energy is None)

    @property
    def energy(self) -> float | None:
        """The energy of the layers for which it is known, in pJ; None where there are none."""
        known = [each.energy for each in self.layers if each.energy is not None]
        return math.fsum(known) if known else None

    def __str__(self) -> str:
        width = max((len(each.name) for each in self.layers), default=0)
        rows = [(each.name, each.multiplications, each.energy, f"  {each.multiplier}")
                for each in self.layers]  # fmt: skip
        rows.append(("", self.multiplications, self.energy, ""))
        lines = [
            f"{name:{width}}  {count:>15,}  {_shown(energy):>12}{multiplier}"
            for name, count, energy, multiplier in rows
        ]
        left_out = f"without {self.unknown:,} of unknown energy" if self.unknown else "in all"
        return "\n".join([*lines[:-1], f"{lines[-1]}  {left_out}"])


def cost(
    model: nn.Module,
    *inputs: Any,
    energies: Mapping[Any, float] | None = None,
) -> ModelCost:
    """Counts the multiplications of convolutions and linear layers in one forward pass, and gives
    the energy that they take and the area of their multipliers, where these are known.

    The model is called once, in evaluation mode and with exact products, so that it need not have
    been trained; it is left as it was. Counted are calls of :class:`torch.nn.Linear`, of
    convolutions of one to three dimensions, also transposed, of subclasses of these, and of
    approximate layers. Not counted are products of other layers, of PyTorch's attention and
    TorchScript among them, biases, and what quantising takes. Of a layer that torch.vmap calls,
    one sample is counted.

    The energy of a multiplication is power times delay, of a circuit whose C file says both
    (``PDK45_PWR`` in mW, ``PDK45_DELAY`` in ns; :attr:`hoconv.approx.LookupTable.figures`), in pJ.
    It is unknown of any other multiplier, also of ``"exact"``, unless `energies` says it.

    Args:
        model: any model, also one without approximate layers.
        inputs: of its forward. Multiplications are those of this call: give one sample.
        energies: multiplier -> energy of a multiplication, in pJ; goes before the figures of a
            circuit. A multiplier is named as a layer's argument names it: ``"exact"``,
            ``"drum:k=4"``, the path of a file.

    Raises:
        TypeError: `model` is no module, or `energies` no mapping.
        ValueError: a multiplier in `energies` is unknown, or there twice; its energy is no positive
            number.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    known = energy_by_multiplier(energies or {})
    counts = _count(model, inputs)
    return ModelCost(
        tuple(_of_layer(name, layer, counts[layer], known) for name, layer in _counted(model))
    )


def energy_by_multiplier(energies: Mapping[Any, float]) -> dict[Hashable, float]:
    """Returns the identity of a multiplier -> energy of a multiplication.

    Raises: as :func:`cost`.
    """
    if not isinstance(energies, Mapping):
        raise TypeError(
            "energies: expected pJ of a multiplication by multiplier, such as {'exact': 3.7}; got "
            f"{energies!r}"
        )
    found: dict[Hashable, float] = {}
    for key, energy in energies.items():
        is_number = isinstance(energy, numbers.Real) and not isinstance(energy, bool)
        if not is_number or not 0 < energy < math.inf:
            raise ValueError(
                f"energies: expected pJ of a multiplication by {str(key)!r}, a number above 0; got "
                f"{energy!r}"
            )
        try:
            identity = _identity(find(key))
        except ValueError as error:
            raise ValueError(f"energies: {error}") from error
        if found.setdefault(identity, float(energy)) != energy:
            raise ValueError(f"energies: {str(key)!r} is there twice, with two energies")
    return found


def _identity(multiplier: str | Found) -> Hashable:
    """Returns what is equal of the same multipliers: a name; or the products, or the code, and
    where they are from, wherever the folder of a file is said to be."""
    if isinstance(multiplier, str):
        return multiplier
    if isinstance(multiplier, CFunction):
        return multiplier.bits, multiplier.signed, multiplier.path.name, multiplier.code
    if isinstance(multiplier, LookupTable):
        products, kind = multiplier.products, multiplier.signed
    else:
        products, kind = multiplier.on(torch.device("cpu")), None
    digest = hashlib.sha256(products.numpy().tobytes()).hexdigest()
    return kind, os.path.basename(multiplier.origin), digest


def _counted(model: nn.Module) -> list[tuple[str, Any]]:
    return [(name, each) for name, each in model.named_modules() if isinstance(each, _COUNTED)]


def _count(model: nn.Module, inputs: tuple[Any, ...]) -> dict[nn.Module, int]:
    """Returns the multiplications of each layer in a call."""
    counts = {layer: 0 for _, layer in _counted(model)}

    def count(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> None:
        x = args[0] if args else kwargs["input"]
        # An output is a sum of as many products as a row of the weight has numbers; in a
        # transposed convolution an input is an operand of as many.
        numbers = x if isinstance(layer, _TRANSPOSED) else out
        terms = x.shape[-1] if isinstance(layer, Product) else layer.weight[0].numel()
        counts[layer] += numbers.numel() * terms

    # With hooks, PyTorch's encoders of transformers call the layers that else a fused kernel reads.
    # Before hooks of a user, which may change the output.
    hooks = [layer.register_forward_hook(count, prepend=True, with_kwargs=True) for layer in counts]
    try:
        with (
            _exact_products(counts), _evaluation(model), torch.no_grad(),
            torch.compiler.set_stance("force_eager"),
        ):  # fmt: skip
            model(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return counts


@contextlib.contextmanager
def _exact_products(layers: Mapping[nn.Module, int]) -> Iterator[None]:
    """Lets approximate layers compute what those of PyTorch do, unless their forward is of a
    user."""
    plain = {
        ApproxConv2d.forward: nn.Conv2d.forward,
        ApproxLinear.forward: nn.Linear.forward,
        ApproxMatmul.forward: lambda layer, input, other: input @ other,
        Projection.forward: lambda layer, input, weight: F.linear(input, weight),
    }
    replaced: list[Any] = [
        layer
        for layer in layers
        if isinstance(layer, Approximate)
        and type(layer).forward in plain
        and "forward" not in vars(layer)
    ]
    for layer in replaced:
        layer.forward = functools.partial(plain[type(layer).forward], layer)
    try:
        yield
    finally:
        for layer in replaced:
            del layer.forward


@contextlib.contextmanager
def _evaluation(model: nn.Module) -> Iterator[None]:
    """Sets all modules of a model to evaluation, and back to what each was in."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _of_layer(
    name: str, layer: Any, multiplications: int, known: Mapping[Hashable, float]
) -> LayerCost:
    is_approximate = isinstance(layer, Approximate)
    multiplier = layer.multiplier if is_approximate else "exact"
    figures = multiplier.figures if isinstance(multiplier, OfIntegers) else {}
    power, delay = figures.get(_POWER), figures.get(_DELAY)
    energy = known.get(_identity(multiplier))
    if energy is None and power is not None and delay is not None:
        energy = power * delay
    return LayerCost(
        name, str(multiplier), multiplications,
        None if energy is None else energy * multiplications, figures.get(_AREA),
    )  # fmt: skip


def _shown(energy: float | None) -> str:
    return "unknown" if energy is None else f"{energy:.6g} pJ"
