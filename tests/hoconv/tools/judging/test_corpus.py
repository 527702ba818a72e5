"""Kernels that cheat or are wrong, each with the harm that it does: `hoconv judge` says of each
what it does, and nothing of honest ones."""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from hoconv.tools.judging.command import Options, judge
from hoconv.tools.judging.definition import read
from hoconv.tools.judging.record import WRONG
from hoconv.tools.judging.session import Starter
from hoconv.tools.judging.verdict import Verdict

HERE = Path(__file__).parent
TIMED = "timed call|remembers values"
LEAST = 40
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def corpus() -> Iterator[tuple[str, str, str]]:
    """Yields the file of each exploit, its name, and the names by which it may be caught."""
    for path in sorted((HERE / "corpus").glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            said = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
            if caught := re.search("Caught: (.*)", said or ""):
                yield path.stem, node.name, caught[1].rstrip(".")  # pyright: ignore


def judge_exploit(
    family: str, name: str, caught: str, device: str, starter: Starter, folder: Path
) -> Verdict:
    """Judges a function of the corpus as a file of its own."""
    definition = shutil.copy(HERE / "definition.py", folder)  # which some write to
    shutil.copy(HERE / "corpus" / "honest.py", folder)
    candidate = folder / "exploit.py"
    source = (HERE / "corpus" / f"{family}.py").read_text()
    candidate.write_text(f"{source}\n\nnormalize = {name}\nDEFINITION = {str(definition)!r}\n")
    options = Options(
        device,
        seed=int.from_bytes(name.encode()[:4]),
        more=150,
        seconds=3 if caught == "no answer" else 60,
        times=bool(re.search(TIMED, caught)),
    )
    return judge(read(str(definition), device, 0), str(candidate), starter, options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("family", "name", "caught"), [*corpus()])
def test_exploit_is_caught_by_name(
    family: str, name: str, caught: str, device: str, starter: Starter, tmp_path: Path
) -> None:
    verdict = judge_exploit(family, name, caught, device, starter, tmp_path)
    names = [finding.name for finding in verdict.findings]
    if caught == "nothing":
        assert (verdict.outcome, verdict.findings) == ("correct", [])
    elif caught in ("seldom", "in any call"):  # a fault at random: chance picks the call
        assert set(names) <= set(WRONG.values())
        assert verdict.rarest() > 1e-4
        assert caught == "seldom" or verdict.outcome == "wrong"
    elif any(caught in said for said in verdict.provenance()):
        assert verdict.outcome == "correct"
    else:
        assert set(names) & set(caught.split(" or ")), verdict.findings
        assert verdict.outcome in ("wrong", "refused")


def test_the_corpus_is_large() -> None:
    assert len([caught for *_, caught in corpus() if caught not in ("nothing", "seldom")]) >= LEAST
