"""Times training steps and the layers' share of them: ``python scripts/benchmark.py step``.

The networks are those of ``python train.py experiment=mnist_cnn``, of ``coco_segmentation`` and
``coco_captions`` with ``model.network.depth=5``, and the simple model: the high-order layer on
3 x 224 x 224 images, global average pooling and a linear classifier. A step is the forward pass,
cross-entropy, the backward pass and the optimizer, on one fixed batch. Writes::

    step_<device>.json
        command, date, method
        environment       hoconv.tools.doctor.environment(), with the commit
        device
        unavailable       implementation -> why it was not timed
        rows              one for each network, precision and implementation of its layers:
            network, precision (float32; bfloat16 by autocast, on a GPU), batch, impl
            error                 null, "out of memory", or what was raised: then the rest is null
            samples_per_s         the median over runs of steps
            captured_samples_per_s    the same of steps that are one CUDA graph each; null on a CPU
            step_ms, layers_ms    device time of one step, and of its layers: median_ms, p20_ms,
                                  p80_ms, repeats
            layers_share          the median of layers_ms over that of step_ms
            speed_up_limit        of a step if its layers took no time (Amdahl)
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from rich.box import SIMPLE
from rich.table import Table
from torch import Tensor, nn

from datamodules.coco.datamodule import COCO
from hoconv import HighOrderConv2d, set_impl
from hoconv.dispatch.implementations import ImplementationError, choose
from hoconv.tools.benchmarking.marks import LayerMarks, mark, milliseconds_between
from hoconv.tools.benchmarking.measurement import (
    FLUSH_BYTES,
    WARM_UP,
    failure,
    memory_limit,
    percentiles,
    temporarily,
)
from hoconv.tools.commands import hardware, write_json
from hoconv.tools.tables import show
from models.networks.attention_decoder import AttentionDecoder
from models.networks.cnn import CNN
from models.networks.encoder_decoder import EncoderDecoder

RUNS = 5
STEPS = {"cpu": 1, "cuda": 20}  # of a run
MARKED_STEPS = 5  # timed with marks around the layers
CLASSES = 10
CATEGORIES = COCO.published_categories + 1
WORDS, VOCABULARY = 20, 10_000
PRECISIONS = {"cpu": ("float32",), "cuda": ("float32", "bfloat16")}
MEASURED = (
    "samples_per_s", "captured_samples_per_s", "step_ms", "layers_ms", "layers_share",
    "speed_up_limit",
)  # fmt: skip
METHOD = (
    "Samples a second: median over runs of some steps each, ended by a synchronisation, "
    "time.perf_counter, after warm-up. Share of the layers: marks are set at the begin and end of "
    "a step, and by hooks where the device enters and leaves a layer. It enters before the "
    "forward, and when the gradient of the output is ready. It leaves after the forward, and when "
    "the last gradient of its input and parameters is ready. Autograd runs in the reverse order of "
    "the forward, so nothing else runs in between. A mark is a CUDA event, or time.perf_counter on "
    "a CPU. On a GPU these steps are queued behind reads that outlast their launch: their times "
    "exclude gaps in which the device waits for the host. Samples a second include such gaps, as "
    "training with capture=off does. A captured step is one CUDA graph. "
    "torch.backends.cudnn.allow_tf32=False, as in train.py. Captions: 20 words of a "
    "vocabulary of 10,000."
)


@dataclass(frozen=True)
class Network:
    """A network, its batch size and input, and its optimizer.

    The labels of an image have `label_shape`; each is one of `classes`.
    """

    build: Callable[[], nn.Module]
    batch: int
    image_shape: tuple[int, int, int]
    optimizer: Callable[..., torch.optim.Optimizer]
    label_shape: tuple[int, ...] = ()
    classes: int = CLASSES

    def make(self, impl: str) -> nn.Module:
        """Builds the network and sets its layers to an implementation."""
        network = self.build()
        set_impl(network, impl)
        return network


def one_layer() -> nn.Module:
    return nn.Sequential(
        HighOrderConv2d(3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, CLASSES)
    )


class Captions(nn.Module):
    """Predicts each word of a caption from the words before it."""

    words: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.network = AttentionDecoder(depth=5, hidden_size=256)
        self.network.set_vocabulary(VOCABULARY)
        self.register_buffer("words", torch.randint(VOCABULARY, (1, WORDS)))

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images, self.words.expand(len(images), -1)).mT


NETWORKS = {
    "mnist_cnn": Network(  # as in conf/
        lambda: CNN((1, 28, 28), CLASSES), 128, (1, 28, 28), torch.optim.AdamW
    ),
    "one layer at 224 x 224": Network(one_layer, 64, (3, 224, 224), torch.optim.SGD),
    "coco_segmentation": Network(
        lambda: EncoderDecoder(CATEGORIES, depth=5),
        64, (3, 224, 224), torch.optim.AdamW, (224, 224), CATEGORIES,
    ),
    "coco_captions": Network(
        Captions, 64, (3, 224, 224), torch.optim.AdamW, (WORDS,), VOCABULARY
    ),
}  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--network", nargs="+", choices=NETWORKS, default=list(NETWORKS),
                        help="default: all of them")  # fmt: skip


def run(arguments: argparse.Namespace, head: dict[str, Any]) -> None:
    """Measures, shows and writes the results."""
    for device in arguments.device:
        measured = head | measure(device, arguments.network)
        show(_table(measured))
        for impl, reason in measured["unavailable"].items():
            print(f"{impl}: {reason}")
        for row in measured["rows"]:
            if row["error"]:
                print(f"{row['network']}, {row['precision']}, {row['impl']}: {row['error']}")
        write_json(arguments.out / f"step_{device}.json", measured)


def measure(device_type: str, networks: list[str]) -> dict[str, Any]:
    """Times the steps of some networks on one device; returns the contents of its JSON."""
    rows, unavailable = [], {}
    with memory_limit(device_type), temporarily(torch.backends.cudnn, allow_tf32=False):
        for impl in ("reference", "cuda" if device_type == "cuda" else "cpp"):
            try:
                choose(HighOrderConv2d.operator, impl, device_type)
            except ImplementationError as error:
                unavailable[impl] = str(error)
                continue
            rows += [
                _row(name, precision, impl, device_type)
                for name, precision in product(networks, PRECISIONS[device_type])
            ]
    return {
        "method": METHOD,
        "device": device_type,
        "unavailable": unavailable,
        "rows": rows,
    }


def _row(name: str, precision: str, impl: str, device_type: str) -> dict[str, Any]:
    print(f"{name}, {precision}, {impl}", flush=True)
    network = NETWORKS[name]
    times: dict[str, Any] = dict.fromkeys(MEASURED)

    def time_steps() -> None:
        times.update(_time_steps(network, impl, precision, torch.device(device_type)))

    error = failure(time_steps)
    row = {"network": name, "precision": precision, "batch": network.batch, "impl": impl}
    return row | {"error": error} | times


def _time_steps(
    network: Network, impl: str, precision: str, device: torch.device
) -> dict[str, Any]:
    model = network.make(impl).to(device)
    optimizer = network.optimizer(model.parameters(), lr=1e-3)
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = device.type == "cuda"
    images = torch.randn(network.batch, *network.image_shape, device=device)
    labels = torch.randint(network.classes, (network.batch, *network.label_shape), device=device)

    def step() -> None:
        optimizer.zero_grad()
        mixed = precision == "bfloat16"
        with torch.autocast(device.type, torch.bfloat16, enabled=mixed, cache_enabled=False):
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()

    for _ in range(WARM_UP):
        step()
    seconds = _step_s(step, device)
    captured = network.batch / _step_s(_capture(step), device) if device.type == "cuda" else None

    marks = LayerMarks(model, functools.partial(mark, device))
    steps_ms, layers_ms = [], []
    for _ in range(MARKED_STEPS):
        _keep_busy(2e3 * seconds, device)
        marks.clear()
        begin = mark(device)
        step()
        steps_ms.append(milliseconds_between(begin, mark(device)))
        layers_ms.append(sum(marks.milliseconds().values()))
    step_ms, layer_ms = percentiles(steps_ms), percentiles(layers_ms)
    share = layer_ms["median_ms"] / step_ms["median_ms"]
    found = network.batch / seconds, captured, step_ms, layer_ms, share, 1 / (1 - share)
    return dict(zip(MEASURED, found, strict=True))


def _step_s(step: Callable[[], None], device: torch.device) -> float:
    """Returns the seconds of a step, the median over runs."""

    def run_s() -> float:
        synchronize(device)
        begin = time.perf_counter()
        for _ in range(STEPS[device.type]):
            step()
        synchronize(device)
        return time.perf_counter() - begin

    return statistics.median(run_s() for _ in range(RUNS)) / STEPS[device.type]


def _capture(step: Callable[[], None]) -> Callable[[], None]:
    """Returns a function that runs a step as a CUDA graph."""
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph, stream=side):
        step()
    return graph.replay


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _keep_busy(milliseconds: float, device: torch.device) -> None:
    """Queues reads that take a GPU about this long; does nothing on a CPU, which has no queue."""
    if device.type == "cpu":
        return
    buffer = torch.zeros(FLUSH_BYTES // 4, device=device)
    buffer.sum()
    begin = mark(device)
    buffer.sum()
    once = milliseconds_between(begin, mark(device))
    for _ in range(math.ceil(milliseconds / once)):
        buffer.sum()


def _table(measured: dict[str, Any]) -> Table:
    table = Table("network", "precision", "layers", title=f"training steps, {hardware(measured)}",
                  box=SIMPLE)  # fmt: skip
    for column in (
        "batch",
        "samples / s",
        "captured",
        "step, ms",
        "in the layers, ms",
        "share",
        "limit",
    ):
        table.add_column(column, justify="right")
    for row in measured["rows"]:
        cells = [row["network"], row["precision"], row["impl"], str(row["batch"])]
        captured = row["captured_samples_per_s"]
        cells += ["[red]failed", "", "", "", "", ""] if row["error"] else [
            f"{row['samples_per_s']:.4g}",
            f"{captured:.4g}" if captured else "",
            f"{row['step_ms']['median_ms']:.4g}",
            f"{row['layers_ms']['median_ms']:.4g}",
            f"{row['layers_share']:.0%}",
            f"{row['speed_up_limit']:.1f}x",
        ]  # fmt: skip
        table.add_row(*cells)
    return table
