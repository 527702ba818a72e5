"""Running a sequence: each call of the layer against copies that were never called."""

from __future__ import annotations

import contextlib
import functools
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from fuzzing.draw import Draw
from fuzzing.sequences import calls
from fuzzing.sequences.calls import Call, Results, Way, backward, plain
from fuzzing.sequences.changes import LINES, NAMES, World, copied
from fuzzing.sequences.layers import KINDS, Arguments, arguments, make

LENGTH = 40
_CALLS = 0.5  # the share of calls among the operations
# The largest relative error of results by dtype: between calls of one implementation, and between
# implementations.
_SAME = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
_OTHER = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 1e-1, torch.float16: 1e-1}
_ROUNDED = dict.fromkeys(_OTHER, 1e-1) | {torch.float64: 1e-9}  # in calls.autocast


class Case(NamedTuple):
    """A kind of layer, where it runs, the key of its draws, and the ways left out."""

    kind: str
    impl: str
    device: str
    key: str
    without: Sequence[str]


class Refusal(NamedTuple):
    """An error of a call, without its traceback, which would keep the call's graph."""

    kind: type
    text: str


class Fault(NamedTuple):
    """The first disagreement of a sequence: at which operation, and what it is."""

    at: int
    why: str
    said: tuple[str, ...]


def operations(key: str) -> list[int]:
    """Returns the operations of a sequence: each is the seed of its own draws."""
    draw = Draw(key, "operations")
    return [draw.integer(0, 2**40) for _ in range(LENGTH)]


