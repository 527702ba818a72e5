"""How one call is measured: clock, cold caches, memory, turns, copy bandwidth; said in METHOD."""

from __future__ import annotations

import gc
import json
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# The profiler, which counts the memory on a CPU, announces every start and stop otherwise.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch
from common import differentiable
from torch import Tensor

from hoconv.operators import Sample

WARM_UP = 3
REPEATS = {"cpu": 15, "cuda": 50}
ENOUGH_S = 10.0  # of measured calls a contender and size; then LEAST_REPEATS do
LEAST_REPEATS = 3
COPY_BYTES = {"cpu": 2**28, "cuda": 2**30}
# Read before every call: several times any cache. Eight passes keep a GPU busy for longer than
# the host needs to queue the call behind them.
FLUSH_BYTES = 2**28
FLUSH_PASSES = {"cpu": 1, "cuda": 8}

METHOD = (
    "Every call starts with cold caches: a large buffer is read before it (read, not written, so "
    "that no dirty lines are left to be written back meanwhile). forward: the public function with "
    "gradients enabled; backward: torch.autograd.grad of its output with respect to all "
    "floating-point arguments, timed apart, after each forward. Contenders take turns within one "
    "process, after warm-up, each turn beginning with a forward and backward that are not timed; "
    "medians, 20th and 80th percentiles. torch.compile: dynamic=False, "
    "fullgraph=True, reset at every size, so that each size gets code of its own. Copy bandwidth: "
    "tensor.copy_ between two large buffers, same clock, same run. "
)
CLOCK = {
    "cpu": "Clock: time.perf_counter. Memory: allocations seen by torch.profiler.",
    "cuda": "Clock: CUDA events around the call, which is queued behind the reading of the buffer, "
    "so that launch latency is hidden where it is shorter than that. Memory: "
    "torch.cuda.max_memory_allocated less what was allocated before the call.",
}


@dataclass
class Contender:
    """One way to compute the operator at one size, and what was measured of it.

    Attributes:
        forward_ms, backward_ms: one entry a repeat.
        extra_memory: bytes held at most by one forward and backward beyond the inputs.
        error: why it stopped, or None.
    """

    name: str
    function: Callable[..., Tensor]
    forward_ms: list[float] = field(default_factory=list)
    backward_ms: list[float] = field(default_factory=list)
    extra_memory: int | None = None
    error: str | None = None

    def is_done(self, repeats: int) -> bool:
        count = len(self.forward_ms)
        long_enough = sum(self.forward_ms) + sum(self.backward_ms) > 1e3 * ENOUGH_S
        return (
            self.error is not None
            or count >= repeats
            or (long_enough and count >= min(repeats, LEAST_REPEATS))
        )


