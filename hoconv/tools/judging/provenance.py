"""Notes what a candidate calls, and which functions it replaces, from its own process.

A candidate shares that process, and can hide what it calls. This is provenance, and no part of the
judgement of its numbers and times, for which nothing that its process says is believed.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType, ModuleType
from typing import Any

import torch
from torch.autograd.profiler import profile

# Modules whose functions a timer, a comparison or a judge may use.
_WATCHED = (
    "builtins", "time", "timeit", "math", "random", "gc", "os", "json", "signal", "pickle", "torch",
    "torch.Tensor", "torch.cuda", "torch.cuda.Event", "torch.cuda.Stream", "torch.testing",
    "torch.autograd", "torch.linalg", "torch.nn.functional", "torch.utils._pytree",
    "hoconv.tools.testing.comparison", "hoconv.tools.judging.worker",
    "hoconv.tools.judging.exchange", "multiprocessing.connection.Connection",
)  # fmt: skip
_KEYS = {"CPU", "CUDA", "Autograd", "AutogradCPU", "AutogradCUDA"}  # of PyTorch's dispatcher
# ATen's operations that compute nothing: they make, copy, convert or view tensors.
_MEMORY = {
    "alias", "as_strided", "broadcast_tensors", "clone", "contiguous", "copy_", "_to_copy",
    "to", "detach", "detach_", "empty", "empty_like", "empty_strided", "expand", "expand_as",
    "fill_", "flatten", "full", "full_like", "item", "lift_fresh", "_local_scalar_dense",
    "narrow", "new_empty", "new_empty_strided", "new_zeros", "numpy_T", "ones", "ones_like",
    "permute", "pin_memory", "promote_types", "requires_grad_", "reshape", "_reshape_alias",
    "resize_", "resolve_conj", "resolve_neg", "result_type", "scalar_tensor", "select", "set_",
    "slice", "split", "squeeze", "t", "transpose", "unbind", "unflatten", "_unsafe_view",
    "unsqueeze", "view", "zero_", "zeros", "zeros_like",
}  # fmt: skip


def functions() -> dict[str, Any]:
    """Returns the functions of the modules and classes that are watched, by name, with their code;
    and the operations of ATen that Python code computes on a CPU or GPU."""
    found = {}
    for name in _WATCHED:
        owner = _find(name)
        for attribute, value in list(vars(owner).items()) if owner else ():
            if callable(value) and not isinstance(value, ModuleType):
                found[f"{name}.{attribute}"] = value, getattr(value, "__code__", None)
    taken = (each.split("/") for each in getattr(torch.library, "_impls", ()))
    return found | {f"aten::{op}": key for space, op, key in taken
                    if space == "aten" and key in _KEYS}  # fmt: skip


def replaced(before: dict[str, Any]) -> list[str]:
    """Names what is no longer as :func:`functions` found it."""
    now = functions()
    taken = {name for name in now.keys() - before.keys() if name.startswith("aten::")}
    changed = {name for name, value in before.items() if not _is_same(now.get(name), value)}
    return sorted(changed | taken)


def _is_same(now: Any, before: Any) -> bool:
    if isinstance(now, tuple) and isinstance(before, tuple):
        return all(a is b for a, b in zip(now, before))
    return now == before


@contextmanager
def traced(definition: CodeType | None) -> Iterator[list[str]]:
    """Notes in a list what is called meanwhile: operations of PyTorch, those that compiled code
    calls included, kernels on a GPU that ATen does not launch, and the definition itself.

    Args:
        definition: the code of the definition's function, where this process has it.
    """
    calls: list[str] = []

    def notice(frame: FrameType, event: str, _: object) -> None:
        if frame.f_code is definition and event == "call" and "its definition" not in calls:
            calls.append("its definition")

    gpu = torch.cuda.is_initialized()
    profiler = profile(use_device="cuda" if gpu else None, use_kineto=gpu)
    with _profiled(notice), profiler:
        yield calls
    events = profiler.function_events or ()
    launches = [event.kernels for event in events if event.name.startswith("aten::")]
    of_aten = {kernel.name for kernels in launches for kernel in kernels}
    for event in events:
        kernel = "CUDA" in str(event.device_type)
        name = f"kernel {event.name}" if kernel else event.name
        own = event.name not in of_aten and not event.name.startswith(("Memcpy", "Memset"))
        if name not in calls and (own if kernel else _computes(name)):
            calls.append(name)


def code_of(function: Callable[..., Any]) -> CodeType | None:
    """Returns the code of a Python function under decorators and partial applications."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__code__", None)


def _find(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return sys.modules.get(name) or getattr(sys.modules.get(module), attribute, None)


def _computes(name: str) -> bool:
    space, _, operation = name.partition("::")
    known = space in ("autograd", "profiler", "torch") or (space == "aten" and operation in _MEMORY)
    return bool(operation) and not known


@contextmanager
def _profiled(notice: Callable[..., None]) -> Iterator[None]:
    sys.setprofile(notice)
    threading.setprofile(notice)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # pyright: ignore[reportArgumentType]
