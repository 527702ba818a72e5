"""scripts/fuzz.py: some cases with a fixed seed, and faults of every kind that it has to find."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hoconv
from hoconv.dispatch.declaration import Implementation, operators
from hoconv.ops.dynamic_conv1d import operator as dynamic_conv1d
from hoconv.ops.dynamic_conv1d import reference
from hoconv.recurrent.ir.functions import FUNCTIONS

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.append(str(SCRIPTS))
fuzz = importlib.import_module("fuzz")
cases = importlib.import_module("fuzzing.cases")
workers = importlib.import_module("fuzzing.workers")
sequences = importlib.import_module("fuzzing.commands.sequences")
BAD = importlib.import_module("fuzzing.verdicts").BAD
SEED = 17


def run(
    numbers: Any, operator: str, impl: str, kind: str | None = None
) -> Iterator[tuple[Any, Any]]:
    """Runs the cases of one kind in this process; by default all but exports."""
    for number in numbers:
        case = cases.Case(cases.Key(operator, impl, "cpu", SEED, number))
        if case.kind == kind or (kind is None and case.kind != "export"):
            yield case, case.judge(Path())


def test_every_operator_has_a_generator() -> None:
    assert {operator.name for operator in operators()} - {"recurrent"} <= set(
        cases.operator_names()
    )


@pytest.mark.parametrize("impl", ["reference", "cpp"])
@pytest.mark.parametrize("operator", cases.operator_names())
def test_cases_with_a_fixed_seed(operator: str, impl: str) -> None:
    bad = [
        f"case {case.key.number}: {case}: {verdict.why}"
        for case, verdict in run(range(20), operator, impl)
        if verdict.kind in BAD
    ]
    assert not bad, "\n".join(bad)


@pytest.mark.slow
def test_cases_in_processes_whose_freed_memory_is_nan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--impl", "cpp", "--device", "cpu", "--cases", "100", "--seed", str(SEED)]
    assert fuzz.main(["operators", *options, "--out", str(tmp_path)]) == 0, capsys.readouterr().out


@pytest.mark.slow
def test_cells_with_a_fixed_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["cells", "--device", "cpu", "--cases", "12", "--seed", str(SEED), "--jobs", "1"]
    assert fuzz.main([*options, "--out", str(tmp_path)]) == 0
    assert "12 cases, 0 wrong" in capsys.readouterr().out
    assert (tmp_path / "fuzz_cells_interpret_cpu.json").exists()


def test_a_wrong_derivative_of_a_cell_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = importlib.import_module("fuzzing.commands.cells")
    wrong = dataclasses.replace(FUNCTIONS["sum"], derivative=lambda rnn, g, y, x: (g * 1.001,))
    monkeypatch.setitem(FUNCTIONS, "sum", wrong)
    verdicts = [
        cells.run(
            cells.Key("interpret", "cpu", SEED, number), Path(), lambda description: None
        ).kind
        for number in range(12)
    ]
    assert "wrong" in verdicts


@pytest.mark.parametrize("layer", ["HighOrderConv2d", "LightweightConv1d", "LSTM"])
def test_a_sequence_with_a_fixed_seed(layer: str) -> None:
    # A compiler takes seconds for one sequence of a recurrent layer.
    impl = "reference" if layer == "LSTM" else "cpp"
    key = sequences.Key(layer, impl, "cpu", SEED, 0, (), ("compiled", "compiled_autograd"))
    verdict = sequences.run(key, Path(), lambda description: None)
    assert verdict.kind == "equal", verdict.why


def test_a_layer_that_remembers_its_first_call_is_found(monkeypatch) -> None:
    found: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
    forward = hoconv.LightweightConv1d.forward

    def remembering(self: Any, x: Tensor) -> Tensor:
        now = self.softmax
        self.softmax = found.setdefault(self, now)
        try:
            return forward(self, x)
        finally:
            self.softmax = now

    monkeypatch.setattr(hoconv.LightweightConv1d, "forward", remembering)
    verdicts = (
        sequences.run(
            sequences.Key("LightweightConv1d", "reference", "cpu", SEED, number),
            Path(),
            lambda description: None,
        )
        for number in range(50)
    )
    verdict = next(v for v in verdicts if v.kind == "wrong" and "layer.softmax = " in v.why)
    assert "warm and cold: " in verdict.why
    assert verdict.why.count("\n") < 8  # shrunk: how it was made, two calls, what lies between


def test_a_key_determines_its_case() -> None:
    for operator in cases.operator_names():
        one, again = (cases.Case(cases.Key(operator, "cpp", "cpu", SEED, 3)) for _ in range(2))
        assert str(one) == str(again)
        for a, b in zip(one.call.tensors, again.call.tensors, strict=True):
            assert torch.equal(a.nan_to_num(), b.nan_to_num())
        assert str(cases.Case(cases.Key(operator, "cpp", "cpu", SEED + 1, 3))) != str(one)


def wrong_value(x: Tensor, weight: Tensor, padding: int) -> Tensor:
    return reference.dynamic_conv1d(x, weight, padding) * 1.001


def wrong_gradient(x: Tensor, weight: Tensor, padding: int) -> Tensor:
    out = reference.dynamic_conv1d(x, weight, padding)
    return out + 0.001 * (weight.sum() - weight.sum().detach()) * out.detach()


class _Once(torch.autograd.Function):
    """First derivatives are right; second ones, and those of forward mode, are silently zero."""

    @staticmethod
    def forward(*arguments: Any) -> Tensor:
        x, weight, padding = arguments
        return reference.dynamic_conv1d(x, weight, padding)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        *tensors, ctx.padding = inputs
        ctx.like = output.shape, output.dtype
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        with torch.enable_grad():
            x, weight = (t.detach().requires_grad_() for t in ctx.saved_tensors)
            out = reference.dynamic_conv1d(x, weight, ctx.padding)
        first = torch.autograd.grad(out, (x, weight), grad.detach())
        return *((a * 0).sum() + g for a, g in zip(ctx.saved_tensors, first, strict=True)), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        return torch.zeros(ctx.like[0], dtype=ctx.like[1])


def ignores_strides(x: Tensor, weight: Tensor, padding: int) -> Tensor:
    if x.numel() and not x.is_contiguous() and x.untyped_storage().nbytes() >= x.nbytes:
        x = x.as_strided(x.shape, torch.empty(x.shape).stride(), 0)
    return reference.dynamic_conv1d(x, weight, padding)


def forgets_nan(x: Tensor, weight: Tensor, padding: int) -> Tensor:
    return reference.dynamic_conv1d(x.nan_to_num(), weight, padding)


def overwrites(x: Tensor, weight: Tensor, padding: int) -> Tensor:
    out = reference.dynamic_conv1d(x, weight, padding)
    with torch.no_grad():
        x.copy_(x + 1)
    return out


def hoards(x: Tensor, weight: Tensor, padding: int) -> Tensor:
    torch.zeros(1 << 27).fill_(1.0)
    return reference.dynamic_conv1d(x, weight, padding)


def breaks(x: Tensor, weight: Tensor, padding: int) -> Tensor:
    return reference.dynamic_conv1d(x, weight.reshape(7, -1), padding)


def other_dtype(x: Tensor, weight: Tensor, padding: int) -> Tensor:
    return reference.dynamic_conv1d(x, weight, padding).double()


@pytest.mark.parametrize(
    ("function", "kind", "why"),
    [
        (wrong_value, "forward", "output: error"),
        (wrong_gradient, "backward", "gradient 1: error"),
        (_Once.apply, "penalty", "gradient"),
        (_Once.apply, "func_jvp", "derivative: error"),
        (ignores_strides, "forward", "output: "),
        (forgets_nan, "backward", "infinite or NaN"),
        (overwrites, "forward", "was changed"),
        (hoards, "forward", "MiB"),
        (breaks, "forward", "RuntimeError"),
        (other_dtype, "forward", "expected shape and dtype"),
    ],
)
def test_faults_are_found(monkeypatch, function: Callable, kind: str, why: str) -> None:
    monkeypatch.setitem(
        dynamic_conv1d.OPERATOR.implementations, "reference", Implementation(function)
    )
    found = (
        verdict
        for _, verdict in run(range(400), "dynamic_conv1d", "reference", kind)
        if verdict.kind in BAD and why in verdict.why
    )
    assert next(found, None), "none of 400 cases found it"


def test_unchecked_arguments_are_found(monkeypatch) -> None:
    monkeypatch.setattr(dynamic_conv1d, "_check", lambda *args: None)
    whys = [v.why for _, v in run(range(400), "dynamic_conv1d", "reference", "invalid")
            if v.kind == "wrong"]  # fmt: skip
    assert any("accepted" in why for why in whys)
    assert any("internal error" in why for why in whys)


@pytest.mark.slow
def test_tasks_after_a_crash_and_a_hang_still_run(tmp_path: Path) -> None:
    tasks = importlib.import_module("tests.scripts.tasks")
    given = ["go", "raise", "crash", "hang"]
    outcomes = list(workers.run(tasks.judge, given, tmp_path, jobs=1, seconds=1))
    assert [o.task for o in outcomes] == given
    assert [o.description for o in outcomes] == [f"about to {task}" for task in given]
    kinds = [o.verdict.kind for o in outcomes]
    assert kinds == ["equal", "wrong", "crashed", "hung"]
    assert "the definition is wrong" in outcomes[1].verdict.why
    assert "SIGSEGV" in outcomes[2].verdict.why


@pytest.fixture
def in_this_process(monkeypatch) -> None:
    def run(function, tasks, folder, jobs, seconds=0.0):
        for task in tasks:
            descriptions: list[str] = []
            verdict = function(task, folder, descriptions.append)
            yield workers.Outcome(task, descriptions[-1], verdict)

    monkeypatch.setattr(workers, "run", run)


@pytest.mark.usefixtures("in_this_process")
def test_it_writes_a_record_and_repeats_one_case(
    monkeypatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["operators", "--operator", "dynamic_conv1d", "--impl", "reference",
               "--device", "cpu", "--seed", "1", "--jobs", "1"]  # fmt: skip
    monkeypatch.setattr(cases, "_EXPORTED_IN_1000", 0)
    path = tmp_path / "fuzz_operators_cpu.json"

    assert fuzz.main([*options, "--cases", "5", "--out", str(tmp_path)]) == 0
    record = json.loads(path.read_text())
    assert record["seed"] == 1
    assert record["cases"] == 5
    (row,) = record["rows"]
    assert (row["operator"], row["impl"], row["bad"]) == ("dynamic_conv1d", "reference", [])
    assert sum(n for verdicts in row["kinds"].values() for n in verdicts.values()) == 5

    wrong = Implementation(wrong_value)
    monkeypatch.setitem(dynamic_conv1d.OPERATOR.implementations, "reference", wrong)
    assert fuzz.main([*options, "--cases", "5", "--out", str(tmp_path)]) == 1
    (row,) = json.loads(path.read_text())["rows"]
    capsys.readouterr()
    bad = row["bad"][0]
    assert fuzz.main([*options, "--case", str(bad["case"])]) == 1
    out = capsys.readouterr().out
    assert bad["what"] in out
    assert bad["why"] in out


@pytest.mark.usefixtures("in_this_process")
def test_every_implementation_that_an_operator_has_is_tried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--operator", "dynamic_conv1d", "approx_multiply", "--device", "cpu", "--jobs", "1"]
    assert fuzz.main(["operators", *options, "--cases", "1", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "dynamic_conv1d triton on cpu: not run" in out
    assert "approx_multiply triton" not in out


@pytest.mark.slow
def test_another_process_loads_a_saved_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exported = next(
        n for n in range(1000)
        if cases.Case(cases.Key("dynamic_conv1d", "cpp", "cpu", SEED, n)).kind == "export"
    )  # fmt: skip
    code = fuzz.main(["operators", "--operator", "dynamic_conv1d", "--impl", "cpp", "--device",
                      "cpu", "--seed", str(SEED), "--case", str(exported)])  # fmt: skip
    out = capsys.readouterr().out
    assert "export: " in out
    assert code == 0, out