def take_turns(
    contenders: list[Contender],
    sample: Sample,
    device: torch.device,
    repeats: int,
    say: Callable[[Contender], None],
) -> int | None:
    """Warms up, measures memory, then lets the contenders take turns; fills them in.

    Args:
        say: called with a contender before it runs: ``1 + repeats`` times at most.

    Returns:
        The bytes of the output and the gradients; None where no contender could run.
    """
    args, leaves = differentiable(sample)
    flush = torch.rand(FLUSH_BYTES // 4, device=device)
    grad = None

    def forward(contender: Contender) -> Tensor:
        return contender.function(*args, **sample.kwargs)

    def both(contender: Contender) -> Any:
        nonlocal grad
        output = forward(contender)
        if grad is None:
            grad = torch.randn_like(output)
        return output, torch.autograd.grad(output, leaves, grad)

    def prepare(contender: Contender) -> None:
        for _ in range(WARM_UP):
            both(contender)
        contender.extra_memory = _extra_memory(lambda: both(contender), device)

    def measure(contender: Contender) -> None:
        # A virtual machine may give memory that another contender freed back to its host within
        # seconds: whoever comes next would pay for its return.
        both(contender)
        _flush(flush)
        output, forward_ms = _timed(lambda: forward(contender), device)
        _flush(flush)
        _, backward_ms = _timed(lambda: torch.autograd.grad(output, leaves, grad), device)
        contender.forward_ms.append(forward_ms)
        contender.backward_ms.append(backward_ms)

    for contender in contenders:
        say(contender)
        _attempt(contender, prepare)
    while waiting := [c for c in contenders if not c.is_done(repeats)]:
        for contender in waiting:
            say(contender)
            _attempt(contender, measure)
    return None if grad is None else sum(t.nbytes for t in (grad, *leaves))


def summary(times_ms: list[float], least_bytes: int, bandwidth: float) -> dict[str, Any] | None:
    """Percentiles beside the floor, `least_bytes` over `bandwidth` (bytes a second)."""
    if not times_ms:
        return None
    points = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    p20, median, p80 = torch.tensor(times_ms, dtype=torch.float64).quantile(points).tolist()
    floor = 1e3 * least_bytes / bandwidth
    return {
        "median_ms": median,
        "p20_ms": p20,
        "p80_ms": p80,
        "repeats": len(times_ms),
        "floor_ms": floor,
        "share_of_floor": floor / median,
        "gb_per_s": 1e-6 * least_bytes / median,
    }


def copy_bandwidth(device: torch.device, repeats: int) -> float:
    """Bytes read plus bytes written a second, of one large copy."""
    source = torch.rand(COPY_BYTES[device.type] // 4, device=device)
    target = torch.empty_like(source)
    times = [_timed(lambda: target.copy_(source), device)[1] for _ in range(WARM_UP + repeats)]
    return 2 * source.nbytes / (1e-3 * statistics.median(times[WARM_UP:]))


@contextmanager
def memory_limit(device_type: str) -> Iterator[None]:
    """Makes a CPU allocation beyond what is free fail; Linux would rather kill the process."""
    if device_type != "cpu":
        yield
        return
    sizes = {line.split()[0]: int(line.split()[1]) * 1024
             for name in ("/proc/meminfo", "/proc/self/status")
             for line in Path(name).read_text().splitlines() if line.endswith("kB")}  # fmt: skip
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = sizes["VmData:"] + int(0.9 * sizes["MemAvailable:"])
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _attempt(contender: Contender, action: Callable[[Contender], None]) -> None:
    """Notes what the contender raises, so that the others go on."""
    try:
        action(contender)
    except (RuntimeError, MemoryError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        out_of_memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
        # A CPU has no exception type for it; the second is how C++ says it.
        out_of_memory |= "can't allocate memory" in str(error) or "bad_alloc" in str(error)
        contender.error = "out of memory" if out_of_memory else lines[0]
        contender.forward_ms, contender.backward_ms, contender.extra_memory = [], [], None
    if contender.error:  # only here are the tensors that the exception held let go
        gc.collect()
        torch.cuda.empty_cache()


def _flush(buffer: Tensor) -> None:
    for _ in range(FLUSH_PASSES[buffer.device.type]):
        buffer.sum()


def _timed(call: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """What a call returns, and how long it took in milliseconds."""
    if device.type == "cpu":
        begin = time.perf_counter()
        result = call()
        return result, 1e3 * (time.perf_counter() - begin)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    result = call()
    end.record()
    end.synchronize()
    return result, begin.elapsed_time(end)


def _extra_memory(call: Callable[[], Any], device: torch.device) -> int:
    """Most bytes that a call holds at a time, its result included, beyond what was held before."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        return torch.cuda.max_memory_allocated() - before
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        cpu = torch.profiler.ProfilerActivity.CPU
        with torch.profiler.profile(activities=[cpu], profile_memory=True) as profiler:
            call()
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    held = most = 0
    for event in sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["ts"]):
        held += event["args"]["Bytes"]  # negative where memory is freed
        most = max(most, held)
    return most
