"""Changes of a layer between calls: lines of Python, so that a sequence is a program.

In a line, $any is a parameter; $p is one that is its owner's own, with its $name in $owner; $m is
the layer or its generator, and $method a method of that; $attribute of the layer gets $value; $n is
a new number. A line that does not apply to a layer fails, and changes nothing.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import pickle
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from string import Template
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from fuzzing.draw import Draw
from fuzzing.sequences.layers import Kind

_HOOKS = ("forward_hook(scale_output)", "forward_pre_hook(scale_input)",
          "full_backward_hook(scale_gradient)",
          "full_backward_pre_hook(scale_gradient)")  # fmt: skip
_OF_GENERATOR = ("padding = 1, 1", "padding = 0, 0", "padding = 'valid'", "padding = 'same'",
                 "padding_mode = 'circular'", "stride = 2, 2", "stride = 1", "dilation = 2, 2",
                 "groups = 2", "in_channels = 7", "out_channels = 3")  # fmt: skip
_CLASSES = ("nn.Conv2d.forward", "nn.Conv2d._conv_forward", "nn.Linear.forward",
            "nn.Module.__call__", "nn.Module._call_impl", "$class.$method")  # fmt: skip
_SETTINGS = (("default_dtype", "get_default_dtype", "torch.float16"),
             ("num_threads", "get_num_threads", "1"),
             ("grad_enabled", "is_grad_enabled", "False"))  # fmt: skip
# Line -> its weight in draws.
_FOR_GOOD = {
    "$any.detach().mul_(-1.2).add_(0.05)": 2, "$any.data = $any.data * 0.9": 1,
    "$any.data = $any.data.mT.contiguous().mT": 1,
    "$any.data = torch.stack([$any.data] * 2, -1)[..., 1]": 1,
    "$owner.$name = nn.Parameter($p.detach() * 0.9, $p.requires_grad)": 1.5,
    "$owner.$other = $p": 1,
    "$any.requires_grad_(not $any.requires_grad)": 2,
    "layer.requires_grad_(not $any.requires_grad)": 1,
    "layer.load_state_dict({k: v * 0.95 for k, v in layer.state_dict().items()})": 0.6,
    "layer.load_state_dict({k: v * 0.95 for k, v in layer.state_dict().items()}, assign=True)": 0.4,
    "layer.$attribute = $value": 7, "layer.to($dtype)": 1, "layer.train(not layer.training)": 2,
    "layer = copied(layer)": 1, "layer = pickle.loads(pickle.dumps(layer))": 0.7,
    "torch.manual_seed($n); layer.reset_parameters()": 0.5,
    "layer.options.update(p=0.9, slots=5)": 0.3, "layer.options['factors'].append(3.0)": 0.3,
}  # fmt: skip
# Line -> the line that undoes it; at the latest at the end of the sequence.
_UNTIL_UNDONE: dict[str, tuple[str, float]] = {
    "parametrize.register_parametrization($owner, '$name', Times())":
        ("parametrize.remove_parametrizations($owner, '$name')", 0.7),
    "parametrizations.weight_norm($owner, '$name')":
        ("parametrize.remove_parametrizations($owner, '$name')", 0.3),
    "prune.random_unstructured($owner, '$name', 0.4)": ("prune.remove($owner, '$name')", 1),
    "p$n = $p; del $owner.$name; $owner.$name = p$n.detach() * 0.9":
        ("del $owner.$name; $owner.$name = p$n", 0.6),
    "p$n = $p; del $owner.$name; $owner.register_buffer('$name', p$n.detach() * 0.9)":
        ("del $owner.$name; $owner.$name = p$n", 0.6),
    "$m.$method = types.MethodType(scaling(type($m).$method), $m)": ("del $m.$method", 2.5),
    "$m.__class__ = overriding(type($m), '$method')": ("$m.__class__ = type($m).__base__", 2),
    "layer.generator = nn.Sequential(layer.generator)":
        ("layer.generator = layer.generator[0]", 0.5),
    **{f"h$n = $m.register_{hook}": ("h$n.remove()", 0.5) for hook in _HOOKS},
    **{f"h$n = nn.modules.module.register_module_{hook}": ("h$n.remove()", 0.15)
       for hook in _HOOKS},
    **{f"f$n = {method}; {method} = scaling(f$n)":
        (f"{method} = f$n", 2 if "$" in method else 0.3) for method in _CLASSES},
    **{f"s$n = torch.{read}(); torch.set_{name}({value})": (f"torch.set_{name}(s$n)", 0.5)
       for name, read, value in _SETTINGS},
}  # fmt: skip
# The same, undone after the next call: most of these calls are to be refused.
_FOR_A_CALL = {
    "v$n = layer.$attribute; layer.$attribute = $value": ("layer.$attribute = v$n", 3),
    "p$n = $p; del $owner.$name": ("$owner.$name = p$n", 0.4),
    "p$n = $p; $owner.$name = None": ("$owner.$name = p$n", 0.4),
    **{f"d$n = $p.data; $p.grad = None; $p.data = {wrong}": ("$p.grad = None; $p.data = d$n", 0.3)
       for wrong in ("torch.cat((d$n, d$n[:1]))", "d$n.half()", "d$n.flatten()")},
    **{f"v$n = layer.generator.{each.split()[0]}; layer.generator.{each}":
        (f"layer.generator.{each.split()[0]} = v$n", 0.1) for each in _OF_GENERATOR},
}  # fmt: skip
_NOT_OF_A_CALL = ("extra_repr", "explain", "why_unfused", "_load_from_state_dict", "_convert",
                  "_is_whole", "reset_parameters", "initial_state", "step")  # fmt: skip
_UNDO = "undo"
LINES = {
    _UNDO: 12, **_FOR_GOOD,
    **{line: weight for line, (_, weight) in (_UNTIL_UNDONE | _FOR_A_CALL).items()},
}  # fmt: skip


@dataclass
class World:
    """What lines refer to by `names`, the layer among it, and lines that undo changes: `mend` after
    the next call, `undo` at the end of the sequence or earlier."""

    kind: Kind
    impl: str
    names: dict[str, Any]
    undo: list[str] = field(default_factory=list)
    mend: list[str] = field(default_factory=list)
    number: int = 0

    @property
    def layer(self) -> Any:
        return self.names["layer"]

    def change(self, line: str, draw: Draw) -> str:
        """Runs a line of `LINES`; returns what was run."""
        if line == _UNDO:
            line = self.undo.pop()
            self.take_back([line])
            return line
        values = dict(self._values(draw))
        filled = Template(line).substitute(values)
        exec(filled, self.names)
        for lines, where in ((_UNTIL_UNDONE, self.undo), (_FOR_A_CALL, self.mend)):
            if line in lines:
                where.append(Template(lines[line][0]).substitute(values))
        return filled

    def take_back(self, lines: list[str]) -> None:
        """Runs lines, the last first. They fail where the layer became another one meanwhile."""
        while lines:
            with contextlib.suppress(Exception):
                exec(lines.pop(), self.names)

    def _values(self, draw: Draw) -> Iterator[tuple[str, Any]]:
        """Yields what stands for the names in a line."""
        self.number += 1
        yield "n", self.number
        found = [(_path(name), owner, each, p) for name, owner in self.layer.named_modules()
                 for each, p in owner._parameters.items() if p is not None]  # fmt: skip
        if found:
            owner, _, name, _ = draw.choice(found)
            yield "any", f"{owner}.{name}"
        whole = [each for each in found if not isinstance(each[1], parametrize.ParametrizationList)
                 and not each[2].endswith("_orig")
                 and not parametrize.is_parametrized(each[1])]  # fmt: skip
        if whole:
            path, owner, name, p = draw.choice(whole)
            yield from {"owner": path, "name": name, "p": f"{path}.{name}"}.items()
            like = [n for n, q in owner._parameters.items() if q is not None and q.shape == p.shape]
            yield "other", draw.choice(like)
        generator = getattr(self.layer, "generator", None)
        m = draw.choice(("layer", "layer.generator") if generator is not None else ("layer",))
        of = type(self.layer if m == "layer" else generator)
        method = draw.choice(_methods(of))
        owner = next((base for base in of.__mro__ if method in vars(base)), of)
        self.names[owner.__name__] = owner
        yield from {"m": m, "method": method, "class": owner.__name__}.items()
        settings = self.kind.settings | {"impl": ("auto", "reference", self.impl)}
        attribute = draw.choice([*settings])
        yield from {"attribute": attribute, "value": repr(draw.choice(settings[attribute]))}.items()
        # A recurrent layer compiles a loop for every dtype: rarely.
        others = (torch.float32, torch.bfloat16) if self.kind.dtype is torch.float64 else ()
        yield "dtype", draw.choice((*[self.kind.dtype] * (2 if self.kind.shape else 12), *others))


def _path(name: str) -> str:
    parts = name.split(".") if name else []
    return "layer" + "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in parts)


def _methods(kind: type) -> list[str]:
    """Lists the methods that the library's classes define for what a layer computes."""
    bases = [base for base in kind.__mro__ if base.__module__.startswith("hoconv.")]
    found = {n for base in bases for n, value in vars(base).items() if inspect.isfunction(value)}
    found = {n for n in found if not n.startswith("__") and n not in _NOT_OF_A_CALL}
    return sorted(found) or ["forward", "_conv_forward"]


