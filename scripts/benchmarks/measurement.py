"""How one call is measured: clock, cold caches, memory, turns, the device's rates. See `method`."""

from __future__ import annotations

import gc
import json
import os
import resource
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# The profiler, which counts the memory on a CPU, announces every start and stop otherwise.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hoconv.declaration import Sample
from hoconv.testing.comparison import differentiable, is_floating

WARM_UP = 3
REPEATS = {"cpu": 15, "cuda": 50}
ENOUGH_S = 10.0  # of measured calls a contender and size; then LEAST_REPEATS do
LEAST_REPEATS = 3
COPY_BYTES = {"cpu": 2**28, "cuda": 2**30}
MATMUL_SIZE = {"cpu": 2048, "cuda": 8192}
# Read before every call: several times any cache. Eight passes keep a GPU busy for longer than
# the host needs to queue the call behind them.
FLUSH_BYTES = 2**28
FLUSH_PASSES = {"cpu": 1, "cuda": 8}

_COLD = (
    "Every call starts with cold caches: a large buffer is read before it (read, not written, so "
    "that no dirty lines are left to be written back meanwhile). forward: the public function with "
    "gradients enabled; "
)
APART = (
    "backward: torch.autograd.grad of its output with respect to all floating-point arguments, "
    "timed apart, after each forward. "
)
TOGETHER = (
    "forward_backward: one more forward and torch.autograd.grad of its output with respect to all "
    "floating-point arguments, timed as one call. "
)
_TURNS = (
    "Contenders take turns within one process, after warm-up, each turn beginning with a forward "
    "and backward that are not timed; medians, 20th and 80th percentiles. torch.compile: "
    "dynamic=False, fullgraph=True, reset at every size, so that each size gets code of its own. "
    "Copy bandwidth: tensor.copy_ between two large buffers, same clock, same run. "
)
CLOCK = {
    "cpu": "Clock: time.perf_counter. Memory: allocations seen by torch.profiler.",
    "cuda": "Clock: CUDA events around the call, which is queued behind the reading of the buffer, "
    "so that launch latency is hidden where it is shorter than that. Memory: "
    "torch.cuda.max_memory_allocated less what was allocated before the call.",
}


