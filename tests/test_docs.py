"""README and docs: what they link to is there, and figures come from the command beside them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    paths = [link for link in links if not link.startswith("http")]
    assert [path for path in paths if not (page.parent / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_command_beside_a_record_is_the_one_that_wrote_it(page: Path) -> None:
    for links, command in re.findall(
        r"\(((?:\[\w+\]\([^)]+\.json\),\s)+)by\s+`([^`]+)`", page.read_text()
    ):
        for link in re.findall(r"\(([^)]+)\)", links):
            recorded = json.loads((page.parent / link).read_text())["command"]
            assert re.sub(r" --out \S+", "", recorded) == " ".join(command.split()), link
