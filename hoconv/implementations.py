"""Which implementations of an operator can run here, why not, and which one ``auto`` means."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from hoconv import jit
from hoconv.declaration import Operator, find, layers
from hoconv.jit import BuildError

# Answers that a process caches. Programs are unbounded in number: beyond this many, the one asked
# for least recently is decided again.
_KEPT = 1024


class ImplementationError(RuntimeError):
    """An implementation was asked for by name and cannot run here; says why and what to do."""


class BrokenImplementationError(ImplementationError):
    """It could run here, as nothing is missing, but does not compile or load; says why."""


@dataclass(frozen=True)
class Choice:
    """The implementation that a call will use, and why."""

    name: str
    why: str


def implementations() -> dict[str, str]:
    """What can be built for this machine: implementation -> ``"available"``, or what is missing.

    Looks for compilers and devices; compiles nothing, and so does not know what is broken.
    """
    return {
        "reference": "available",
        "cpp": jit.obstacle("cpu") or "available",
        "cuda": jit.obstacle("cuda") or "available",
    }


def set_impl(module: nn.Module, impl: str | Mapping[str, str]) -> None:
    """Sets the implementation of every layer of `module` that is built on an operator.

    Args:
        module: a model, or a layer.
        impl: a name for all: a layer whose operator has none of that name is set to ``"auto"``.
            Or a mapping from an operator's name, or a layer's as ``module.named_modules()`` gives
            it, to a name; a layer's own entry counts before its operator's, and a layer that has
            neither keeps what it had.

    Raises:
        ValueError: no operator of these layers has such an implementation; a key of the mapping is
            the name of none of them.
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
        program: what is to be run, where the operator generates code for it: the arguments of
            :attr:`hoconv.declaration.Implementation.prepare`. Messages show the first word of each.

    Raises:
        ValueError: the operator has no implementation of that name.
        ImplementationError: it was asked for by name and cannot run here.
        BrokenImplementationError: likewise, since it fails to compile or load.
    """
    check_name(operator, impl)
    if impl == "auto":
        return _fastest(operator, device_type, *program)
    if reason := obstacle(operator, impl, device_type):
        raise ImplementationError(f"impl={impl} cannot run {operator.name}: {reason}")
    if reason := _failure(operator, impl, device_type, *program):
        raise BrokenImplementationError(f"impl={impl} is broken for {operator.name}: {reason}")
    return Choice(impl, "asked for by name")


def resolve(operator: str, impl: str, device_type: str, *program: str) -> str:
    """The name that :func:`choose` chooses, for calls of the operator of that name.

    A constant to torch.compile, which does not trace it: strings in, a string out.
    """
    return choose(find(operator), impl, device_type, *program).name


# What torch.compiler.assume_constant_result does, without its import of the compiler, which takes
# longer than everything else at start-up.
resolve._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


@functools.cache
def obstacle(operator: Operator, impl: str, device_type: str) -> str | None:
    """What is missing to run `impl` on tensors of such a device, with the fix; None where nothing
    is. Compiles nothing."""
    implementation = operator.implementations[impl]
    if implementation.devices and device_type not in implementation.devices:
        here = " and ".join(
            name
            for name, other in operator.implementations.items()
            if not other.devices or device_type in other.devices
        )
        wanted = " or ".join(implementation.devices)
        reason = f"it runs on {wanted} tensors and these are on {device_type}"
        if "cuda" in implementation.devices and not torch.cuda.is_available():
            reason = jit.no_gpu()
        return f"{reason}; or use impl=auto ({here} can run on {device_type})"
    try:
        return implementation.obstacle()
    except Exception:
        return None  # it is not missing but broken: _failure says so


def candidates(operator: Operator, device_type: str) -> list[str]:
    """The implementations for tensors of such a device, the fastest first."""
    return [
        name
        for name, implementation in reversed(list(operator.implementations.items()))
        if not implementation.devices or device_type in implementation.devices
    ]


@functools.lru_cache(_KEPT)
def _fastest(operator: Operator, device_type: str, *program: str) -> Choice:
    names, why = candidates(operator, device_type), f"the fastest on {device_type}"
    if program:  # of those which, as is said already, can run at all
        first = _fastest(operator, device_type)
        names, why = names[names.index(first.name) :], first.why
    failed = []
    for name in names:
        if reason := obstacle(operator, name, device_type):
            failed.append(f"{name} cannot: {reason}")
        elif reason := _failure(operator, name, device_type, *program):
            failed.append(f"{name} is broken: {reason}")
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


@functools.lru_cache(_KEPT)
def _failure(operator: Operator, impl: str, device_type: str, *program: str) -> str | None:
    """Why an implementation that misses nothing does not compile or load; None where it does."""
    implementation = operator.implementations[impl]
    try:
        if not program:
            return implementation.obstacle() or implementation.load()
        if reason := _failure(operator, impl, device_type):
            return reason
        implementation.prepare(device_type, *program)
    except BuildError as error:
        return str(error)
    except Exception as error:  # whatever it raises is its failure, not that of what asks
        return f"{type(error).__name__}: {error}"
    return None
