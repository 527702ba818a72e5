"""Changes of a layer as a module: hooks, attributes, methods, classes, its generator.

A change returns what it did, or None for nothing.
"""

from __future__ import annotations

import copy
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fuzzing.draw import Draw
from fuzzing.sequences.world import World, scale


def _altered(original: Callable[..., Any]) -> Callable[..., Any]:
    """A method that calls the original and changes its result."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return scale(original(self, *args, **kwargs))

    return method


def _methods(kind: type) -> list[str]:
    """Lists the names of the methods that the library's classes define for a layer."""
    names = [
        name
        for base in kind.__mro__
        if base.__module__.startswith("hoconv.")
        for name, value in vars(base).items()
        if inspect.isfunction(value) and not name.startswith("__")
    ]
    skipped = ("extra_repr", "explain", "why_unfused", "_load_from_state_dict", "_convert",
               "_is_whole", "reset_parameters", "initial_state", "step")  # fmt: skip
    return sorted(set(names) - set(skipped))


class Adapter(nn.Module):
    """A module around another, as LoRA puts it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.gain = nn.Parameter(torch.tensor(1.25, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) * self.gain.to(x.dtype)


# Hooks


def _double_output(module: nn.Module, args: Any, output: Any) -> Any:
    return scale(output)


def _observe(*args: Any) -> None:
    return None


def _double_input(module: nn.Module, args: Any) -> Any:
    first, *rest = args
    return (first * 1.5 if isinstance(first, Tensor) else first, *rest)


def _double_gradient(module: nn.Module, into: Any, out: Any) -> Any:
    return scale(into)


def _double_out_gradient(module: nn.Module, out: Any) -> Any:
    return scale(out)


_HOOKS = {
    "forward_hook": (_double_output, _observe),
    "forward_pre_hook": (_double_input, _observe),
    "full_backward_hook": (_double_gradient, _observe),
    "full_backward_pre_hook": (_double_out_gradient, _observe),
}


def hook(world: World, draw: Draw) -> str:
    where, module = world.module(draw)
    kind = draw.choice([*_HOOKS])
    function = draw.choice(_HOOKS[kind])
    handle = getattr(module, f"register_{kind}")(function)
    return world.later(f"{where}.register_{kind}({function.__name__})", handle.remove)


def global_hook(world: World, draw: Draw) -> str:
    kind = draw.choice([*_HOOKS])
    function = draw.choice(_HOOKS[kind])
    name = f"register_module_{kind}"
    handle = getattr(nn.modules.module, name)(function)
    return world.later(f"nn.modules.module.{name}({function.__name__})", handle.remove)


# Attributes, methods, classes


def attribute(world: World, draw: Draw) -> str:
    """An attribute set to another value, for good or for a call."""
    layer = world.layer
    name = draw.choice([*world.made.settings])
    value, before = draw.choice(world.made.settings[name]), getattr(layer, name)
    setattr(layer, name, value)
    if draw.chance(0.7):
        return f"layer.{name} = {value!r}"
    world.mend.append(lambda: setattr(layer, name, before))
    return f"layer.{name} = {value!r} for a call, {before!r} before"


def generator_attribute(world: World, draw: Draw) -> str | None:
    generator = getattr(world.layer, "generator", None)
    if not isinstance(generator, nn.Conv2d):
        return None
    k = generator.kernel_size[0]
    name, value = draw.choice((
        ("padding", (k // 2, k // 2)), ("padding", (0, 0)), ("padding_mode", "circular"),
        ("stride", (2, 2)), ("stride", (1, 1)), ("dilation", (2, 2)), ("groups", 2),
        ("padding", "valid"), ("padding", "same"), ("in_channels", 7), ("kernel_size", (9, 9)),
        ("out_channels", 3), ("stride", 1), ("dilation", 1),
    ))  # fmt: skip
    before = getattr(generator, name)
    setattr(generator, name, value)
    world.mend.append(lambda: setattr(generator, name, before))
    return f"layer.generator.{name} = {value!r} for a call"


def method(world: World, draw: Draw) -> str:
    """A method set on the instance, of the layer or of its generator."""
    where, module = world.module(draw)
    names = _methods(type(module)) or ["forward", "_conv_forward"]
    name = draw.choice([n for n in names if hasattr(module, n)])
    if name in vars(module):
        delattr(module, name)
        return f"del {where}.{name}"
    setattr(module, name, types.MethodType(_altered(getattr(type(module), name)), module))
    # The definition calls the generator, and no method of the layer.
    foreign = module is world.layer
    world.foreign += foreign

    def undo() -> None:
        if name in vars(module):
            delattr(module, name)
        world.foreign -= foreign

    return world.later(f"{where}.{name} = a method that scales its result", undo)


def subclass(world: World, draw: Draw) -> str:
    """The layer becomes one of a subclass that overrides a method."""
    layer, before = world.layer, type(world.layer)
    name = draw.choice(_methods(before))
    new = type("Sub" + before.__name__, (before,), {name: _overriding(before, name)})
    layer.__class__ = new
    world.foreign += 1

    def undo() -> None:
        if type(layer) is new:
            layer.__class__ = before
            world.foreign -= 1

    return world.later(f"layer.__class__ = a subclass that overrides {name}", undo)


def _overriding(base: type, name: str) -> Callable[..., Any]:
    def override(self: Any, *args: Any, **kwargs: Any) -> Any:
        return scale(getattr(base, name)(self, *args, **kwargs))

    return override


def patch(world: World, draw: Draw) -> str:
    """A method of the layer's class replaced."""
    name = draw.choice(_methods(type(world.layer)))
    owner = next(b for b in type(world.layer).__mro__ if name in vars(b))
    world.foreign += 1

    def undo() -> None:
        world.foreign -= 1

    return _patched(world, owner, name, _altered(vars(owner)[name]), undo)


