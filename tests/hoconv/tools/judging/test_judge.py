"""hoconv judge: commands and exit codes, formats of definitions, isolation, provenance."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import textwrap
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hoconv import jit
from hoconv.dispatch.declaration import Sample
from hoconv.tools import cli
from hoconv.tools.judging import command, exchange
from hoconv.tools.judging.command import Options, judge
from hoconv.tools.judging.definition import read
from hoconv.tools.judging.isolation import descendants
from hoconv.tools.judging.session import Starter
from hoconv.tools.judging.verdict import Verdict
from hoconv.tools.testing.variations import (
    of_another_size,
    of_following_sizes,
    of_other_numbers,
)
from tests.hoconv.tools.generated import install

HERE = Path(__file__).parent
DEFINITION = str(HERE / "definition.py")
ROOT = HERE.parents[3]
QUICK = Options(seed=5, more=20, times=False)
MODEL = """
import torch
from torch import nn

class {name}(nn.Module):
    def __init__(self, features, scale):
        super().__init__()
        self.linear = nn.Linear(features, 7)
        self.norm = nn.BatchNorm1d(7)
        self.scale = scale

    def forward(self, x):
        return {output}
"""
INPUTS = """
batch = 9

def get_inputs():
    return [torch.rand(batch, 5)]

def get_init_inputs():
    return [5, 0.5]
"""
OUTPUT = "self.norm(self.linear(x)) * self.scale"
FLASHINFER = {
    "name": "scaled_gemm",
    "op_type": "gemm",
    "axes": {"M": {"type": "var"}, "N": {"type": "const", "value": 6}},
    "inputs": {
        "A": {"shape": ["M", "N"], "dtype": "float16"},
        "B": {"shape": ["N", "N"], "dtype": "float16"},
        "scale": {"shape": None, "dtype": "float32"},
    },
    "outputs": {"C": {"shape": ["M", "N"], "dtype": "float16"}},
    "reference": "import torch\n\ndef run(A, B, scale):\n    return A @ B.T * scale",
}


def write(folder: Path, name: str, source: str) -> str:
    path = folder / name
    path.write_text(textwrap.dedent(source))
    return str(path)


def judged(definition: str, candidate: str, starter: Starter, options: Options = QUICK) -> Verdict:
    return judge(read(definition, "cpu", 3), candidate, starter, options)


def names(verdict: Verdict) -> set[str]:
    return {finding.name for finding in verdict.findings}


HONEST = """
def normalize(x, gain):
    return gain * x * (x.square().mean(1, keepdim=True) + 1e-6).rsqrt()
