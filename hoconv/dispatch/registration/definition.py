"""The parts of an implementation: libraries of compiled code, ops of torch.library."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch

from hoconv.dispatch.declaration import Implementation
from hoconv.dispatch.registration.batches import register_vmap
from hoconv.dispatch.registration.eager import Op
from hoconv.jit import CSRC, Library

_code: dict[torch._ops.OpOverload, Library] = {}  # what has the kernels of an op


def kernels(folder: str) -> dict[str, Library]:
    """Returns the libraries of hoconv's own kernels in a folder of csrc/, by implementation."""
    name, root = folder.replace("/", "_"), CSRC / folder

    def library(device: Literal["cpu", "cuda"], *patterns: str) -> Library:
        found = sorted(path for pattern in patterns for path in root.glob(pattern))
        # A folder without sources is an error on use, not on import.
        return Library(name, found or [root], device, include=[CSRC])

    return {
        "cpp": library("cpu", "cpu/*.cpp", "aten/*.cpp"),
        "cuda": library("cuda", "cuda/**/*.cu"),
    }


def compiled(
    function: Callable[..., Any], devices: tuple[str, ...], *libraries: Library
) -> Implementation:
    """Returns the declaration of an implementation that calls compiled code.

    Args:
        function, devices: as of the implementation.
        libraries: what it calls.
    """

    def first(reasons: Iterable[str | None]) -> str | None:
        return next(filter(None, reasons), None)

    return Implementation(
        function,
        devices,
        load=lambda: first(library.load() for library in libraries),
        obstacle=lambda: first(library.obstacle() for library in libraries),
        libraries=libraries,
    )


def define(
    library: torch.library.Library,
    name: str,
    impl: str,
    schema: str,
    fake: Callable[..., Any],
    code: Library | None = None,
) -> Op:
    """Defines an implementation's overload of an op, and returns it.

    The first call of an overload whose kernels are in compiled code loads that, so that a saved
    program runs in a process that has called nothing else.

    Args:
        fake: returns what the op would return, for tensors without data.
        code: the compiled code that has the kernels, if any.
    """
    overload = f"{name}.{impl}"
    library.define(overload + schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.register_fake(f"{library.ns}::{overload}", fake)
    op = getattr(getattr(getattr(torch.ops, library.ns), name), impl)

    def load_and_call(code: Library, keyset: torch._C.DispatchKeySet, *args: Any) -> Any:
        if reason := code.load():
            raise RuntimeError(f"{op.name()} cannot run here: {reason}")
        key = keyset.highestPriorityTypeId()
        if not torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key.name):
            raise RuntimeError(
                f"{op.name()} has no kernel for {key.name} tensors; in a source of it, write "
                f'm.impl("{overload}", TORCH_BOX(...)) within STABLE_TORCH_LIBRARY_IMPL'
                f"({library.ns}, {key.name}, m)"
            )
        return op.redispatch(keyset, *args)

    if code:  # the kernels that it loads take precedence over this
        _code[op] = code
        call = functools.partial(load_and_call, code)
        library.impl(overload, call, "CompositeExplicitAutograd", with_keyset=True)
    register_vmap(library, op)
    return Op(op)


def find_code(op: torch._ops.OpOverload) -> Library | None:
    """Finds the compiled code that has the kernels of an op; None where :func:`define` was given
    none."""
    return _code.get(op)


def find_ops(code: Library) -> list[torch._ops.OpOverload]:
    """Finds the ops whose kernels are in compiled code."""
    return [op for op, of in _code.items() if of == code]