def run(
    case: Case, seeds: Sequence[int], tell: Callable[[str], None] = lambda text: None
) -> Fault | None:
    """Runs the operations of these seeds; returns the first fault."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        kind = KINDS[case.kind]
        layer, text = make(kind, Draw(case.key, "layer"), case.impl, case.device)
        world = World(kind, case.impl, {**NAMES, "layer": layer})
        said = [f"layer = {text}"]
        try:
            for at, seed in enumerate(seeds):
                draw = Draw(seed, device=case.device)
                if draw.chance(_CALLS):
                    if fault := _call(world, draw, seed, case.without, said, tell):
                        return Fault(at, fault, tuple(said))
                    world.take_back(world.mend)
                else:
                    # Not every line applies to every layer.
                    with contextlib.suppress(Exception):
                        said.append(world.change(draw.weighted(LINES), draw))
        finally:
            world.take_back(world.undo + world.mend)
    return None


def _call(
    world: World, draw: Draw, seed: int, without: Sequence[str], said: list[str],
    tell: Callable[[str], None],
) -> str | None:  # fmt: skip
    """Calls the layer and its copies in one way; returns how they disagree."""

    def drawn() -> Arguments:
        return arguments(world.kind, Draw(seed, "arguments", device=draw.device), world.layer)

    with torch.no_grad():
        given = drawn()
    outputs, derived = (
        ways[draw.weighted({n: way.weight for n, way in ways.items() if n not in without})]
        for ways in (calls.OUTPUTS, calls.DERIVED)
    )
    packed = isinstance(given.args[0], PackedSequence)
    # Compiled autograd of torch 2.11 does not take subclasses of tensors.
    subclass = derived is calls.compiled_autograd and type(given.args[0]) is not Tensor
    outputs = plain if packed and not outputs.packed else outputs
    derived = backward if subclass or (packed and not derived.packed) else derived
    derived = derived if outputs is plain or outputs is calls.functional else backward
    said.append(f"{outputs.run.__name__}, {derived.run.__name__}: {given.text}")
    tell("; ".join(said))
    try:
        cold, reference, called = (copied(world.layer) for _ in range(3))
    except Exception:
        return None  # PyTorch cannot copy every layer that it can call
    reference.impl = "reference"
    outcome = functools.partial(_outcome, drawn, seed)
    before = {n: t.detach().clone() for n, t in world.layer.state_dict().items()}
    got = outcome(world.layer, outputs, derived)
    after = world.layer.state_dict()
    if changed := [n for n, t in before.items() if n not in after or _unlike(after[n], t, {})]:
        return f"the call changed {changed}"
    if why := _differ(got, outcome(cold, outputs, derived), _SAME):
        return f"warm and cold: {why}"
    if isinstance(got, Refusal):
        pytorchs = derived.refused and derived.refused in got.text
        if pytorchs or (derived is calls.func_jvp and issubclass(got.kind, NotImplementedError)):
            return None
    simple = outputs.plain or outputs, derived.plain or derived
    if simple != (outputs, derived) and (why := _differ(got, outcome(cold, *simple), _OTHER)):
        return f"{said[-1].partition(':')[0]} and a plain call: {why}"
    if outputs.alone:
        return None
    tolerances = _ROUNDED if outputs is calls.autocast else _OTHER
    if why := _differ(got, outcome(reference, *simple), tolerances):
        return f"{world.impl} and reference: {why}"
    altered = any("._" in line for line in world.undo)  # a private method, or a class
    if altered or not isinstance(generator := getattr(called, "generator", None), nn.Module):
        return None
    # A layer calls a generator that overrides a method, and computes what any other one does.
    forward = functools.partialmethod(type(generator).forward)
    generator.__class__ = type("Called", (type(generator),), {"forward": forward})
    expected = outcome(called, *simple)
    refused = isinstance(got, Refusal) or isinstance(expected, Refusal)
    why = None if refused else _differ(got, expected, tolerances)
    return why and f"{world.impl} and the generator called: {why}"


def _outcome(
    drawn: Callable[[], Arguments], seed: int, layer: Any, outputs: Way, derived: Way
) -> Results | Refusal:
    enabled = torch.is_grad_enabled()
    try:
        return calls.results(outputs, derived, Call(layer, drawn, seed))
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)[-3:]
        lines = " < ".join(f"{f.filename.rpartition('/')[2]}:{f.lineno}" for f in reversed(frames))
        message = " ".join(str(error).split())[:200]
        return Refusal(type(error), f"{type(error).__name__}: {message} ({lines})")
    finally:
        torch.set_grad_enabled(enabled)


def _differ(
    got: Results | Refusal, expected: Results | Refusal, tolerances: dict[torch.dtype, float]
) -> str | None:
    if isinstance(got, Refusal) or isinstance(expected, Refusal):
        kinds = [r.kind if isinstance(r, Refusal) else None for r in (got, expected)]
        texts = [r.text if isinstance(r, Refusal) else "no error" for r in (got, expected)]
        return None if kinds[0] is kinds[1] else f"got {texts[0]}; expected {texts[1]}"
    if tolerances is _SAME and got.keys() != expected.keys():
        return f"expected {sorted(expected)}, got {sorted(got)}"
    for name in got | expected:
        value, right = got.get(name), expected.get(name)
        if tolerances is not _SAME:
            # An implementation may not see that no result depends on a leaf, and returns zeros for
            # other gradients that are None.
            if name.endswith("'s gradient"):
                continue
            value = torch.zeros_like(right) if value is None and right is not None else value
            right = torch.zeros_like(value) if right is None and value is not None else right
        if why := _unlike(value, right, tolerances):
            return f"{name}: {why}"
    return None


def _unlike(value: Any, right: Any, tolerances: dict[torch.dtype, float]) -> str | None:
    if not isinstance(value, Tensor) or not isinstance(right, Tensor):
        same = type(value) is type(right) and value == right
        return None if same else f"got {value!r:.50}, expected {right!r:.50}"
    allowed = tolerances.get(right.dtype, 0.0)
    norm = right.nan_to_num(0, 0, 0).double().norm().item()
    floor = 1e-2 if allowed < 1e-6 else 1.0  # the norm below which errors are absolute
    try:
        torch.testing.assert_close(
            value, right, rtol=0, atol=allowed * (norm + floor), equal_nan=True, check_stride=False
        )
    except AssertionError as error:
        return " ".join(str(error).split())[:150]
    return None


def shrink(
    case: Case, seeds: Sequence[int], fault: Fault, seconds: float
) -> tuple[list[int], Fault]:
    """Drops operations while the same sort of fault remains."""
    end = time.monotonic() + seconds
    kept = [*seeds[: fault.at + 1]]
    size = max(1, len(kept) // 2)
    while size:
        at = 0
        while at < len(kept) - 1 and time.monotonic() < end:
            fewer = [*kept[:at], *kept[min(at + size, len(kept) - 1) :]]
            found = run(case, fewer)
            if found and found.why.partition(":")[0] == fault.why.partition(":")[0]:
                kept, fault = fewer[: found.at + 1], found
            else:
                at += size
        size //= 2
    return kept, fault
