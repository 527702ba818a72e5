"""A report at Weights & Biases: a text in Markdown, and a picture."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

from training.results.loggers import has_api_key

PROJECT = "hoconv"  # as conf/logger/wandb.yaml has it


class ReportError(Exception):
    """Why there is no report, and what to do."""


def require_online() -> None:
    """Looks, before there is anything to publish, whether it can be.

    Raises:
        ReportError: it cannot.
    """
    if importlib.util.find_spec("wandb_workspaces") is None:
        raise ReportError(
            "--wandb needs the package wandb-workspaces: `pip install 'wandb[workspaces]'`"
        )
    if (mode := os.environ.get("WANDB_MODE", "online")) != "online":
        raise ReportError(
            f"--wandb: a report is made at the server, and WANDB_MODE is {mode}; unset it"
        )
    if not has_api_key():
        raise ReportError("--wandb: there is no API key; run `wandb login` first")


def publish(title: str, text: str, picture: Path) -> str:
    """Publishes a report; returns its address.

    The picture belongs to a run of its own, from which the report takes it.

    Raises:
        ReportError: the server cannot be reached, or refuses.
    """
    import wandb

    # As modules without types: theirs are not those of what their functions take.
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
    except Exception as error:  # wandb's have no type in common
        line = " ".join(str(error).split())
        raise ReportError(f"--wandb: the report is not published: {line}") from error
