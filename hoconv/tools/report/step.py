"""The parts of a training step's time: what a faster operator can change, and what it did."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hoconv.tools.report.estimates import LEAST_VALUES, amdahl, estimate, holds, ratios
from hoconv.tools.report.files import Found
from hoconv.tools.report.groups import Group

BUSY = 0.9  # of a GPU's time: with less, kernels wait for the host to launch them
PARTS = "operator_ms", "other_ms", "undivided_ms", "idle_ms", "wait_ms"
WAITING = 0.3  # of a step's time: with more, the data sets the pace


@dataclass(frozen=True)
class Share:
    """The time that the device takes for a step and, within it, for an operator.

    Attributes:
        device: its type.
        step_ms, operator_ms: without gaps in which the device waits for the host or for data. Those
            of a CUDA graph are without what it saves at each launch.
        launches: kernels that the host launches in a step that is no graph; None where that was not
            counted.
        source: what measured it.
    """

    device: str
    step_ms: float
    operator_ms: float
    launches: int | None
    source: str


def find_share(found: Found, operator: str, group: Group) -> Share | None:
    """Returns the share that was measured for the settings of a group."""
    runs = group.finished()
    if not runs:
        return None
    settings = runs[0].settings
    for contents, others in found.shares:
        fixed = {*group.settings, "impl", "model", "data"}
        if any(settings.get(name) != others.get(name) for name in fixed):
            continue
        if (times := contents["operators"].get(operator)) is not None:
            step_ms, operator_ms = contents["step_ms"]["median_ms"], times["median_ms"]
            launches = contents["launches"]
            counted = (contents.get("operator_launches") or {}).get(operator)
            if counted and group.captured() and (computing := _computing(group)):
                saved_a_launch = max(0.0, step_ms - computing) / launches
                step_ms -= saved_a_launch * launches
                operator_ms = max(0.0, operator_ms - saved_a_launch * counted)
            source = f"the layers of a run, {contents['step_ms']['repeats']} steps"
            return Share(contents["device"], step_ms, operator_ms, launches, source)
    return _share_of_network(found, group)


def _computing(group: Group) -> float | None:
    """Returns the milliseconds of a mean step in which it does not wait for data."""
    step_ms = estimate(group.throughput("step_ms").values())["mean"]
    wait = estimate(group.throughput("data_wait_fraction").values())["mean"]
    return step_ms and step_ms * (1 - (wait or 0.0))


def _share_of_network(found: Found, group: Group) -> Share | None:
    """Finds a network that has the name of the experiment, on the same device."""
    run = group.finished()[0]
    wanted = {
        "network": run.settings.get("experiment"),
        "impl": run.settings["impl"],
        "precision": run.dtype,
        "error": None,
    }
    for measured in found.steps:
        if run.gpu != (measured["environment"]["gpu"] if measured["device"] == "cuda" else None):
            continue
        for row in measured["rows"]:
            if all(row.get(name) == value for name, value in wanted.items()):
                return Share(
                    measured["device"],
                    row["step_ms"]["median_ms"],
                    row["layers_ms"]["median_ms"],
                    None,
                    f"`{measured['command']}`, all layers of the network",
                )
    return None


def parts(each: Group, share: Share | None) -> dict[str, Any] | None:
    """Divides the mean time of a step; returns None where it was not measured.

    Returns:
        Milliseconds, which add up to ``step_ms``: ``wait_ms`` for data; ``operator_ms`` and
        ``other_ms``, what the device computes otherwise, or without a share ``undivided_ms``;
        ``idle_ms``, in which a GPU waits for the host, at least; and ``shares`` of the step. Where
        the steps of the run take the device another time than those that were measured layer by
        layer, as those of a busier CPU do, the operator's part changes alike.
    """
    step_ms, left = estimate(each.throughput("step_ms").values())["mean"], _computing(each)
    if not step_ms or left is None:
        return None
    wait = estimate(each.throughput("data_wait_fraction").values())["mean"]
    found: dict[str, float | None] = dict.fromkeys(PARTS)
    found["wait_ms"] = None if wait is None else step_ms - left
    if share is None:
        found["undivided_ms"] = left
    else:
        on_gpu = share.device == "cuda"
        busy = min(left, share.step_ms) if on_gpu else left
        found["operator_ms"] = busy * share.operator_ms / share.step_ms
        found["other_ms"] = busy - found["operator_ms"]
        found["idle_ms"] = left - busy if on_gpu else None
    return {
        "step_ms": step_ms,
        **found,
        "shares": {
            name.removesuffix("_ms"): None if value is None else value / step_ms
            for name, value in found.items()
        },
        "measured_by": None if share is None else asdict(share),
    }


def predict(
    old: Group, new: Group, shares: Mapping[str, Share | None], kernel_speedup: float | None
) -> dict[str, Any]:
    """Compares what Amdahl's law predicts with what was measured.

    Args:
        shares: by the label of the group.
        kernel_speedup: of the operator by its benchmark, where the new group has no share.

    Returns:
        ``share`` of the operator in the step of `old`, ``speedup`` of the operator, the
        ``predicted`` and ``measured`` speed-up of the step, the ``limit`` that no kernel can pass,
        ``inside``, whether the prediction lies in the interval of the measurement, and ``why`` not.
    """
    measured = estimate(ratios(old.throughput("step_ms"), new.throughput("step_ms")))
    found: dict[str, Any] = {
        "label": new.label, "measured": measured, "share": None, "speedup": None,
        "speedup_source": None, "predicted": None, "limit": None, "inside": None, "why": [],
    }  # fmt: skip
    before, after = shares[old.label], shares[new.label]
    times = parts(old, before)
    if before is None or times is None:
        found["why"] = [f"the share of the operator in a step of {old.label} was not measured"]
        return found
    if after is not None and after.operator_ms > 0:
        speedup, source = before.operator_ms / after.operator_ms, "in the step"
    elif kernel_speedup is not None:
        speedup, source = kernel_speedup, "in the benchmark, whose sizes are other ones"
    else:
        found["why"] = [f"the operator's time with {new.label} was not measured"]
        return found
    share = times["shares"]["operator"]
    limit = amdahl(share, math.inf)
    found |= {
        "share": share,
        "speedup": speedup,
        "speedup_source": source,
        "predicted": amdahl(share, speedup),
        "limit": limit if math.isfinite(limit) else None,
    }
    found["inside"] = holds(measured, found["predicted"])
    found["why"] = _why(old, new, before, after, found)
    return found


def _why(
    old: Group, new: Group, before: Share, after: Share | None, found: dict[str, Any]
) -> list[str]:
    """Says why a prediction and a measurement differ, where they do."""
    if found["inside"]:
        return []
    if found["inside"] is None:
        return [f"{found['measured']['n'] or 'no'} seeds have no interval: it takes {LEAST_VALUES}"]
    why = []
    for each, share in ((old, before), (new, after)):
        times = parts(each, share)
        if times is None or share is None:
            continue
        wait, idle = times["shares"]["wait"], times["shares"]["idle"]
        if wait is not None and wait > WAITING:
            why.append(f"a step of {each.label} waits for data {wait:.0%} of its time")
        if idle is not None and idle > 1 - BUSY:
            why.append(
                f"the GPU idles {idle:.0%} of a step of {each.label}, between the operations "
                "that the host gives it"
            )
    if after is not None:
        rest, now = (each.step_ms - each.operator_ms for each in (before, after))
        if abs(now / rest - 1) > 1 - BUSY:
            why.append(
                "the rest of the step, which Amdahl's law takes to be the same, takes "
                f"{rest:.3g} ms with {old.label} and {now:.3g} ms with {new.label}"
            )
    return why or [
        "nothing measured here explains it: the operator was timed in a few steps of another run"
    ]