"""


def test_the_command_prints_a_page_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    candidate = write(tmp_path, "honest.py", HONEST)
    path = tmp_path / "verdict.json"
    monkeypatch.chdir(HERE)

    code = cli.main(["judge", "definition.py", candidate, "--json", str(path), "--calls", "20"])

    record = json.loads(path.read_text())
    assert code == 0
    assert record["command"].startswith("hoconv judge definition.py")
    assert record["merit"]["verdict"] == "correct"
    assert record["merit"]["milliseconds"].keys() == {
        "reference before", "candidate", "reference after"
    }  # fmt: skip
    assert 0.05 < record["merit"]["ratio"]["forward"] < 20
    assert "aten::rsqrt" in record["provenance"]["calls"]
    said = capsys.readouterr().out
    pinned = record["definition"]["sha256"]
    assert f"definition  normalize {pinned}\n" in said
    assert f"candidate   {candidate} {record['candidate']['sha256']} on cpu\n" in said
    assert "no kernel of its own was seen" in said
    assert f"seed        {record['seed']}\n" in said


@pytest.mark.parametrize(
    ("definition", "source", "code", "said"),
    [
        (DEFINITION, "def normalize(", 3, "not judged: SyntaxError"),
        (DEFINITION, "def normalize(x, gain): return x * gain", 1, "wrong result: call 1, float32"),
        (DEFINITION, "import no_such_module", 3, "merit       not judged: ModuleNotFoundError"),
        (DEFINITION, "def other(): ...", 3, "not judged: AttributeError"),
        (DEFINITION, None, 2, "CANDIDATE: expected a Python file or normalize:reference"),
        ("no_such_operator", HONEST, 2, "expected a file, package.module:OPERATOR, or an operator"),
        ("hoconv.ops:no", HONEST, 2, "has no attribute 'no'"),
        ("broken.py", HONEST, 3, "DEFINITION: ZeroDivisionError"),
        ("none.py", HONEST, 2, "expected one Operator in it, found 0"),
    ],
)
def test_exit_codes_say_what_was_judged(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    starter: Starter,
    definition: str,
    source: str | None,
    code: int,
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "broken.py", "1 / 0")
    write(tmp_path, "none.py", "")
    candidate = "normalize" if source is None else write(tmp_path, "candidate.py", source)
    monkeypatch.setattr(command, "time_reference", lambda *_: {})
    monkeypatch.setattr(command, "Starter", lambda: nullcontext(starter))
    assert cli.main(["judge", definition, candidate, "--calls", "5"]) == code
    captured = capsys.readouterr()
    assert said in captured.out + captured.err


STEPS = """
    import torch
    from hoconv.dispatch.declaration import Benchmark, Cost, Implementation, Operator, Sample

    def steps(x, gain, *, impl="reference"):
        smooth = x * gain
        return smooth + (smooth.round() - smooth).detach()

    def samples(device, dtype):
        odd = 10 * torch.randint(20, (50, 4), device=device) + 5  # times 0.1, a tie in float32
        x = torch.cat([odd, 300 * torch.randn(50, 4)]).to(device, dtype)
        yield Sample((x, torch.full((4,), 0.1, device=device, dtype=dtype)), name="ties")

    OPERATOR = Operator(
        name="steps", function=steps, implementations={"reference": Implementation(steps)},
        samples=samples, tolerances={torch.float32: 1e-6}, cost=lambda sample: Cost(1, 1, 1, 1),
        benchmark=Benchmark("rows", (1,), lambda *_: next(samples("cpu", torch.float32))),
        surrogate_gradient=True,
    )
"""


@pytest.mark.parametrize(
    ("rounded", "right"),
    [
        ("smooth.round()", True),
        ("(x.double() * gain.double()).round().to(x)", True),
        ("torch.where(x > 100, smooth.double(), x.double() * gain.double()).round().to(x)", True),
        ("(smooth + 0.01).round()", False),
        ("(smooth.bfloat16() + 0.0).round().to(x)", False),
        ("torch.where(smooth - smooth.floor() == 0.5, smooth.floor(), smooth.round())", False),
        ("smooth", False),
    ],
)
def test_at_a_tie_the_definition_in_float64_is_no_more_right_than_in_the_dtype(
    tmp_path: Path, starter: Starter, rounded: str, right: bool
) -> None:
    definition = write(tmp_path, "definition.py", STEPS)
    source = f"""
    import torch
    def steps(x, gain):
        smooth = x * gain
        return smooth + ({rounded} - smooth).detach()
    """
    candidate = write(tmp_path, "candidate.py", source)
    verdict = judged(definition, candidate, starter)
    assert (verdict.outcome == "correct") == right, verdict.findings
    assert names(verdict) <= {"wrong result", "wrong in one of many calls"}


def test_an_output_may_depend_on_some_arguments_alone(tmp_path: Path, starter: Starter) -> None:
    body = "return x * gain, x.square().sum(1)"
    steps = STEPS.partition("        smooth = ")[0] + f"        {body}\n\n    def samples"
    definition = write(tmp_path, "definition.py", steps + STEPS.partition("    def samples")[2])
    candidate = write(tmp_path, "candidate.py", f"def steps(x, gain): {body}")
    verdict = judged(definition, candidate, starter)
    assert (verdict.outcome, verdict.findings) == ("correct", [])


def test_forward_only_is_said(tmp_path: Path, starter: Starter) -> None:
    source = "FORWARD_ONLY = True\n\ndef normalize(x, gain): return right(x, gain).detach()\n"
    candidate = write(tmp_path, "candidate.py", HONEST.replace("normalize", "right") + source)
    verdict = judged(DEFINITION, candidate, starter)
    assert (verdict.outcome, verdict.gradients) == ("correct", False)


def test_a_file_of_kernelbench_is_read_as_it_is(tmp_path: Path, starter: Starter) -> None:
    definition = write(tmp_path, "model.py", MODEL.format(name="Model", output=OUTPUT) + INPUTS)
    wrong = "self.norm(self.linear(x)) * 0.500" + "4"
    for output, expected in (
        (OUTPUT, set()),
        (wrong, {"wrong result", "wrong in one of many calls"}),
    ):
        source = MODEL.format(name="ModelNew", output=output)
        verdict = judged(definition, write(tmp_path, "new.py", source), starter)
        assert (verdict.outcome == "correct") == (not expected)
        assert names(verdict) <= expected
        assert verdict.record.errors.keys() == {"float32"}


@pytest.mark.gpu
def test_float32_is_float32_on_a_gpu(tmp_path: Path, starter: Starter) -> None:
    """In the candidate's process as in the judge's: TF32 would be wrong by more than is allowed."""
    source = """
