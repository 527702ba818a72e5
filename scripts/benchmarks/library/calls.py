"""Times the host's part of a call of a layer: ``python scripts/benchmark.py calls``.

Writes::

    calls_<device>.json
        command, date, method, environment, device, impl
        rows              one a layer:
            layer             PyTorch's (the peers) and ours
            peer              the layer of PyTorch that it is compared with; of a peer itself
            forward, forward_backward
                median_us, p20_us, p80_us   of a call
                ratio                       of the medians, to the peer's
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

import hoconv
from hoconv import approx
from hoconv import recurrent as rnn
from hoconv.tools.commands import write_json
from hoconv.tools.tables import show

CALLS = 50
TURNS = 21
WARM_UP = 3
METHOD = (
    "Inputs so small that a call's time is that of the host: its checks, the choice of a kernel, "
    f"autograd, the launches. A turn is {CALLS} calls one after another, timed by "
    "time.perf_counter with the GPU idle before it and not waited for after it, and then divided "
    f"by their number; all layers take turns, {TURNS} times; medians, 20th and 80th percentiles. "
    "forward: the layer under torch.no_grad(). forward_backward: the layer, backward() from its "
    "output, and the gradients set to None. CPU: one thread."
)


@dataclass(frozen=True)
class Case:
    """A layer, its input, and the name of the layer of PyTorch that it is compared with."""

    name: str
    layer: nn.Module
    x: Tensor
    peer: str

    def output(self) -> Tensor:
        output = self.layer(self.x)
        return output[0] if isinstance(output, tuple) else output


def cases(impl: str) -> Iterator[Case]:
    """The layers, on the CPU. Recurrent ones run two steps."""
    image, signal, rows = torch.randn(1, 3, 4, 4), torch.randn(1, 4, 6), torch.randn(2, 8)
    sequence = torch.randn(2, 1, 4)
    conv, lstm = "nn.Conv2d", "nn.LSTM"
    yield Case(conv, nn.Conv2d(3, 3, 3, padding=1), image, conv)
    high_order = hoconv.HighOrderConv2d(3, 3, generator_kernel_size=3, impl=impl)
    yield Case("HighOrderConv2d", high_order, image, conv)
    yield Case("LightweightConv1d", hoconv.LightweightConv1d(4, 3, impl=impl), signal, conv)
    yield Case("DynamicConv1d", hoconv.DynamicConv1d(4, 3, impl=impl), signal, conv)
    yield Case("ApproxLinear", approx.ApproxLinear(8, 4, impl=impl), rows, conv)
    approximate = approx.ApproxConv2d(3, 3, 3, padding=1, impl=impl)
    yield Case("ApproxConv2d", approximate, image, conv)
    yield Case(lstm, nn.LSTM(4, 4), sequence, lstm)
    yield Case("rnn.LSTM", rnn.LSTM(4, 4, impl=impl), sequence, lstm)
    peephole = rnn.RNN(rnn.peephole_lstm, 4, 4, impl=impl)
    yield Case("RNN(peephole_lstm)", peephole, sequence, lstm)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--impl", default="auto", help="of our layers; default: auto")


def run(arguments: argparse.Namespace, head: dict[str, Any]) -> None:
    """Measures, shows and writes what the arguments ask for."""
    for name in arguments.device:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            rows = _measure(arguments.impl, torch.device(name))
        finally:
            torch.set_num_threads(threads)
        measured = {"method": METHOD, "device": name, "impl": arguments.impl, "rows": rows}
        write_json(arguments.out / f"calls_{name}.json", head | measured)
        show(_table(rows, name))


def _measure(impl: str, device: torch.device) -> list[dict[str, Any]]:
    made = [
        Case(case.name, case.layer.to(device), case.x.to(device), case.peer) for case in cases(impl)
    ]
    phases = [(case, phase, call) for case in made for phase, call in _phases(case).items()]
    for _, _, call in phases:
        for _ in range(WARM_UP):
            call()
    each_us: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for _ in range(TURNS):
        for case, phase, call in phases:
            each_us[case.name][phase].append(_microseconds(call, device))
    rows = []
    for case in made:
        row: dict[str, Any] = {"layer": case.name, "peer": case.peer}
        for phase, times in each_us[case.name].items():
            p20, *_, p80 = statistics.quantiles(times, n=5, method="inclusive")
            median = statistics.median(times)
            ratio = median / statistics.median(each_us[case.peer][phase])
            row[phase] = {"median_us": median, "p20_us": p20, "p80_us": p80, "ratio": ratio}
        rows.append(row)
    return rows


def _phases(case: Case) -> dict[str, Callable[[], None]]:
    """Returns what is timed: by its name, a function."""
    parameters = list(case.layer.parameters())
    cotangent = torch.randn_like(case.output())

    @torch.no_grad()
    def forward() -> None:
        case.output()

    def forward_backward() -> None:
        case.output().backward(cotangent)
        for parameter in parameters:
            parameter.grad = None

    return {"forward": forward, "forward_backward": forward_backward}


def _microseconds(call: Callable[[], None], device: torch.device) -> float:
    """Of one call, by the mean of several."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    for _ in range(CALLS):
        call()
    return 1e6 * (time.perf_counter() - begin) / CALLS


def _table(rows: list[dict[str, Any]], device: str) -> Table:
    table = Table("layer", "no gradient, µs", "ratio", "forward + backward, µs", "ratio",
                  title=f"host's time of a call, {device}")  # fmt: skip
    for row in rows:
        cells = [row["layer"]]
        for phase in ("forward", "forward_backward"):
            cells += [f"{row[phase]['median_us']:.0f}", f"{row[phase]['ratio']:.2f}"]
        table.add_row(*cells)
    return table
