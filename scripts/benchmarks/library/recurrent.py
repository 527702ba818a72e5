"""Times recurrent layers: ``python scripts/benchmark.py recurrent``.

Input and states of a layer have H features. The sections, in float32 and on a GPU in bfloat16:

- ``cells``: cells that no library has, against the definition, which PyTorch calls at every step.
  The cells of ``--compile`` also against torch.compile, which unrolls ``--compile-steps`` steps.
- ``published``: cells of papers (benchmarks/library/published.py), likewise; on a GPU also with
  schedule ``graph``.
- ``library``: LSTM and GRU against nn.LSTM and nn.GRU. On a GPU also with schedule ``graph``, which
  keeps no weights on the chip, and in float32 with TF32.
- ``ladder``: an LSTM with every schedule, against nn.LSTM, in float32.
- ``directions``: an LSTM in one direction, in both, and nn.LSTM in both.
- ``lengths``: an LSTM on sequences of lengths uniform in 1 to T, against nn.LSTM on the same
  sequences, packed, and on all steps of the padded ones.
- ``linear``: h = sigmoid(a) h + b, where a and b are the halves of the input, against a copy of as
  many bytes, and on a GPU the package accelerated-scan, where it is installed; minGRU against
  nn.GRU. On a CPU also against the definition.
- ``matrices``: cells whose state is a matrix for each head (benchmarks/library/matrices.py), on a
  CPU against the definition; in bfloat16 on a GPU against the package fla, where it is installed.
- ``latency``: the first calls of a new process, with an empty cache and with a full one.

Writes one file for each section, and draws ``library`` and ``ladder`` beside them::

    recurrent_<section>_<device>.json
        command, date, method
        environment       hoconv.tools.doctor.environment(), with the commit
        device, section
        rows              one for each case, precision and contender:
            cell, T, B, H, layers, precision, contender
            heads, keys           of the section matrices, where H is the input's size: keys, and
                                  values, of each head
            error                 null, "out of memory", or what was raised: then the rest is null
            forward, forward_backward    median_ms, p20_ms, p80_ms, repeats
            speed_up              phase -> the baseline's median over this one's; the baseline is
                                  the first contender of the case and precision
            cold                  of the sections linear and matrices, with cold caches: phase -> as
                                  forward; the phases are forward and backward, the latter by
                                  itself. On a GPU its own time: the calls are queued
            extra_memory_bytes    most that a forward and a backward hold beyond the input
            compile_s             of torch.compile: seconds of its first forward and backward
        geometric_means   of speed_up over the shapes, if there are several: cell, layers,
                          precision, contender, and the phases
    recurrent_latency_<device>.json
        command, date, method, environment, device, section, case
        seconds           "empty cache", "full cache" -> name of the call -> seconds
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from benchmarks.library.matrices import KINDS, has_fla
from benchmarks.library.precision import BFLOAT16, FLOAT32, TF32, Precision
from benchmarks.library.published import CELLS as PUBLISHED
from benchmarks.library.recurrent_report import (
    PHASES,
    draw_ladder,
    draw_library,
    latency_table,
    table,
)
from hoconv import recurrent as rnn
from hoconv.dispatch.declaration import Sample
from hoconv.recurrent import cells as ready
from hoconv.tools.benchmarking.measurement import (
    Contender,
    Timed,
    failure,
    mark,
    memory_limit,
    milliseconds_between,
    percentiles,
    take_turns,
    time_apart,
)
from hoconv.tools.commands import count, write_json
from hoconv.tools.tables import console, show

REPEATS = {"cpu": 5, "cuda": 10}
CALLS = {"cpu": 1, "cuda": 3}  # of a repeat, one after another
ENOUGH_S = {"cpu": 2.0, "cuda": 0.1}  # as of `take_turns`
APART_LIMIT_S = 240.0
FLA_LIMIT_S = 600.0  # it compiles and times many variants of its kernels first
METHOD = (
    "A layer of random parameters and input. forward: the layer, with gradients enabled; "
    "forward_backward: the same and torch.autograd.grad of the output with respect to the input "
    "and all parameters. A repeat is the mean time of some calls one after another, queued behind "
    "a call that is not timed: on a GPU, as in training, the longer of the host's time and the "
    "device's. Contenders take turns within one process, after warm-up; medians, "
    "20th and 80th percentiles. Clock: CUDA events, or time.perf_counter. Strict float32 is "
    "torch.backends.cuda.matmul.allow_tf32=False and torch.backends.cudnn.allow_tf32=False, tf32 "
    "both True. torch.compile: dynamic=False, fullgraph=True, in a process of its own. "
    "accelerated-scan and fla: likewise, with inputs in their own layouts. latency: a "
    "forward and backward, time.perf_counter, after PyTorch and its matrix products are set up."
)


@dataclass(frozen=True)
class Case:
    """A layer's sizes: T time steps, B batch, H hidden size."""

    cell: str
    T: int
    B: int
    H: int
    layers: int = 1


