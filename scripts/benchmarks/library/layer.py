"""Times the whole high-order layer against its peers: ``python scripts/benchmark.py layer``.

Ours are ``hoconv.high_order_layer`` with the implementations `cuda` and `cpp`, as HighOrderConv2d
calls it. The peers are

- PyTorch's convolution, contiguous or channels-last, which generates the weights, followed by our
  high-order convolution or by torch.compile of its definition;
- torch.compile of the definition of the whole layer.

The images are 3 x 224 x 224, k = 5, the generator is 5 x 5. A GPU computes in strict float32, in
float32 with TF32, in bfloat16 and in float16.

`reference` and torch.compile are slow to run or compile: they are timed at ``--slow-sizes`` only.
Errors are taken at the smallest of these sizes, where every contender runs. ``among`` names the
peers from which the best one of a size is chosen.

Writes, and draws the times beside it, and the memory in layer_<device>_memory.png::

    layer_<device>.json
        command, date, method
        environment       hoconv.tools.doctor.environment(), with the commit
        device, axis
        copy_gb_per_s     copy bandwidth of this run: bytes read plus bytes written, 1e9 a second
        matmul_tflop_per_s    precision -> rate of one large matrix product in this run
        unavailable       contender -> why it was not timed
        rows              one for each precision, size and contender:
            precision, size, contender, kind (ours, peer, reference)
            error                 null, "out of memory", or what was raised: then the rest is null
            forward, forward_backward
                median_ms, p20_ms, p80_ms, repeats
                bytes_floor_ms    least traffic over the copy bandwidth: x and the generator read,
                                  the output written; with backward also the gradient of the
                                  output, x and the generator read, their gradients written
                flops_floor_ms    operations of generator and application over the rate of a matrix
                                  product; with backward three times those
            extra_memory_bytes    most that a forward and a backward hold beyond their inputs
            least_memory_bytes    output and gradients; null only where every contender failed
        best_peers        one for each precision and size:
            precision, size, among (the peers that were timed)
            forward, forward_backward    null where no peer was timed
                contender, median_ms
                speed_up          ours -> the peer's median over its own
        errors            one for each precision and contender, at one size:
            precision, size, contender, kind, error
            output, x, weight, bias      |a - b| / |b| (Euclidean norms) of the output and of the
                                         gradients; b is the reference in float64, same inputs
        trains            one for each precision, large size, and ours or the best peer:
            precision, size, contender, kind, error
            peak_memory_bytes     of one forward and backward, inputs included; null if it failed
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from benchmarks.library.precision import BFLOAT16, FLOAT32, TF32, Precision
from hoconv import high_order_conv2d, high_order_layer
from hoconv.dispatch.declaration import Sample, find
from hoconv.dispatch.implementations import ImplementationError, choose
from hoconv.tools.benchmarking.charts import grid, lines, save, sizes_axis
from hoconv.tools.benchmarking.measurement import (
    ENOUGH_S,
    REPEATS,
    TOGETHER,
    Contender,
    copy_bandwidth,
    extra_memory,
    failure,
    matmul_peak,
    memory_limit,
    method,
    percentiles,
    take_turns,
    time_together,
)
from hoconv.tools.commands import count, hardware, write_json
from hoconv.tools.tables import show

CHANNELS, IMAGE, KERNEL, GENERATOR = 3, 224, 5, 5
AXIS = (
    f"batch size ({CHANNELS} x {IMAGE} x {IMAGE}, k = {KERNEL}, "
    f"generator {GENERATOR} x {GENERATOR})"
)
SIZES = {"cpu": (64,), "cuda": (8, 16, 32, 64, 128, 256, 512)}
SLOW_SIZES = (64, 512)
TRAINS = {"cpu": (), "cuda": (512, 2048)}  # large batches: do they train in the GPU's memory?
# Seconds. On a GPU there are many contenders, whose times vary less.
ENOUGH = {"cpu": ENOUGH_S, "cuda": 0.5}
EXACT_IMAGES = 8  # at a time in the float64 reference, which keeps all intermediate results
PHASES = {"forward": "forward", "forward_backward": "forward and backward"}
COMPARED = ("output", "x", "weight", "bias")

_FURTHER = (
    "Strict float32 is torch.backends.cudnn.allow_tf32=False, tf32 the same with True; "
    "torch.backends.cudnn.benchmark=True throughout. Channels-last peers get x and the generator's "
    "weight in that format. Matrix product: torch.matmul of two square matrices, same clock, same "
    "run, TF32 as in the precision. "
)
METHOD = _FURTHER + method(TOGETHER)


FLOAT16 = Precision("float16", torch.float16)
PRECISIONS = {"cpu": [FLOAT32], "cuda": [FLOAT32, TF32, BFLOAT16, FLOAT16]}


@dataclass(frozen=True)
class Way:
    """One way to compute the layer: a function of x, the generator's weight and its bias."""

    name: str
    kind: str  # ours, peer, reference
    function: Callable[..., Tensor]
    channels_last: bool = False
    slow: bool = False
    needs: tuple[str, str] | None = None  # an operator, and its implementation

    def contender(self, sample: Sample) -> Contender:
        if self.channels_last:
            x, weight, bias = sample.args
            x, weight = (t.to(memory_format=torch.channels_last) for t in (x, weight))
            sample = Sample((x, weight, bias), sample.kwargs)
        return Contender(self.name, self.function, sample)


