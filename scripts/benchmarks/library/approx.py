"""Times approximate products beside PyTorch's: ``python scripts/benchmark.py approx``.

By default the problems are a matrix product and a convolution as in the middle of a ResNet, of
dense operands, with every multiplier of floats that has a kernel. ``--problem`` and
``--multiplier`` choose others. Writes, also after each problem, and draws beside it::

    approx_<device>.json
        command, date, method
        environment       hoconv.tools.doctor.environment(), with the commit
        device, threads
        unavailable       why our kernels were not timed, or null
        scalar_gmac_per_s multiplier -> multiply-accumulates, 1e9 a second, of the scalar loop
                          that `method` describes; CPU only, of multipliers with a name
        rows              one for each problem and contender:
            problem
            contender             "torch", or a multiplier, of a file its name without
                                  folder and suffix; with one of integers this is the product alone,
                                  and "<multiplier>, layer" the layer, which quantises
            macs                  multiply-accumulates of a forward, or of a captured step; null
                                  where they are unknown
            error                 null, "out of memory", or what was raised: then the rest is null
            forward, backward     backward is null where there is none: of integers
                median_ms, p20_ms, p80_ms, repeats
                gmac_per_s        1e9 multiply-accumulates a second; a backward has twice as many
                share_of_torch    of PyTorch's rate in the same direction
                times_scalar      times the rate of the scalar loop; CPU, forward only
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn

from hoconv import ApproxConv2d, ApproxLinear, approx
from hoconv.dispatch.declaration import Sample
from hoconv.dispatch.implementations import ImplementationError, choose
from hoconv.jit import BuildError
from hoconv.jit.generated import compile_cpp
from hoconv.ops.approx.operator import CONV2D
from hoconv.ops.approx.sources.c_functions import CFunction
from hoconv.ops.approx.sources.find import Found, find
from hoconv.ops.approx.tables import OfIntegers
from hoconv.tools.benchmarking.charts import COLOURS, save
from hoconv.tools.benchmarking.measurement import (
    APART,
    ENOUGH_S,
    LEAST_REPEATS,
    REPEATS,
    Contender,
    Timed,
    memory_limit,
    method,
    percentiles,
    take_turns,
    temporarily,
    time_apart,
)
from hoconv.tools.commands import count, hardware, write_json
from hoconv.tools.tables import show

TORCH = "torch"
BACKWARD = 2  # multiply-accumulates of a backward for each of the forward
SCALAR_ROWS, SCALAR_REPEATS = 32, 5
SCALAR = """
#include <cstdint>
#include "approx/multipliers.h"

extern "C" void scalar_matmul(const char* multiplier, const float* a, const float* b, float* out,
                              int64_t M, int64_t K, int64_t N) {
  hoconv::approx::with_multiplier(multiplier, [&](auto m) {
    for (int64_t i = 0; i < M; ++i)
      for (int64_t j = 0; j < N; ++j) {
        float sum = 0;
        for (int64_t k = 0; k < K; ++k) {
          float product = m.multiply(a[i * K + k], b[j * K + k]);
          hoconv::approx::keep_rounded(product);
          sum += product;
        }
        out[i * N + j] = sum;
      }
  });
}
"""
_SCALAR_METHOD = (
    " Scalar loop: three nested loops over the multiplier's definition in C++, the innermost over "
    "k, with both operands contiguous, one thread, compiled with the flags of the library; an "
    "empty asm statement on each product keeps the compiler from vectorising it. Median of "
    f"{SCALAR_REPEATS} calls of {SCALAR_ROWS} rows by 512 columns, K = 512."
)
_PRODUCTS_METHOD = (
    " PyTorch's products are float32, without TF32. A product of integers is given integers, and "
    "has no backward; its layer is given floats. A training step is the forward to the loss, of "
    "random images and labels, and the gradients of all parameters, without an optimizer: of "
    "torchvision's model, and of the same converted by hoconv.approx.convert, though not to a "
    "function in C of more than 8 bits. A captured step is one CUDA graph of both, shown as a "
    "forward."
)
METHOD = method(APART) + _PRODUCTS_METHOD + _SCALAR_METHOD
# Convolutions of ResNet-18 that differ: channels, the image's pixels over the input's along a side,
# filters, their side, stride.
RESNET18 = (
    (3, 1, 64, 7, 2), (64, 4, 64, 3, 1), (64, 4, 128, 3, 2), (64, 4, 128, 1, 2),
    (128, 8, 128, 3, 1), (128, 8, 256, 3, 2), (128, 8, 256, 1, 2), (256, 16, 256, 3, 1),
    (256, 16, 512, 3, 2), (256, 16, 512, 1, 2), (512, 32, 512, 3, 1),
)  # fmt: skip
# Two depthwise convolutions of MobileNetV2: channels, pixels likewise, stride.
DEPTHWISE = ((32, 2, 1), (576, 16, 2))


@dataclass(frozen=True)
class Setting:
    """The device of the products that are timed, our implementation there, name -> multiplier."""

    device: torch.device
    impl: str
    multipliers: Mapping[str, str | Found]


@dataclass(frozen=True)
class Problem:
    """A computation and its cost: `make` returns PyTorch's contender, then ours."""

    name: str
    macs: int | None
    make: Callable[[Setting], list[Contender]]


