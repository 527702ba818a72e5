"""Running a sequence: each call of the layer against a copy that was never called.

The truth of a call comes from up to three copies: one with the same implementation; one with
``impl="reference"``; and one whose forward is the definition in plain PyTorch.
"""

from __future__ import annotations

import functools
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from fuzzing.draw import Draw
from fuzzing.sequences.calls import Call, Results, backward
from fuzzing.sequences.changes import CHANGES
from fuzzing.sequences.layers import make
from fuzzing.sequences.modes import ALONE, MODES, NOT_PACKED, PLAIN, REFUSED, Mode
from fuzzing.sequences.surroundings import autocast, compiled, compiled_autograd
from fuzzing.sequences.transforms import func_jvp
from fuzzing.sequences.world import World

LENGTH = 40
_CALLS = 0.5  # the share of calls among the operations
# The largest relative error of results by dtype: between calls of one implementation, and between
# implementations.
_SAME = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
_OTHER = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 1e-1, torch.float16: 1e-1}
_FLOOR = 1e-2  # the norm below which errors are absolute


class Case(NamedTuple):
    """A kind of layer, where it runs, the key of its draws, and the operations left out."""

    kind: str
    impl: str
    device: str
    key: str
    without: Sequence[str]


@dataclass(frozen=True)
class Refusal:
    """An error of a call, without its traceback, which would keep the call's graph."""

    kind: type
    text: str


@dataclass(frozen=True)
class Fault:
    """The first disagreement of a sequence: at which operation, and what it is."""

    at: int
    why: str
    said: tuple[str, ...]


def operations(key: str) -> list[int]:
    """Returns the operations of a sequence: each is the seed of its own draws."""
    draw = Draw(key, "operations")
    return [draw.integer(0, 2**40) for _ in range(LENGTH)]


def _weighted(draw: Draw, weights: dict[Any, float]) -> Any:
    at = draw.integer(0, 10**9) / 10**9 * sum(weights.values())
    for value, weight in weights.items():
        at -= weight
        if at <= 0:
            return value
    return next(iter(weights))


def run(
    case: Case, seeds: Sequence[int], tell: Callable[[str], None] = lambda text: None
) -> Fault | None:
    """Runs the operations of these seeds; returns the first fault."""
    kind, impl, device, key, without = case
    said: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        made = make(kind, Draw(key, "layer"), impl, device)
        said.append(f"layer = {made.text}, impl={impl!r}")
        world = World(made, made.layer)
        try:
            for at, seed in enumerate(seeds):
                draw = Draw(seed, device=device)
                if draw.chance(_CALLS):
                    mode = _weighted(draw, MODES)
                    if mode.__name__ in without:
                        continue
                    fault = _call(world, draw, mode, seed, impl, said, tell)
                    if fault:
                        return Fault(at, fault, tuple(said))
                    world.mend_all()
                    continue
                change = _weighted(draw, CHANGES)
                if change.__name__ in without:
                    continue
                try:
                    text = change(world, draw)
                except Exception as error:
                    text = f"({change.__name__}: {type(error).__name__}: {str(error)[:80]})"
                if text:
                    said.append(text)
                    tell("; ".join(said))
        finally:
            world.end()
    return None


def _call(
    world: World, draw: Draw, mode: Mode, seed: int, impl: str, said: list[str],
    tell: Callable[[str], None],
) -> str | None:  # fmt: skip
    def arguments() -> Any:
        return world.made.arguments(
            Draw(seed, "arguments", device=draw.device), world.made, world.layer
        )

    call = Call(arguments, seed)
    with torch.no_grad():
        given = arguments()
    # torch.compile does not see hooks of all modules and patches of PyTorch, and fails elsewhere
    # where shapes do not fit.
    altered = mode is compiled and (world.undo or world.mend)
    # Nor does compiled autograd of torch 2.11 take subclasses of tensors.
    subclass = mode is compiled_autograd and type(given.args[0]) is not Tensor
    if altered or subclass or (mode in NOT_PACKED and isinstance(given.args[0], PackedSequence)):
        mode = backward
    said.append(f"{mode.__name__}: {given.text}")
    tell("; ".join(said))
    plain = PLAIN.get(mode, mode)
    try:
        cold, reference, own = world.copy(), world.copy(), world.copy()
    except Exception as error:
        said[-1] += f" (not copied: {type(error).__name__})"
        return None
    reference.impl = "reference"
    before = {n: t.detach().clone() for n, t in world.layer.state_dict().items()}
    got = _outcome(world.layer, call, mode)
    if why := _changed(before, world.layer.state_dict()):
        return f"the call changed {why}"
    if why := _differ(got, _outcome(cold, call, mode), _SAME):
        return f"warm and cold: {why}"
    if isinstance(got, Refusal) and mode in REFUSED and REFUSED[mode] in got.text:
        return None
    if plain is not mode and (why := _differ(got, _outcome(cold, call, plain), _OTHER)):
        return f"{mode.__name__} and {plain.__name__}: {why}"
    documented = isinstance(got, Refusal) and issubclass(got.kind, NotImplementedError)
    if mode in ALONE or (documented and mode is func_jvp):
        return None
    low = mode is autocast
    tolerances = (
        dict.fromkeys(_OTHER, _OTHER[torch.bfloat16]) | {torch.float64: 1e-9} if low else _OTHER
    )
    if why := _differ(got, _outcome(reference, call, plain), tolerances):
        return f"{impl} and reference: {why}"
    # On a GPU the mask of a dropout depends on how the tensor lies in memory.
    masked = world.layer.training and getattr(world.layer, "weight_dropout", 0)
    define = None if masked and draw.device != "cpu" else world.made.define
    if define is None or world.foreign or "forward" in vars(own) or isinstance(got, Refusal) or low:
        return None
    own.forward = functools.partial(define, own)
    expected = _outcome(own, call, plain)
    if isinstance(expected, Refusal):
        return None
    if why := _differ(got, expected, tolerances):
        return f"{impl} and the definition: {why}"
    return None