def add_options(parser: argparse.ArgumentParser) -> None:
    names = [precision.name for precision in PRECISIONS["cuda"]]
    parser.add_argument("--precision", nargs="+", choices=names, default=names,
                        help="default: all that the device has; a CPU has float32")  # fmt: skip
    parser.add_argument("--sizes", nargs="+", type=count,
                        help=f"default: cpu {SIZES['cpu']}, cuda {SIZES['cuda']}")  # fmt: skip
    parser.add_argument("--slow-sizes", nargs="+", type=count, default=SLOW_SIZES,
                        help="sizes at which reference and torch.compile are timed too; "
                        f"default: {SLOW_SIZES}")  # fmt: skip


def run(arguments: argparse.Namespace, head: dict[str, Any]) -> None:
    """Measures, shows and writes the results."""
    for device in arguments.device:
        precisions = [p for p in PRECISIONS[device] if p.name in arguments.precision]
        if not precisions:
            print(f"{device}: it has none of the precisions {', '.join(arguments.precision)}")
            continue
        measured = head | measure(device, precisions, arguments)
        _show(measured)
        path = arguments.out / f"layer_{device}.json"
        write_json(path, measured)
        draw_times(measured, path.with_suffix(".png"))
        memory = path.with_name(f"{path.stem}_memory.png")
        draw_memory(measured, memory)


