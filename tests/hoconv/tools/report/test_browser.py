"""The page in a headless Chromium: it draws, hovers, fetches nothing and runs no text as code."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
pytestmark = pytest.mark.skipif(not BROWSER, reason="no chromium is installed")
OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--host-resolver-rules=MAP * ~NOTFOUND",
    "--virtual-time-budget=10000", "--enable-logging=stderr", "--window-size=1200,900",
)  # fmt: skip
EVIL = "<script>injected()</script><img src='http://127.0.0.1/x' onerror='injected()'>\"'&"
# Runs in the page when its charts are drawn: hovers over each point, and leaves what it finds.
PROBE = """
<script>
function injected() { document.documentElement.dataset.injected = "yes"; }
const seen = new Set();
const probe = setInterval(() => {
  if (document.documentElement.dataset.drawn !== "yes") return;
  clearInterval(probe);
  const marks = ".chart .mark-symbol path, .chart .mark-rect path";
  for (const mark of document.querySelectorAll(marks)) {
    const { x, y, width, height } = mark.getBoundingClientRect();
    const at = { bubbles: true, clientX: x + width / 2, clientY: y + height / 2 };
    for (const kind of ["mouseover", "mousemove", "pointerover", "pointermove"])
      mark.dispatchEvent(new PointerEvent(kind, at));
    const tip = document.getElementById("vg-tooltip-element");
    if (tip) seen.add(tip.innerText.replace(/\\s+/g, " "));
  }
  const found = {
    tips: [...seen],
    fetched: performance.getEntriesByType("resource").map((entry) => entry.name),
    charts: [...document.querySelectorAll(".chart")].map(
      (chart) => chart.querySelectorAll("svg path").length),
    wide: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  };
  document.body.insertAdjacentHTML("beforeend", "<pre id=found></pre>");
  document.getElementById("found").textContent = JSON.stringify(found);
}, 50);
</script>
"""


class Seen(NamedTuple):
    """What a browser made of a page: what the probe found, the document, and its console."""

    found: dict[str, Any]
    document: str
    console: list[str]


@pytest.fixture
def browse(tmp_path: Path) -> Callable[[Path], Seen]:
    def browse(page: Path) -> Seen:
        probed = tmp_path / "probed.html"
        probed.write_text(page.read_text().replace("<main>", PROBE + "<main>"))
        done = subprocess.run(
            [BROWSER, *OPTIONS, f"--user-data-dir={tmp_path}/profile", "--dump-dom", str(probed)],
            capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip
        kept = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
        assert kept, f"the charts were not drawn: {done.stderr}"
        console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
        return Seen(json.loads(html.unescape(kept[1])), done.stdout, console)

    return browse


def test_the_page_draws_and_fetches_nothing(
    three_seeds: Callable[..., Any], browse: Callable[[Path], Seen]
) -> None:
    files = three_seeds([10.0, 10.2, 9.8], [5.0, 5.2, 4.9], [10.1, 10.2, 9.9])
    files.share("reference", step_ms=9.0, operator_ms=6.0)
    files.share("cpp", step_ms=4.5, operator_ms=1.5)
    files.run("cpp", 3, 5.0, losses=[1.0, float("nan"), -1.0])
    files.check()
    files.kernels(reference=10.0, cpp=2.0)
    files.report()
    seen = browse(files.page)
    assert seen.console == []
    assert seen.found["fetched"] == []
    assert len(seen.found["charts"]) == 7
    assert all(seen.found["charts"])
    assert seen.found["wide"] == 0
    tips = " | ".join(seen.found["tips"])
    for text in ("share of the step", "speed-up: predicted", "median, ms: 16", "seed: 3"):
        assert text.replace(":", "") in tips.replace(":", ""), tips


def test_no_text_becomes_code(files: Any, browse: Callable[[Path], Seen]) -> None:
    for seed in range(2):
        for impl in ("reference", EVIL):
            files.run(impl, seed, 10.0 + seed, data=EVIL, metrics={f"test/{EVIL}": 0.5 + seed})
    files.run("cuda", 0, None, status="failed", error=EVIL, metrics={})
    files.kernels(**{"reference": 10.0, EVIL: 2.0})
    files.check(cpp=[EVIL])
    files.report()
    seen = browse(files.page)
    assert "data-injected" not in seen.document.split("<body")[0]
    assert seen.console == []
    assert seen.found["fetched"] == []
    assert any("injected()" in tip for tip in seen.found["tips"])  # shown as the text that it is
