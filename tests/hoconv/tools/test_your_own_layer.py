"""docs/extend/your_own_layer.md, run as it stands: every command, every snippet."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hoconv
from hoconv import jit
from hoconv.dispatch import declaration
from hoconv.tools.testing.comparison import relative_error
from tests.hoconv.tools.generated import install

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "extend" / "your_own_layer.md").read_text()
FILES = ROOT / "docs" / "extend" / "carafe"
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.M | re.S)
COMMANDS = [line for language, block in BLOCKS if not language for line in block.splitlines()]
# The first line of a snippet is a comment with the name of its file.
SNIPPETS = [
    (first[first.index(" ") + 1 :], code)
    for first, _, code in (block.partition("\n") for language, block in BLOCKS if language)
]
TRAINING = [command for command in COMMANDS if command.startswith("python train.py")]
needs_compiler = pytest.mark.skipif(
    jit.obstacle("cpu") is not None, reason=str(jit.obstacle("cpu"))
)


def commands(*beginnings: str) -> list[list[str]]:
    return [shlex.split(command) for command in COMMANDS if command.startswith(beginnings)]


def run_commands(folder: Path, *commands: list[str]) -> str:
    """Runs commands `hoconv ...` one after another where a package is installed; each must be
    right. Returns what they print."""
    code = f"from hoconv.tools.cli import main\nfor c in {commands!r}: assert main(c[1:]) == 0, c"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder / "src"), str(ROOT)])},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def carafe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The package, made by the commands of the page, and importable; beside it, as `generated`,
    what `hoconv new` wrote."""
    site, declared, path = tmp_path_factory.mktemp("site"), dict(declaration._declared), sys.path[:]
    (site / "docs").symlink_to(ROOT / "docs")
    folder = site / "carafe"
    install("carafe", folder)
    shutil.copytree(folder, site / "generated")
    for command in commands("cp ", "rm "):
        subprocess.run(command, cwd=site, check=True)
    sys.path.insert(0, str(folder / "src"))
    yield folder
    sys.path[:] = path
    declaration._declared.clear()
    declaration._declared.update(declared)
    for name in [name for name in sys.modules if name.partition(".")[0] == "carafe"]:
        del sys.modules[name]


def test_all_commands_of_the_page_are_known() -> None:
    known = ("hoconv new ", "pip ", "cp ", "rm ", "hoconv check ", "hoconv test ",
             "hoconv benchmark ", "python train.py ")  # fmt: skip
    assert commands("hoconv new", "pip") == [
        ["hoconv", "new", "carafe"], ["pip", "install", "-e", "carafe"]
    ]  # fmt: skip
    assert [c for c in COMMANDS if c and not c.startswith(known)] == []
    assert len(TRAINING) == 2


def test_code_of_the_page_is_that_of_the_files() -> None:
    shown = [(name, code) for name, code in SNIPPETS if name.startswith("src/carafe/")]
    assert len(shown) == 5
    for name, code in shown:
        assert code in (FILES / name).read_text(), code


@needs_compiler
@pytest.mark.slow
def test_the_layer_is_right(carafe: Path) -> None:
    check, test = commands("hoconv check", "hoconv test")
    # The other tests know the operator as these do; hoconv's own operators run them all.
    few = ["-k", "finite_differences or threads or auto_is or declaration or cost or test_carafe"]
    said = run_commands(carafe, check, [*test, *few])
    assert re.search(r"cpp +bfloat16 +6 .*pass", said)
    assert " 0 failures" in said
    assert "passed" in said


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("command", TRAINING)
def test_a_network_with_the_layer_trains(carafe: Path, run, command: str) -> None:
    _, _, *arguments = shlex.split(command.replace("$PWD", str(carafe.parent)))
    done = run(*arguments, "trainer=cpu", "logger=none", "trainer.max_epochs=1",
               "trainer.limit_train_batches=2", "trainer.log_every_n_steps=1")  # fmt: skip
    assert done.exit_code == 0, done.err
    if "-m" not in arguments:
        assert done.results["impl"] == "reference"
        return
    losses = {}
    for folder in done.folder.iterdir():
        if (folder / "losses.csv").exists():
            rows = (folder / "losses.csv").read_text().splitlines()[1:]
            losses[folder.name] = [float(row.split(",")[1]) for row in rows]
    assert len(losses) == 4
    reference, cpp = (torch.tensor([losses[str(i)] for i in pair]) for pair in ((0, 1), (2, 3)))
    torch.testing.assert_close(reference, cpp)


@needs_compiler
@pytest.mark.slow
def test_a_kernel_of_load_inline_is_an_implementation(tmp_path: Path) -> None:
    folder = tmp_path / "soft_clip"
    install("soft_clip", folder)
    (inline, module), (_, registered), (_, declared) = (
        snippet for snippet in SNIPPETS if snippet[0].startswith("src/soft_clip/")
    )
    (folder / inline).write_text(module)
    operator = folder / "src" / "soft_clip" / "operator.py"
    text = operator.read_text()
    for before, added in (
        ("\n\ndef _samples", registered), ('            "cpp": _compiled', declared)
    ):  # fmt: skip
        assert text.count(before) == 1
        text = text.replace(before, added + before)
    operator.write_text(text)
    said = run_commands(folder, ["hoconv", "check", "soft_clip", "--impl", "inline", "--small"])
    assert re.search(r"inline +float32 +5 .*pass", said)


def test_involution_is_a_high_order_convolution() -> None:
    (code,) = (code for name, code in SNIPPETS if name == "involution")
    B, C, G, k, H, W = 2, 8, 2, 3, 5, 6
    names = {"C": C, "G": G, "k": k, "x": torch.randn(B, C, H, W), "nn": nn, "hoconv": hoconv}
    exec(code, names)
    # Eq. 4 and 6 of the paper, pixel by pixel.
    kernels = names["span"](names["reduce"](names["x"])).view(B, G, k, k, H, W)
    padded = F.pad(names["x"], (1, 1, 1, 1))
    expected = torch.zeros(B, C, H, W)
    for c in range(C):
        for i in range(H):
            for j in range(W):
                window = padded[:, c, i : i + k, j : j + k]
                expected[:, c, i, j] = (kernels[:, c * G // C, :, :, i, j] * window).sum((1, 2))
    assert relative_error(names["y"].detach(), expected.detach()) < 1e-6


def lines_of_code(path: Path) -> Counter[str]:
    """The lines that are neither empty, nor a comment, nor of a docstring; of kernels, what
    registers them."""
    text = path.read_text()
    if path.suffix != ".py":
        (registered,) = re.findall(
            r"^STABLE_TORCH_LIBRARY_IMPL.*?^\}|^STABLE.*\}$", text, re.M | re.S
        )
        return Counter(registered.splitlines())
    lines = dict(enumerate(text.splitlines(), 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            said = node.body[0]
            for i in range(said.lineno, (said.end_lineno or said.lineno) + 1):
                lines.pop(i)
    return Counter(line for line in lines.values() if line.strip() and line.strip()[0] != "#")


def test_the_page_counts_the_lines_that_a_user_writes(carafe: Path) -> None:
    written = 0
    for name in ("operator.py", "layer.py", "kernels/carafe.cpp", "kernels/carafe.cu"):
        generated = lines_of_code(carafe.parent / "generated" / "src" / "carafe" / name)
        written += (lines_of_code(FILES / "src" / "carafe" / name) - generated).total()
    assert f"that is {written} lines of code" in PAGE
    assert written <= 120