@dataclass(frozen=True)
class MatrixCase(Case):
    """The input has H features; the state is a matrix of keys x keys for each head."""

    heads: int = 1
    keys: int = 1


PRECISIONS = {"cpu": (FLOAT32,), "cuda": (FLOAT32, TF32, BFLOAT16)}
IMPLS = {"cpu": "cpp", "cuda": "cuda"}
CELLS = ("peephole_lstm", "layernorm_lstm", "coupled_lstm")
NN = {"lstm": nn.LSTM, "gru": nn.GRU}
SHAPES = {
    "cpu": ((28, 128, 128), (100, 64, 256), (100, 64, 512)),
    "cuda": (
        (28, 128, 128), (784, 128, 128), (100, 64, 512), (256, 16, 768), (128, 64, 1024),
        (512, 32, 2048),
    ),
}  # fmt: skip
# H is the input's size: that of the state is half of it.
LINEAR_SHAPES = {
    "cpu": ((1024, 8, 256), (1024, 64, 256)),
    "cuda": (
        (2048, 8, 2048), (4096, 8, 3072), (16384, 1, 2048), (65536, 1, 512), (128, 64, 1024),
        (1024, 16, 256), (2048, 256, 1024),
    ),
}  # fmt: skip
GRU_SHAPES = {"cpu": ((1024, 8, 128),), "cuda": ((1000, 64, 100), (4096, 8, 1024))}
MATRIX_SHAPES = {  # T, B, heads, keys
    "cpu": ((256, 2, 4, 32),),
    "cuda": ((2048, 8, 8, 128), (8192, 1, 32, 128)),
}
LONGEST = {"cpu": 200, "cuda": 1000}  # T of the section lengths
TYPICAL = (100, 64, 512)  # T, B, H
SMALLER = (100, 32, 256)

COLD_PHASES = "forward", "backward"
Turn = Callable[[Contender, Timed], dict[str, float]]  # as of `take_turns`
# A layer, and the function of its input that is timed.
Timeable = tuple[nn.Module, Callable[[Tensor], Tensor]]
# Makes the layer of a case.
Way = Callable[[Case, torch.device, torch.dtype], Timeable]


def ours(impl: str, schedule: str = "auto", bidirectional: bool = False) -> Way:
    """Returns the way to make our layer with an implementation and a schedule."""

    def make(case: Case, device: torch.device, dtype: torch.dtype) -> Timeable:
        layer = rnn.RNN(
            find_cell(case.cell), case.H, case.H, case.layers, bidirectional, schedule=schedule,
            impl=impl, device=device, dtype=dtype,
        )  # fmt: skip
        return layer, lambda x: layer(x)[0]

    return make


def find_cell(name: str) -> rnn.Cell:
    return next((cell for cell in PUBLISHED if cell.name == name), None) or getattr(ready, name)


def make_pytorch(
    case: Case, device: torch.device, dtype: torch.dtype, bidirectional: bool = False,
    module: Callable[..., nn.Module] | None = None,
) -> Timeable:  # fmt: skip
    sizes = {"bidirectional": bidirectional, "device": device, "dtype": dtype}
    layer = (module or NN[case.cell])(case.H, case.H, case.layers, **sizes)
    return layer, lambda x: layer(x)[0]


def with_lengths(make: Way) -> Way:
    """Returns a way whose layer is called with random lengths."""

    def make_with_lengths(case: Case, device: torch.device, dtype: torch.dtype) -> Timeable:
        layer, _ = make(case, device, dtype)
        lengths = _lengths(case)
        return layer, lambda x: layer(x, None, lengths)[0]

    return make_with_lengths


def make_packed(case: Case, device: torch.device, dtype: torch.dtype) -> Timeable:
    layer, _ = make_pytorch(case, device, dtype)
    lengths = _lengths(case)

    def run(x: Tensor) -> Tensor:
        sequence = pack_padded_sequence(x, lengths, enforce_sorted=False)
        return pad_packed_sequence(layer(sequence)[0])[0]

    return layer, run


