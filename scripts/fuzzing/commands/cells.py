"""Random recurrent cells against their definition: ``python scripts/fuzz.py cells``.

The cells are those of :mod:`hoconv.tools.testing.random_cells`, half of them wild. ``interpret``
runs the programs of every schedule op by op in PyTorch. An implementation runs as a layer.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fuzzing.verdicts import Verdict
from hoconv import recurrent as rnn
from hoconv.dispatch.implementations import ImplementationError, choose
from hoconv.recurrent.frontend.cell import BoundCell
from hoconv.recurrent.ladder import SCHEDULES
from hoconv.recurrent.operator import OPERATOR
from hoconv.recurrent.schedule import plan
from hoconv.tools.commands import add_device_option
from hoconv.tools.testing.cells import CellCase, assert_close, gradients, join
from hoconv.tools.testing.random_cells import random_cell

METHOD = (
    "Each case is a cell drawn from the whole language: expressions of parameters alone, "
    "conditions in every position, constants with infinities and NaN, common subexpressions, one "
    "to four states and up to two inputs beside x, of several sizes; with lengths and resets or "
    "without, forwards or backwards. Outputs, final states and all gradients are compared in "
    "float64, to 1e-9, with the cell on tensors, differentiated by autograd. NaN is expected where "
    "the cell has NaN, unless only steps past the end of a sequence make it, and allowed where "
    "infinite values meet a state that no step reads. Refused: values used as conditions, or "
    "conditions as numbers, with the same message in all implementations."
)
INTERPRET = "interpret"


class Key(NamedTuple):
    """One case."""

    impl: str
    device: str
    seed: int
    number: int


def add_options(parser: argparse.ArgumentParser) -> None:
    known = (INTERPRET, *(name for name in OPERATOR.implementations if name != "reference"))
    parser.add_argument("--impl", nargs="+", choices=known, default=[INTERPRET],
                        help="default: interpret, the programs op by op")  # fmt: skip
    add_device_option(parser)


def keys(arguments: argparse.Namespace) -> list[Key]:
    numbers = [arguments.case] if arguments.case is not None else range(arguments.cases)
    found = []
    for device in arguments.device:
        for impl in arguments.impl:
            if impl != INTERPRET:
                try:
                    choose(OPERATOR, impl, device)
                except ImplementationError as error:
                    print(f"{impl} on {device}: not run: {error}")
                    continue
            found += [Key(impl, device, arguments.seed, number) for number in numbers]
    return found


def label(arguments: argparse.Namespace) -> str:
    """Returns the part of the file's name that depends on the options."""
    return "_".join(("cells", *arguments.impl, *arguments.device))


def row(key: Key) -> dict[str, str]:
    """Returns what identifies the row of a case."""
    return {"impl": key.impl, "device": key.device}


def run(key: Key, folder: Path, tell: Callable[[str], None]) -> Verdict:
    """Judges one cell."""
    draw = random.Random(f"{key.seed} {key.number}")
    wild, masked, resets, reverse = (draw.random() < 0.5 for _ in range(4))
    tell(f"{'wild' if wild else 'tame'}: masked={masked}, resets={resets}, reverse={reverse}")
    cell = random_cell(draw.randrange(2**31), wild)
    torch.manual_seed(key.number)
    judge = _interpreted if key.impl == INTERPRET else _run
    try:
        return judge(cell, key, masked, resets, reverse)
    except AssertionError as error:
        return Verdict("wrong", " ".join(str(error).split())[:400])


def _interpreted(cell: BoundCell, key: Key, masked: bool, resets: bool, reverse: bool) -> Verdict:
    try:
        case = CellCase(cell, key.device, masked=masked, resets=resets, reverse=reverse)
    except rnn.CellError as error:
        return Verdict("refused", str(error))
    for schedule in SCHEDULES:
        case.check_plan(plan(cell, torch.float64, schedule, **case.options))
    return Verdict("equal")


def _run(cell: BoundCell, key: Key, masked: bool, resets: bool, reverse: bool) -> Verdict:
    """Runs the cell as a layer, bidirectional if `reverse`."""
    found: dict[str, dict[str, Tensor] | str] = {}
    alone = None
    for impl in ("reference", key.impl):
        try:
            layer = rnn.RNN(cell.cell, cell.input_size, cell.hidden_size, bidirectional=reverse,
                            dtype=torch.float64, device=key.device, impl=impl)  # fmt: skip
        except rnn.CellError as error:
            found[impl] = str(error)
            continue
        torch.manual_seed(key.number)  # parameters, inputs and noise
        found[impl] = results = _results(layer, masked, resets)
        if impl == "reference" and masked and any(t.isnan().any() for t in results.values()):
            torch.manual_seed(key.number)
            alone = _results(layer, masked, resets, alone=True)
    exact, got = found["reference"], found[key.impl]
    if isinstance(exact, str) or isinstance(got, str):
        if exact == got:
            return Verdict("refused", str(exact))
        return Verdict("wrong", f"refused by one alone: {exact if isinstance(exact, str) else got}")
    assert_close(cell, got, exact, alone)
    return Verdict("equal")


def _results(layer: rnn.RNN, masked: bool, resets: bool, alone: bool = False) -> dict[str, Tensor]:
    """Computes output, final states and all gradients of a layer with random parameters; each
    sequence by itself and without steps past its end, if `alone`."""
    device = next(layer.parameters()).device
    T, B = 4, 3

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64).to(device).requires_grad_()

    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(drawn(*parameter.shape))
    x = drawn(T, B, layer.input_size)
    shapes = layer.runs[0][0].state_shapes
    beside = layer.runs[0][0].input_shapes
    inputs = {name: drawn(T, B, *shape) for name, shape in beside.items()}
    states = tuple(drawn(len(layer.runs), B, *shape) for shape in shapes.values())
    reset = torch.rand(T, B, device=device) < 0.3 if resets else None
    lengths = [2, 4, 1] if masked else [T] * B

    def call(rows: slice, steps: int, lengths: list[int] | None) -> dict[str, Tensor]:
        output, final = layer(
            x[:steps, rows],
            tuple(state[:, rows] for state in states),
            lengths,
            None if reset is None else reset[:steps, rows],
            **{name: t[:steps, rows] for name, t in inputs.items()},
        )
        finals = final if isinstance(final, tuple) else (final,)
        return {"output": output, **dict(zip(shapes, finals, strict=True))}

    if alone:
        outputs = join([call(slice(b, b + 1), n, None) for b, n in enumerate(lengths)], T, 1)
    else:
        outputs = call(slice(B), T, lengths if masked else None)
    leaves = {"d_x": x, **{f"d_{name}": t for name, t in inputs.items()},
              **{f"d_{name}": s for name, s in zip(shapes, states, strict=True)},
              **{f"d_{name}": p for name, p in layer.named_parameters()}}  # fmt: skip
    cotangents = {name: drawn(*t.shape).detach() for name, t in outputs.items()}
    return outputs | gradients(outputs, leaves, cotangents)
