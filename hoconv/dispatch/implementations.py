"""Decides which implementations of an operator can run here, and which one a call uses."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from hoconv import jit
from hoconv.dispatch.declaration import Operator, find, layers, libraries
from hoconv.jit import BuildError, MissingCompilerError, triton

# How many decisions a process caches. A process may run any number of programs; the decision that
# was used least recently is dropped first.
_CACHED = 1024


class ImplementationError(RuntimeError):
    """An implementation was asked for by name and cannot run here; says why and what to do."""


class BrokenImplementationError(ImplementationError):
    """Nothing is missing to run an implementation, but it does not compile or load; says why."""


@dataclass(frozen=True)
class Choice:
    """The implementation that a call will use, and why."""

    name: str
    why: str


def implementations() -> dict[str, str]:
    """Finds what can be built on this machine: name -> ``"available"``, or what is missing.

    It looks for compilers and devices and compiles nothing, so that it does not know what is
    broken. Where all compiled code of the operators is in the cache, no compiler is missing.
    """
    return {
        "reference": "available",
        "cpp": _find_obstacle("cpu") or "available",
        "triton": triton.obstacle() or "available",
        "cuda": _find_obstacle("cuda") or "available",
    }


def _find_obstacle(device_type: str) -> str | None:
    reasons = [each.obstacle() for each in libraries(device_type)] or [jit.obstacle(device_type)]
    return next(filter(None, reasons), None)


def set_impl(module: nn.Module, impl: str | Mapping[str, str]) -> None:
    """Sets the implementation of every layer of `module` that is built on an operator.

    Args:
        module: a model, or a layer.
        impl: one name for all layers; a layer whose operator has no such implementation is set to
            ``"auto"``. Or a mapping from the name of an operator, or of a layer as in
            ``module.named_modules()``, to the name of an implementation. A layer's own entry takes
            precedence over its operator's; a layer that has neither keeps its implementation.

    Raises:
        ValueError: no operator of these layers has such an implementation; a key of the mapping
            names neither an operator nor a layer.
    """
    found = dict(layers(module))
    if isinstance(impl, str):
        known = [
            "auto",
            *dict.fromkeys(n for x in found.values() for n in x.operator.implementations),
        ]
        if found and impl not in known:
            raise ValueError(f"impl: expected one of {', '.join(known)}; got {impl!r}")
        for layer in found.values():
            layer.impl = impl if impl in layer.operator.implementations else "auto"
        return
    known = [*dict.fromkeys(layer.operator.name for layer in found.values()), *found]
    for key in impl:
        if key not in known:
            raise ValueError(
                f"impl: expected names of operators or layers, of {', '.join(known) or 'none'}; "
                f"got {key!r}"
            )
    wanted = {}
    for name, layer in found.items():
        if choice := impl.get(name, impl.get(layer.operator.name)):
            check_name(layer.operator, choice)
            wanted[name] = choice
    for name, choice in wanted.items():
        found[name].impl = choice


def impl_label(impl: str | Mapping[str, str]) -> str:
    """Returns `impl` as a word: ``cuda``, or ``recurrent-cpp_approx_conv2d-cuda`` of a mapping."""
    if not isinstance(impl, Mapping):
        return str(impl)
    return "_".join(f"{key}-{name}" for key, name in impl.items())


def check_name(operator: Operator, impl: str) -> None:
    """Checks an argument `impl`, of a layer, say, before there are tensors.

    Raises:
        ValueError: neither ``"auto"`` nor an implementation of the operator.
    """
    if impl != "auto" and impl not in operator.implementations:
        allowed = ", ".join(("auto", *operator.implementations))
        raise ValueError(f"impl: expected one of {allowed}; got {impl!r} for {operator.name}")


def choose(operator: Operator, impl: str, device_type: str, *program: str) -> Choice:
    """Decides which implementation a call of `operator` on a device uses.

    Compiles and loads what the implementation needs on its first use.

    Args:
        operator: the declaration.
        impl: an implementation's name, or ``"auto"``: the fastest that can run.
        device_type: where the tensors are: ``"cpu"``, ``"cuda"``, ...
        program: the program that the call runs, where the operator generates code: the arguments
            of :attr:`hoconv.dispatch.declaration.Implementation.prepare`. Messages show the first
            word of each.

    Raises:
        ValueError: the operator has no implementation of that name.
        ImplementationError: it was asked for by name and cannot run here.
        BrokenImplementationError: it was asked for by name and does not compile or load.
    """
    check_name(operator, impl)
    if impl == "auto":
        return _choose_fastest(operator, device_type, *program)
    if reason := obstacle(operator, impl, device_type):
        raise ImplementationError(f"impl={impl} cannot run {operator.name}: {reason}")
    if failure := _find_failure(operator, impl, device_type, *program):
        if failure.missing:
            raise ImplementationError(f"impl={impl} cannot run {operator.name}: {failure.reason}")
        raise BrokenImplementationError(
            f"impl={impl} is broken for {operator.name}: {failure.reason}"
        )
    return Choice(impl, "asked for by name")


def resolve(operator: str, impl: str, device_type: str, *program: str) -> str:
    """Returns the name that :func:`choose` chooses, for the operator of that name.

    torch.compile does not trace this function, and takes its result as a constant.
    """
    return choose(find(operator), impl, device_type, *program).name


# What torch.compiler.assume_constant_result does. That function imports the compiler, which takes
# longer than everything else at start-up.
resolve._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


@functools.cache
def obstacle(operator: Operator, impl: str, device_type: str) -> str | None:
    """Returns what is missing to run `impl` on tensors of such a device, with the fix, or None.

    It compiles nothing.
    """
    implementation = operator.implementations[impl]
    if implementation.devices and device_type not in implementation.devices:
        here = " and ".join(
            name
            for name, other in operator.implementations.items()
            if not other.devices or device_type in other.devices
        )
        wanted = " or ".join(implementation.devices)
        reason = f"it runs on {wanted} tensors and these are on {device_type}"
        if implementation.devices == ("cuda",) and not torch.cuda.is_available():
            reason = jit.no_gpu()
        return f"{reason}; or use impl=auto ({here} can run on {device_type})"
    try:
        return implementation.obstacle()
    except (Exception, SystemExit):
        return None  # nothing is known to be missing: it is broken, which _find_failure says


def candidates(operator: Operator, device_type: str) -> list[str]:
    """Returns the implementations for tensors of such a device, the fastest first."""
    return [
        name
        for name, implementation in reversed(list(operator.implementations.items()))
        if not implementation.devices or device_type in implementation.devices
    ]


@functools.lru_cache(_CACHED)
def _choose_fastest(operator: Operator, device_type: str, *program: str) -> Choice:
    names, why = candidates(operator, device_type), f"the fastest on {device_type}"
    if program:
        # Those faster than the choice without a program cannot run; the reason was shown then.
        first = _choose_fastest(operator, device_type)
        names, why = names[names.index(first.name) :], first.why
    failed = []
    for name in names:
        if reason := obstacle(operator, name, device_type):
            failed.append(f"{name} cannot: {reason}")
        elif failure := _find_failure(operator, name, device_type, *program):
            how = "cannot" if failure.missing else "is broken"
            failed.append(f"{name} {how}: {failure.reason}")
        else:
            if failed:
                which = f" ({', '.join(p.partition(' ')[0] for p in program)})" if program else ""
                why = "; ".join(reason.splitlines()[0] for reason in failed)
                what = f"{operator.name}{which} uses {name} on {device_type}"
                print(f"hoconv: {what}; {why}", file=sys.stderr)
                for reason in failed:
                    _show_once(reason.partition("\n")[2])
            return Choice(name, why)
    nothing = f"{operator.name} has no implementation for {device_type} tensors"
    raise ImplementationError("; ".join([nothing, *failed, "move them to the CPU"]))


@functools.cache
def _show_once(details: str) -> None:
    """Prints the further lines of a reason once, although several operators may share it."""
    if details:
        print(details, file=sys.stderr)


class _Failure(NamedTuple):
    """Why an implementation does not run; `missing`, whether the machine lacks what it needs, or it
    is broken."""

    reason: str
    missing: bool = False


@functools.lru_cache(_CACHED)
def _find_failure(
    operator: Operator, impl: str, device_type: str, *program: str
) -> _Failure | None:
    """Returns why an implementation for which nothing is known to be missing does not run."""
    implementation = operator.implementations[impl]
    try:
        if not program:
            reason = implementation.obstacle() or implementation.load()
            return _Failure(reason) if reason else None
        if failure := _find_failure(operator, impl, device_type):
            return failure
        implementation.prepare(device_type, *program)
    except MissingCompilerError as error:  # what is not generated is here, compiled
        return _Failure(str(error), missing=True)
    except BuildError as error:
        return _Failure(str(error))
    except (Exception, SystemExit) as error:  # whatever it raises is its failure, not the caller's
        return _Failure(f"{type(error).__name__}: {error}")
    return None