def _lengths(case: Case) -> Tensor:
    drawn = torch.randint(1, case.T + 1, (case.B,), generator=torch.Generator().manual_seed(0))
    drawn[0] = case.T
    return drawn


def cells(device: str, precision: Precision) -> Iterator[tuple[Case, dict[str, Way]]]:
    ways = {"reference": ours("reference"), "ours": ours(IMPLS[device])}
    for cell in () if precision.tf32 else CELLS:
        yield Case(cell, *TYPICAL), ways


def published(device: str, precision: Precision) -> Iterator[tuple[Case, dict[str, Way]]]:
    ways = {"reference": ours("reference"), "ours": ours(IMPLS[device])}
    if device == "cuda":
        ways["ours, graph"] = ours(IMPLS[device], "graph")
    for cell in () if precision.tf32 else PUBLISHED:
        yield Case(cell.name, *SMALLER), ways


def library(device: str, precision: Precision) -> Iterator[tuple[Case, dict[str, Way]]]:
    for cell, theirs in NN.items():
        for shape in SHAPES[device]:
            case, impl = Case(cell, *shape), IMPLS[device]
            ways = {f"nn.{theirs.__name__}": make_pytorch, "ours": ours(impl)}
            if device == "cuda":
                ways["ours, graph"] = ours(impl, "graph")
            yield case, ways


def ladder(device: str, precision: Precision) -> Iterator[tuple[Case, dict[str, Way]]]:
    if precision == FLOAT32:
        rungs = {name: ours(IMPLS[device], name) for name in rnn.SCHEDULES if name != "auto"}
        for layers in (1, 4):
            yield Case("lstm", *TYPICAL, layers), rungs | {"nn.LSTM": make_pytorch}


def directions(device: str, precision: Precision) -> Iterator[tuple[Case, dict[str, Way]]]:
    ways: dict[str, Way] = {
        "ours, one direction": ours(IMPLS[device]),
        "ours, both": ours(IMPLS[device], bidirectional=True),
        "nn.LSTM, both": functools.partial(make_pytorch, bidirectional=True),
    }
    for shape in () if precision.tf32 else SHAPES[device]:
        yield Case("lstm", *shape), ways


def lengths(device: str, precision: Precision) -> Iterator[tuple[Case, dict[str, Way]]]:
    ways = {
        "nn.LSTM, packed": make_packed,
        "nn.LSTM, all steps": make_pytorch,
        "ours": with_lengths(ours(IMPLS[device])),
    }
    if not precision.tf32:
        yield Case("lstm", LONGEST[device], *TYPICAL[1:]), ways


@rnn.cell(state=("h",))
def gated_sum(x: Any, h: Any) -> Any:
    """The smallest linear recurrence."""
    a, b = rnn.chunk(x, 2)
    h = rnn.sigmoid(a) * h + b
    return h, dict(h=h)


class _Copies(torch.autograd.Function):
    """Copies as many bytes as `gated_sum` must read and write: of n numbers of a state, 3 n forward
    (a, b, h) and 5 n backward (the gradient of h, a, h, those of a and b)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        n = x.numel() // 2
        ctx.shape = x.shape
        to, given = x.new_empty(2, 3 * n // 2)
        to.copy_(given)
        return to[:n].view(*x.shape[:-1], x.shape[-1] // 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        n = gradient.numel()
        to, given = gradient.new_empty(2, 5 * n // 2)
        to.copy_(given)
        return to[: 2 * n].view(ctx.shape)


def make_copies(case: Case, device: torch.device, dtype: torch.dtype) -> Timeable:
    return nn.Identity(), _Copies.apply


def make_gated_sum(impl: str) -> Way:
    def make(case: Case, device: torch.device, dtype: torch.dtype) -> Timeable:
        layer = rnn.RNN(gated_sum, case.H, case.H // 2, impl=impl, device=device, dtype=dtype)
        return layer, lambda x: layer(x)[0]

    return make


def make_accelerated_scan(case: Case, device: torch.device, dtype: torch.dtype) -> Timeable:
    """In the layout of that package: (B, n, T), T contiguous; its input is there already."""
    from accelerated_scan.warp import scan  # pyright: ignore[reportMissingImports]

    def run(x: Tensor) -> Tensor:
        a, b = x.view(2, case.B, case.H // 2, case.T)
        return scan(torch.sigmoid(a), b)

    return nn.Identity(), run


def has_accelerated_scan() -> bool:
    return importlib.util.find_spec("accelerated_scan") is not None


def linear(device: str, precision: Precision) -> Iterator[tuple[Case, dict[str, Way]]]:
    impl = IMPLS[device]
    ways = {"copy": make_copies, "ours": make_gated_sum(impl)}
    theirs: dict[str, Way] = {"nn.GRU": functools.partial(make_pytorch, module=nn.GRU)}
    if device == "cpu":
        ways["reference"] = make_gated_sum("reference")
        theirs["reference"] = ours("reference")
    for shape in () if precision.tf32 else LINEAR_SHAPES[device]:
        yield Case(gated_sum.name, *shape), ways
    for shape in () if precision.tf32 else GRU_SHAPES[device]:
        yield Case("min_gru", *shape), theirs | {"ours": ours(impl)}


def make_matrices(impl: str, heads: int, keys: int) -> Way:
    def make(case: Case, device: torch.device, dtype: torch.dtype) -> Timeable:
        layer = rnn.RNN(
            KINDS[case.cell].cell, case.H, heads * keys, impl=impl, device=device, dtype=dtype,
            heads=heads, keys=keys, values=keys,
        )  # fmt: skip
        return layer, lambda x: layer(x)[0]

    return make


def make_fla(case: Case, device: torch.device, dtype: torch.dtype) -> Timeable:
    """Makes fla's function, of inputs in its layout, each a tensor of its own."""
    return nn.Identity(), KINDS[case.cell].load_fla()


