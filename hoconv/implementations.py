"""Which implementations of an operator can run here, why not, and which one ``auto`` means."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass

import torch

from hoconv import build
from hoconv.operators import Operator, find


class ImplementationError(RuntimeError):
    """An implementation was asked for by name and cannot run here; says why and what to do."""


@dataclass(frozen=True)
class Choice:
    """The implementation that a call will use, and why."""

    name: str
    why: str


def implementations() -> dict[str, str]:
    """What can run on this machine: implementation -> ``"available"``, or the reason why not.

    Looks for compilers and devices; compiles nothing.
    """
    return {
        "reference": "available",
        "cpp": build.obstacle("cpu") or "available",
        "cuda": build.obstacle("cuda") or "available",
    }


def check_name(operator: Operator, impl: str) -> None:
    """Checks an argument `impl`, of a layer, say, before there are tensors.

    Raises:
        ValueError: neither ``"auto"`` nor an implementation of the operator.
    """
    if impl != "auto" and impl not in operator.implementations:
        allowed = ", ".join(("auto", *operator.implementations))
        raise ValueError(f"impl: expected one of {allowed}; got {impl!r} for {operator.name}")


def choose(operator: Operator, impl: str, device_type: str) -> Choice:
    """Decides which implementation a call of `operator` on a device uses.

    Compiles and loads what the implementation needs on its first use.

    Args:
        operator: the declaration.
        impl: an implementation's name, or ``"auto"``: the fastest that can run.
        device_type: where the tensors are: ``"cpu"``, ``"cuda"``, ...

    Raises:
        ValueError: the operator has no implementation of that name.
        ImplementationError: it was asked for by name and cannot run here.
    """
    check_name(operator, impl)
    if impl == "auto":
        return _fastest(operator, device_type)
    if reason := _obstacle(operator, impl, device_type):
        raise ImplementationError(f"impl={impl} cannot run {operator.name}: {reason}")
    return Choice(impl, "asked for by name")


def resolve(operator: str, impl: str, device_type: str) -> str:
    """The name that :func:`choose` chooses, for calls of the operator of that name.

    A constant to torch.compile, which does not trace it: strings in, a string out.
    """
    return choose(find(operator), impl, device_type).name


# What torch.compiler.assume_constant_result does, without its import of the compiler, which takes
# longer than everything else at start-up.
resolve._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


@functools.cache
def _fastest(operator: Operator, device_type: str) -> Choice:
    failed = []
    for name, implementation in reversed(list(operator.implementations.items())):
        if implementation.devices and device_type not in implementation.devices:
            continue
        reason = _obstacle(operator, name, device_type)
        if reason is None:
            if failed:
                message = f"hoconv: {operator.name} uses {name} on {device_type}; "
                print(message + "; ".join(failed), file=sys.stderr)
            return Choice(name, "; ".join(failed) or f"the fastest on {device_type}")
        failed.append(f"{name} cannot: {reason}")
    raise ImplementationError(
        f"{operator.name} has no implementation for {device_type} tensors; move them to the CPU"
    )


@functools.cache
def _obstacle(operator: Operator, impl: str, device_type: str) -> str | None:
    """Why `impl` cannot run on tensors of such a device, with the fix; None where it can."""
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
            reason = build.no_gpu()
        return f"{reason}; or use impl=auto ({here} can run on {device_type})"
    return implementation.load()
