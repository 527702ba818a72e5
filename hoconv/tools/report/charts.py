"""The charts of a page, as specifications in Vega-Lite.

A colour is a variable of the page's style sheet, so that a chart follows the reader's light or dark
scheme, and paper's, without being drawn again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

COLOURS = [f"var(--series-{i})" for i in range(8)]  # the first is grey, for the reference
SHAPES = ["circle", "square", "triangle-up", "diamond", "cross", "triangle-down",
          "triangle-right", "triangle-left"]  # fmt: skip
BAR = "M-0.15,-1.2L0.15,-1.2L0.15,1.2L-0.15,1.2Z"
PARTS = {
    "operator": "the operator",
    "other": "other computation",
    "undivided": "computation, not divided",
    "idle": "the GPU waits for the host",
    "wait": "waiting for data",
}
HEIGHT, ROW_HEIGHT = 200, 46
FONT = "system-ui, -apple-system, Segoe UI, Roboto, DejaVu Sans, sans-serif"

CONFIG = {
    "background": "transparent",
    "font": FONT,
    "view": {"stroke": None},
    "axis": {
        "domainColor": "var(--line)", "tickColor": "var(--line)", "gridColor": "var(--grid)",
        "labelColor": "var(--soft)", "titleColor": "var(--soft)", "titleFontWeight": "normal",
        "labelFontSize": 12, "titleFontSize": 12, "titlePadding": 8, "labelOverlap": True,
    },
    "legend": {
        "labelColor": "var(--text)", "titleColor": "var(--soft)", "labelFontSize": 12,
        "titleFontSize": 12, "orient": "top", "direction": "horizontal", "title": None,
        "symbolSize": 90, "columnPadding": 14, "labelLimit": 220,
    },
    "text": {"color": "var(--text)"},
    "rule": {"color": "var(--text)"},
}  # fmt: skip


LEGEND = {"title": None, "symbolOpacity": 1}  # the page sets its columns
ROWS = {  # the vertical axis of a chart that has a row for each group
    "field": "label", "type": "nominal", "title": None, "sort": None,
    "axis": {"domain": False, "ticks": False, "labelFontSize": 13, "labelLimit": 140,
             "labelPadding": 10, "labelColor": "var(--text)"},
}  # fmt: skip


def _coloured(field: str, labels: Sequence[str], present: Sequence[str]) -> dict[str, Any]:
    """The colour of each label, the same on the whole page; a legend of those that are present."""
    return {
        "field": field,
        "type": "nominal",
        "scale": _scale(labels, present, COLOURS),
        "legend": LEGEND,
    }


def _scale(labels: Sequence[str], present: Sequence[str], values: Sequence[str]) -> dict[str, Any]:
    shown = [values[labels.index(name) % len(values)] for name in present]
    return {"domain": [*present], "range": shown}


def _chart(title: str, layers: list[dict[str, Any]], height: int = HEIGHT) -> dict[str, Any]:
    return {
        "description": title,
        "width": "container",
        "height": height,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "layer": layers,
        "config": CONFIG,
    }


def kernel_times(measured: dict[str, Any], way: str, labels: Sequence[str]) -> dict[str, Any]:
    """Time of a call against the size, a line for each contender, and the floor."""
    rows = [row for row in measured["rows"] if row[way]]
    present = [name for name in labels if any(row["contender"] == name for row in rows)]
    data = [
        {
            "size": row["size"],
            "contender": row["contender"],
            "ms": row[way]["median_ms"],
            "low": row[way]["p20_ms"],
            "high": row[way]["p80_ms"],
            "share": row[way]["share_of_floor"],
            "gbs": row[way]["gb_per_s"],
        }
        for row in rows
    ]
    floors = [{"size": row["size"], "ms": row[way]["floor_ms"]} for row in rows]
    sizes = sorted({row["size"] for row in rows})
    x = {
        "field": "size", "type": "quantitative", "title": measured["axis"],
        "scale": {"type": "log", "nice": False, "padding": 12},
        "axis": {"values": sizes, "grid": False, "format": "~s"},
    }  # fmt: skip
    y = {"field": "ms", "type": "quantitative", "title": "ms per call",
         "scale": {"type": "log"}, "axis": {"tickCount": 5}}  # fmt: skip
    colour = _coloured("contender", labels, present)
    shape = colour | {"scale": _scale(labels, present, SHAPES)}
    return _chart(f"Time of a {way} call against the size", [
        {
            "data": {"values": floors},
            "mark": {"type": "line", "strokeDash": [5, 4], "color": "var(--text)"},
            "encoding": {"x": x, "y": y},
        },
        {
            "data": {"values": floors[-1:]},
            "mark": {"type": "text", "align": "right", "dy": 12, "fontSize": 11,
                     "color": "var(--soft)"},
            "encoding": {"x": x, "y": y, "text": {"value": "floor"}},
        },
        {
            "data": {"values": data},
            "mark": {"type": "line", "strokeWidth": 2},
            "encoding": {"x": x, "y": y, "color": colour},
        },
        {
            "data": {"values": data},
            "mark": {"type": "point", "filled": True, "size": 70, "opacity": 1},
            "encoding": {
                "x": x, "y": y, "color": colour,
                "shape": shape,
                "tooltip": [
                    {"field": "contender", "title": "contender"},
                    {"field": "size", "title": measured["axis"]},
                    {"field": "ms", "title": "median, ms", "format": ".4g"},
                    {"field": "low", "title": "20th percentile, ms", "format": ".4g"},
                    {"field": "high", "title": "80th percentile, ms", "format": ".4g"},
                    {"field": "share", "title": "share of the floor", "format": ".0%"},
                    {"field": "gbs", "title": "GB/s", "format": ".4g"},
                ],
            },
        },
    ])  # fmt: skip


def step_parts(groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns where the time of a step goes: a bar for each group, divided."""
    data = [
        {"label": each["label"], "part": name, "order": i,
         "ms": each["parts"][f"{part}_ms"], "share": each["parts"]["shares"][part]}
        for each in groups
        for i, (part, name) in enumerate(PARTS.items())
        if each["parts"][f"{part}_ms"] is not None
    ]  # fmt: skip
    order = [*PARTS.values()]
    present = [name for name in order if any(row["part"] == name and row["ms"] for row in data)]
    scale = {
        "domain": present,
        "range": [f"var(--part-{order.index(name)})" for name in present],
    }
    totals = [{"label": each["label"], "ms": each["parts"]["step_ms"]} for each in groups]
    return _chart("Where the time of a step goes", [
        {
            "data": {"values": data},
            "mark": {"type": "bar", "height": {"band": 0.62}},
            "encoding": {
                "y": ROWS,
                "x": {"field": "ms", "type": "quantitative", "title": "ms per step",
                      "stack": "zero", "axis": {"tickCount": 6}},
                "color": {"field": "part", "type": "nominal", "scale": scale,
                          "legend": LEGEND},
                "order": {"field": "order"},
                "tooltip": [
                    {"field": "label", "title": "runs"},
                    {"field": "part", "title": "part"},
                    {"field": "ms", "title": "ms per step", "format": ".4g"},
                    {"field": "share", "title": "share of the step", "format": ".1%"},
                ],
            },
        },
        {
            "data": {"values": totals},
            "mark": {"type": "text", "align": "left", "dx": 6, "fontSize": 12},
            "encoding": {"y": ROWS, "x": {"field": "ms", "type": "quantitative"},
                         "text": {"field": "ms", "format": ".3g"}},
        },
    ], ROW_HEIGHT * len(groups))  # fmt: skip