import torch

class {name}(torch.nn.Conv2d):
    pass

def get_inputs():
    return [torch.rand(8, 64, 32, 32)]

def get_init_inputs():
    return [64, 64, 3]
"""
    definition = write(tmp_path, "model.py", source.format(name="Model"))
    candidate = write(tmp_path, "new.py", source.format(name="ModelNew"))
    verdict = judge(read(definition, "cuda", 3), candidate, starter, replace(QUICK, device="cuda"))
    assert verdict.outcome == "correct", verdict.findings


def test_weights_are_those_of_the_definition(tmp_path: Path, starter: Starter) -> None:
    """Even where the candidate draws them in another order."""
    definition = write(tmp_path, "model.py", MODEL.format(name="Model", output=OUTPUT) + INPUTS)
    source = MODEL.format(name="ModelNew", output=OUTPUT)
    source = source.replace("super().__init__()", "super().__init__(); torch.randn(3)")
    assert judged(definition, write(tmp_path, "new.py", source), starter).outcome == "correct"


def test_a_definition_of_flashinfer_bench_is_read_as_it_is(
    tmp_path: Path, starter: Starter
) -> None:
    definition = write(tmp_path, "gemm.json", json.dumps(FLASHINFER))
    right = write(tmp_path, "right.py", "def run(A, B, scale): return (A @ B.mT) * scale")
    wrong = write(tmp_path, "wrong.py", "def run(A, B, scale): return A @ B * scale")
    assert judged(definition, right, starter).outcome == "correct"
    assert names(judged(definition, wrong, starter)) == {"wrong result"}


def test_an_implementation_that_is_the_definition_is_told_from_others(
    tmp_path: Path, starter: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    definition = read("dynamic_conv1d", "cpu", 0)
    operator = definition.operator
    few = [*operator.samples(torch.device("cpu"), torch.float32)][:2]
    monkeypatch.setitem(operator.__dict__, "samples", lambda device, dtype: few)
    monkeypatch.setitem(operator.__dict__, "tolerances", {torch.float32: 1e-6})
    candidate = write(
        tmp_path,
        "calls_it.py",
        "import hoconv\n\ndef dynamic_conv1d(x, weight, padding):\n"
        "    return hoconv.dynamic_conv1d(x, weight, padding=padding, impl='reference')\n",
    )
    for impl, calls in ((candidate, True), ("reference", True), ("cpp", False)):
        verdict = judge(definition, impl, starter, QUICK)
        assert verdict.outcome == "correct", verdict.findings
        assert ("calls its definition" in verdict.provenance()) == calls


def test_what_a_candidate_started_ends_with_it(tmp_path: Path, starter: Starter) -> None:
    beats = tmp_path / "beats"
    source = f"""
    import os, time
    if not os.fork():
        os.setsid()
        if os.fork():
            os._exit(0)
        while True:
            with open({str(beats)!r}, "a") as file:
                file.write(".")
            time.sleep(0.02)
    """
    candidate = write(tmp_path, "candidate.py", textwrap.dedent(source) + HONEST)
    verdict = judged(DEFINITION, candidate, starter)
    assert verdict.outcome == "correct"
    assert any("leaves processes running" in said for said in verdict.provenance())
    size = beats.stat().st_size
    time.sleep(0.3)
    assert beats.stat().st_size == size > 0


def test_a_candidate_has_no_network(tmp_path: Path, starter: Starter) -> None:
    source = """
    import socket
    def normalize(x, gain):
        socket.create_connection(("127.0.0.1", PORT), timeout=5)
    """
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        candidate = write(tmp_path, "candidate.py", source.replace("PORT", port))
        verdict = judged(DEFINITION, candidate, starter)
    assert names(verdict) == {"error"}
    assert "network" in verdict.isolated or "has no network" in verdict.findings[0].detail


def test_without_namespaces_the_network_is_blocked_in_python() -> None:
    code = """
    import socket
    from hoconv.tools.judging import isolation
    isolation.give_up(set(), [])
    try:
        socket.create_connection(("127.0.0.1", 9), timeout=1)
    except PermissionError as error:
        print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout == "a kernel that is judged has no network\n", done.stderr


