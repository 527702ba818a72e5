"""compare.py --wandb, with a server in this process in W&B's place, and report.py --wandb offline:
no network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RUNS = ROOT / "docs" / "results" / "digits"

pytest.importorskip("wandb_workspaces", reason="needs wandb[workspaces]")


class Server(ThreadingHTTPServer):
    """Answers the queries of a run and of a report; `runs` are the ids of those that began, `views`
    the reports that were saved, `files` the names of what was uploaded. With `broken` it refuses
    the report."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.runs: set[str] = set()
        self.views: list[dict[str, Any]] = []
        self.files: list[str] = []
        self.broken = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def answer(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        project = {"id": "p", "internalId": "7", "name": "hoconv", "entityName": "someone"}
        run = {"id": "r", "name": variables.get("name"), "displayName": "digits", "config": "{}",
               "project": project | {"entity": {"id": "e", "name": "someone"}}}  # fmt: skip
        view = {"id": "view1", "displayName": "digits", "project": project, "spec": "{}"}
        urls = [{"name": name, "uploadUrl": f"{self.url}/{name}"}
                for name in variables.get("files", ())]  # fmt: skip
        if "upsertBucket" in query:
            self.runs.add(variables["name"])
        if "upsertView" in query:
            if self.broken:
                return {"errors": [{"message": "no reports\ntoday"}]}
            self.views.append(variables)
        nothing = {"edges": [], "pageInfo": {"hasNextPage": False, "endCursor": None}}
        return {
            "data": {
                "viewer": {"id": "u", "username": "someone", "entity": "someone", "flags": "{}"},
                "project": project,
                "models": nothing,
                "upsertBucket": {"bucket": run, "inserted": True},
                "createRunFiles": {"runID": "r", "uploadHeaders": [], "files": urls},
                "upsertView": {"view": view},
            }
        }


class Handler(BaseHTTPRequestHandler):
    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_POST(self) -> None:
        asked = self._body()
        answer = {}
        if self.path == "/graphql":
            asked = json.loads(asked)
            answer = self.server.answer(asked["query"], asked.get("variables") or {})
        self._reply(answer)

    def do_PUT(self) -> None:
        self._body()
        self.server.files.append(self.path)
        self._reply({})

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _reply(self, answer: dict[str, Any]) -> None:
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: Any) -> None:
        """Says nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def compare(tmp_path: Path, server: Server):
    """Compares the committed runs, in a process of its own; with a key where none is given."""

    def compare(**settings: str) -> subprocess.CompletedProcess[str]:
        settings = {"WANDB_API_KEY": "0" * 40} | settings
        kept = {name: v for name, v in os.environ.items() if not name.startswith("WANDB_")}
        environment = kept | {
            "HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc"), "WANDB_BASE_URL": server.url,
            "WANDB_ERROR_REPORTING": "false", "WANDB_DIR": str(tmp_path), **settings,
        }  # fmt: skip
        return subprocess.run(
            [sys.executable, "scripts/compare.py", str(RUNS), "--name", "digits", "--wandb",
             "--out", str(tmp_path)],
            cwd=ROOT, env=environment, capture_output=True, text=True,
        )  # fmt: skip

    return compare


@pytest.mark.slow
def test_the_table_and_the_chart_become_a_report(compare, server, tmp_path):
    done = compare()
    assert done.returncode == 0, done.stderr
    (view,) = server.views
    assert (view["entityName"], view["projectName"], view["displayName"]) == (
        "someone", "hoconv", "digits",
    )  # fmt: skip
    blocks = json.loads(view["spec"])["blocks"]
    (text,) = (block["content"] for block in blocks if block["type"] == "markdown-block")
    assert text == (tmp_path / "digits.md").read_text()
    (grid,) = (block["metadata"] for block in blocks if block["type"] == "panel-grid")
    (runs,) = grid["runSets"]
    assert {each["value"] for each in runs["filters"]["filters"]} == server.runs
    (panel,) = grid["panelBankSectionConfig"]["panels"]
    assert panel["config"]["mediaKeys"] == ["digits"]
    assert any("media/images/digits" in name for name in server.files)
    assert done.stdout.splitlines()[-1].startswith(server.url)


@pytest.mark.slow
def test_a_server_that_refuses_is_one_line_and_the_files_are_there(compare, server, tmp_path):
    server.broken = True
    done = compare()
    assert done.returncode == 1
    line = done.stderr.splitlines()[-1]
    assert line.startswith("Error: --wandb: the report is not published: ")
    assert "no reports today" in line
    assert (tmp_path / "digits.md").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"WANDB_API_KEY": ""}, "there is no API key"),
        ({"WANDB_MODE": "offline"}, "WANDB_MODE is offline; unset it"),
    ],
    ids=["no key", "offline"],
)
def test_where_no_report_can_be_made_nothing_is_written(compare, tmp_path, settings, message):
    done = compare(**settings)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert message in line
    assert not (tmp_path / "digits.md").exists()


def test_a_page_is_logged_with_its_figures(
    script: Any, wandb_alone: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    page = tmp_path / "report_carafe.html"
    page.write_text("<p>a page</p>")
    estimate = {"mean": 2.0, "ci95": 0.5, "n": 3}
    group = {"label": "cpp", "runs": 3, "speedup": estimate, "metrics": {"test/accuracy": estimate}}
    prediction = {"label": "cpp", "share": 0.5, "predicted": 1.9, "limit": None}
    contents = {
        "verdict": {"headline": "cpp trains 2 times as fast"},
        "training": {"groups": [group], "predictions": [prediction]},
    }
    module = script("wandb_report")
    assert module.figures(contents) == {
        "verdict": "cpp trains 2 times as fast", "speedup/cpp": 2.0, "speedup_ci95/cpp": 0.5,
        "test/accuracy/cpp": 2.0, "test/accuracy_ci95/cpp": 0.5, "share/cpp": 0.5,
        "predicted/cpp": 1.9,
    }  # fmt: skip
    folder = Path(module.log_page(page, contents))
    (logged,) = folder.rglob("*.html")
    assert "a page" in logged.read_text()