class Contender:
    """One way to compute the operator at one size, and what was measured of it.

    Attributes:
        args, leaves: the sample's arguments, and those of them that are differentiated.
        grads: the gradient of each tensor of the output; set in warm-up.
        times_ms: phase -> one entry a repeat.
        extra_memory: bytes held at most by one forward and backward beyond the inputs.
        error: why it stopped, or None.
    """

    def __init__(self, name: str, function: Callable[..., Any], sample: Sample) -> None:
        self.name = name
        self.function = function
        self.args = differentiable(sample.args)
        self.leaves = [a for a in self.args if is_floating(a)]
        self.kwargs = sample.kwargs
        self.grads: list[Tensor] = []
        self.times_ms: defaultdict[str, list[float]] = defaultdict(list)
        self.extra_memory: int | None = None
        self.error: str | None = None

    def forward(self) -> Any:
        return self.function(*self.args, **self.kwargs)

    def gradients(self, outputs: list[Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(outputs, self.leaves, self.grads)

    def both(self) -> tuple[Any, tuple[Tensor, ...]]:
        output = self.forward()
        return output, self.gradients(differentiable_leaves(output))

    def is_done(self, repeats: int, enough_s: float) -> bool:
        count = min(map(len, self.times_ms.values()), default=0)
        long_enough = sum(map(sum, self.times_ms.values())) > 1e3 * enough_s
        return (
            self.error is not None
            or count >= repeats
            or (long_enough and count >= min(repeats, LEAST_REPEATS))
        )


def differentiable_leaves(output: Any) -> list[Tensor]:
    """The floating-point tensors of an output, which is one or a pytree of them."""
    return [t for t in tree_leaves(output) if is_floating(t)]


# Calls a function with cold caches; returns what it does, and how long it took in milliseconds.
Timed = Callable[[Callable[[], Any]], tuple[Any, float]]


def apart(contender: Contender, timed: Timed) -> dict[str, float]:
    """What `APART` says."""
    output, forward_ms = timed(contender.forward)
    outputs = differentiable_leaves(output)
    _, backward_ms = timed(lambda: contender.gradients(outputs))
    return {"forward": forward_ms, "backward": backward_ms}


def together(contender: Contender, timed: Timed) -> dict[str, float]:
    """What `TOGETHER` says."""
    return {
        "forward": timed(contender.forward)[1],
        "forward_backward": timed(contender.both)[1],
    }


def method(phases: str, device_types: Iterable[str] = CLOCK) -> str:
    """How contenders are measured; `phases` is what is timed of each, `APART` or `TOGETHER`."""
    return _COLD + phases + _TURNS + " ".join(CLOCK[device_type] for device_type in device_types)


def take_turns(
    contenders: list[Contender],
    turn: Callable[[Contender, Timed], dict[str, float]],
    device: torch.device,
    repeats: int,
    say: Callable[[Contender], None],
    enough_s: float = ENOUGH_S,
) -> int | None:
    """Warms up, measures memory, then lets the contenders take turns; fills them in.

    Args:
        turn: what is timed in a turn, `apart` or `together`.
        say: called with a contender before it runs: ``1 + repeats`` times at most.
        enough_s: seconds of measured calls of a contender after which `LEAST_REPEATS` do.

    Returns:
        The bytes of the output and the gradients; None where no contender could run.
    """
    flush = torch.rand(FLUSH_BYTES // 4, device=device)
    grads: dict[Any, Tensor] = {}  # one for each layout that a tensor of the outputs has

    def timed(call: Callable[[], Any]) -> tuple[Any, float]:
        _flush(flush)
        return _timed(call, device)

    def prepare(contender: Contender) -> None:
        contender.grads = []
        for i, t in enumerate(differentiable_leaves(contender.forward())):
            layout = i, t.stride()
            if layout not in grads:
                grads[layout] = torch.randn_like(t)
            contender.grads.append(grads[layout])
            del t
        for _ in range(WARM_UP):
            contender.both()
        contender.extra_memory = extra_memory(contender.both, device)

    def measure(contender: Contender) -> None:
        # A virtual machine may give memory that another contender freed back to its host within
        # seconds: whoever comes next would pay for its return.
        contender.both()
        for phase, milliseconds in turn(contender, timed).items():
            contender.times_ms[phase].append(milliseconds)

    def attempt(contender: Contender, action: Callable[[Contender], None]) -> None:
        say(contender)
        contender.error = failure(lambda: action(contender))
        if contender.error:
            contender.times_ms.clear()
            contender.extra_memory = None

    for contender in contenders:
        attempt(contender, prepare)
    while waiting := [c for c in contenders if not c.is_done(repeats, enough_s)]:
        for contender in waiting:
            attempt(contender, measure)
    for contender in contenders:
        if contender.grads:
            return sum(tensor.nbytes for tensor in (*contender.grads, *contender.leaves))
    return None


def percentiles(times_ms: list[float]) -> dict[str, Any]:
    points = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    p20, median, p80 = torch.tensor(times_ms, dtype=torch.float64).quantile(points).tolist()
    return {"median_ms": median, "p20_ms": p20, "p80_ms": p80, "repeats": len(times_ms)}


def summary(times_ms: list[float], least_bytes: int, bandwidth: float) -> dict[str, Any] | None:
    """Percentiles beside the floor, `least_bytes` over `bandwidth` (bytes a second)."""
    if not times_ms:
        return None
    times = percentiles(times_ms)
    floor = 1e3 * least_bytes / bandwidth
    return times | {
        "floor_ms": floor,
        "share_of_floor": floor / times["median_ms"],
        "gb_per_s": 1e-6 * least_bytes / times["median_ms"],
    }


def copy_bandwidth(device: torch.device, repeats: int) -> float:
    """Bytes read plus bytes written a second, of one large copy."""
    source = torch.rand(COPY_BYTES[device.type] // 4, device=device)
    target = torch.empty_like(source)
    times = [_timed(lambda: target.copy_(source), device)[1] for _ in range(WARM_UP + repeats)]
    return 2 * source.nbytes / (1e-3 * statistics.median(times[WARM_UP:]))


def matmul_peak(device: torch.device, dtype: torch.dtype, tf32: bool, repeats: int) -> float:
    """Floating-point operations a second of one large matrix product."""
    n = MATMUL_SIZE[device.type]
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    with temporarily(torch.backends.cuda.matmul, allow_tf32=tf32):
        times = [_timed(lambda: torch.matmul(a, b, out=out), device)[1]
                 for _ in range(WARM_UP + repeats)]  # fmt: skip
    return 2 * n**3 / (1e-3 * statistics.median(times[WARM_UP:]))


@contextmanager
def temporarily(settings: Any, **values: Any) -> Iterator[None]:
    """Sets attributes, and puts back what they were."""
    before = {name: getattr(settings, name) for name in values}
    try:
        for name, value in values.items():
            setattr(settings, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(settings, name, value)


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


def failure(action: Callable[[], Any]) -> str | None:
    """Runs an action; returns why it failed, so that others go on, or None."""
    try:
        action()
        return None
    except (RuntimeError, MemoryError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        out_of_memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
        # A CPU has no exception type for it; the second is how C++ says it.
        out_of_memory |= "can't allocate memory" in str(error) or "bad_alloc" in str(error)
        reason = "out of memory" if out_of_memory else lines[0]
    gc.collect()  # only here are the tensors that the exception held let go
    torch.cuda.empty_cache()
    return reason


def _flush(buffer: Tensor) -> None:
    for _ in range(FLUSH_PASSES[buffer.device.type]):
        buffer.sum()


def _timed(call: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """What a call returns, and how long it took in milliseconds."""
    begin = mark(device)
    result = call()
    return result, milliseconds_between(begin, mark(device))


def mark(device: torch.device) -> float | torch.cuda.Event:
    """A point in the work of a device: the time, or an event queued behind what was asked of it."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds_between(begin: Any, end: Any) -> float:
    """Between two marks; waits for the second."""
    if isinstance(begin, float):
        return 1e3 * (end - begin)
    end.synchronize()
    return begin.elapsed_time(end)


def extra_memory(call: Callable[[], Any], device: torch.device) -> int:
    """Most bytes that a call holds at a time, its result included, beyond what was held before."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        return torch.cuda.max_memory_allocated() - before
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        cpu = torch.profiler.ProfilerActivity.CPU
        # acc_events: there is one cycle only, yet torch 2.11 warns that another would be forgotten.
        with torch.profiler.profile(
            activities=[cpu], profile_memory=True, acc_events=True
        ) as profiler:
            call()
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    held = most = 0
    for event in sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["ts"]):
        held += event["args"]["Bytes"]  # negative where memory is freed
        most = max(most, held)
    return most