def fla_shapes(case: MatrixCase) -> list[tuple[int, ...]]:
    kind, rows = KINDS[case.cell], (case.B, case.T, case.heads)
    return [(*rows, case.keys)] * kind.wide + [rows] * kind.scalars


def matrices(device: str, precision: Precision) -> Iterator[tuple[Case, dict[str, Way]]]:
    impls = {"reference": "reference"} if device == "cpu" else {}
    impls["ours"] = IMPLS[device]
    for cell, kind in () if precision.tf32 else KINDS.items():
        for T, B, heads, keys in MATRIX_SHAPES[device]:
            case = MatrixCase(cell, T, B, kind.count_features(heads, keys), heads=heads, keys=keys)
            yield case, {name: make_matrices(impl, heads, keys) for name, impl in impls.items()}


DRAWN = {"library": draw_library, "ladder": draw_ladder}
SECTIONS = {
    "cells": cells, "published": published, "library": library, "ladder": ladder,
    "directions": directions, "lengths": lengths, "linear": linear, "matrices": matrices,
}  # fmt: skip
COLD = "linear", "matrices"  # sections whose calls are also timed with cold caches
LATENCY = "latency"
KEY = "cell", "layers", "precision", "contender"


def add_options(parser: argparse.ArgumentParser) -> None:
    names = [*SECTIONS, LATENCY]
    parser.add_argument("--sections", nargs="+", choices=names, default=names,
                        help="default: all of them")  # fmt: skip
    parser.add_argument("--compile", nargs="+", choices=CELLS, default=[],
                        help="cells to time torch.compile of, too")  # fmt: skip
    parser.add_argument("--compile-steps", type=count, default=TYPICAL[0], metavar="N",
                        help="steps to compile at a time; default: all, in minutes")  # fmt: skip


def run(arguments: argparse.Namespace, head: dict[str, Any]) -> None:
    """Measures, shows and writes the results."""
    for device in arguments.device:
        for section in arguments.sections:
            measured = head | {"method": METHOD, "device": device, "section": section}
            path = arguments.out / f"recurrent_{section}_{device}.json"
            if section == LATENCY:
                measured |= latency(device)
                show(latency_table(measured))
            else:
                for found in measure(section, device, arguments.compile, arguments.compile_steps):
                    measured |= found
                    write_json(path, measured, say=False)  # a case may take minutes
                show(table(measured))
            write_json(path, measured)
            if draw := DRAWN.get(section):
                draw(measured, path.with_suffix(".png"))


