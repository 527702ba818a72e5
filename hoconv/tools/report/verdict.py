"""The verdict of a report, in words: what the operator's kernels buy, why, and what comes next."""

from __future__ import annotations

from typing import Any

from hoconv.tools.report.estimates import LEAST_VALUES, holds, shown
from hoconv.tools.report.step import BUSY, WAITING

SMALL = 1.05  # times as fast: a limit below that is not worth a kernel


def verdict(contents: dict[str, Any]) -> dict[str, Any]:
    """Returns a ``headline``, its ``tone`` (good, bad or neutral), ``reasons``, and what is
    ``next``, which may be None."""
    failed = [row for row in contents["correctness"] if row["failures"] and row["dtype"]]
    if failed:
        names = ", ".join(dict.fromkeys(row["impl"] for row in failed))
        several = "," in names
        return {
            "headline": f"{names} {'compute' if several else 'computes'} something else than the "
            "definition: the speed says nothing.",
            "tone": "bad",
            "reasons": [f"{r['impl']}, {r['device']}: {f}" for r in failed for f in r["failures"]][
                :3
            ],
            "next": f"`hoconv check {contents['operator']}` shows every failure.",
        }
    training = contents["training"]
    if training is None or not training["predictions"]:
        return _of_kernels(contents)
    return _of_training(training)


def _of_kernels(contents: dict[str, Any]) -> dict[str, Any]:
    """Of the kernels alone, where no two implementations were trained."""
    best = [
        (min(measured["summary"], key=lambda row: row["median_ms"]), measured)
        for measured in contents["kernels"]
        if measured["summary"]
    ]
    reasons = [
        f"On {measured['hardware']} in {measured['dtype']}, {row['contender']} is the fastest: "
        f"{row['share_of_floor']:.0%} of what the hardware allows"
        + (f", {row['speedup_over_best_other']:.3g} times as fast as {row['best_other']}."
           if row["best_other"] else ".")
        for row, measured in best
    ]  # fmt: skip
    return {
        "headline": "What the kernels change in training was not measured.",
        "tone": "neutral",
        "reasons": reasons,
        "next": "Train with two implementations and three seeds, and give the folders of the runs.",
    }


def _of_training(training: dict[str, Any]) -> dict[str, Any]:
    """Of the group whose steps are the shortest beside the baseline's."""
    old = training["baseline"]
    groups = {each["label"]: each for each in training["groups"]}
    measured = [p for p in training["predictions"] if p["measured"]["mean"] is not None]
    if not groups[old]["runs"]:
        return {
            "headline": f"No run of {old} finished: there is nothing to compare with.",
            "tone": "bad",
            "reasons": groups[old]["problems"][:3],
            "next": None,
        }
    if not measured:
        return {
            "headline": "The runs were too short to be timed.",
            "tone": "neutral",
            "reasons": ["The first steps of a run do not count: they compile and allocate."],
            "next": "Train for more steps.",
        }
    best = max(measured, key=lambda prediction: prediction["measured"]["mean"])
    new, speedup = best["label"], best["measured"]
    times = shown(speedup)
    noise = training["noise"]["most"] or 0.0
    differs = holds(speedup, 1.0) is False and abs(speedup["mean"] - 1) > noise
    reasons: list[str] = []
    if speedup["ci95"] is None:
        n = speedup["n"]
        seeds = "one seed" if n == 1 else f"{n} seeds"
        headline = f"{new} trains {times} times as fast as {old}, by {seeds} alone."
        tone = "neutral"
        reasons.append(f"A confidence interval, which says whether this holds, takes "
                       f"{LEAST_VALUES} seeds.")  # fmt: skip
    elif not differs:
        headline, tone = _no_difference(groups[old], best, old, new), "neutral"
        reasons.append(f"A step of {new} is {times} times as fast as one of {old}.")
    elif speedup["mean"] > 1:
        headline, tone = f"{new} trains {times} times as fast as {old}.", "good"
    else:
        headline, tone = f"{new} trains slower than {old}: {times} times as fast.", "bad"
    reasons += _reasons(training, groups, best, old)
    for label in dict.fromkeys((old, new)):
        reasons += [f"{label}: {problem}." for problem in groups[label]["problems"][:1]]
    return {"headline": headline, "tone": tone, "reasons": reasons,
            "next": _next(groups[new])}  # fmt: skip


