"""docs/use/recurrent.md, whose cells run, and docs/internals/recurrent.md, which shows what the
compiler prints."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from hoconv import recurrent as rnn
from hoconv.recurrent.schedule import plan

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "use" / "recurrent.md").read_text()
COMPILER = (DOCS / "internals" / "recurrent.md").read_text()


def blocks(marker: str) -> list[Any]:
    """Returns what follows a comment in a code block, by the comment's name."""
    return re.findall(rf"<!-- {marker} -->\n```\n(.*?)\n```", COMPILER, re.DOTALL)


def test_the_program_is_what_the_compiler_prints() -> None:
    shown = dict(blocks("stage: ([a-z ]+)"))
    stages = plan(rnn.lstm.bind(3, 4, {}), torch.float32).stages
    assert shown == {name: str(program) for name, program in stages if name in shown}
    explained = rnn.RNN(rnn.lstm, 3, 4).explain(stages=True)
    for name, program in stages:
        assert f"after the pass: {name}\n{program}" in explained


def test_the_explanation_is_what_explain_says() -> None:
    assert blocks("explain") == [rnn.RNN(rnn.lstm, 3, 4).explain()]


def test_its_cells_run() -> None:
    code = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    source = Path(__file__).with_name("docs_cells.py")
    scope: dict[str, Any] = {}
    first, *cells = code
    exec(compile(first.replace("num_layers=2", 'impl="reference"'), str(source), "exec"), scope)
    for text in cells:
        exec(compile(text, str(source), "exec"), scope)
    options = {
        "leaky": {"p": 0.2}, "writer": {"slots": 5}, "event_driven": {},
        "gated_delta": {"H": 2, "K": 3, "V": 2},
    }  # fmt: skip
    for name, given in options.items():
        output, _ = rnn.RNN(scope[name], 3, 4, impl="reference", **given)(torch.randn(6, 2, 3))
        assert output.shape == (6, 2, 4)
        assert output.isfinite().all()