def measure(
    section: str, device_type: str, compiled: Sequence[str] = (), steps: int = TYPICAL[0]
) -> Iterator[dict[str, Any]]:
    """Times a section's contenders on one device; yields the contents of its JSON after each
    case."""
    device = torch.device(device_type)
    rows: list[dict[str, Any]] = []
    with memory_limit(device_type), Progress(console=console(), transient=True) as progress:
        task = progress.add_task(section, total=None)
        for precision in PRECISIONS[device_type]:
            for case, ways in SECTIONS[section](device_type, precision):
                label = {**asdict(case), "precision": precision.name}
                progress.update(task, description=", ".join(map(str, label.values())))
                with precision.in_force():
                    turn = time_cold_too if section in COLD else time_in_a_row
                    timed = _compete(case, ways, device, precision.dtype, turn)
                apart = functools.partial(
                    _apart, case=case, device=device_type, precision=precision
                )
                if section == "cells" and case.cell in compiled:
                    name = "torch.compile" if steps >= case.T else f"torch.compile, {steps} steps"
                    timed.append(apart(name, compete_compiled, steps=steps))
                if device_type == "cuda" and case.cell == gated_sum.name and has_accelerated_scan():
                    # It has read outside its memory, which ends the process.
                    timed.append(apart("accelerated-scan", compete_accelerated_scan))
                if section == "matrices" and precision == BFLOAT16 and has_fla():
                    timed.append(apart("fla", compete_fla, limit_s=FLA_LIMIT_S))
                rows += [label | row for row in _compared(timed)]
                yield {"rows": rows, "geometric_means": geometric_means(rows)}


def _compete(
    case: Case, ways: Mapping[str, Way], device: torch.device, dtype: torch.dtype, turn: Turn,
    shapes: Sequence[tuple[int, ...]] = (),
) -> list[dict[str, Any]]:  # fmt: skip
    """Measures one case; returns a row for each way. The inputs have `shapes`, by default that of
    a layer."""
    inputs = tuple(
        torch.randn(shape, device=device, dtype=dtype)
        for shape in shapes or ((case.T, case.B, case.H),)
    )
    contenders = []
    for name, make in ways.items():
        layer, function = make(case, device, dtype)
        contender = Contender(name, function, Sample(inputs))
        contender.leaves += layer.parameters()
        contenders.append(contender)
    take_turns(
        contenders,
        turn,
        device,
        REPEATS[device.type],
        lambda _: None,
        ENOUGH_S[device.type],
    )
    return [
        {
            "contender": contender.name,
            "error": contender.error,
            **{phase: percentiles(times) if (times := contender.times_ms[phase]) else None
               for phase in PHASES},
            "cold": {phase: percentiles(times) for phase in COLD_PHASES
                     if (times := contender.times_ms[f"cold {phase}"])},
            "extra_memory_bytes": contender.extra_memory,
        }
        for contender in contenders
    ]  # fmt: skip


def time_in_a_row(contender: Contender, _timed: Timed) -> dict[str, float]:
    """Times several calls one after another, as `METHOD` describes."""
    device = contender.leaves[0].device
    times = {}
    for phase, call in zip(PHASES, (contender.forward, contender.both), strict=True):
        begin = mark(device)
        for _ in range(CALLS[device.type]):
            call()
        times[phase] = milliseconds_between(begin, mark(device)) / CALLS[device.type]
    return times


def time_cold_too(contender: Contender, timed: Timed) -> dict[str, float]:
    """Also times a forward and a backward with cold caches."""
    apart = time_apart(contender, timed)
    cold = {f"cold {phase}": apart[phase] for phase in COLD_PHASES}
    return time_in_a_row(contender, timed) | cold