def _outcome(layer: Any, call: Call, mode: Mode) -> Results | Refusal:
    enabled = torch.is_grad_enabled()
    try:
        return mode(layer, call)
    except Exception as error:
        return Refusal(type(error), _where(error))
    finally:
        torch.set_grad_enabled(enabled)


def _changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> str | None:
    if before.keys() != after.keys():
        return "the names of the state dict"
    for name, tensor in before.items():
        if not torch.equal(tensor.nan_to_num(), after[name].nan_to_num()):
            return name
    return None


def _where(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    lines = " < ".join(f"{f.filename.rpartition('/')[2]}:{f.lineno}" for f in reversed(frames))
    return f"{type(error).__name__}: {str(error).strip()[:200]} ({lines})".replace("\n", " ")


def _differ(
    got: Results | Refusal, expected: Results | Refusal, tolerances: dict[torch.dtype, float]
) -> str | None:
    if isinstance(got, Refusal) or isinstance(expected, Refusal):
        if isinstance(got, Refusal) and isinstance(expected, Refusal) and got.kind is expected.kind:
            return None
        texts = [r.text if isinstance(r, Refusal) else "no error" for r in (got, expected)]
        return f"got {texts[0]}; expected {texts[1]}"
    if tolerances is _SAME and got.keys() != expected.keys():
        return f"expected {sorted(expected)}, got {sorted(got)}"
    for name in got | expected:
        value, right = got.get(name), expected.get(name)
        if tolerances is not _SAME and name.endswith("'s gradient"):
            continue  # an implementation may not see that no result depends on a leaf
        if tolerances is not _SAME:  # which zeros are None differs between implementations
            value = torch.zeros_like(right) if value is None and right is not None else value
            right = torch.zeros_like(value) if right is None and value is not None else right
        if not isinstance(value, Tensor) or not isinstance(right, Tensor):
            if isinstance(value, Tensor) != isinstance(right, Tensor) or value != right:
                shown = [
                    v if not isinstance(v, Tensor) else f"norm {v.norm().item():.3g}"
                    for v in (value, right)
                ]
                return f"{name}: got {shown[0]}, expected {shown[1]}"
            continue
        if value.shape != right.shape or value.dtype != right.dtype:
            return (f"{name}: got {tuple(value.shape)} {value.dtype}, expected "
                    f"{tuple(right.shape)} {right.dtype}")  # fmt: skip
        allowed = tolerances.get(value.dtype, 0.0)
        a, b = (t.detach().as_subclass(Tensor).double() for t in (value, right))
        if not torch.equal(a.isnan(), b.isnan()) or not torch.equal(a.isinf(), b.isinf()):
            return f"{name}: NaN or infinite in other places"
        finite = b.isfinite()
        error = (a[finite] - b[finite]).norm().item()
        norm = b[finite].norm().item()
        if not error <= allowed * (norm + _FLOOR * (1 if allowed < 1e-6 else 100)):
            return f"{name}: error {error:.2e}, norm {norm:.2e}"
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
            if found and _sort(found) == _sort(fault):
                kept, fault = fewer[: found.at + 1], found
            else:
                at += size
        size //= 2
    return kept, fault


def _sort(fault: Fault) -> str:
    return fault.why.partition(":")[0]