def test_slow_answers_are_slow(tmp_path: Path, starter: Starter) -> None:
    """By the judge's clock, whatever the candidate does to its own."""
    source = "import time\nsleep, time.sleep = time.sleep, None\ntime.perf_counter = lambda: 0.0\n"
    slow = HONEST.replace("    return", "    sleep(0.03)\n    return")
    candidate = write(tmp_path, "candidate.py", source + slow)
    began = time.perf_counter()
    verdict = judged(DEFINITION, candidate, starter, Options(seed=1, more=1))
    assert verdict.times["candidate"]["forward"] > 30
    assert verdict.replaced == ["time.perf_counter", "time.sleep"]
    assert verdict.outcome == "refused"
    assert time.perf_counter() - began < 120


@pytest.mark.parametrize(
    "t",
    [
        torch.randn(3, 4),
        torch.randn(3, 4).mT,
        torch.randn(4, 9)[:, 1::2],
        torch.randn(1, 4).expand(3, 4),
        torch.randn(0, 4),
        torch.randn(()),
        torch.arange(5),
        torch.tensor([True, False]),
        torch.randn(5).bfloat16()[1:],
    ],
)
def test_tensors_keep_their_strides_in_shared_memory(t: torch.Tensor) -> None:
    memory = torch.zeros(4096, dtype=torch.uint8)
    first, end = exchange.put(torch.ones(3), memory, 0)
    placed, _ = exchange.put(t, memory, end)
    view = placed.view(memory)
    assert torch.equal(view, t)
    assert view.stride() == t.stride()
    assert view.data_ptr() % 64 == t.storage_offset() * t.element_size() % 64 or not t.numel()
    assert torch.equal(first.view(memory), torch.ones(3))
    assert exchange.is_as_put(t, placed, memory)
    if t.numel() and t.storage_offset():  # a byte of the first one, or behind it
        memory[placed.offset + t.element_size() * min(t.stride()) - 1] ^= 1
        assert not exchange.is_as_put(t, placed, memory)


def test_other_sizes_change_what_depends_on_them() -> None:
    sample = Sample((torch.randn(3, 5), torch.randn(5)), name="3 x 5")
    seen = set()
    for seed in range(50):
        changed = of_another_size(sample, random.Random(seed))
        assert changed is not None
        x, gain = changed.args
        assert gain.shape == x.shape[1:]
        seen.add(tuple(x.shape))
    assert len(seen) > 5
    assert (3, 5) not in seen