def predicted_and_measured(training: dict[str, Any]) -> dict[str, Any]:
    """The speed-up of a step: measured, with its interval and the noise; predicted; the limit."""
    rows = [p for p in training["predictions"] if p["measured"]["mean"] is not None]
    data = []
    for row in rows:
        half, mean = row["measured"]["ci95"] or 0.0, row["measured"]["mean"]
        kinds = {"measured": mean, "predicted": row["predicted"], "limit": row["limit"]}
        data += [
            {"label": row["label"], "kind": kind, "x": value, "low": mean - half,
             "high": mean + half, "measured": kind == "measured"}
            for kind, value in kinds.items()
            if value is not None
        ]  # fmt: skip
    kinds = [k for k in ("measured", "predicted", "limit") if any(r["kind"] == k for r in data)]
    styles = {
        "measured": ("var(--accent)", "circle"),
        "predicted": ("var(--series-2)", "diamond"),
        "limit": ("var(--soft)", BAR),
    }
    colour = {"domain": kinds, "range": [styles[k][0] for k in kinds]}
    shape = {"domain": kinds, "range": [styles[k][1] for k in kinds]}
    most = training["noise"]["most"] or 0.0
    x = {"type": "quantitative", "title": f"times as fast as {training['baseline']}",
         "scale": {"zero": False, "padding": 16},
         "axis": {"tickCount": 6}}  # fmt: skip
    noise = {"low": 1 - most, "high": 1 + most}
    return _chart("Speed-up of a step, predicted and measured", [
        {
            "data": {"values": [noise]},
            "mark": {"type": "rect", "color": "var(--soft)", "opacity": 0.22},
            "encoding": {"x": x | {"field": "low"}, "x2": {"field": "high"}},
        },
        {
            "data": {"values": [{"x": 1}]},
            "mark": {"type": "rule", "strokeDash": [3, 3], "color": "var(--soft)"},
            "encoding": {"x": x | {"field": "x"}},
        },
        {
            "data": {"values": [row for row in data if row["measured"]]},
            "mark": {"type": "rule", "strokeWidth": 3, "color": "var(--accent)", "opacity": 0.55},
            "encoding": {"x": x | {"field": "low"}, "x2": {"field": "high"}, "y": ROWS},
        },
        {
            "data": {"values": data},
            "mark": {"type": "point", "filled": True, "size": 150, "opacity": 1,
                     "strokeWidth": 3},
            "encoding": {
                "x": x | {"field": "x"}, "y": ROWS,
                "color": {"field": "kind", "type": "nominal", "scale": colour,
                          "legend": {"title": None}},
                "shape": {"field": "kind", "type": "nominal", "scale": shape,
                          "legend": {"title": None}},
                "tooltip": [
                    {"field": "label", "title": "runs"},
                    {"field": "kind", "title": "speed-up"},
                    {"field": "x", "title": "times", "format": ".4g"},
                ],
            },
        },
    ], ROW_HEIGHT * len(rows))  # fmt: skip


