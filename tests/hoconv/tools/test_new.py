"""The command ``hoconv``, and the package that ``hoconv new`` writes: it is right as it is written,
and what is broken in it is found."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hoconv import jit
from hoconv.tools import cli
from hoconv.tools.new import write_package
from tests.hoconv.tools.generated import install

ROOT = Path(__file__).parents[3]
needs_compiler = pytest.mark.skipif(
    jit.obstacle("cpu") is not None, reason=str(jit.obstacle("cpu"))
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns where the package `tone_curve` is written and installed."""
    site = tmp_path_factory.mktemp("site")
    install("tone_curve", site)
    return site


def hoconv(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the command where the package is installed."""
    before = filter(None, [os.environ.get("PYTHONPATH")])
    path = os.pathsep.join([str(site / "src"), str(ROOT), *before])
    return subprocess.run(
        [sys.executable, "-c", "import sys; from hoconv.tools.cli import main; sys.exit(main())",
         *arguments],
        env={**os.environ, "PYTHONPATH": path}, cwd=site, capture_output=True, text=True,
        check=False,
    )  # fmt: skip


def test_every_file_has_the_new_name(site: Path) -> None:
    files = [path for path in site.rglob("*") if path.is_file()]
    assert site / "src/tone_curve/kernels/tone_curve.cu" in files
    for path in files:
        text = f"{path.relative_to(site)} {path.read_text()}"
        assert "soft_clip" not in text
        assert "SoftClip" not in text


@pytest.mark.slow
@needs_compiler
def test_the_package_is_right_as_it_is_written(site: Path) -> None:
    done = hoconv(site, "check", "tone_curve", "--device", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 failures" in done.stdout
    done = hoconv(site, "test", "tone_curve", "-k", "not inductor")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "failed" not in done.stdout


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(
    ("file", "right", "wrong", "said"),
    [
        ("kernels/tone_curve.cpp", "std::tanh", "std::tan", "output: error"),
        ("kernels/tone_curve.cpp", "#include <cmath>", "#include <cmth>", "cmth"),
        ("operator.py", "(grad * slope).to", "grad.to", "gradient of argument 0: error"),
        ("kernels/tone_curve.cpp", "[plane %", "[(plane - begin) %", "several threads: output"),
    ],
    ids=["kernel", "source that does not compile", "gradient", "second thread"],
)
def test_what_is_broken_is_found_and_named(
    site: Path, tmp_path: Path, file: str, right: str, wrong: str, said: str
) -> None:
    broken = tmp_path / "site"
    shutil.copytree(site, broken)
    path = broken / "src" / "tone_curve" / file
    assert right in path.read_text()
    path.write_text(path.read_text().replace(right, wrong))
    done = hoconv(broken, "check", "tone_curve", "--device", "cpu")
    assert done.returncode == 1, done.stdout + done.stderr
    assert said in done.stdout + done.stderr


@pytest.mark.slow
@needs_compiler
def test_an_implementation_is_one_entry(site: Path, tmp_path: Path) -> None:
    less = tmp_path / "site"
    shutil.copytree(site, less)
    path = less / "src/tone_curve/operator.py"
    text = path.read_text()
    for impl in ("triton", "cuda"):
        text, deleted = re.subn(
            rf'^ +"{impl}": \w+\(.*?^(?= {{8,12}}["}}])', "", text, flags=re.M | re.S
        )
        assert deleted == 1
    path.write_text(text)
    for kernel in ("kernels/tone_curve.cu", "triton_kernel.py"):
        (path.parent / kernel).unlink()
    done = hoconv(less, "check", "tone_curve", "--device", "cpu", "--small")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tone_curve: cuda" not in done.stdout


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("command", ["check", "test"])
def test_a_kernel_that_ends_the_process_is_named(site: Path, tmp_path: Path, command: str) -> None:
    broken = tmp_path / "site"
    shutil.copytree(site, broken)
    path = broken / "src/tone_curve/kernels/tone_curve.cpp"
    far = "limits[plane % channels + (channels == 8) * (int64_t{1} << 60)]"
    path.write_text(path.read_text().replace("limits[plane % channels]", far))
    options = ["--device", "cpu"] if command == "check" else ["-k", "cpp and inputs_are_left"]
    done = hoconv(broken, command, "tone_curve", *options)
    assert done.returncode == 1
    case = "tone_curve: float64 on cpu, cpp, (4, 8)"
    test = "test_inputs_are_left_alone[tone_curve-cpp-cpu-float64]"
    line = f"The process ended in {case if command == 'check' else test}: somebody killed it, a"
    assert line in done.stderr


@pytest.mark.slow
@needs_compiler
def test_a_network_with_the_layer_trains(site: Path, run, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(site / "src"))
    for precision, tolerance in (("32-true", 1e-5), ("bf16-mixed", 2e-2)):
        losses = []
        for impl in ("reference", "cpp"):
            done = run(
                f"--config-dir={site}/conf", "model=tone_curve", f"impl={impl}", "logger=csv",
                f"trainer.precision={precision}", "trainer.max_epochs=1",
                "trainer.limit_train_batches=2", "trainer.log_every_n_steps=1",
                "trainer.accelerator=cpu", "seed=1",
            )  # fmt: skip
            assert done.exit_code == 0, done.err
            assert done.results["impl"] == impl
            losses.append([float(loss) for loss in done.losses])
        assert losses[1] == pytest.approx(losses[0], rel=tolerance), precision


@pytest.mark.slow
@pytest.mark.skipif(
    not shutil.which("nvcc"), reason="the CUDA source is compiled by nvcc, which is not there"
)
def test_the_cuda_source_compiles(site: Path) -> None:
    kernel = site / "src/tone_curve/kernels/tone_curve.cu"
    jit.Library("tone_curve", [kernel], device="cuda").compile(["9.0"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["new", "CamelCase"], "NAME: expected a name in snake_case"),
        (["new", "class"], "NAME: expected a name in snake_case"),
        (["new", "torchvision"], "NAME: a package 'torchvision' is installed already"),
        (["new", "double"], "NAME: 'double' is a word of C++; choose another name"),
        (["new", "nullptr"], "NAME: 'nullptr' is a word of C++; choose another name"),
        (["new", "int8_t"], "NAME: 'int8_t' ends like a type of C, such as size_t; drop the _t"),
        (["new", "high_order_conv2d"], "NAME: there is an operator 'high_order_conv2d' already"),
        (["new", "reference"], "NAME: the code of the package uses 'reference' itself"),
        (["new", "mine", "."], "DIR: . has files already; give another folder, such as mine"),
        (["new", "mine", "README.md"], "DIR: README.md cannot be written (Not a directory); give"),
        (
            ["chekc"],
            "benchmark, test, judge, doctor, report, build, publish; got 'c",
        ),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = cli.main(arguments)
    except SystemExit as stopped:
        code = stopped.code
    assert code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("test", "argument OPERATOR: expected approx_multiply"),
        ("check", "got 'mine'; if it is in a package of yours, install that: pip"),
    ],
)
def test_an_operator_that_is_unknown_is_named(
    command: str, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([command, "mine"]) == 2
    assert said in capfd.readouterr().err


def test_a_package_that_cannot_be_imported_is_named(site: Path, tmp_path: Path) -> None:
    broken = tmp_path / "site"
    shutil.copytree(site, broken)
    path = broken / "src/tone_curve/operator.py"
    path.write_text(path.read_text().replace("import torch\n", "import tortch\n", 1))
    done = hoconv(broken, "check", "tone_curve", "--device", "cpu")
    assert done.returncode == 2
    assert "tone_curve is broken: ModuleNotFoundError: No module named 'tortch'" in done.stderr


def test_a_test_of_the_package_that_cannot_be_imported_keeps_no_other_from_running(
    site: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "site"
    shutil.copytree(site, broken)
    (broken / "tests" / "test_old.py").write_text("from tone_curve import Gone\n")
    done = hoconv(broken, "test", "tone_curve", "-k", "declaration_is_complete")
    assert done.returncode == 1, done.stderr
    assert "cannot import name 'Gone'" in done.stdout
    assert re.search(r"^1 passed, .* 1 error in", done.stdout, re.MULTILINE)


@pytest.mark.parametrize("end", ["sys.exit(0)", "os._exit(0)", "os.kill(os.getpid(), 9)"])
def test_an_implementation_that_ends_the_process_is_not_right(end: str) -> None:
    program = (
        "import os, sys; from hoconv.dispatch.declaration import find; "
        "from hoconv.tools import cli; "
        f"find('splat').implementations['cpp'].__dict__['load'] = lambda: {end}; "
        "sys.exit(cli.main(['check', 'splat', '--device', 'cpu', '--small']))"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout


@pytest.mark.parametrize(("stop", "code", "said"), [
    (signal.SIGINT, 130, "hoconv check: interrupted"),
    (signal.SIGTERM, 1, "somebody killed it"),
])  # fmt: skip
def test_a_judging_command_ends_with_its_process(
    stop: signal.Signals, code: int, said: str
) -> None:
    command = [sys.executable, "-m", "hoconv.tools.cli", "check", "splat", "--device", "cpu"]
    unbuffered = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=unbuffered
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("seed")
        process.send_signal(stop)
        _, errors = process.communicate()  # returns when both processes have closed the pipe
    assert process.returncode == code
    assert said in errors
    assert "Traceback" not in errors


def test_an_interrupted_command_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(argv: list[str]) -> int:
        raise KeyboardInterrupt

    build = cli.COMMANDS["build"]._replace(run=interrupt)
    monkeypatch.setitem(cli.COMMANDS, "build", build)
    assert cli.main(["build"]) == 130
    assert capsys.readouterr().err == "\nhoconv build: interrupted\n"


def test_a_reader_that_has_read_enough_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "hoconv.tools.cli", "doctor"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.slow
def test_the_kernel_in_triton_computes_the_same(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    write_package("tone_curve_three", tmp_path / "made")
    text = """
import torch
from tone_curve_three import triton_kernel
from tone_curve_three.operator import reference
for shape in ((2, 3, 5, 7), (4, 8), (1, 2, 1100)):
    x, limit = 3 * torch.randn(shape), torch.rand(shape[1]) + 0.5
    torch.testing.assert_close(triton_kernel.tone_curve_three(x, limit), reference(x, limit))
"""
    path = os.pathsep.join([str(tmp_path / "made" / "src"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", text], env=environment, check=True)
