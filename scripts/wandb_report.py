"""Publishing at Weights & Biases: a report of a text in Markdown and a picture, or a page."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import common  # noqa: F401 (lets training/ be imported)

from training.results.loggers import has_api_key

PROJECT = "hoconv"  # as in conf/logger/wandb.yaml


class ReportError(Exception):
    """Why there is no report, and what to do."""


def require_online() -> None:
    """Checks, before there is anything to publish, that a report can be published.

    Raises:
        ReportError: it cannot be.
    """
    if importlib.util.find_spec("wandb_workspaces") is None:
        raise ReportError(
            "--wandb needs the package wandb-workspaces: `pip install 'wandb[workspaces]'`"
        )
    if (mode := os.environ.get("WANDB_MODE", "online")) != "online":
        raise ReportError(f"--wandb: a report needs the server, and WANDB_MODE is {mode}; unset it")
    if not has_api_key():
        raise ReportError("--wandb: there is no API key; run `wandb login` first")


def publish(title: str, text: str, picture: Path) -> str:
    """Publishes a report; returns its address.

    The picture is logged to a run of its own, because a report can only show pictures of runs.

    Raises:
        ReportError: the server cannot be reached, or refuses.
    """
    import wandb

    # Imported without types, because the functions accept more than their annotations say.
    wr: Any = importlib.import_module("wandb_workspaces.reports.v2")
    expr: Any = importlib.import_module("wandb_workspaces.expr")
    key = picture.stem
    try:
        with wandb.init(project=PROJECT, job_type="report", name=title) as run:
            run.log({key: wandb.Image(str(picture))})
        where = {"entity": run.entity, "project": run.project}
        shown = wr.PanelGrid(
            runsets=[wr.Runset(**where, filters=[expr.Metric("ID") == run.id])],
            panels=[wr.MediaBrowser(media_keys=[key], layout=wr.Layout(w=24, h=12))],
        )
        return wr.Report(**where, title=title, blocks=[wr.MarkdownBlock(text), shown]).save().url
    except Exception as error:  # wandb's errors have no common type
        line = " ".join(str(error).split())
        raise ReportError(f"--wandb: the report is not published: {line}") from error


def log_page(page: Path, contents: dict[str, Any]) -> str:
    """Logs a page of :mod:`hoconv.tools.report`, and its figures as the run's summary, in a
    run of its own, offline where there is no API key. Returns where it is.

    Raises:
        ReportError: the server cannot be reached, or refuses.
    """
    import wandb

    mode = None if "WANDB_MODE" in os.environ or has_api_key() else "offline"
    try:
        with wandb.init(project=PROJECT, job_type="report", name=page.stem, mode=mode) as run:
            run.log({"report": wandb.Html(str(page), inject=False)})
            run.summary.update(figures(contents))
        return run.url or run.dir
    except Exception as error:  # wandb's errors have no common type
        line = " ".join(str(error).split())
        raise ReportError(f"--wandb: the page is not published: {line}") from error


def figures(contents: dict[str, Any]) -> dict[str, Any]:
    """Returns the figures of a page under names of one level, such as ``step_ms/cpp``."""
    found: dict[str, Any] = {"verdict": contents["verdict"]["headline"]}
    training = contents["training"] or {"groups": [], "predictions": []}
    for each in training["groups"]:
        estimates = {name: v for name, v in each.items() if isinstance(v, dict) and "ci95" in v}
        for name, value in (estimates | each["metrics"]).items():
            found[f"{name}/{each['label']}"] = value["mean"]
            found[f"{name}_ci95/{each['label']}"] = value["ci95"]
    for each in training["predictions"]:
        for name in ("share", "predicted", "limit"):
            found[f"{name}/{each['label']}"] = each[name]
    return {name: value for name, value in found.items() if value is not None}
