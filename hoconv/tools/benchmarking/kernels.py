"""The kernels that a call launches on a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from hoconv.tools.benchmarking.measurement import Contender, differentiable_leaves


def launched(contender: Contender) -> dict[str, list[str]] | None:
    """Returns "forward" and "backward" -> the kernels that a contender launches, in this order, and
    copies that it makes; None where it runs on a CPU, or could not run.

    Args:
        contender: one that has been timed.
    """
    if contender.error or not contender.leaves[0].is_cuda:
        return None
    output, forward = _kernels_of(contender.forward)
    _, backward = _kernels_of(lambda: contender.gradients(differentiable_leaves(output)))
    return {"forward": forward, "backward": backward}


def _kernels_of(call: Callable[[], Any]) -> tuple[Any, list[str]]:
    activities = [torch.profiler.ProfilerActivity.CUDA]
    # acc_events: torch 2.11 warns that it drops all cycles but one, although there is only one.
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        result = call()
        torch.cuda.synchronize()
    events = [event for event in profiler.events() or () if event.device_type.name == "CUDA"]
    events.sort(key=lambda event: event.time_range.start)
    return result, [short_name(event.name) for event in events]


def short_name(kernel: str) -> str:
    """Shortens the name of a C++ kernel to that of the function, and its template arguments."""
    name = kernel.replace("(anonymous namespace)::", "").removeprefix("void ")
    name = re.sub(r"\((?:int|bool|unsigned int|long)\)", "", name)  # of a template argument
    return re.sub(r"\w+::", "", name.partition("(")[0]).strip()