def _compared(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    baseline = rows[0]
    for row in rows:
        yield row | {"speed_up": None if row["error"] or baseline["error"] else {
            phase: baseline[phase]["median_ms"] / row[phase]["median_ms"] for phase in PHASES
        }}  # fmt: skip


def _apart(
    name: str, compete: Callable[..., dict[str, Any]], *, case: Case, device: str,
    precision: Precision, limit_s: float | None = None, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Returns the row of a contender from a process of its own, which may crash, and is killed if
    it takes longer than `limit_s`, by default `APART_LIMIT_S`."""
    limit_s = APART_LIMIT_S if limit_s is None else limit_s
    row = {"contender": name, **dict.fromkeys(PHASES), "cold": {}, "extra_memory_bytes": None}
    given = json.dumps(
        {**asdict(case), "device_type": device, "precision": precision.name, **options}
    )
    try:
        return row | _elsewhere(_COMPETE, compete.__name__, given, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return row | {"error": f"not done after {limit_s:g} s"}
    except subprocess.CalledProcessError as error:
        return row | {"error": f"crashed, exit status {error.returncode}"}


_COMPETE = """
import json, sys
from benchmarks.library import recurrent
print(json.dumps(getattr(recurrent, sys.argv[1])(**json.loads(sys.argv[2]))))
"""


def compete_accelerated_scan(device_type: str, precision: str, **sizes: Any) -> dict[str, Any]:
    """Times the package; returns a row without a name."""
    (setting,) = (p for p in PRECISIONS[device_type] if p.name == precision)
    ways: dict[str, Way] = {"": make_accelerated_scan}
    (row,) = _compete(Case(**sizes), ways, torch.device(device_type), setting.dtype, time_cold_too)
    del row["contender"]
    return row


def compete_fla(device_type: str, precision: str, **sizes: Any) -> dict[str, Any]:
    """Times the package; returns a row without a name."""
    (setting,) = (p for p in PRECISIONS[device_type] if p.name == precision)
    case, device = MatrixCase(**sizes), torch.device(device_type)
    try:
        ways: dict[str, Way] = {"": make_fla}
        (row,) = _compete(case, ways, device, setting.dtype, time_cold_too, fla_shapes(case))
    except Exception as error:  # of any type, from Triton's compiler among others
        return {"error": (str(error).strip() or type(error).__name__).splitlines()[0]}
    del row["contender"]
    return row


def compete_compiled(device_type: str, precision: str, steps: int, **sizes: Any) -> dict[str, Any]:
    """Compiles `steps` steps of the definition and times all; returns a row without a name."""
    case, device = Case(**sizes), torch.device(device_type)
    (setting,) = (p for p in PRECISIONS[device_type] if p.name == precision)
    layer, _ = ours("reference")(case, device, setting.dtype)
    some_steps = torch.compile(layer, dynamic=False, fullgraph=True)

    def function(x: Tensor) -> Tensor:
        outputs, states = [], first
        for part in x.split(steps):
            output, states = some_steps(part, states)
            outputs.append(output)
        return torch.cat(outputs)

    x = torch.randn(case.T, case.B, case.H, device=device, dtype=setting.dtype)
    with torch.no_grad():
        first = tuple(torch.zeros_like(state) for state in layer(x[:1])[1])
    with setting.in_force():
        begin = time.perf_counter()
        error = failure(lambda: function(x.requires_grad_()).sum().backward())
        seconds = time.perf_counter() - begin
        if error:
            return {"error": error}
        ways: dict[str, Way] = {"": lambda *_: (layer, function)}
        (row,) = _compete(case, ways, device, setting.dtype, time_in_a_row)
    del row["contender"]
    return row | {"compile_s": seconds}


def geometric_means(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the geometric mean of the speed-up over the shapes of each `KEY`."""
    found: dict[tuple[Any, ...], list[dict[str, float]]] = {}
    for row in rows:
        if row["speed_up"]:
            key = tuple(row[name] for name in KEY)
            found.setdefault(key, []).append(row["speed_up"])
    return [
        dict(zip(KEY, key))
        | {phase: math.exp(sum(math.log(s[phase]) for s in each) / len(each)) for phase in PHASES}
        for key, each in found.items()
        if len(each) > 1
    ]


_FIRST_CALLS = """
import json, sys, time, torch
device, impl, (T, B, H) = *sys.argv[1:3], map(int, sys.argv[3:])
w = torch.randn(H, H, device=device, requires_grad=True)
(w @ w).sum().backward()
from hoconv import recurrent as rnn
layer = rnn.RNN(rnn.peephole_lstm, H, H, device=device, impl=impl)
def call(T, B):
    begin = time.perf_counter()
    layer(torch.randn(T, B, H, device=device))[0].sum().backward()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin
calls = {"first": (T, B), "again": (T, B), "new length": (T - 1, B), "new batch": (T, B // 2)}
print(json.dumps({name: call(*sizes) for name, sizes in calls.items()}))
"""


def latency(device: str) -> dict[str, Any]:
    """Measures the seconds of the first calls, with an empty and with a full cache."""
    sizes = map(str, TYPICAL)
    with tempfile.TemporaryDirectory() as cache:
        arguments = _FIRST_CALLS, device, IMPLS[device], *sizes
        seconds = {
            state: _elsewhere(*arguments, TORCH_EXTENSIONS_DIR=cache)
            for state in ("empty cache", "full cache")
        }
    return {"case": asdict(Case("peephole_lstm", *TYPICAL)), "seconds": seconds}


def _elsewhere(
    program: str, *arguments: str, timeout: float | None = None, **environment: str
) -> dict[str, Any]:
    """Runs a program in a process of its own; returns the JSON of the last line that it prints."""
    path = os.pathsep.join(sys.path)  # hoconv need not be installed
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], check=True, timeout=timeout, text=True,
        env={**os.environ, "PYTHONPATH": path, **environment}, stdout=subprocess.PIPE,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])