def _no_difference(baseline: dict[str, Any], prediction: dict[str, Any], old: str, new: str) -> str:
    shares = baseline["parts"]["shares"]
    if (shares["wait"] or 0) > WAITING:
        return "The step waits for data: a faster kernel cannot help."
    if baseline["gpu_busy"] is not None and baseline["gpu_busy"] < BUSY:
        return "The GPU waits for the host: a faster kernel cannot help."
    if prediction["limit"] is not None and prediction["limit"] < SMALL:
        return "The operator is too small a part of the step: a faster kernel cannot help."
    return f"No difference between {new} and {old} can be told from noise."


def _reasons(
    training: dict[str, Any],
    groups: dict[str, dict[str, Any]],
    best: dict[str, Any],
    old: str,
) -> list[str]:
    reasons = []
    new = best["label"]
    idle = groups[old]["parts"]["shares"]["idle"] or 0.0
    if best["share"] is not None and idle > 1 - BUSY:
        reasons.append(
            f"The GPU idles {idle:.0%} of a step of {old}, and computes the operator "
            f"{best['share']:.0%} of it: fewer operations for the host to give save more than "
            "faster ones, and Amdahl's law, which counts the device's time, predicts "
            f"{best['predicted']:.3g} times."
        )
    elif best["share"] is not None:
        limit = "without limit" if best["limit"] is None else f"at most {best['limit']:.3g} times"
        reasons.append(
            f"The operator takes {best['share']:.0%} of a step of {old}, and is "
            f"{best['speedup']:.3g} times as fast with {new} ({best['speedup_source']}): Amdahl's "
            f"law predicts {best['predicted']:.3g} times for the step, and {limit} for any kernel."
        )
    if best["inside"]:
        reasons.append("The prediction lies within the interval of the measurement.")
    elif best["share"] is not None and best["inside"] is False:
        reasons.append(f"The measurement differs from that: {'; '.join(best['why'])}.")
    elif best["share"] is not None:
        reasons.append(f"Whether the prediction was met cannot be told: {best['why'][0]}.")
    if training["noise"]["most"] is not None:
        reasons.append(
            f"Two runs of the same code differ by at most {training['noise']['most']:.1%}."
        )
    for name, change in groups[new]["differences"].items():
        same = holds(change, 0.0)
        if same:
            within = f" within ±{change['ci95']:.2g}" if change["ci95"] else ""
            reasons.append(f"{name} is the same{within}.")
        elif same is False:
            reasons.append(f"{name} differs by {shown(change, '{:+.4f}')}.")
    return reasons


def _next(group: dict[str, Any]) -> str | None:
    """Names the largest part of the step that is left."""
    if not group["parts"] or group["parts"]["operator_ms"] is None:
        return None
    shares = group["parts"]["shares"]
    limit = 1 / (1 - shares["operator"]) if shares["operator"] < 1 else None
    if (shares["wait"] or 0) > max(WAITING, shares["operator"]):
        return f"The data comes next: a step waits for it {shares['wait']:.0%} of its time."
    if (shares["idle"] or 0) > max(1 - BUSY, shares["operator"]):
        return f"The host comes next: the GPU idles {shares['idle']:.0%} of a step."
    if limit is not None and limit < SMALL:
        return (
            f"The operator is {shares['operator']:.0%} of the step now: what is left is elsewhere."
        )
    gain = "" if limit is None else f", and a still faster kernel can gain {limit:.3g} times"
    return f"The operator is {shares['operator']:.0%} of the step now{gain}."
