"""Arguments of ops and layers: what they must be, and where a module has them."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    _has_any_global_hook,  # pyright: ignore[reportAttributeAccessIssue]
)


def check_dense(x: Tensor, name: str = "x") -> None:
    """Checks an argument, by its name, before its shape and device are read.

    Raises:
        TypeError: it is no tensor.
        ValueError: it is not dense.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}; convert it first")
    if x.layout is not torch.strided or x.is_nested:
        kind = "a nested one" if x.is_nested else x.layout
        raise ValueError(f"{name}: expected a dense tensor, got {kind}; use {name}.to_dense()")


def check_dtypes(x: Tensor, dtypes: Collection[torch.dtype], **others: Tensor | None) -> None:
    """Checks that x has one of these dtypes, and that the others have x's dtype and device.

    Raises:
        TypeError: a dtype that is not supported, or that is not x's.
        ValueError: a device that is not x's.
    """
    dtype, device = x.dtype, x.device
    if dtype not in dtypes:
        names = ", ".join(map(str, dtypes))
        raise TypeError(f"x: expected one of {names}, got {dtype}; convert it with x.to(...)")
    for name, tensor in others.items():
        if tensor is None:
            continue
        if tensor.dtype != dtype:
            raise TypeError(f"{name}: expected the dtype of x, {dtype}, got {tensor.dtype}")
        if tensor.device != device:
            raise ValueError(f"{name}: expected the device of x, {device}, got {tensor.device}")


class FixedAttributes(nn.Module):
    """A module that refuses other values for attributes by which its parameters were made.

    Without that a call would read one size from the attribute and another from the parameters.
    """

    fixed: tuple[str, ...] = ()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.fixed and name in self.__dict__ and value != self.__dict__[name]:
            raise AttributeError(
                f"{name}: is {self.__dict__[name]!r} and cannot become {value!r}, since the shapes "
                f"of the parameters depend on it; make a new {type(self).__name__}"
            )
        super().__setattr__(name, value)


def get_parameter(module: nn.Module, name: str) -> Any:
    """An attribute of a module that is a parameter or None, or what took its place: a
    parametrization, say.

    ``Module.__getattr__`` takes three times as long to find a parameter.
    """
    parameters = module._parameters
    return parameters[name] if name in parameters else getattr(module, name)


def computes_as_made(generator: Any, kind: type[nn.Module]) -> bool:
    """Returns whether a generator computes what a module of this class computes from its
    parameters, and nothing else happens when it is called.

    Args:
        generator: a module of any class.
        kind: ``nn.Conv2d`` or ``nn.Linear``.
    """
    own = type(generator)
    for name, published in _METHODS[kind].items():
        if getattr(own, name, None) is not published or name in generator.__dict__:
            return False
    if not torch.compiler.is_compiling():  # PyTorch's tracers replace them
        for name, published in _CALLS.items():
            if getattr(own, name, None) is not published:
                return False
    return (
        not _has_any_global_hook()
        and not (generator._forward_pre_hooks or generator._forward_hooks)
        and not (generator._backward_pre_hooks or generator._backward_hooks)
    )


def _find_published(kind: type[nn.Module], *names: str) -> dict[str, Callable[..., Any] | None]:
    """Returns methods of a class of torch.nn, by name; None for one that is not PyTorch's own:
    adapters replace methods on the class, and may have done so before this module was imported."""
    found = {name: getattr(kind, name) for name in names}
    folder = os.path.dirname(inspect.getfile(nn.Module))
    return {
        name: method if os.path.dirname(inspect.getfile(method)) == folder else None
        for name, method in found.items()
    }


# By which a module is called, and by which it computes.
_CALLS = _find_published(nn.Module, "__call__", "_call_impl")
_METHODS: dict[type[nn.Module], dict[str, Callable[..., Any] | None]] = {
    nn.Conv2d: _find_published(nn.Conv2d, "forward", "_conv_forward"),
    nn.Linear: _find_published(nn.Linear, "forward"),
}
