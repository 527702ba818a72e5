"""README and docs: links lead to files and headings, and records name the command beside them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")])


def headings(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)]+)\)", text):
        path, _, heading = link.partition("#")
        target = page.parent / path if path else page
        if path.startswith("http"):
            continue
        if not target.exists() or (heading and heading not in headings(target)):
            broken.append(link)
    assert broken == []


def test_options_of_training_commands_come_before_overrides() -> None:
    """As argparse wants it: else the overrides behind an option are unrecognized arguments."""
    for page in [*PAGES, *ROOT.glob("hoconv/tools/template/*.md")]:
        for command in re.findall(r"^python train\.py .*", page.read_text(), re.MULTILINE):
            assert not re.search(r" [^- ]\S*=\S+ -m ", command), f"{page}: {command}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_command_beside_a_record_is_the_one_that_wrote_it(page: Path) -> None:
    for links, command in re.findall(
        r"\(((?:\[\w+\]\([^)]+\.json\),\s)+)by\s+`([^`]+)`", page.read_text()
    ):
        for link in re.findall(r"\(([^)]+)\)", links):
            recorded = json.loads((page.parent / link).read_text())["command"]
            assert re.sub(r" --out \S+", "", recorded) == " ".join(command.split()), link
