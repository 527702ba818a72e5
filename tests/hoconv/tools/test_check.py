"""hoconv check on a toy operator: right implementations pass, each fault is found and named."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hoconv.dispatch.declaration import Implementation, Operator, Sample, declare
from hoconv.tools import check, commands

ROOT = Path(__file__).parents[3]


def run(tmp_path: Path, *options: str) -> tuple[int, dict[str, Any]]:
    path = tmp_path / "check.json"
    code = check.main(["--device", "cpu", "--seed", "7", "--json", str(path), *options])
    return code, json.loads(path.read_text())


def add(toy: Operator, name: str, implementation: Implementation) -> None:
    assert isinstance(toy.implementations, dict)
    toy.implementations[name] = implementation


def row_of(record: dict[str, Any], impl: str, dtype: str | None) -> dict[str, Any]:
    (row,) = (r for r in record["rows"] if r["impl"] == impl and r["dtype"] == dtype)
    return row


def test_right_implementations_pass(
    toy: Operator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, record = run(tmp_path)

    assert code == 0
    assert record["seed"] == 7
    assert record["environment"]["torch"] == torch.__version__
    for impl, dtype in itertools.product(("reference", "swapped"), ("float32", "float16")):
        row = row_of(record, impl, dtype)
        assert (row["operator"], row["device"], row["cases"]) == ("toy", "cpu", 3)
        assert row["same_bits"]
        assert row["failures"] == []
    assert len(record["rows"]) == 4
    half = row_of(record, "swapped", "float16")
    assert 1e-5 < half["output_error"] <= half["tolerance"]
    assert 1e-5 < half["gradient_error"] <= half["tolerance"]
    assert "12 cases, 0 failures" in capsys.readouterr().out


def test_it_needs_torch_alone() -> None:
    others = "rich", "pytorch_lightning", "hydra", "matplotlib", "pytest"
    blocked = f"import sys; sys.modules.update(dict.fromkeys({others}))"
    command = f"{blocked}; from hoconv.tools import check; sys.exit(check.main(['--help']))"
    done = subprocess.run(
        [sys.executable, "-c", command], capture_output=True, text=True, check=False
    )
    assert done.stdout.startswith("usage: hoconv check"), done.stderr


def test_small_keeps_float32(toy: Operator, tmp_path: Path) -> None:
    code, record = run(tmp_path, "--small", "--impl", "swapped")

    assert code == 0
    assert [(row["impl"], row["dtype"]) for row in record["rows"]] == [("swapped", "float32")]


def test_a_definition_that_fails_is_named(
    toy: Operator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(x: Tensor, y: Tensor, scale: float) -> Tensor:
        raise IndexError("no such pixel")

    add(toy, "reference", Implementation(fail))
    code, record = run(tmp_path)

    assert code == 1
    assert row_of(record, "reference", "float32")["failures"] == [
        "scale 1: IndexError: no such pixel"
    ]
    said = capsys.readouterr().out
    assert re.search(r"toy reference cpu float32: scale 1: IndexError.*: float32, float16\)", said)


def test_samples_that_fail_are_named(toy: Operator, tmp_path: Path) -> None:
    def one(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
        yield next(iter(toy.samples(device, dtype)))
        raise ValueError("no more")

    declared = dataclasses.replace(toy, samples=one)
    arguments = check._parse(["--operator", "toy", "--seed", "1"])
    rows = check.check(declared, "cpu", arguments, lambda what: None)
    assert [row.failures for row in rows] == [["the sample after scale 1: ValueError: no more"]] * 2


def forgetful(x: Tensor, y: Tensor, scale: float) -> Tensor:
    """Never writes the first element."""
    out = torch.empty_like(x)
    out.flatten()[1:] = (x * y * scale).flatten()[1:]
    return out


def wrong_gradient(x: Tensor, y: Tensor, scale: float) -> Tensor:
    return x * y * scale + 0.01 * scale * (y - y.detach()) * x.detach()


def clears_its_input(x: Tensor, y: Tensor, scale: float) -> Tensor:
    out = (x * y * scale).clone()
    x.data.zero_()
    return out


_kept: dict[int, tuple[Tensor, Tensor]] = {}


def remembers(x: Tensor, y: Tensor, scale: float) -> Tensor:
    """Its results are those of the first call with a tensor."""
    out = x * y * scale
    _, first = _kept.setdefault(x.data_ptr(), (x, out.detach()))
    return out - out.detach() + first


class Reuses(torch.autograd.Function):
    """Every call returns the same memory."""

    memory: dict[tuple[object, ...], Tensor] = {}

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x, y)
        ctx.scale = scale
        out = Reuses.memory.setdefault((x.shape, x.dtype, scale), torch.zeros_like(x))
        out.data.copy_(x * y * scale)
        return out.data[:]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return grad * y * ctx.scale, grad * x * ctx.scale, None


class RingOfBuffers(torch.autograd.Function):
    """Returns the memory of the tenth call before."""

    memory: dict[tuple[object, ...], list[Tensor]] = {}

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x, y)
        ctx.scale = scale
        ring = RingOfBuffers.memory.setdefault((x.shape, x.dtype), [])
        ring.append(torch.empty_like(x) if len(ring) < 10 else ring.pop(0))
        ring[-1].data.copy_(x * y * scale)
        return ring[-1].data[:]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return grad * y * ctx.scale, grad * x * ctx.scale, None


def wrong_in_other_threads(x: Tensor, y: Tensor, scale: float) -> Tensor:
    alone = threading.current_thread() is threading.main_thread()
    return x * y * scale * (1 if alone else 2)


_scratch: dict[Any, Tensor] = {}


def shares_scratch(x: Tensor, y: Tensor, scale: float) -> Tensor:
    smooth, product = x, _scratch.setdefault((x.shape, x.dtype), torch.empty_like(x))
    product.copy_(x.detach() * y.detach())
    for _ in range(20):  # a kernel that takes a while
        smooth = x * y * scale
    return smooth + (product * scale - smooth).detach()


_ballast: list[Tensor] = []


def keeps_memory(x: Tensor, y: Tensor, scale: float) -> Tensor:
    _ballast.append(torch.ones(1 << 16))  # in all more than a process of many tests has free
    return x * y * scale


def in_the_memory_of_its_argument(x: Tensor, y: Tensor, scale: float) -> Tensor:
    return x * y * scale if torch.is_grad_enabled() else x.mul_(y * scale)


class Subclass(torch.Tensor):
    @staticmethod
    def compute(x: Tensor, y: Tensor, scale: float) -> Tensor:
        out = x * y * scale
        return out if out.requires_grad else out.as_subclass(Subclass)


def needs_a_gradient(x: Tensor, y: Tensor, scale: float) -> Tensor:
    out = x * y * scale
    torch.autograd.grad(out.sum(), x, retain_graph=True)
    return out


def drops_nans(x: Tensor, y: Tensor, scale: float) -> Tensor:
    return x.nan_to_num() * y.nan_to_num() * scale


def adds_at_zero(x: Tensor, y: Tensor, scale: float) -> Tensor:
    return x * y * scale + (x.detach() == 0)


def saturates(x: Tensor, y: Tensor, scale: float) -> Tensor:
    return (x * y * scale).clamp(-1e4, 1e4)


def knows_the_samples(x: Tensor, y: Tensor, scale: float) -> Tensor:
    return x * y * scale * (1 if x.shape in ((4, 5), (0,)) else 2)


def exits(x: Tensor, y: Tensor, scale: float) -> Tensor:
    raise SystemExit(0)


_alike: list[Tensor] = []


def tires(x: Tensor, y: Tensor, scale: float) -> Tensor:
    """Raises an error when it has been called with the same values eighteen times in a row."""
    if _alike and not (x.shape == _alike[0].shape and torch.equal(x, _alike[0])):
        _alike.clear()
    _alike.append(x.detach().clone())
    if x.numel() and len(_alike) > 18:
        raise RuntimeError("enough")
    return x * y * scale


@pytest.mark.parametrize(
    ("function", "failure"),
    [
        (clears_its_input, "scale 1: argument 0 was changed"),
        (remembers, "scale 1, then other values in the same tensors: output: error"),
        (
            Reuses.apply,
            "scale 1, then other values in the same tensors: output: the result of the first",
        ),
        (lambda x, y, scale: x * y, "scale -2: output: error"),
        (lambda x, y, scale: x * y * scale + float("nan"), "scale 1: output: error nan"),
        (lambda x, y, scale: (x * y * scale)[:1], "scale 1: RuntimeError"),
        (
            lambda x, y, scale: (x * y * scale).double(),
            "scale 1: output: ValueError: expected shape",
        ),
        (lambda x, y, scale: (x * y * scale).detach(), "scale 1: RuntimeError"),
        (wrong_gradient, "scale 1: gradient of argument 1: error 1.0e-02"),
        (forgetful, "scale 1: output: error nan"),
        (RingOfBuffers.apply, "20 calls later: output: the first result changed"),
        (wrong_in_other_threads, "in 4 threads at once: output: error"),
        (shares_scratch, "in 4 threads at once: output: error"),
        (keeps_memory, ": memory grows: "),
        (in_the_memory_of_its_argument, "under torch.no_grad: output: it is in the memory of"),
        (Subclass.compute, "under torch.no_grad: output: expected a dense torch.Tensor, got"),
        (needs_a_gradient, "under torch.no_grad: RuntimeError: element 0"),
        (drops_nans, "NaN in all of argument 0: output: a NaN of the reference is missing"),
        (adds_at_zero, "zeros everywhere: output: error inf"),
        (saturates, "huge values: output: error"),
        (knows_the_samples, " in place of "),
        (exits, "scale 1: SystemExit: 0"),
        (tires, "20 calls later: RuntimeError: enough"),
    ],
    ids=[
        "changes its input",
        "remembers",
        "reuses memory",
        "argument ignored",
        "nan",
        "shape",
        "dtype",
        "no gradient",
        "gradient",
        "not written",
        "ring of buffers",
        "threads",
        "threads that share memory",
        "keeps memory",
        "memory of an argument",
        "subclass",
        "needs a gradient",
        "drops NaN",
        "zeros",
        "saturates",
        "sizes",
        "exits",
        "tires",
    ],
)
def test_fault_is_found_and_named(
    toy: Operator,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    function: Callable[..., Tensor],
    failure: str,
) -> None:
    add(toy, "faulty", Implementation(function))

    code, record = run(tmp_path)
    _ballast.clear()

    assert code == 1
    assert any(failure in line for line in row_of(record, "faulty", "float32")["failures"])
    said = capsys.readouterr().out
    assert re.search(rf"^toy faulty cpu float32: .*{re.escape(failure)}", said, re.MULTILINE)
    assert row_of(record, "swapped", "float32")["failures"] == []


def test_a_definition_that_is_another_in_float64_is_told_what_to_do(toy: Operator) -> None:
    def steps(x: Tensor, y: Tensor, scale: float) -> Tensor:
        smooth = x * y * scale
        return smooth + ((1e6 * smooth).round() % 2 - smooth).detach()

    add(toy, "reference", Implementation(steps))
    found = failures_of(toy)
    (said,) = (line for line in found["reference"] if line.startswith("20 x 30: output: error "))
    assert said.endswith("let it decide in float64, declare bitwise=True, or a larger tolerance")
    there = re.search(
        r"at \[\d+, \d+\]: [01], not ([01]), where argument 0 is (\S+) and argument 1 is (\S+); ",
        said,
    )
    assert there
    assert round(1e6 * float(there[2]) * float(there[3])) % 2 == int(there[1])
    assert failures_of(toy, bitwise=True, tolerances={torch.float32: 0})["reference"] == []


def test_a_definition_that_refuses_float64_is_told_what_it_is_for(toy: Operator) -> None:
    def single(x: Tensor, y: Tensor, scale: float) -> Tensor:
        if x.dtype == torch.float64:
            raise TypeError("x: expected torch.float32, got torch.float64")
        return x * y * scale

    add(toy, "reference", Implementation(single))
    (said,) = failures_of(toy)["reference"]
    assert said.startswith("20 x 30: TypeError: x: expected torch.float32, got torch.float64; ")
    assert said.endswith("unless bitwise=True is")
    assert failures_of(toy, bitwise=True)["reference"] == []


def test_roundings_of_one_dtype_are_compared_within_the_tolerance(toy: Operator) -> None:
    add(toy, "fused", Implementation(lambda x, y, scale: x * y * (scale * (1 + 2e-7))))
    for tolerance, failing in ((0, {"fused"}), (1e-6, set())):
        found = failures_of(toy, bitwise=True, tolerances={torch.float32: tolerance})
        assert {impl for impl, failures in found.items() if failures} == failing


@pytest.mark.parametrize("bitwise", [False, True])
def test_infinities_and_the_sign_of_a_zero_are_no_errors(toy: Operator, bitwise: bool) -> None:
    def masked(x: Tensor, y: Tensor, scale: float) -> Tensor:
        out = torch.where(x.detach() > 1, torch.inf, x * y * scale)
        return torch.where(x.detach() < -1, torch.zeros_like(out), out)

    def minus_zero(x: Tensor, y: Tensor, scale: float) -> Tensor:
        out = masked(x, y, scale)
        return torch.where(out == 0, -0.0, out)

    add(toy, "reference", Implementation(masked))
    add(toy, "finite", Implementation(lambda *args: masked(*args).clamp(max=1e30)))
    add(toy, "coarse", Implementation(lambda *args: masked(*args) * 1.01))
    add(toy, "swapped", Implementation(minus_zero))
    tolerance = 0 if bitwise else 1e-6
    found = failures_of(toy, bitwise=bitwise, tolerances={torch.float32: tolerance})
    assert {impl for impl, failures in found.items() if failures} == {"finite", "coarse"}


def test_what_is_wrong_with_several_samples_is_said_once(
    toy: Operator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def many(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
        for n in range(1, 9):
            x, y = (torch.randn(n, 3, device=device, dtype=dtype) for _ in "xy")
            yield Sample((x, y), {"scale": float(n)}, name=f"{n} x 3")

    def refuses_small_ones(x: Tensor, y: Tensor, scale: float) -> Tensor:
        if len(x) < 4:
            raise ValueError(f"expected more than {3 * x.numel()} elements, got shape {[*x.shape]}")
        return x * y * scale

    declare(dataclasses.replace(toy, name="many", samples=many))
    add(toy, "double", Implementation(lambda x, y, scale: 2 * x * y * scale))
    add(toy, "refuses", Implementation(refuses_small_ones))
    code, record = run(tmp_path, "--operator", "many")

    assert code == 1
    assert len(row_of(record, "double", "float32")["failures"]) == 24
    lines = [line for line in capsys.readouterr().out.splitlines() if " cpu float32: " in line]
    *doubled, refused = lines
    both = "samples with this: float32, float16)"
    assert doubled == [
        f"many double cpu float32: 1 x 3: {what}: error 1.0e+00 (the first of 16 {both}"
        for what in ("output", "gradient of argument 0", "gradient of argument 1")
    ]
    assert refused == (
        "many refuses cpu float32: 1 x 3: ValueError: expected more than 9 elements, got shape "
        f"[1, 3] (the first of 6 {both}"
    )


def test_where_the_reference_itself_is_imprecise_no_result_is_judged(toy: Operator) -> None:
    def cancels(x: Tensor, y: Tensor, scale: float) -> Tensor:
        """Loses digits of huge values, which no sample has; in float64 fewer than it is judged."""
        return torch.where(x.detach().abs() > 100, (x + 1e9) - 1e9, x) * y * scale

    add(toy, "reference", Implementation(cancels))
    add(toy, "alike", Implementation(cancels))
    assert failures_of(toy) == {"reference": [], "swapped": [], "alike": []}


def test_one_wrong_element_among_many_is_found(toy: Operator) -> None:
    def large(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
        x, y = (torch.rand(300_001, device=device) + 0.5 for _ in "xy")
        yield Sample((x.to(dtype), y.to(dtype)), {"scale": 1.0}, name="an odd number")

    def drops_the_last(x: Tensor, y: Tensor, scale: float) -> Tensor:
        """As a kernel that computes two elements at once may."""
        kept = torch.ones_like(x)
        kept[-1] = 0
        return x * y * scale * kept

    add(toy, "faulty", Implementation(drops_the_last))
    arguments = check._parse(["--operator", "toy", "--seed", "1"])
    declared = dataclasses.replace(toy, samples=large)
    rows = check.check(declared, "cpu", arguments, lambda what: None)

    (faulty,) = (row for row in rows if (row.impl, row.dtype) == ("faulty", "float16"))
    assert faulty.tolerance is not None
    assert faulty.output_error <= faulty.tolerance  # of all elements together
    assert faulty.failures[0].startswith("an odd number: output: an element is wrong by")
    assert [row.failures for row in rows if row.impl != "faulty"] == [[]] * 4


def larger(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    x, y = (torch.randn(20, 30, dtype=torch.float64).to(device, dtype) for _ in "xy")
    yield Sample((x, y), {"scale": 1.0}, name="20 x 30")


def failures_of(toy: Operator, **changes: Any) -> dict[str, list[str]]:
    """Checks the toy with other samples or tolerances, in float32."""
    arguments = check._parse(["--operator", "toy", "--seed", "1"])
    declared = dataclasses.replace(toy, samples=larger, **changes)
    rows = check.check(declared, "cpu", arguments, lambda what: None)
    return {row.impl: row.failures for row in rows if row.dtype == "float32"}


def test_an_error_of_small_channels_alone_is_found(toy: Operator) -> None:
    def drops_small_channels(x: Tensor, y: Tensor, scale: float) -> Tensor:
        small = x.detach().abs().amax(0) < 0.01 * x.detach().abs().max()
        return x * y * scale * ~small

    add(toy, "faulty", Implementation(drops_small_channels))
    found = failures_of(toy)
    said = "20 x 30, small values at every other index of dimension 1: output: at index 1 of"
    assert any(line.startswith(said) for line in found["faulty"])
    assert found["swapped"] == []


def test_an_error_of_a_lower_precision_is_named(toy: Operator) -> None:
    def in_half_precision(x: Tensor, y: Tensor, scale: float) -> Tensor:
        return x.half().to(x.dtype) * y.half().to(y.dtype) * scale

    add(toy, "faulty", Implementation(in_half_precision))
    found = failures_of(toy, tolerances={torch.float32: 1e-2})
    assert len(found["faulty"]) == 2
    for line, what in zip(found["faulty"], ("output", "gradient"), strict=True):
        assert re.match(
            rf"{what}: error \d\.\de-04 is that of TF32 or half precision, not of", line
        )
    assert found["swapped"] == []


@pytest.mark.gpu
def test_algorithms_of_the_mode_that_fills_tensors_do_not_count_on_a_gpu(
    toy: Operator, tmp_path: Path
) -> None:
    def coarse(x: Tensor, y: Tensor, scale: float) -> Tensor:
        rounding = 1e-3 if torch.are_deterministic_algorithms_enabled() else 0.0
        return x * y * scale * (1 + rounding)

    add(toy, "coarse", Implementation(coarse))
    add(toy, "forgetful", Implementation(forgetful))

    _, record = run(tmp_path, "--device", "cuda")

    assert row_of(record, "coarse", "float32")["failures"] == []
    assert "scale 1: output: error nan" in row_of(record, "forgetful", "float32")["failures"]


def test_wrong_gradient_is_told_from_the_right_ones(toy: Operator, tmp_path: Path) -> None:
    add(toy, "faulty", Implementation(wrong_gradient))

    _, record = run(tmp_path)

    row = row_of(record, "faulty", "float32")
    assert row["output_error"] < 1e-6
    assert row["gradient_error"] == pytest.approx(0.01, rel=1e-3)
    assert not any("output" in line or "argument 0" in line for line in row["failures"])


def test_different_bits_are_reported(toy: Operator, tmp_path: Path) -> None:
    factors = itertools.cycle([1.0, 1.0 + 2e-7])
    wavering = Implementation(lambda x, y, scale: x * y * scale * next(factors))
    add(toy, "wavering", wavering)

    code, record = run(tmp_path, "--small")

    assert code == 0  # both are right
    assert not row_of(record, "wavering", "float32")["same_bits"]
    assert row_of(record, "swapped", "float32")["same_bits"]


def test_a_terminal_of_80_columns_holds_the_table(
    toy: Operator,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    missing = "words " * 30
    right = toy.implementations["swapped"].function
    add(toy, "absent", Implementation(right, obstacle=lambda: missing))
    add(toy, "faulty", Implementation(lambda *args: right(*args).neg()))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert run(tmp_path)[0] == 1
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines if str(tmp_path) not in line) <= 80
    assert re.search(r"faulty +float32 .* \d+ failed$", "\n".join(lines), re.MULTILINE)
    assert "\n".join(lines).count("words") == 30


def test_progress_is_one_line_that_the_next_replaces(
    toy: Operator,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert run(tmp_path)[0] == 0
    shown = capsys.readouterr().err.split("\r\033[K")
    assert "toy: float32 on cpu, swapped," in shown
    assert max(map(len, shown)) < 30


def test_an_unavailable_implementation_says_why(
    toy: Operator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add(toy, "absent", Implementation(torch.mul, obstacle=lambda: "it was never written; write it"))

    code, record = run(tmp_path)

    assert code == 0
    assert "never written" in row_of(record, "absent", None)["unavailable"]
    assert "absent" in capsys.readouterr().out


def raising() -> None:
    raise ImportError("no such library")


@pytest.mark.parametrize(
    ("load", "reason"),
    [(lambda: "t.cpp:7: error: no name\n  t.cpp:8: error: nor this", "t.cpp:7: error: no name"),
     (raising, "ImportError: no such library")],
)  # fmt: skip
def test_a_broken_implementation_fails(
    toy: Operator,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    load: Callable[[], str | None],
    reason: str,
) -> None:
    add(toy, "faulty", Implementation(toy.implementations["swapped"].function, load=load))

    code, record = run(tmp_path)

    assert code == 1
    row = row_of(record, "faulty", None)
    assert row["unavailable"] is None
    assert row["failures"][0].startswith(f"impl=faulty is broken for toy: {reason}")
    assert row_of(record, "swapped", "float32")["failures"] == []  # the others are checked
    said = capsys.readouterr().out
    assert f"toy faulty cpu: impl=faulty is broken for toy: {reason}" in said
    assert "12 cases, 1 failures" in said


def test_a_kernel_that_does_not_compile_fails_with_its_errors_once(
    tmp_path: Path,
) -> None:
    compiler = tmp_path / "broken"
    errors = '  for i in 7 8 9; do echo "x.cpp:$i: error: out of order"; done'
    compiler.write_text(f"#!/bin/sh\nexec >&2\n{errors}\nseq 5000\nexit 1\n")
    compiler.chmod(0o755)
    operators = ["high_order_conv2d", "high_order_layer", "dynamic_conv1d"]
    done = subprocess.run(
        [sys.executable, "-m", "hoconv.tools.check", "--device", "cpu", "--impl", "cpp", "--small",
         "--operator", *operators],
        env={**os.environ, "PYTHONPATH": str(ROOT), "CXX": str(compiler),
             "TORCH_EXTENSIONS_DIR": str(tmp_path)},
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "3 failures" in done.stdout.splitlines()[-1]
    assert done.stdout.count("x.cpp:7: error: out of order") == 3  # a line for each operator
    assert done.stdout.count("x.cpp:8: error: out of order") == 3  # each has a library
    assert "4999" not in done.stdout + done.stderr


def test_a_broken_package_fails_and_the_others_are_checked(
    toy: Operator,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken = {"bad = gone": "ImportError: gone"}
    monkeypatch.setattr(commands, "broken_packages", lambda: broken)

    code, _ = run(tmp_path)

    assert code == 1
    assert run(tmp_path, "--operator", "toy")[0] == 0  # it was not asked for
    said = capsys.readouterr()
    assert "The package of operators bad = gone is broken: ImportError: gone" in said.err
    assert "12 cases, 0 failures" in said.out


def test_an_operator_without_samples_is_a_failure(
    toy: Operator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = dataclasses.replace(toy, name="silent", samples=lambda device, dtype: [])
    declare(silent)

    code, record = run(tmp_path)

    assert code == 1
    for row in record["rows"]:
        assert bool(row["failures"]) == (row["operator"] == "silent")


def test_the_exit_code_says_what_was_not_checked(
    toy: Operator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add(toy, "absent", Implementation(torch.mul, obstacle=lambda: "it was never written; write it"))
    assert run(tmp_path, "--impl", "swapped", "absent")[0] == check.NOT_ALL_JUDGED
    assert capsys.readouterr().out.endswith("not checked: absent\n")
    assert run(tmp_path, "--impl", "absent")[0] == check.NOT_ALL_JUDGED
    only = {"reference": toy.implementations["reference"], "only": Implementation(torch.mul)}
    declare(dataclasses.replace(toy, name="other", implementations=only))
    assert run(tmp_path, "toy", "--impl", "only")[0] == check.NOT_ALL_JUDGED
    said = "not checked: only\nno operator that was checked has an implementation only\n"
    assert capsys.readouterr().out.endswith(said)

    assert isinstance(toy.implementations, dict)
    del toy.implementations["swapped"]
    assert run(tmp_path, "toy")[0] == check.ONLY_THE_REFERENCE
    assert capsys.readouterr().out.endswith("only the reference was checked\n")
    assert run(tmp_path, "toy", "--impl", "reference")[0] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "tpu"], "expected cpu or cuda, got 'tpu'"),
        (["--operator", "unknown"], "expected toy; got 'unknown'; if it is in a package of yours"),
        (["--impl", "unknown"], "choose from"),
    ],
)
def test_unknown_option_values_are_named(
    toy: Operator,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    with pytest.raises(SystemExit) as error:
        run(tmp_path, *options)

    assert error.value.code == 2
    assert message in capsys.readouterr().err