def measure(
    device_type: str, precisions: list[Precision], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Times the contenders on one device; returns the contents of its JSON."""
    device = torch.device(device_type)
    sizes = arguments.sizes or SIZES[device_type]
    slow_sizes = [size for size in sizes if size in arguments.slow_sizes]
    ways, unavailable = _ways(device_type)
    bandwidth = copy_bandwidth(device, REPEATS[device_type])
    peaks, rows, best_peers, errors, trains = {}, [], [], [], []
    with Progress(console=Console(stderr=True)) as progress, memory_limit(device_type):
        task = progress.add_task(f"layer {device_type}", total=len(precisions) * len(sizes))
        for precision in precisions:
            with precision.in_force(products=False, benchmark=True):
                peak = matmul_peak(device, precision.dtype, precision.tf32, REPEATS[device_type])
                peaks[precision.name] = peak
                for size in sizes:
                    label = {"precision": precision.name, "size": size}

                    title = f"layer {precision.name} {size}: "

                    def say(name: str, title: str = title) -> None:
                        progress.update(task, description=title + name)

                    here = [way for way in ways if size in slow_sizes or not way.slow]
                    with_errors = size == min(slow_sizes, default=sizes[0])
                    sample = layer_sample(size, device, precision.dtype)
                    timed, compared = _compete(here, sample, bandwidth, peak, with_errors, say)
                    rows += [label | row for row in timed]
                    errors += [label | row for row in compared]
                    best_peers.append(label | best_peer(timed))
                    progress.advance(task)
                trains += _trains(ways, best_peers[-1], device, precision)
    return {
        "method": _FURTHER + method(TOGETHER, [device_type]),
        "device": device_type,
        "axis": AXIS,
        "copy_gb_per_s": bandwidth / 1e9,
        "matmul_tflop_per_s": {name: peak / 1e12 for name, peak in peaks.items()},
        "unavailable": unavailable,
        "rows": rows,
        "best_peers": best_peers,
        "errors": errors,
        "trains": trains,
    }


def _ways(device_type: str) -> tuple[list[Way], dict[str, str]]:
    """Returns the contenders that can run, and contender -> why it cannot."""

    def layer(impl: str) -> Callable[..., Tensor]:
        return lambda x, *parameters, kernel_size: high_order_layer(
            x, *parameters, kernel_size=kernel_size, impl=impl
        )

    def generate_then(apply: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
        def function(x: Tensor, weight: Tensor, bias: Tensor, *, kernel_size: int) -> Tensor:
            generated = F.conv2d(x, weight, bias, padding="same")
            return apply(x, generated.unflatten(1, (kernel_size**2, -1)).transpose(0, 1))

        return function

    compile = functools.partial(torch.compile, dynamic=False, fullgraph=True)
    needs = ("high_order_conv2d", "cuda" if device_type == "cuda" else "cpp")
    op = generate_then(lambda x, taps: high_order_conv2d(x, taps, impl=needs[1]))
    compiled = generate_then(compile(lambda x, taps: high_order_conv2d(x, taps, impl="reference")))
    ways = [
        Way("reference", "reference", layer("reference"), slow=True),
        Way("torch.compile", "peer", compile(layer("reference")), slow=True),
        Way("conv + op", "peer", op, needs=needs),
        Way("conv + torch.compile", "peer", compiled, slow=True),
        Way("channels-last conv + op", "peer", op, channels_last=True, needs=needs),
        Way("channels-last conv + torch.compile", "peer", compiled, channels_last=True, slow=True),
        Way("cpp", "ours", layer("cpp"), needs=("high_order_layer", "cpp")),
        Way("cuda", "ours", layer("cuda"), needs=("high_order_layer", "cuda")),
    ]
    unavailable = {}
    for way in ways:
        try:
            if way.needs:
                operator, impl = way.needs
                choose(find(operator), impl, device_type)
        except ImplementationError as error:
            unavailable[way.name] = str(error)
    return [way for way in ways if way.name not in unavailable], unavailable


def layer_sample(size: int, device: torch.device, dtype: torch.dtype) -> Sample:
    x = torch.randn(size, CHANNELS, IMAGE, IMAGE, device=device, dtype=dtype)
    shape = KERNEL**2, CHANNELS, GENERATOR, GENERATOR
    weight = torch.randn(shape, device=device, dtype=dtype) * (CHANNELS * GENERATOR**2) ** -0.5
    bias = torch.randn(KERNEL**2, device=device, dtype=dtype)
    return Sample((x, weight, bias), {"kernel_size": KERNEL})


def _compete(
    ways: list[Way],
    sample: Sample,
    bandwidth: float,
    peak: float,
    with_errors: bool,
    say: Callable[[str], None],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Measures one size: returns a row for each way, and its errors if `with_errors`."""
    device = sample.args[0].device
    torch.compiler.reset()
    contenders = [way.contender(sample) for way in ways]
    least_memory = take_turns(
        contenders, time_together, device, REPEATS[device.type],
        lambda contender: say(contender.name), ENOUGH[device.type],
    )  # fmt: skip
    cost = find("high_order_layer").cost(sample)
    floors = {
        "forward": (cost.forward_bytes, cost.forward_flops),
        "forward_backward": (
            cost.forward_bytes + cost.backward_bytes,
            cost.forward_flops + cost.backward_flops,
        ),
    }

    def times(contender: Contender, phase: str) -> dict[str, Any] | None:
        if contender.error:
            return None
        least_bytes, flops = floors[phase]
        return percentiles(contender.times_ms[phase]) | {
            "bytes_floor_ms": 1e3 * least_bytes / bandwidth,
            "flops_floor_ms": 1e3 * flops / peak,
        }

    rows = [
        {
            "contender": way.name,
            "kind": way.kind,
            **{phase: times(contender, phase) for phase in PHASES},
            "extra_memory_bytes": contender.extra_memory,
            "least_memory_bytes": least_memory,
            "error": contender.error,
        }
        for way, contender in zip(ways, contenders, strict=True)
    ]
    if not with_errors:
        return rows, []
    say("errors")
    grad = torch.randn_like(sample.args[0])
    exact = _exact(sample, grad)
    errors = [{"contender": way.name, "kind": way.kind, **_errors(contender, grad, exact)}
              for way, contender in zip(ways, contenders, strict=True)]  # fmt: skip
    return rows, errors


def best_peer(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the fastest peer in the rows of one size, and how many times faster ours are."""
    peers, ours = ([row for row in rows if row["kind"] == kind and not row["error"]]
                   for kind in ("peer", "ours"))  # fmt: skip
    best: dict[str, Any] = {"among": [row["contender"] for row in peers]}
    for phase in PHASES:
        medians = {row["contender"]: row[phase]["median_ms"] for row in peers}
        name = min(medians, key=lambda name: medians[name], default=None)
        best[phase] = None if name is None else {
            "contender": name,
            "median_ms": medians[name],
            "speed_up": {
                row["contender"]: medians[name] / row[phase]["median_ms"] for row in ours
            },
        }  # fmt: skip
    return best


def _exact(sample: Sample, grad: Tensor) -> list[Tensor]:
    """Computes output and gradients by the definition in float64, a few images at a time."""
    x, *parameters = (tensor.double() for tensor in sample.args)
    images: list[tuple[Tensor, Tensor]] = []  # output and gradient of x
    sums = [torch.zeros_like(parameter) for parameter in parameters]
    for part in zip(x.split(EXACT_IMAGES), grad.double().split(EXACT_IMAGES), strict=True):
        leaves = [tensor.detach().requires_grad_() for tensor in (part[0], *parameters)]
        output = high_order_layer(*leaves, **sample.kwargs, impl="reference")
        d_x, *d_parameters = torch.autograd.grad(output, leaves, part[1])
        images.append((output.detach(), d_x))
        for total, gradient in zip(sums, d_parameters, strict=True):
            total += gradient
    return [*(torch.cat(parts) for parts in zip(*images, strict=True)), *sums]


def _errors(contender: Contender, grad: Tensor, exact: list[Tensor]) -> dict[str, Any]:
    """Computes the relative errors of output and gradients; strings where they are not finite."""
    errors: dict[str, Any] = dict.fromkeys(COMPARED)

    def compare() -> None:
        output = contender.forward()
        results = output, *torch.autograd.grad(output, contender.leaves, grad)
        for name, result, right in zip(COMPARED, results, exact, strict=True):
            error = ((result.double() - right).norm() / right.norm()).item()
            errors[name] = error if math.isfinite(error) else str(error)

    return errors | {"error": contender.error or failure(compare)}


def _trains(
    ways: list[Way], best: dict[str, Any], device: torch.device, precision: Precision
) -> list[dict[str, Any]]:
    """Tries whether ours and the best peer train at large sizes, and in how much memory."""
    peer = best["forward_backward"] and best["forward_backward"]["contender"]
    rows = []
    for size in TRAINS[device.type]:
        for way in ways:
            if way.kind == "ours" or way.name == peer:
                peak: list[int] = []

                def step(way: Way = way, size: int = size, peak: list[int] = peak) -> None:
                    contender = way.contender(layer_sample(size, device, precision.dtype))
                    contender.grads = [torch.randn_like(contender.args[0])]
                    contender.both()  # the first also tries algorithms that need more memory
                    inputs = sum(tensor.nbytes for tensor in (*contender.grads, *contender.leaves))
                    peak.append(inputs + extra_memory(contender.both, device))

                torch.compiler.reset()
                error = failure(step)
                rows.append({
                    "precision": precision.name,
                    "size": size,
                    "contender": way.name,
                    "kind": way.kind,
                    "peak_memory_bytes": peak[0] if peak else None,
                    "error": error,
                })  # fmt: skip
    return rows


def _show(measured: dict[str, Any]) -> None:
    for precision, peak in measured["matmul_tflop_per_s"].items():
        title = f"layer, {precision}, {hardware(measured)}, copy "
        title += f"{measured['copy_gb_per_s']:.4g} GB/s, matrix product {peak:.4g} TFLOP/s"
        show(_times_table(measured, precision, title))
    if measured["errors"]:
        show(_errors_table(measured["errors"]))
    if measured["trains"]:
        show(_trains_table(measured["trains"]))
    for name, reason in measured["unavailable"].items():
        print(f"{name}: {reason}")
    for row in measured["rows"]:
        if row["error"]:
            print(f"{row['precision']} {row['contender']} at {row['size']}: {row['error']}")


def _times_table(measured: dict[str, Any], precision: str, title: str) -> Table:
    caption = "share of floors: of bytes over copy bandwidth, of operations over matrix product"
    table = Table("size", title=title, caption=caption, box=SIMPLE)
    table.add_column("contender", no_wrap=True)
    for phase in ("forward", "both"):
        for column in (f"{phase}\nms", "share of\nfloors", "best peer\n/ this"):
            table.add_column(column, justify="right")
    table.add_column("extra\nMiB", justify="right")
    for best in measured["best_peers"]:
        if best["precision"] != precision:
            continue
        table.add_section()
        for row in measured["rows"]:
            if (row["precision"], row["size"]) != (precision, best["size"]):
                continue
            cells = [str(row["size"]), row["contender"]]
            for phase in PHASES:
                timing, peer = row[phase], best[phase]
                if timing is None:
                    cells += ["[red]failed", "", ""]
                    continue
                shares = (timing[f"{floor}_floor_ms"] / timing["median_ms"]
                          for floor in ("bytes", "flops"))  # fmt: skip
                cells += [
                    f"{timing['median_ms']:.4g}",
                    " ".join(f"{share:.0%}" for share in shares),
                    f"{peer['median_ms'] / timing['median_ms']:.2f}" if peer else "",
                ]
            extra = row["extra_memory_bytes"]
            table.add_row(*cells, "" if extra is None else f"{extra / 2**20:.3g}")
    return table


def _errors_table(errors: list[dict[str, Any]]) -> Table:
    table = Table("precision", "size", "contender", title="relative errors", box=SIMPLE)
    for column in COMPARED:
        table.add_column(column, justify="right")
    for row in errors:
        cells = [row["precision"], str(row["size"]), row["contender"]]
        for error in (row[name] for name in COMPARED):
            cells.append(f"{error:.2e}" if isinstance(error, float) else f"[red]{error}")
        table.add_row(*cells)
    return table


def _trains_table(trains: list[dict[str, Any]]) -> Table:
    table = Table("precision", "size", "contender", "", title="large batches", box=SIMPLE)
    table.add_column("peak\nGiB", justify="right")
    for row in trains:
        peak = row["peak_memory_bytes"]
        table.add_row(row["precision"], str(row["size"]), row["contender"],
                      f"[red]{row['error']}" if row["error"] else "trains",
                      "" if peak is None else f"{peak / 2**30:.3g}")  # fmt: skip
    return table


def draw_times(measured: dict[str, Any], path: Path) -> None:
    """Draws the times against the batch size, a row of panels for each precision."""
    precisions = list(measured["matmul_tflop_per_s"])
    figure, panels = grid(len(precisions), len(PHASES))
    for precision, line in zip(precisions, panels, strict=True):
        rows = [row for row in measured["rows"] if row["precision"] == precision]
        for panel, (phase, title) in zip(line, PHASES.items(), strict=True):
            lines(panel, rows, lambda row, key=phase: row[key] and row[key]["median_ms"])
            for floor, style, label in (
                ("bytes_floor_ms", "k.--", "floor: bytes / copy bandwidth"),
                ("flops_floor_ms", "kx:", "floor: operations / rate of a matrix product"),
            ):
                points = {row["size"]: row[phase][floor] for row in rows if row[phase]}
                panel.plot([*points], [*points.values()], style, label=label)
            panel.set_title(f"{precision}: {title}")
            sizes_axis(panel, rows, measured["axis"])
        line[0].set_ylabel("time of a call, ms")
    save(figure, _title(measured), path, columns=4)


def draw_memory(measured: dict[str, Any], path: Path) -> None:
    """Draws the memory of a forward and backward beyond their inputs, against the batch size."""
    precisions = list(measured["matmul_tflop_per_s"])
    figure, panels = grid(1, len(precisions))
    for precision, panel in zip(precisions, panels[0], strict=True):
        rows = [row for row in measured["rows"] if row["precision"] == precision]
        lines(
            panel, rows, lambda row: row["extra_memory_bytes"] and row["extra_memory_bytes"] / 2**20
        )
        points = {row["size"]: row["least_memory_bytes"] / 2**20 for row in rows
                  if row["least_memory_bytes"]}  # fmt: skip
        panel.plot([*points], [*points.values()], "k.--", label="least: output and gradients")
        panel.set_title(precision)
        sizes_axis(panel, rows, measured["axis"])
    panels[0][0].set_ylabel("extra memory of a training step, MiB")
    save(figure, _title(measured), path, columns=4)


def _title(measured: dict[str, Any]) -> str:
    return f"high-order layer: {hardware(measured)}, torch {measured['environment']['torch']}"
