"""The Dockerfile, as far as it can be checked where there is no Docker."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCKERFILE, README = (ROOT / name for name in ("Dockerfile", "README.md"))
IGNORED = [
    line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")
]


def is_ignored(path: str) -> bool:
    """Returns whether a pattern matches a path or a folder that holds it: ``**/`` begins those for
    any folder."""
    patterns = (
        re.escape(line).replace(r"\*\*/", "(.*/)?").replace(r"\*", "[^/]*") for line in IGNORED
    )
    return any(re.fullmatch(f"{pattern}(/.*)?", path) for pattern in patterns)


def test_it_runs_the_commands_of_the_readme() -> None:
    text, lines = DOCKERFILE.read_text(), README.read_text().splitlines()
    (default,) = re.findall(r"^CMD (.*)$", text, re.MULTILINE)
    runs = [re.sub(r"^docker run .* hoconv ?", "", line) for line in lines if "docker run" in line]
    assert len(runs) == 2
    for command in (run or " ".join(json.loads(default)) for run in runs):
        assert any(line.startswith(command) for line in lines), command
    (installs,) = re.findall(r"^RUN pip install .*(-e .*)$", text, re.MULTILINE)
    assert any(line.startswith(f"pip install {installs}") for line in lines)


def test_the_image_has_the_files_of_git_and_no_others() -> None:
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True,
                                check=True)  # fmt: skip
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"not a git checkout: {error}")
    assert [path for path in listed.stdout.split("\0") if path and is_ignored(path)] == []
    # .gitignore names folders anywhere, or by a slash in front those of the root.
    for pattern in (ROOT / ".gitignore").read_text().split("\n"):
        if pattern and not pattern.startswith("#"):
            name = pattern.strip("/").replace("*", "hoconv")
            assert is_ignored(name), pattern
            assert pattern.startswith("/") or is_ignored(f"docs/{name}"), pattern
