"""Measuring the time and memory of a call, and the rates of a device. See `method`."""

from __future__ import annotations

import gc
import json
import os
import resource
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Without this, the profiler, which counts memory on a CPU, prints every start and stop.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hoconv.dispatch.declaration import Sample
from hoconv.tools.benchmarking.marks import mark, milliseconds_between
from hoconv.tools.testing.comparison import differentiable, is_floating

WARM_UP = 3  # calls
REPEATS = {"cpu": 15, "cuda": 50}
# A contender whose measured calls at one size have taken this long needs LEAST_REPEATS only.
ENOUGH_S = 10.0
LEAST_REPEATS = 3
OUT_OF_MEMORY = "out of memory"  # a contender's error
# So large that caches and the launch do not matter.
COPY_BYTES = {"cpu": 2**28, "cuda": 2**30}
MATMUL_SIZE = {"cpu": 2048, "cuda": 8192}
# A buffer larger than most caches is read before every call; that of a large server may hold as
# much. So many passes keep a GPU busy for about 1 ms, longer than the host needs to queue the call
# behind them.
FLUSH_BYTES = 2**28
FLUSH_PASSES = {"cpu": 1, "cuda": 16}
_SHARE_OF_FREE = 0.9  # of the free memory that a CPU's contenders may take; the rest is for others

_COLD = (
    "Every call starts with cold caches: a large buffer is read before it (read, not written, so "
    "that no dirty lines remain to be written back during the call). forward: the public function "
    "with gradients enabled; "
)
APART = (
    "backward: torch.autograd.grad of its output with respect to all floating-point arguments, "
    "timed by itself, after each forward. "
)
TOGETHER = (
    "forward_backward: one more forward and torch.autograd.grad of its output with respect to all "
    "floating-point arguments, timed as one call. "
)
_TURNS = (
    "Contenders take turns within one process, after warm-up. Each turn begins with a forward and "
    "backward that are not timed; medians, 20th and 80th percentiles. torch.compile: "
    "dynamic=False, fullgraph=True, reset at every size, so that each size is compiled anew. "
    "Copy bandwidth: tensor.copy_ between two large buffers, same clock, same run. "
)
CLOCK = {
    "cpu": "Clock: time.perf_counter. Memory: allocations seen by torch.profiler.",
    "cuda": "Clock: CUDA events around the call, which is queued behind the reading of the buffer, "
    "so that launch latency is hidden where it is shorter than that. Memory: "
    "torch.cuda.max_memory_allocated less the memory allocated before the call.",
}