def losses(curves: Sequence[dict[str, Any]], against: str, labels: Sequence[str]) -> dict[str, Any]:
    """The training loss: mean, and the band from the least to the greatest over the runs."""
    data = [
        {"label": curve["label"], "x": point[against], **point}
        for curve in curves
        for point in curve["points"]
        if point[against] is not None
    ]
    positive = all(point["low"] is None or point["low"] > 0 for point in data)
    title = {"step": "step", "seconds": "seconds of training"}[against]
    x = {"field": "x", "type": "quantitative", "title": title,
         "axis": {"grid": False, "tickCount": 6}}  # fmt: skip
    scale = {"type": "log"} if positive else {"zero": False}
    y = {"type": "quantitative", "title": "training loss", "scale": scale,
         "axis": {"tickCount": 5}}  # fmt: skip
    present = [name for name in labels if any(row["label"] == name for row in data)]
    colour = _coloured("label", labels, present)
    return _chart(f"Training loss against {title}", [
        {
            "data": {"values": data},
            "mark": {"type": "area", "opacity": 0.18, "invalid": "break-paths-filter-domains"},
            "encoding": {"x": x, "y": y | {"field": "low"}, "y2": {"field": "high"},
                         "color": colour},
        },
        {
            "data": {"values": data},
            "mark": {"type": "line", "strokeWidth": 2, "invalid": "break-paths-filter-domains"},
            "encoding": {"x": x, "y": y | {"field": "mean"}, "color": colour},
        },
        {
            "data": {"values": data},
            "mark": {"type": "point", "filled": True, "size": 60, "opacity": 0},
            "encoding": {
                "x": x, "y": y | {"field": "mean"}, "color": colour,
                "tooltip": [
                    {"field": "label", "title": "runs"},
                    {"field": "step", "title": "step"},
                    {"field": "mean", "title": "mean loss", "format": ".4g"},
                    {"field": "low", "title": "least", "format": ".4g"},
                    {"field": "high", "title": "greatest", "format": ".4g"},
                ],
            },
        },
    ])  # fmt: skip


def per_seed(
    groups: Sequence[dict[str, Any]], metric: str, labels: Sequence[str]
) -> dict[str, Any]:
    """A metric of the test: a point for each seed, and the mean with its interval."""
    data = [
        {"label": each["label"], "seed": row["seed"], "value": row[metric]}
        for each in groups
        for row in each["per_seed"]
        if row.get(metric) is not None
    ]
    means = []
    for each in groups:
        found = each["metrics"].get(metric)
        if found and found["mean"] is not None:
            half = found["ci95"] or 0.0
            means.append({"label": each["label"], "mean": found["mean"],
                          "low": found["mean"] - half, "high": found["mean"] + half})  # fmt: skip
    present = [name for name in labels if any(row["label"] == name for row in data)]
    colour = _coloured("label", labels, present) | {"legend": None}
    x = {"type": "quantitative", "title": metric, "scale": {"zero": False, "padding": 12},
         "axis": {"tickCount": 5}}  # fmt: skip
    return _chart(f"{metric} of every seed", [
        {
            "data": {"values": means},
            "mark": {"type": "rule", "strokeWidth": 3, "opacity": 0.45},
            "encoding": {"x": x | {"field": "low"}, "x2": {"field": "high"}, "y": ROWS,
                         "color": colour},
        },
        {
            "data": {"values": means},
            "mark": {"type": "tick", "thickness": 3, "size": 22},
            "encoding": {"x": x | {"field": "mean"}, "y": ROWS, "color": colour},
        },
        {
            "data": {"values": data},
            "mark": {"type": "point", "filled": True, "size": 70, "opacity": 0.85},
            "encoding": {
                "x": x | {"field": "value"}, "y": ROWS, "color": colour,
                "tooltip": [
                    {"field": "label", "title": "runs"},
                    {"field": "seed", "title": "seed"},
                    {"field": "value", "title": metric, "format": ".5g"},
                ],
            },
        },
    ], ROW_HEIGHT * len(means))  # fmt: skip
