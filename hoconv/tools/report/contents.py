"""Joins what the files say of an operator; the page shows this and nothing else."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from hoconv.tools.commands import hardware
from hoconv.tools.report.estimates import LEAST_VALUES, estimate
from hoconv.tools.report.files import Found
from hoconv.tools.report.groups import Group, choose_baseline, compare, group
from hoconv.tools.report.losses import curve
from hoconv.tools.report.step import Share, find_share, parts, predict
from hoconv.tools.report.verdict import verdict

METHOD = (
    "Mean over seeds and, of three or more, half of a 95% confidence interval by Student's t. "
    "Speed-ups and differences are taken between runs with the same seed; several runs of one seed "
    "count as one, their mean. Their ratio is the noise: what two runs of the same code differ by. "
    "Steps exclude validation and warm-up. Amdahl: a step of which the share p gets s times as "
    "fast gets 1 / (1 - p + p / s) times as fast, at most 1 / (1 - p) times."
)


class NothingFoundError(Exception):
    """There is nothing to report on, and what to do."""


def join(found: Found, operator: str, baseline: str | None = None) -> dict[str, Any]:
    """Returns the contents of a report.

    Args:
        operator: its name.
        baseline: the label of the runs that others are compared with.

    Raises:
        NothingFoundError: no file says anything of the operator.
        ComparisonError: no run has the label `baseline`.
    """
    _require_operator(found, operator)
    correctness = _correctness(found, operator)
    kernels = _kernels(found, operator)
    training = _training(found, operator, kernels, baseline) if found.runs else None
    contents = {
        "operator": operator,
        "method": METHOD,
        "sources": found.paths,
        "correctness": correctness,
        "kernels": kernels,
        "training": training,
        "missing": _missing(found, operator, correctness, kernels, training),
    }
    return _without_nan({**contents, "verdict": verdict(contents)})


def _require_operator(found: Found, operator: str) -> None:
    """Checks that a file names the operator, or that runs are there which may have used it."""
    checked = [row["operator"] for check in found.checks for row in check["rows"]]
    timed = [measured["operator"] for measured in found.kernels]
    shared = [name for shares, _ in found.shares for name in shares["operators"]]
    names = sorted({*checked, *timed, *shared})
    if operator in names or (found.runs and not shared):
        return
    others = f"; they speak of {', '.join(names)}" if names else ""
    raise NothingFoundError(
        f"no file says anything of {operator}{others}; `hoconv check {operator} --json PATH`, "
        "`hoconv benchmark` and training runs leave what a report reads"
    )


def _correctness(found: Found, operator: str) -> list[dict[str, Any]]:
    """The rows of the checks; of two checks of the same thing the later one counts."""
    rows = {}
    for check in sorted(found.checks, key=lambda check: check.get("date", "")):
        for row in check["rows"]:
            if row["operator"] == operator:
                row = row | {"date": check.get("date")}
                rows[row["impl"], row["device"], row["dtype"]] = row
    return [*rows.values()]


def _kernels(found: Found, operator: str) -> list[dict[str, Any]]:
    return [
        measured
        | {
            "hardware": hardware(measured),
            "summary": _summary(measured["rows"]),
        }
        for measured in found.kernels
        if measured["operator"] == operator
    ]


def _summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns what each contender needs for a forward and a backward at the largest size all can
    run."""
    size = max(
        (row["size"] for row in rows if not row["error"]),
        key=lambda size: (sum(row["size"] == size and not row["error"] for row in rows), size),
        default=None,
    )
    times = {
        row["contender"]: [row[way] for way in ("forward", "backward")]
        for row in rows
        if row["size"] == size and not row["error"]
    }
    total = {
        name: math.fsum(way["median_ms"] for way in ways if way) for name, ways in times.items()
    }
    memory = {
        row["contender"]: row.get("extra_memory_bytes") for row in rows if row["size"] == size
    }
    summary = []
    for name, ways in times.items():
        others = {other: ms for other, ms in total.items() if other != name}
        best = min(others, key=others.__getitem__, default=None)
        floor = math.fsum(way["floor_ms"] for way in ways if way)
        summary.append({
            "contender": name,
            "size": size,
            "median_ms": total[name],
            "share_of_floor": floor / total[name],
            "speedup_over_reference": total["reference"] / total[name]
            if "reference" in total else None,
            "extra_memory_bytes": memory[name],
            "best_other": best,
            "speedup_over_best_other": None if best is None else others[best] / total[name],
        })  # fmt: skip
    return summary


def _training(
    found: Found, operator: str, kernels: list[dict[str, Any]], label: str | None
) -> dict[str, Any]:
    groups = group(found.runs)
    baseline = choose_baseline(groups, label)
    groups.sort(key=lambda each: each is not baseline)
    compared = compare(groups, [baseline] * len(groups), baseline.label)
    shares: dict[str, Share | None] = {}
    for each, row in zip(groups, compared["groups"], strict=True):
        shares[each.label] = find_share(found, operator, each)
        row |= _of_the_step(each, shares[each.label])
    predictions = [
        predict(baseline, each, shares, _kernel_speedup(kernels, baseline, each))
        for each in groups
        if each is not baseline and each.finished()
    ]
    return {
        **compared,
        "settings": _common_settings(groups),
        "predictions": predictions,
        "noise": _noise(groups),
        "curves": [curve(each) for each in groups if each.finished()],
    }