class Contender:
    """One way to compute the operator at one size, and its measurements.

    Attributes:
        args, leaves: the sample's arguments, and those of them that are differentiated.
        grads: the gradient of each tensor of the output; set in warm-up.
        times_ms: phase -> the time of each repeat.
        extra_memory: the most bytes that a forward and backward hold beyond the inputs.
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
        if not self.leaves:  # of integers
            return ()
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


class DeviceLost(RuntimeError):
    """A contender left the device unusable for this process, as an illegal memory access does.

    Attributes:
        contender: its name.
        reason: what was raised.
    """

    def __init__(self, contender: str, reason: str) -> None:
        super().__init__(contender, reason)  # as it is pickled
        self.contender, self.reason = contender, reason


def differentiable_leaves(output: Any) -> list[Tensor]:
    """The floating-point tensors of an output, which is one or a pytree of them."""
    return [t for t in tree_leaves(output) if is_floating(t)]


# Calls a function with cold caches; returns its result, and its time in milliseconds.
Timed = Callable[[Callable[[], Any]], tuple[Any, float]]


def time_apart(contender: Contender, timed: Timed) -> dict[str, float]:
    """Times forward and backward as `APART` describes."""
    output, forward_ms = timed(contender.forward)
    outputs = differentiable_leaves(output)
    _, backward_ms = timed(lambda: contender.gradients(outputs))
    return {"forward": forward_ms, "backward": backward_ms}


def time_together(contender: Contender, timed: Timed) -> dict[str, float]:
    """Times forward, and forward and backward, as `TOGETHER` describes."""
    return {
        "forward": timed(contender.forward)[1],
        "forward_backward": timed(contender.both)[1],
    }


def method(phases: str, device_types: Iterable[str] = CLOCK) -> str:
    """Says how contenders are measured; `phases` is `APART` or `TOGETHER`."""
    return _COLD + phases + _TURNS + " ".join(CLOCK[device_type] for device_type in device_types)


def take_turns(
    contenders: list[Contender],
    turn: Callable[[Contender, Timed], dict[str, float]],
    device: torch.device,
    repeats: int,
    say: Callable[[Contender], None],
    enough_s: float = ENOUGH_S,
) -> int | None:
    """Warms up, measures memory, then lets the contenders take turns; sets their attributes.

    Args:
        turn: times one turn of a contender: `time_apart` or `time_together`.
        say: called with a contender before it runs: ``1 + repeats`` times at most.
        enough_s: seconds of measured calls of a contender after which `LEAST_REPEATS` suffice.

    Contenders that have an error are left out.

    Returns:
        The bytes of the output and the gradients; None where no contender could run.

    Raises:
        DeviceLost: nothing can be measured in this process any more.
    """
    flush = torch.rand(FLUSH_BYTES // 4, device=device)
    grads: dict[Any, Tensor] = {}  # one for each layout of each tensor of the outputs

    def timed(call: Callable[[], Any]) -> tuple[Any, float]:
        flush_caches(flush)
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
        # A virtual machine may return memory that another contender freed to its host within
        # seconds. This call pays for getting it back.
        contender.both()
        for phase, milliseconds in turn(contender, timed).items():
            contender.times_ms[phase].append(milliseconds)

    def attempt(contender: Contender, action: Callable[[Contender], None]) -> None:
        say(contender)
        try:
            contender.error = failure(lambda: action(contender))
        except torch.AcceleratorError as error:  # not even memory can be freed
            raise DeviceLost(contender.name, str(error).partition("\n")[0]) from error
        if contender.error:
            contender.times_ms.clear()
            contender.extra_memory = None

    for contender in contenders:
        if not contender.error:
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


def summary(
    times_ms: list[float], least_bytes: int, least_flops: int, bandwidth: float, peak: float
) -> dict[str, Any] | None:
    """Returns percentiles and the floor, the longer of the time to move `least_bytes` at
    `bandwidth` (bytes per second) and that to compute `least_flops` at `peak` (a second); and what
    the floor is made of, so that it can be computed again for another device."""
    if not times_ms:
        return None
    times = percentiles(times_ms)
    moving, computing = 1e3 * least_bytes / bandwidth, 1e3 * least_flops / peak
    floor = max(moving, computing)
    return times | {
        "least_bytes": least_bytes,
        "least_flops": least_flops,
        "floor_ms": floor,
        "floor_is": "memory" if moving >= computing else "arithmetic",
        "share_of_floor": floor / times["median_ms"],
        "gb_per_s": 1e-6 * least_bytes / times["median_ms"],
        "tflop_per_s": 1e-9 * least_flops / times["median_ms"],
    }


def copy_bandwidth(device: torch.device, repeats: int) -> float:
    """Measures a large copy: bytes read plus bytes written a second."""
    source = torch.rand(COPY_BYTES[device.type] // 4, device=device)
    target = torch.empty_like(source)
    times = [_timed(lambda: target.copy_(source), device)[1] for _ in range(WARM_UP + repeats)]
    return 2 * source.nbytes / (1e-3 * statistics.median(times[WARM_UP:]))


def matmul_peak(device: torch.device, dtype: torch.dtype, tf32: bool, repeats: int) -> float:
    """Measures a large matrix product: floating-point operations a second."""
    n = MATMUL_SIZE[device.type]
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    # Restoring allow_tf32 would turn this setting from "none" into "ieee". It is a part of the key
    # of Inductor's cache, which would miss what was compiled before.
    precision = "tf32" if tf32 else "ieee"
    with temporarily(torch.backends.cuda.matmul, fp32_precision=precision):
        times = [_timed(lambda: torch.matmul(a, b, out=out), device)[1]
                 for _ in range(WARM_UP + repeats)]  # fmt: skip
    return 2 * n**3 / (1e-3 * statistics.median(times[WARM_UP:]))


@contextmanager
def temporarily(settings: Any, **values: Any) -> Iterator[None]:
    """Sets attributes, and restores them at the end of the block."""
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
    """Makes a CPU allocation beyond the free memory fail, where Linux would kill the process."""
    if device_type != "cpu":
        yield
        return
    sizes = {line.split()[0]: int(line.split()[1]) * 1024
             for name in ("/proc/meminfo", "/proc/self/status")
             for line in Path(name).read_text().splitlines() if line.endswith("kB")}  # fmt: skip
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = sizes["VmData:"] + int(_SHARE_OF_FREE * sizes["MemAvailable:"])
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def failure(action: Callable[[], Any]) -> str | None:
    """Runs an action; returns why it failed, or None. The caller goes on either way."""
    try:
        action()
        return None
    except (RuntimeError, MemoryError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        out_of_memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
        # A CPU has no exception type for it; the second is how C++ says it.
        out_of_memory |= "can't allocate memory" in str(error) or "bad_alloc" in str(error)
        reason = OUT_OF_MEMORY if out_of_memory else lines[0]
    gc.collect()  # only here are the tensors that the exception held freed
    torch.cuda.empty_cache()
    return reason


def flush_caches(buffer: Tensor) -> None:
    for _ in range(FLUSH_PASSES[buffer.device.type]):
        buffer.sum()


def _timed(call: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """Calls; returns the result, and the time in milliseconds."""
    begin = mark(device)
    result = call()
    return result, milliseconds_between(begin, mark(device))


def extra_memory(call: Callable[[], Any], device: torch.device) -> int:
    """Measures the most bytes that a call, its result included, holds beyond those before it."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        return torch.cuda.max_memory_allocated() - before
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        cpu = torch.profiler.ProfilerActivity.CPU
        # acc_events: torch 2.11 warns that it drops all cycles but one, although there is only one.
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