# What lines call


def copied(layer: Any) -> Any:
    """Returns a copy that was never called, also of a layer that holds results."""
    values = [value for module in layer.modules() for value in vars(module).values()]
    results = (v for v in values if isinstance(v, Tensor) and not v.is_leaf)
    return copy.deepcopy(layer, {id(t): t.detach().clone() for t in results})


def scaled(value: Any) -> Any:
    """Changes a result: scales its tensors; an int becomes zero."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return value * 1.5
    if type(value) in (tuple, list):
        return type(value)(map(scaled, value))
    return 0 if type(value) is int else value


def scaling(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def altered(*args: Any, **kwargs: Any) -> Any:
        return scaled(function(*args, **kwargs))

    return altered


def overriding(kind: type, method: str) -> type:
    return type(f"Sub{kind.__name__}", (kind,), {method: scaling(getattr(kind, method))})


def scale_output(module: nn.Module, args: Any, output: Any) -> Any:
    return scaled(output)


def scale_input(module: nn.Module, args: Any) -> Any:
    return (scaled(args[0]), *args[1:])


def scale_gradient(module: nn.Module, gradient: Any, of_output: Any = None) -> Any:
    return scaled(gradient)


class Times(nn.Module):
    """A parametrization; the inverse is as exact as the product."""

    def forward(self, x: Tensor) -> Tensor:
        return x * -1.5

    def right_inverse(self, x: Tensor) -> Tensor:
        return x / -1.5


NAMES = {
    each.__name__.rpartition(".")[2]: each
    for each in (
        copied, scaling, overriding, scale_output, scale_input, scale_gradient, Times,
        torch, nn, parametrizations, parametrize, prune, pickle, types,
    )
}  # fmt: skip