def _matrix_product(n: int) -> Problem:
    def layer(**options: Any) -> nn.Module:
        return ApproxLinear(n, n, bias=False, **options)

    make = functools.partial(
        _products, torch.matmul, approx.matmul, layer, ((n, n), (n, n)), options={}
    )
    return Problem(f"matrix product, {n} x {n} x {n}", n**3, make)


def _convolution(
    images: int, channels: int, pixels: int, filters: int, side: int, stride: int = 1,
    groups: int = 1,
) -> Problem:  # fmt: skip
    """Returns a convolution with padding, so that it has an output for each pixel, but for the
    stride. `groups` is 1, or the channels of a depthwise one."""
    options = {"padding": side // 2, "stride": stride, "groups": groups}

    def layer(**more: Any) -> nn.Module:
        return ApproxConv2d(channels, filters, side, bias=False, **options, **more)

    weight = (filters, channels // groups, side, side)
    make = functools.partial(
        _products, F.conv2d, approx.conv2d, layer, ((images, channels, pixels, pixels), weight),
        options=options,
    )  # fmt: skip
    filters_of = "" if groups > 1 else f"{filters} filters of "
    name = "depthwise convolution" if groups > 1 else "convolution"
    name += f", {images} x {channels} x {pixels} x {pixels}, {filters_of}{side} x {side}"
    name += f", stride {stride}" if stride > 1 else ""
    outputs = images * ((pixels - 1) // stride + 1) ** 2 * filters
    return Problem(name, outputs * math.prod(weight[1:]), make)


def _products(
    exact: Callable[..., Tensor], approximate: Callable[..., Tensor],
    layer: Callable[..., nn.Module], shapes: tuple[tuple[int, ...], tuple[int, ...]],
    setting: Setting, options: Mapping[str, Any],
) -> list[Contender]:  # fmt: skip
    """Returns a product of two operands in floats, by multipliers, and by layers that quantise."""
    floats = Sample(tuple(torch.randn(shape, device=setting.device) for shape in shapes))
    contenders = [Contender(TORCH, functools.partial(exact, **options), floats)]
    for name, multiplier in setting.multipliers.items():
        ours: dict[str, Any] = {"multiplier": multiplier, "impl": setting.impl}
        function = functools.partial(approximate, **options, **ours)
        if not isinstance(multiplier, OfIntegers):
            contenders.append(Contender(name, function, floats))
            continue
        integers = (_integers(shape, multiplier, setting.device) for shape in shapes)
        contenders.append(Contender(name, function, Sample(tuple(integers))))
        module = layer(device=setting.device, **ours)
        contenders.append(Contender(f"{name}, layer", module, Sample(floats.args[:1])))
        contenders[-1].leaves += module.parameters()
    return contenders


def _integers(shape: tuple[int, ...], multiplier: OfIntegers, device: torch.device) -> Tensor:
    bits = min(multiplier.bits)
    least = -(1 << bits - 1) if multiplier.signed else 0
    return torch.randint(least, least + (1 << bits), shape, dtype=multiplier.dtype, device=device)


def _training_step(images: int, pixels: int, captured: bool = False) -> Problem:
    """Returns a step that the host starts kernel by kernel, or, captured, as one CUDA graph."""
    name = f"training step of MobileNetV2, {images} x 3 x {pixels} x {pixels}"
    if captured:
        name += ", a CUDA graph"

    def absent(reason: str) -> list[Contender]:
        contender = Contender(TORCH, torch.clone, Sample(()))
        contender.error = reason
        return [contender]

    try:
        from torchvision.models import mobilenet_v2
    except (ImportError, RuntimeError) as error:  # the second, of another version than PyTorch
        reason = f"torchvision: {error}"
        return Problem(name, None, lambda _: absent(reason))

    def make(setting: Setting) -> list[Contender]:
        if captured and setting.device.type != "cuda":
            return absent("a CUDA graph needs a GPU")
        x = torch.randn(images, 3, pixels, pixels, device=setting.device)
        labels = torch.randint(1000, (images,), device=setting.device)
        contenders = []
        for contender, multiplier in {TORCH: None, **setting.multipliers}.items():
            if isinstance(multiplier, CFunction):  # a step on a CPU takes minutes
                continue
            model = mobilenet_v2().to(setting.device)
            if multiplier is not None:
                approx.convert(model, multiplier, impl=setting.impl)

            def loss(model: nn.Module = model) -> Tensor:
                return F.cross_entropy(model(x), labels)

            if captured:
                replay = _capture(loss, list(model.parameters()))
                contenders.append(Contender(contender, replay, Sample(())))
                continue
            contenders.append(Contender(contender, loss, Sample(())))
            contenders[-1].leaves += model.parameters()
        return contenders

    macs = images * approx.cost(mobilenet_v2(), torch.zeros(1, 3, pixels, pixels)).multiplications
    return Problem(name, (1 + BACKWARD) * macs if captured else macs, make)


def _capture(loss: Callable[[], Tensor], parameters: list[nn.Parameter]) -> Callable[[], Tensor]:
    """Returns what replays the CUDA graph of a loss and its gradients."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # kernels are chosen and loaded, and ranges become known
            torch.autograd.grad(loss(), parameters)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value = loss()
        torch.autograd.grad(value, parameters)

    def replay() -> Tensor:
        graph.replay()
        return value.detach()

    return replay


# The value of --problem -> the problems, of the options.
PROBLEMS: dict[str, Callable[[argparse.Namespace], list[Problem]]] = {
    "matmul": lambda given: [_matrix_product(given.size)],
    "conv": lambda given: [_convolution(given.images, given.channels, 14, given.channels, 3)],
    "resnet18": lambda given: [
        _convolution(given.batch, channels, given.pixels // part, filters, side, stride)
        for channels, part, filters, side, stride in RESNET18
    ],
    "depthwise": lambda given: [
        _convolution(given.batch, channels, given.pixels // part, channels, 3, stride, channels)
        for channels, part, stride in DEPTHWISE
    ],
    "mobilenet_v2": lambda given: [_training_step(given.batch, given.pixels)],
    "mobilenet_v2_captured": lambda given: [_training_step(given.batch, given.pixels, True)],
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--problem", nargs="+", choices=PROBLEMS, default=["matmul", "conv"],
                        help="resnet18: its convolutions; depthwise: two of MobileNetV2; "
                        "mobilenet_v2: its training step, kernel by kernel or captured in a CUDA "
                        "graph; default: matmul conv")  # fmt: skip
    parser.add_argument("--multiplier", nargs="+", type=_multiplier,
                        default=list(approx.MULTIPLIERS), help="as layers take it: a name, a "
                        "family with its parameter, a file; default: all with a kernel of their "
                        "own")  # fmt: skip
    parser.add_argument("--size", type=count, help="rows and columns of the matrices; default: 512 "
                        "on a CPU, 4096 on a GPU")  # fmt: skip
    parser.add_argument("--images", type=count, default=32, help="of conv; default: 32")
    parser.add_argument("--channels", type=count, default=256, help="of conv; default: 256")
    parser.add_argument("--batch", type=count, help="images of networks and their convolutions; "
                        "default: 1 on a CPU, 64 on a GPU")  # fmt: skip
    parser.add_argument("--pixels", type=count, default=224, help="along a side of such an image; "
                        "default: 224")  # fmt: skip
    parser.add_argument("--enough-ms", type=count, default=round(1e3 * ENOUGH_S),
                        help="a contender whose measured calls have taken this long needs "
                        f"{LEAST_REPEATS} repeats; default: {1e3 * ENOUGH_S:.0f}")  # fmt: skip
    parser.add_argument("--threads", type=count, default=torch.get_num_threads(),
                        help="of a CPU; default: PyTorch's")  # fmt: skip


def _multiplier(name: str) -> str:
    """Parses a multiplier."""
    try:
        find(name)
    except (BuildError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("multiplier: ")) from error
    return name


def run(arguments: argparse.Namespace, head: dict[str, Any]) -> None:
    """Measures, shows and writes the results."""
    threads = torch.get_num_threads()
    torch.set_num_threads(arguments.threads)
    try:
        for device in arguments.device:
            path, measured = arguments.out / f"approx_{device}.json", {}
            for so_far in measure(device, arguments):
                measured = head | so_far
                write_json(path, measured, say=False)  # of a run that is ended, too
            in_use = f", {arguments.threads} in use" if device == "cpu" else ""
            print(f"approximate products, {hardware(measured)}{in_use}")
            for table in _tables(measured):
                show(table)
            for row in measured["rows"]:
                if row["error"]:
                    print(f"{row['problem']}, {row['contender']}: {row['error']}")
            if measured["unavailable"]:
                print(measured["unavailable"])
            print(path)
            draw(measured, path.with_suffix(".png"))
    finally:
        torch.set_num_threads(threads)


def measure(device_type: str, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Times the problems on one device; yields the contents of its JSON after each."""
    on_cpu = device_type == "cpu"
    impl, unavailable = "cpp" if on_cpu else "cuda", None
    multipliers = {_label(name): find(name) for name in arguments.multiplier}
    try:
        choose(CONV2D, impl, device_type)
    except ImplementationError as error:
        multipliers, unavailable = {}, str(error)
    named = approx.MULTIPLIERS.keys() & multipliers if on_cpu else ()
    scalar = {name: _scalar_gmac_per_s(name) for name in multipliers if name in named}
    setting = Setting(torch.device(device_type), impl, multipliers)
    rows = []
    given = argparse.Namespace(**vars(arguments))
    given.size = given.size or (512 if on_cpu else 4096)
    given.batch = given.batch or (1 if on_cpu else 64)
    with (
        Progress(console=Console(stderr=True)) as progress,
        memory_limit(device_type),
        temporarily(torch.backends.cudnn, allow_tf32=False),
    ):
        for problem in (each for name in given.problem for each in PROBLEMS[name](given)):
            contenders = problem.make(setting)
            repeats = REPEATS[device_type]
            task = progress.add_task(problem.name, total=len(contenders) * (1 + repeats))

            def say(contender: Contender, task: Any = task) -> None:
                progress.update(task, advance=1)

            take_turns(contenders, _time, setting.device, repeats, say, 1e-3 * given.enough_ms)
            rows += [_row(problem, c, contenders[0], scalar.get(c.name)) for c in contenders]
            yield {
                "method": method(APART, [device_type])
                + _PRODUCTS_METHOD
                + (_SCALAR_METHOD if on_cpu else ""),
                "device": device_type,
                "threads": arguments.threads,
                "unavailable": unavailable,
                "scalar_gmac_per_s": scalar,
                "rows": rows,
            }


def _label(name: str) -> str:
    """Returns the name of a file without its folder and suffix; any other name as it is."""
    return Path(name).stem if Path(name).suffix else name


def _time(contender: Contender, timed: Timed) -> dict[str, float]:
    """Times forward, and backward where there is one."""
    if contender.leaves:
        return time_apart(contender, timed)
    return {"forward": timed(contender.forward)[1]}


def _row(
    problem: Problem, contender: Contender, torchs: Contender, scalar: float | None
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "problem": problem.name,
        "contender": contender.name,
        "macs": problem.macs,
        "error": contender.error,
    }
    for direction, passes in (("forward", 1), ("backward", BACKWARD)):
        row[direction] = None
        if problem.macs is not None and (measured := contender.times_ms[direction]):
            times = percentiles(measured)
            rate = 1e-6 * passes * problem.macs / times["median_ms"]
            exact = torchs.times_ms[direction]
            row[direction] = times | {
                "gmac_per_s": rate,
                "share_of_torch": statistics.median(exact) / times["median_ms"] if exact else None,
            }
            if direction == "forward" and scalar is not None:
                row[direction]["times_scalar"] = rate / scalar
    return row


def _scalar_gmac_per_s(multiplier: str) -> float:
    function = ctypes.CDLL(str(compile_cpp("approx", SCALAR))).scalar_matmul
    M, K, N = SCALAR_ROWS, 512, 512
    a, b, out = torch.randn(M, K), torch.randn(N, K), torch.empty(M, N)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (a, b, out)]
    sizes = [ctypes.c_int64(n) for n in (M, K, N)]
    seconds = []
    for _ in range(1 + SCALAR_REPEATS):
        begin = time.perf_counter()
        function(multiplier.encode(), *pointers, *sizes)
        seconds.append(time.perf_counter() - begin)
    expected = approx.matmul(a, b.mT, multiplier, impl="cpp")
    assert torch.equal(out, expected), "the scalar loop is not the definition"
    return 1e-9 * M * K * N / statistics.median(seconds[1:])


def _tables(measured: dict[str, Any]) -> Iterator[Table]:
    """Returns a table for each problem."""
    for problem in dict.fromkeys(row["problem"] for row in measured["rows"]):
        table = Table(title=problem, box=SIMPLE)
        table.add_column("multiplier")
        for direction in ("forward", "backward"):
            for column in (f"{direction}\nms", "\nGMAC/s", "of\ntorch"):
                table.add_column(column, justify="right")
        if measured["scalar_gmac_per_s"]:
            table.add_column("times the\nscalar loop", justify="right")
        for row in measured["rows"]:
            if row["problem"] == problem:
                table.add_row(row["contender"], *_cells(row))
        yield table


def _cells(row: dict[str, Any]) -> list[str]:
    if row["error"]:
        return ["[red]failed"]
    cells = []
    for direction in ("forward", "backward"):
        timing = row[direction]
        cells += ["", "", ""] if timing is None else [
            _short(timing["median_ms"]),
            _short(timing["gmac_per_s"]),
            f"{timing['share_of_torch']:.0%}" if timing["share_of_torch"] else "",
        ]  # fmt: skip
    times = row["forward"].get("times_scalar")
    return [*cells, f"{times:.3g}"] if times else cells


def _short(number: float) -> str:
    return f"{number:.3g}" if number < 1000 else f"{number:.0f}"


def draw(measured: dict[str, Any], path: Path) -> None:
    """Draws the rates, forward and backward, as a PNG with a panel for each problem."""
    names = list(dict.fromkeys(row["problem"] for row in measured["rows"]))
    across = min(len(names), 3)
    down = -(-len(names) // across)
    figure = Figure(figsize=(6 * across, 5 * down), layout="constrained")
    for panel, name in zip(figure.subplots(down, across, squeeze=False).flat, names, strict=False):
        rows = [r for r in measured["rows"] if r["problem"] == name and r["error"] is None]
        for i, direction in enumerate(("forward", "backward")):
            positions = [p + 0.4 * i - 0.2 for p in range(len(rows))]
            rates = [row[direction]["gmac_per_s"] if row[direction] else 0 for row in rows]
            panel.bar(positions, rates, 0.4, label=direction, color=COLOURS[i + 1])
        panel.set_xticks(range(len(rows)), [row["contender"] for row in rows], rotation=45)
        panel.set(title=name, ylabel="10⁹ multiply-accumulates a second")
    save(figure, f"Approximate products: {hardware(measured)}", path)
