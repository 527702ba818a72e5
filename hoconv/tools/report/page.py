"""The page: one HTML file with its style, its charts and the library that draws them."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

from hoconv.tools.report import charts
from hoconv.tools.report.estimates import shown
from hoconv.tools.report.table import CELLS, columns, metric_columns, metrics

TEMPLATE = Path(__file__).with_name("page.html.jinja")
OF_A_STEP = [title for title in CELLS if title != "speed-up"]  # which has a table of its own
TIMES = "\N{MULTIPLICATION SIGN}"
NEEDED = ("jinja2", "scipy", "vl_convert")  # of the extra [report]


class PageError(Exception):
    """Why no page can be made, and what to do."""


def require_packages() -> None:
    """Checks that what draws the page is installed.

    Raises:
        PageError: it is not.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise PageError(f"a page needs {', '.join(missing)}: `pip install 'hoconv[report]'`")


def render(contents: dict[str, Any]) -> str:
    """Returns the HTML of a report's contents.

    Every text of the contents is escaped: none becomes part of the page's code.
    """
    import jinja2

    training = contents["training"]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATE.parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {
        "estimate": lambda value, form=None: shown(value, form) if value else "",
        "number": lambda value, form="{:.3g}": "" if value is None else form.format(value),
        "error": lambda value: value if isinstance(value, str) else f"{value:.1e}",
        "pivot": pivot,
        "code": code,
    }
    return environment.get_template(TEMPLATE.name).render(
        **contents,
        contents=contents,
        charts=draw(contents),
        tiles=tiles(contents),
        step_columns=columns(training["groups"], OF_A_STEP) if training else [],
        metric_names=metrics(training) if training else [],
        metric_columns=metric_columns(training) if training else [],
        library=_library(),
    )


@functools.cache
def _library() -> str:
    """The code that draws the charts: Vega, Vega-Lite and Vega-Embed."""
    import vl_convert

    code = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    return code.replace("</script", "<\\/script")


def draw(contents: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the specification of each chart, under the id of the element that shows it."""
    labels = _labels(contents)
    found = {
        f"kernel-{i}-{way}": charts.kernel_times(measured, way, labels)
        for i, measured in enumerate(contents["kernels"])
        for way in ("forward", "backward")
        if any(row[way] for row in measured["rows"])
    }
    training = contents["training"]
    if training is None:
        return found
    divided = [each for each in training["groups"] if each["parts"]]
    if divided:
        found["parts"] = charts.step_parts(divided)
    if any(p["measured"]["mean"] is not None for p in training["predictions"]):
        found["speedup"] = charts.predicted_and_measured(training)
    curves = [curve for curve in training["curves"] if curve["points"]]
    if curves:
        found["loss-step"] = charts.losses(curves, "step", labels)
    if any(point["seconds"] is not None for curve in curves for point in curve["points"]):
        found["loss-seconds"] = charts.losses(curves, "seconds", labels)
    for i, metric in enumerate(metrics(training)):
        found[f"metric-{i}"] = charts.per_seed(training["groups"], metric, labels)
    return found


def tiles(contents: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Returns the figures at the top: what it is, the figure, and what belongs to it."""
    found = []
    rows = [row for row in contents["correctness"] if row["dtype"] or row["failures"]]
    if rows:
        passed = sum(not row["failures"] for row in rows)
        cases = sum(row["cases"] for row in rows)
        found.append(("correct", f"{passed} of {len(rows)}", f"checks pass, of {cases} cases"))
    for measured in contents["kernels"][:1]:
        timed = [row for row in measured["summary"] if row["share_of_floor"]]
        if timed:
            best = min(timed, key=lambda row: row["median_ms"])
            what = f"of what the hardware allows: {best['contender']}, {measured['dtype']}"
            found.append(("fastest kernel", f"{best['share_of_floor']:.0%}", what))
    training = contents["training"]
    predictions = training["predictions"] if training else []
    timed = [p for p in predictions if p["measured"]["mean"] is not None]
    if training and timed:
        best = max(timed, key=lambda p: p["measured"]["mean"])
        half = best["measured"]["ci95"]
        within = f"± {half:.2g}, " if half is not None else ""
        versus = f"{within}{best['label']} against {training['baseline']}"
        found.append(
            ("training step", f"{shown(best['measured'] | {'ci95': None})}{TIMES}", versus)
        )
        if best["predicted"] is not None:
            limit = (
                "" if best["limit"] is None else f"by Amdahl; at most {best['limit']:.3g}{TIMES}"
            )
            found.append(("predicted", f"{best['predicted']:.3g}{TIMES}", limit))
        if best["share"] is not None:
            what = f"of a step of {training['baseline']} is the operator"
            found.append(("share", f"{best['share']:.0%}", what))
    return found


def pivot(rows: list[dict[str, Any]], way: str) -> dict[str, Any]:
    """Arranges times for a table: a line for each contender, a column for each size."""
    sizes = sorted({row["size"] for row in rows})
    cells = {(row["contender"], row["size"]): row for row in rows}
    names = dict.fromkeys(row["contender"] for row in rows)
    floors = {row["size"]: row[way]["floor_ms"] for row in rows if row[way]}
    return {
        "sizes": sizes,
        "lines": [(name, [cells.get((name, size)) for size in sizes]) for name in names],
        "floors": [floors.get(size) for size in sizes],
    }


def _labels(contents: dict[str, Any]) -> list[str]:
    """Everything that has a colour of its own, the reference and the baseline first."""
    rows = [row for measured in contents["kernels"] for row in measured["rows"]]
    training = contents["training"]
    names = [row["contender"] for row in rows]
    first = ["reference"]
    if training:
        first.append(training["baseline"])
        names = [each["label"] for each in training["groups"]] + names
    known = {*names, *first[1:]}
    return [*dict.fromkeys(name for name in (*first, *names) if name in known)]


def code(text: str) -> Any:
    """Sets what stands between backquotes as code, and escapes the rest."""
    from markupsafe import Markup, escape

    halves = re.split(r"`([^`]*)`", text)
    return Markup("").join(
        Markup("<code>{}</code>").format(half) if i % 2 else escape(half)
        for i, half in enumerate(halves)
    )


def as_json(contents: dict[str, Any]) -> str:
    """JSON of the contents, which hold no NaN and no infinity."""
    return json.dumps(contents, indent=2, allow_nan=False) + "\n"