SUMS = """
    import torch
    from hoconv.dispatch.declaration import Benchmark, Cost, Implementation, Operator, Sample

    def sums(x, *, impl="reference"):
        return x.sum(1)

    def samples(device, dtype):
        yield Sample((torch.randn(300, 40).to(device, dtype),), name="300 x 40")
        yield Sample((torch.randn(50_000, 40).to(device, dtype),), name="50000 x 40")

    OPERATOR = Operator(
        name="sums", function=sums, implementations={"reference": Implementation(sums)},
        samples=samples, tolerances={torch.float32: 1e-6}, cost=lambda sample: Cost(1, 1, 1, 1),
        benchmark=Benchmark("rows", (1,), lambda *_: next(samples("cpu", torch.float32))),
    )
"""


@pytest.mark.parametrize(("precision", "right"), [("float32", True), ("bfloat16", False)])
def test_long_sums_may_round_more_often(
    precision: str, right: bool, tmp_path: Path, starter: Starter
) -> None:
    """As often as numbers are added one by one; not as those of a lower precision."""
    definition = write(tmp_path, "sums.py", SUMS)
    candidate = f"""
    import torch
    FORWARD_ONLY = True

    def sums(x):
        total = x.new_zeros(x.shape[0])
        for column in x.unbind(1):
            total += column.to(torch.{precision} if x.shape[1] > 100 else x.dtype)
        return total
"""
    verdict = judged(definition, write(tmp_path, "candidate.py", candidate), starter)
    assert names(verdict) == (set() if right else {"wrong at another size"}), verdict.findings


def test_every_remainder_and_a_large_size_are_tried() -> None:
    sample = Sample((torch.randn(20, 30), torch.randn(30)), name="20 x 30")
    shapes = [tuple(each.args[0].shape) for each in of_following_sizes(sample)]
    assert {columns % 16 for rows, columns in shapes if rows == 20} == set(range(16))
    assert {rows % 16 for rows, columns in shapes if columns == 30} == set(range(16))
    assert max(rows for rows, _ in shapes) == max(columns for _, columns in shapes) > 4096


def test_numbers_among_the_arguments_become_others() -> None:
    sample = Sample((torch.ones(2), 0.5, 3), {"eps": 1e-3, "axis": 1}, name="ones")
    found = [(each.args[1:], dict(each.kwargs)) for each in of_other_numbers(sample)]
    assert len({args[0] for args, _ in found}) == 3
    assert len({kwargs["eps"] for _, kwargs in found}) == 3
    assert {(args[1], kwargs["axis"]) for args, kwargs in found} == {(3, 1)}
    assert all(args[0] == 0.5 or kwargs["eps"] == 1e-3 for args, kwargs in found)


@pytest.mark.slow
def test_no_alarm_for_this_projects_kernels(starter: Starter) -> None:
    verdict = judged(
        "dynamic_conv1d", "cpp", starter, Options(seed=random.randrange(2**31), more=100)
    )
    assert verdict.outcome == "correct", verdict.findings
    assert any("hoconv::" in said for said in verdict.provenance())


@pytest.mark.gpu
def test_no_alarm_for_this_projects_kernels_on_a_gpu(starter: Starter) -> None:
    options = Options("cuda", seed=random.randrange(2**31), more=100)
    verdict = judge(read("dynamic_conv1d", "cuda", 3), "cuda", starter, options)
    assert verdict.outcome == "correct", verdict.findings
    assert any("hoconv::" in said for said in verdict.provenance())


@pytest.mark.slow
@pytest.mark.skipif(jit.obstacle("cpu") is not None, reason=str(jit.obstacle("cpu")))
def test_no_alarm_for_a_generated_package(tmp_path: Path) -> None:
    site = install("soft_clip", tmp_path / "package")
    command = ["-m", "hoconv.tools.cli", "judge", "soft_clip", "soft_clip:cpp", "--calls", "50"]
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": f"{site}:{ROOT}"}, cwd=tmp_path,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "calls soft_clip::soft_clip" in done.stdout


def test_a_process_may_end_while_its_descendants_are_looked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def end(*_: object) -> None:
        raise FileNotFoundError

    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, end)
    assert descendants(os.getpid()) == [os.getpid()]
