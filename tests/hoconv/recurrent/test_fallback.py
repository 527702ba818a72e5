"""A recurrent layer whose code cannot be compiled: `auto` takes the next one, by name it raises."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hoconv import jit
from hoconv import recurrent as rnn
from hoconv.dispatch.implementations import BrokenImplementationError
from hoconv.jit import nvrtc
from hoconv.recurrent import compiled_plan, plans
from hoconv.recurrent.frontend.serialize import to_text
from hoconv.recurrent.frontend.trace import trace
from hoconv.recurrent.runtime import cuda
from tests.hoconv.recurrent.support import bound, gradients, sequence

ROOT = Path(__file__).parents[3]
needs_compiler = pytest.mark.skipif(
    jit.obstacle("cpu") is not None, reason=str(jit.obstacle("cpu"))
)
needs_nvrtc = pytest.mark.skipif(nvrtc.obstacle() is not None, reason=str(nvrtc.obstacle()))

TRAIN_AND_TEST = """
import functools, torch
from hoconv import recurrent as rnn
from hoconv.dispatch.implementations import BrokenImplementationError, choose
from hoconv.recurrent.operator import OPERATOR, recurrent
torch.manual_seed(0)
layer, x = rnn.LSTM(3, 4, num_layers=2), torch.randn(5, 2, 3)
exact = rnn.LSTM(3, 4, num_layers=2, impl="reference")
exact.load_state_dict(layer.state_dict())
for _ in range(2):
    output, _ = layer(x)
    output.sum().backward()
    assert torch.equal(output, exact(x)[0])
    with torch.no_grad():
        assert torch.equal(layer(x)[0], output)
sample = next(iter(OPERATOR.samples(torch.device("cpu"), torch.float32)))
call = functools.partial(recurrent, *sample.args, **sample.kwargs)
for result, expected in zip(call(impl="auto"), call(impl="reference"), strict=True):
    assert torch.equal(result, expected)
print(choose(OPERATOR, "auto", "cpu").why)
layer.impl = "cpp"
try:
    layer(x)
except BrokenImplementationError as error:
    print(error)
"""


@needs_compiler
@pytest.mark.parametrize("what", ["compiler", "cache"])
def test_layers_fall_back_to_the_reference_with_one_warning(what: str, tmp_path: Path) -> None:
    file = tmp_path / "broken"
    file.write_text("#!/bin/sh\necho 'x.cpp:1: error: out of order' >&2\nexit 1\n")
    file.chmod(0o755)
    if what == "compiler":
        given, reason = {"CXX": str(file), "TORCH_EXTENSIONS_DIR": str(tmp_path)}, "out of order"
    else:
        given, reason = {"TORCH_EXTENSIONS_DIR": str(file)}, "cannot write the build cache"
    done = subprocess.run(
        [sys.executable, "-c", TRAIN_AND_TEST],
        env={**os.environ, "PYTHONPATH": str(ROOT), **given},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    why, raised = done.stdout.splitlines()[:2]
    assert why.startswith("cpp is broken: ")
    assert reason in why
    assert raised.startswith("impl=cpp is broken for recurrent: ")
    assert reason in raised
    said = [line for line in done.stderr.splitlines() if " uses " in line]
    assert len(said) == 1
    assert said[0].startswith("hoconv: recurrent uses reference on cpu; cpp is broken: ")


@pytest.fixture
def compiles_badly(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A cell that no other test has, of which the compiler makes an error."""

    @rnn.cell(state=("h",))
    def hard(x: Any, h: Any, *, slope: float) -> Any:
        h = rnn.tanh(rnn.linear("h", x, h)) * slope
        return h, dict(h=h)

    compile_loops = compiled_plan.compile_loops

    def fail(programs: Any) -> Any:
        if any(program.name.startswith("hard ") for program in programs.values()):
            raise jit.BuildError("the compiler failed: hard to compile")
        return compile_loops(programs)

    monkeypatch.setattr(compiled_plan, "compile_loops", fail)
    return lambda slope, **options: rnn.RNN(hard, 3, 4, dtype=torch.float64, slope=slope, **options)


def exact_of(layer: rnn.RNN, x: Tensor) -> list[Tensor]:
    before, layer.impl = layer.impl, "reference"
    try:
        return gradients(layer, x)
    finally:
        layer.impl = before


@needs_compiler
def test_a_cell_that_does_not_compile_falls_back_alone_and_says_so_once(
    compiles_badly: Callable[..., rnn.RNN], capfd: pytest.CaptureFixture[str]
) -> None:
    layer, other, x = compiles_badly(0.5), rnn.LSTM(3, 4, dtype=torch.float64), sequence()
    for _ in range(2):
        torch.testing.assert_close(gradients(layer, x), exact_of(layer, x), rtol=0, atol=0)
        other(x)
    (said,) = [s for s in capfd.readouterr().err.splitlines() if s.startswith("hoconv: rec")]
    assert said.startswith("hoconv: recurrent (float64/auto/plain/hard, forward) uses")
    assert said.endswith(
        "uses reference on cpu; cpp is broken: the compiler failed: hard to compile"
    )


@needs_compiler
def test_a_cell_that_does_not_compile_is_an_error_by_name_every_time(
    compiles_badly: Callable[..., rnn.RNN],
) -> None:
    layer = compiles_badly(0.25, impl="cpp")
    for _ in range(2):
        with pytest.raises(BrokenImplementationError, match=r"impl=cpp .*: hard to compile"):
            layer(sequence())


@needs_compiler
def test_what_falls_back_can_be_compiled_by_torch(
    compiles_badly: Callable[..., rnn.RNN],
) -> None:
    layer, x = compiles_badly(0.75), sequence()
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(gradients(compiled, x), exact_of(layer, x))
    torch.compiler.reset()


@needs_nvrtc
def test_kernels_are_compiled_before_a_call_with_those_of_the_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled = []
    monkeypatch.setattr(jit, "visible_gpus", lambda: ("8.0", "9.0"))
    monkeypatch.setattr(cuda, "compile_cuda", lambda *source: compiled.append(source))
    cuda.load()
    assert [architecture for *_, architecture in compiled] == ["sm_80", "sm_90"]
    compiled.clear()
    cell = to_text(trace(bound("peephole_lstm", 5, 7)))
    plan = plans.request(cell, torch.float64, "auto", False, False, False)
    plans.prepare("cuda", "cuda", plan, "forward")
    assert len({text for _, text, _ in compiled}) == 2
    assert len(compiled) == 4
    compiled.clear()
    small = plans.request(to_text(trace(bound("lstm"))), torch.float32, "auto", False, False, False)
    assert plans.find_plan(small).plan.cudnn
    plans.prepare("cuda", "cuda", small, "forward")
    assert compiled == []  # cuDNN's is called
