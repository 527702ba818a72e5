"""The declaration of an operator, and the list of declared operators.

An operator is declared once, in its own folder, with :func:`declare`. The correctness check, the
benchmark, the parametrised tests, ``hoconv doctor`` and the start-up table of a training
run all read the declaration: a new operator adds no line to them. Another package declares its
operators on import and names that module in the entry-point group ``hoconv.operators``.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any

import torch
from torch import nn

from hoconv.jit import Library

GROUP = "hoconv.operators"  # of entry points that name modules with declarations


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operator.

    Attributes:
        function: computes it, called with the operator's arguments once they are checked; returns
            a tensor, or a pytree of tensors (a tuple or a dict, say).
        devices: the device types it runs on; empty for all of them.
        load: loads what `function` needs, compiled first if necessary; returns what failed, with
            the fix, or None. If it fails or raises although `obstacle` returns None, the
            implementation is broken.
        obstacle: returns what is missing on this machine, a compiler or a GPU, say, with the fix;
            or None. It compiles nothing.
        prepare: ``prepare(device_type, *program)`` compiles one program, where the operator
            generates code; raises if that fails.
        libraries: the compiled code that it calls, which ``hoconv build`` compiles ahead.
        thread_invariant: whether a CPU's results have the same bits with any number of threads;
            PyTorch's matrix products do not promise it.
    """

    function: Callable[..., Any]
    devices: tuple[str, ...] = ()
    load: Callable[[], str | None] = lambda: None
    obstacle: Callable[[], str | None] = lambda: None
    prepare: Callable[..., None] = lambda *program: None
    libraries: tuple[Library, ...] = ()
    thread_invariant: bool = True


@dataclass(frozen=True)
class Sample:
    """One call of an operator.

    Attributes:
        args: positional arguments; the floating-point tensors among them are differentiated.
        kwargs: keyword arguments, without ``impl``.
        name: what is special about it, in a few words that fit a table: ``k=5, channels-last``.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""


@dataclass(frozen=True)
class Cost:
    """The least that a call must do: the floor that a measured time is compared with.

    Attributes:
        forward_bytes: every input read once and the output written once.
        backward_bytes: the output's gradient and the inputs read once, their gradients written
            once.
        forward_flops, backward_flops: floating-point operations, a fused multiply-add counted as 2.
    """

    forward_bytes: int
    backward_bytes: int
    forward_flops: int
    backward_flops: int


# Taps of a reference that is a loop over them, up to which torch.compile, which unrolls it, takes a
# minute or two.
MOST_UNROLLED = 100


@dataclass(frozen=True)
class Benchmark:
    """The sizes at which ``hoconv benchmark`` times an operator.

    Attributes:
        axis: what varies, the label of the chart's horizontal axis: ``batch size``.
        sizes: its values, ascending.
        sample: ``sample(size, device, dtype)`` makes the call to be timed.
        baselines: name -> what users would write otherwise, timed beside the implementations.
        grid: name -> ``make(device, dtype)``, the calls of ``hoconv benchmark --grid``: the shapes,
            layouts and options that people use, the worst among them.
        compiles: whether ``torch.compile`` of the reference is timed for a call. A reference that
            unrolls into hundreds of operations takes it many minutes.
    """

    axis: str
    sizes: tuple[int, ...]
    sample: Callable[[int, torch.device, torch.dtype], Sample]
    baselines: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    grid: Mapping[str, Callable[[torch.device, torch.dtype], Sample]] = field(default_factory=dict)
    compiles: Callable[[Sample], bool] = lambda _: True

    def calls(
        self, grid: bool, sizes: Sequence[int] | None = None
    ) -> dict[Any, Callable[[torch.device, torch.dtype], Sample]]:
        """Returns size, or name in the grid -> what makes the call.

        Args:
            grid: whether the calls are those of the grid.
            sizes: others than the declared ones; not of the grid.
        """
        if grid:
            return dict(self.grid)
        return {size: functools.partial(self.sample, size) for size in sizes or self.sizes}


@dataclass(frozen=True, eq=False)
class Operator:
    """The declaration of one operator: all that everything else needs to know about it.

    Attributes:
        name: the public name.
        function: the public function, ``function(*args, impl=..., **kwargs)``; returns what the
            function of an implementation returns.
        implementations: name -> implementation, from the slowest to the fastest. The first is
            ``reference``, the definition in plain PyTorch and the ground truth.
        samples: ``samples(device, dtype)`` yields the correctness cases, the awkward ones included,
            small enough that all of them run in seconds.
        tolerances: dtype -> largest allowed ``|out - ref| / |ref|`` (Euclidean norms) against the
            reference in float64, for every tensor of the output and for every gradient.
        cost: computes the least that a sample must do.
        benchmark: the sizes at which it is timed.
        bitwise: whether results are compared with the reference in the operator's own dtypes, for
            an operator that would be a different one in float64. With tolerances of 0 every
            implementation must give the reference's bits, but for the sign of a zero; larger ones
            allow roundings of which none is more exact, as those of fused multiply-adds.
        first_order: whether gradients cannot be differentiated again, except the reference's: to
            try it must be an error.
        surrogate_gradient: whether the reference's gradient is not the derivative of its output, as
            of rounding that passes gradients through: it is the definition of the gradient, and
            finite differences are not compared with it.
    """

    name: str
    function: Callable[..., Any]
    implementations: Mapping[str, Implementation]
    samples: Callable[[torch.device, torch.dtype], Iterable[Sample]]
    tolerances: Mapping[torch.dtype, float]
    cost: Callable[[Sample], Cost]
    benchmark: Benchmark
    bitwise: bool = False
    first_order: bool = False
    surrogate_gradient: bool = False


_declared: dict[str, Operator] = {}


def declare(operator: Operator) -> Operator:
    """Adds an operator to the list; returns it, so that a module can write ``OP = declare(...)``.

    Raises:
        ValueError: another operator has this name.
    """
    if _declared.setdefault(operator.name, operator) is not operator:
        raise ValueError(f"operator {operator.name!r} is already declared; choose another name")
    return operator


def find(name: str) -> Operator:
    """Returns the operator declared under this name."""
    return _declared[name]


def operators() -> list[Operator]:
    """Returns all declared operators: hoconv's own, then those of installed packages."""
    broken_packages()
    return list(_declared.values())