def patch_pytorch(world: World, draw: Draw) -> str:
    """A method of a class of PyTorch replaced."""
    kind, name = draw.choice((
        (nn.Conv2d, "forward"), (nn.Linear, "forward"), (nn.Conv2d, "_conv_forward"),
        (nn.Module, "__call__"), (nn.Module, "_call_impl"),
    ))  # fmt: skip
    return _patched(world, kind, name, _altered(vars(kind)[name]), lambda: None)


def _patched(
    world: World, kind: type, name: str, new: Callable[..., Any], undone: Callable[[], None]
) -> str:
    before = vars(kind)[name]
    setattr(kind, name, new)

    def undo() -> None:
        setattr(kind, name, before)
        undone()

    return world.later(f"{kind.__name__}.{name} replaced by one that scales its result", undo)


def take_back(world: World, draw: Draw) -> str | None:
    if not world.undo:
        return None
    # The last first: one patch of a method may hold another.
    text = [*world.undo][-1]
    world.undo.pop(text)()
    return f"undone: {text.rpartition(' #')[0]}"


def submodule(world: World, draw: Draw) -> str | None:
    layer, generator = world.layer, getattr(world.layer, "generator", None)
    if not isinstance(generator, nn.Module):
        return None
    kind = draw.choice(("adapter", "sequential", "identity", "forward", "_conv_forward", "quiet"))
    made: Any
    if kind == "adapter":
        made = Adapter(generator)
    elif kind == "sequential":
        made = nn.Sequential(generator)
    elif kind == "identity":
        made = nn.Identity()
    elif type(generator) not in (nn.Conv2d, nn.Linear) or "forward" in vars(generator):
        return None  # a forward of the instance would still read the old module
    else:
        base = type(generator)
        changed = {kind: _overriding(base, kind)} if hasattr(base, kind) else {}
        made = copy.copy(generator)  # shares the parameters
        made.__class__ = type("Sub" + base.__name__, (base,), changed)
    made.train(layer.training)
    layer.generator = made

    def undo() -> None:
        layer.generator = generator

    if kind == "identity":
        world.mend.append(undo)
        return "layer.generator = nn.Identity() for a call"
    return world.later(f"layer.generator = {kind}", undo)
