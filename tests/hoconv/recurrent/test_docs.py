"""docs/use/recurrent.md: its cells run, and its programs are what the compiler prints."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from hoconv import recurrent as rnn
from hoconv.recurrent.schedule import plan

PAGE = (Path(__file__).parents[3] / "docs" / "use" / "recurrent.md").read_text()


def blocks(marker: str) -> list[Any]:
    """Returns what follows a comment in a code block, by the comment's name."""
    return re.findall(rf"<!-- {marker} -->\n```\n(.*?)\n```", PAGE, re.DOTALL)


def test_programs_are_those_that_the_compiler_prints() -> None:
    stages = plan(rnn.lstm.bind(3, 4, {}), torch.float32).stages
    shown = blocks("stage: ([a-z ]+)")
    assert [name for name, _ in shown] == [name for name, _ in stages]
    for (name, text), (_, program) in zip(shown, stages, strict=True):
        assert text == str(program), name


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
    options = {"leaky": {"p": 0.2}, "writer": {"slots": 5}, "event_driven": {}}
    for name, given in options.items():
        output, _ = rnn.RNN(scope[name], 3, 4, impl="reference", **given)(torch.randn(6, 2, 3))
        assert output.shape == (6, 2, 4)
        assert output.isfinite().all()