def libraries(device_type: str) -> list[Library]:
    """Returns the compiled code for a device of all declared operators, each library once."""
    found = (
        library
        for operator in operators()
        for implementation in operator.implementations.values()
        for library in implementation.libraries
    )
    return [library for library in dict.fromkeys(found) if library.device == device_type]


@functools.cache
def broken_packages() -> dict[str, str]:
    """Finds installed packages whose operators cannot be imported, or that declare none: entry
    point -> the error."""
    broken = {}
    for entry in entry_points(group=GROUP):
        before = len(_declared)
        try:
            entry.load()
            if len(_declared) == before and not _declares(entry.module):
                raise ImportError(_why_none(entry.module))
        except (Exception, SystemExit) as error:  # a broken package must not hide the others
            broken[f"{entry.name} = {entry.value}"] = f"{type(error).__name__}: {error}"
    return broken


def _declares(module: str) -> bool:
    """Returns whether a module, or another of its package, was imported earlier and declared
    operators."""
    package = module.partition(".")[0]
    return any(op.function.__module__.partition(".")[0] == package for op in _declared.values())


def _why_none(module: str) -> str:
    imported = sys.modules[module]
    if imported.__file__ is None:
        return (
            f"{next(iter(imported.__path__))} has no __init__.py, and Python finds it before the "
            f"installed package {module}: call this from another folder"
        )
    fix = "call hoconv.dispatch.declaration.declare on import"
    return f"{imported.__file__} declares no operator: {fix}"


def layers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields ``(qualified name, layer)`` for the sub-modules of `module` built on an operator.

    Such a layer has the attributes ``operator``, its declaration, and ``impl``.
    """
    for name, layer in module.named_modules():
        if isinstance(getattr(layer, "operator", None), Operator):
            yield name, layer