def _common_settings(groups: list[Group]) -> dict[str, str]:
    runs = [run for each in groups for run in (*each.finished(), *each.unfinished)]
    first = runs[0].settings
    return {k: v for k, v in first.items() if v and all(r.settings.get(k) == v for r in runs)}


def _of_the_step(each: Group, share: Share | None) -> dict[str, Any]:
    """Parts of the step; time of an epoch; what a GPU does."""
    times = parts(each, share)
    runs = each.finished()
    counted = [run.epoch_steps for run in runs if run.epoch_steps]
    epochs = {
        seed: ms / 1000 * statistics.fmean(counted)
        for seed, ms in each.throughput("step_ms").items()
        if counted
    }
    busy = None
    if times and times["idle_ms"] is not None:
        busy = 1 - (times["idle_ms"] + (times["wait_ms"] or 0.0)) / times["step_ms"]
    return {
        "parts": times,
        "epoch_s": estimate(epochs.values()),
        "gpu_busy": busy,
        "launches": 1 if each.captured() else share and share.launches,
        "captured": each.captured(),
        "problems": [
            f"{run.folder}: {problem}"
            for run in (*runs, *each.unfinished)
            for problem in run.problems()
        ],
        "per_seed": [
            {
                "seed": seed,
                "step_ms": each.throughput("step_ms").get(seed),
                **{name: each.metric(name).get(seed) for name in each.metrics()},
            }
            for seed in sorted(each.runs)
        ],
    }


def _kernel_speedup(kernels: list[dict[str, Any]], baseline: Group, each: Group) -> float | None:
    """Returns how many times as fast the operator is by its benchmark, where the runs computed."""
    if not baseline.finished():
        return None
    old, new = baseline.finished()[0], each.finished()[0]
    for measured in kernels:
        gpu = measured["environment"]["gpu"] if measured["device"] == "cuda" else None
        times = {row["contender"]: row["median_ms"] for row in measured["summary"]}
        impls = old.settings["impl"], new.settings["impl"]
        if (gpu, measured["dtype"]) == (new.gpu, new.dtype) and {*impls} <= times.keys():
            return times[impls[0]] / times[impls[1]]
    return None


def _noise(groups: list[Group]) -> dict[str, Any]:
    """Returns what the runs of one seed and the same code differ by."""
    pairs = [
        {"label": each.label, "seed": seed, "speedup": ratio}
        for each in groups
        for seed, ratio in each.again()
    ]
    ratios = [pair["speedup"] for pair in pairs]
    return {
        "pairs": pairs,
        "speedup": estimate(ratios),
        "most": max((abs(ratio - 1) for ratio in ratios), default=None),
    }


def _missing(
    found: Found,
    operator: str,
    correctness: list[dict[str, Any]],
    kernels: list[dict[str, Any]],
    training: dict[str, Any] | None,
) -> list[str]:
    """Says what a report could hold and this one does not, and which command makes it."""
    missing = [f"{path} cannot be read: {why}" for path, why in found.unreadable.items()]
    if not correctness:
        missing.append(f"Correctness: `hoconv check {operator} --json check.json` measures it.")
    if not kernels:
        missing.append(f"Time of the kernels: `hoconv benchmark {operator}` measures it.")
    if training is None:
        missing.append("Training: give the folders of runs.")
        return missing
    labels = [each["label"] for each in training["groups"] if each["runs"]]
    if len(labels) < 2:
        missing.append("Speed-up of training: it needs runs of two implementations or more.")
    if any(0 < len(each["seeds"]) < LEAST_VALUES for each in training["groups"]):
        missing.append(f"Confidence intervals: they need {LEAST_VALUES} seeds or more.")
    if not training["noise"]["pairs"]:
        missing.append("Noise: it needs two runs of one seed and the same code.")
    without = [
        each["label"]
        for each in training["groups"]
        if each["parts"] and each["parts"]["operator_ms"] is None
    ]
    if without:
        missing.append(
            f"Share of the operator in a step of {', '.join(without)}: it needs a shares.json "
            "beside the results.json of a short run with the same settings."
        )
    if any(each["epoch_s"]["mean"] is None for each in training["groups"] if each["runs"]):
        missing.append("Time of an epoch: it needs runs with logger=csv.")
    if not any(curve["points"] for curve in training["curves"]):
        missing.append("Loss curves: no run left its losses.csv.")
    return missing


def _without_nan(value: Any) -> Any:
    """JSON has no NaN and no infinity: what was not measured and what is neither are None."""
    if isinstance(value, dict):
        return {str(key): _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
