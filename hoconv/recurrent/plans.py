"""Plans, found by their content. The torch op takes a plan as a text, which holds the whole cell.

torch.compile treats the text as a constant. The text means the same in every process: an exported
program needs neither the cell nor its module.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from hoconv.recurrent.compiled_plan import CompiledPlan
    from hoconv.recurrent.passes.gradient.saved import Recompute

# The number of plans that a process keeps; it compiles older ones again.
_KEPT = 256


def request(
    cell: str, dtype: torch.dtype, schedule: str, masked: bool, resets: bool, reverse: bool,
    recompute: Recompute = "cheap",
) -> str:  # fmt: skip
    """Writes a plan as a text. Arguments and result are constants: torch.compile does not trace it.

    Args:
        cell: the text of its trace, by :func:`hoconv.recurrent.frontend.serialize.to_text`.
        dtype, schedule, masked, resets, reverse, recompute: as in
            :func:`hoconv.recurrent.schedule.plan_trace`.
    """
    return _request_once(cell, dtype, schedule, recompute, masked, resets, reverse)


_OPTIONS = ("masked", "resets", "reverse")
_RECOMPUTE: dict[str, Recompute] = {"recompute": "all", "functions": "functions"}


@functools.lru_cache(_KEPT)
def _request_once(
    cell: str, dtype: torch.dtype, schedule: str, recompute: Recompute, *options: bool
) -> str:
    chosen = [name for name, wanted in zip(_OPTIONS, options, strict=True) if wanted]
    chosen += [name for name, value in _RECOMPUTE.items() if value == recompute]
    name = str(dtype).removeprefix("torch.")
    return "/".join((name, schedule, "+".join(chosen) or "plain", cell))


request._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def _parse(text: str) -> tuple[str, torch.dtype, str, dict[str, Any]]:
    """Returns the text of the cell, the dtype, the schedule and the options."""
    dtype, schedule, options, cell = text.split("/", 3)
    chosen = set(options.split("+")) - {"plain"}
    if unknown := chosen - {*_OPTIONS, *_RECOMPUTE}:
        raise ValueError(
            f"this recurrent layer was exported by another version of hoconv, which has the option "
            f"{unknown.pop()!r}: load it there, or export it again here"
        )
    recompute = next((_RECOMPUTE[name] for name in chosen & {*_RECOMPUTE}), "cheap")
    flags: dict[str, Any] = {name: name in chosen for name in _OPTIONS}
    return cell, getattr(torch, dtype), schedule, flags | {"recompute": recompute}


@functools.lru_cache(_KEPT)
def find_plan(text: str) -> CompiledPlan:
    """The compiled plan of a text.

    Raises:
        ValueError: the text is of another version of hoconv.
    """
    from hoconv.recurrent.compiled_plan import CompiledPlan  # brings the compiler

    return CompiledPlan(text, *_parse(text))


def find_read(text: str) -> tuple[int, ...]:
    """Returns where the sequences of ``backward`` are among those of ``forward``, its results and
    the gradient of the output. A constant to torch.compile, which traces a backward pass too."""
    return _find_read_once(text)


find_read._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


@functools.lru_cache(_KEPT)
def _find_read_once(text: str) -> tuple[int, ...]:
    made = find_plan(text)
    forward, backward = made.program("forward"), made.program("backward")
    given = (*forward.sequences, *forward.results, ("d_output", None))
    at = {name: i for i, (name, _) in enumerate(given)}
    return tuple(at[name] for name, _ in backward.sequences)


def count_constants(text: str) -> int:
    """Returns the number of constants that the plan of a text reads. A constant to torch.compile,
    which traces a backward pass too."""
    return len(find_plan(text).plan.definition.constants)


count_constants._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def prepare(impl: str, device_type: str, text: str, which: str) -> None:
    """Compiles the loop of one program of a plan; with ``forward`` also that of ``backward``.

    Raises:
        hoconv.jit.BuildError: the compiler failed.
    """
    made = find_plan(text)
    if impl == "cuda" and made.plan.cudnn:
        return  # cuDNN computes the layer
    for program in (which, "backward") if which == "forward" else (which,):
        made.prepare(program, impl, device_type)
