"""python train.py mode=export."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from torch import Tensor, nn

import hoconv
from hoconv import jit
from hoconv.dispatch.exported import compile_operators
from training.results import saved

ROOT = Path(__file__).parents[1]
EXPERIMENTS = {
    "cnn": ("experiment=digits_cnn", "data=digits"),
    "sequence": ("experiment=mnist_lstm", "data=digits", "model.network.cell=gru"),
    "segmentation": (
        "experiment=coco_segmentation", "data=coco_tiny", "data.image_size=16",
        "data.batch_size=4", "model.network.width=4",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture
def train(run, runs: Path, tmp_path: Path):
    """The checkpoint of a short run, the same for all tests."""

    def train(name: str) -> str:
        folder = runs / name
        if not folder.exists():
            cache = [f"data.cache_dir={tmp_path}"] if name == "segmentation" else []
            run(*EXPERIMENTS[name], *cache, "debug=fast", "trainer=cpu", "impl=reference",
                folder=folder)  # fmt: skip
        return str(next((folder / "checkpoints").iterdir()))

    return train


def expected(ckpt: str, inputs: Tensor) -> Tensor:
    """Returns the output of the model of a checkpoint."""
    found = saved.read(ckpt)
    model = instantiate(found.config.model)
    saved.load_weights(model, found)
    with torch.no_grad():
        return model.eval()(inputs)


def draw(name: str, count: int) -> Tensor:
    """Images as a model is given them."""
    return torch.randn(count, *((3, 16, 16) if name == "segmentation" else (1, 8, 8)))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_program_runs_in_a_process_that_knows_only_the_library(
    run, train, tmp_path: Path, name: str
) -> None:
    ckpt = train(name)
    done = run("mode=export", f"ckpt={ckpt}", "impl=reference", "trainer=cpu")
    inputs = draw(name, 5)
    torch.save(inputs, tmp_path / "inputs.pt")
    program = (
        "import sys, torch, hoconv\n"
        f"program = torch.export.load({str(done.folder / 'model.pt2')!r}).module()\n"
        f"torch.save(program(torch.load({str(tmp_path / 'inputs.pt')!r})), 'output.pt')\n"
        "assert not {'models', 'training', 'pytorch_lightning'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], cwd=tmp_path, check=True)
    output = torch.load(tmp_path / "output.pt")
    torch.testing.assert_close(output, expected(ckpt, inputs), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_onnx_runtime_computes_what_the_model_does(run, train, name: str) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    ckpt = train(name)
    done = run("mode=export", f"ckpt={ckpt}", "format=onnx", "trainer=cpu")
    session = onnxruntime.InferenceSession(done.folder / "model.onnx")
    inputs = draw(name, 5)
    (output,) = session.run(None, {session.get_inputs()[0].name: inputs.numpy()})
    exact = expected(ckpt, inputs)
    assert (torch.from_numpy(output) - exact).abs().max() < 1e-5 * exact.abs().max()


@pytest.fixture(scope="module")
def run_exported(tmp_path_factory: pytest.TempPathFactory):
    """Runs a package and its operators in the program of docs/use/run_exported.cpp, which is
    compiled by the command that training.md gives."""
    if reason := jit.obstacle("cpu"):
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("example")
    page = (ROOT / "docs/use/training.md").read_text()
    (command,) = re.findall(r"```\n(torch=.*?)\./run_exported", page, re.DOTALL)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = command.replace("docs/use", f"{ROOT}/docs/use")
    subprocess.run(["bash", "-ec", command], cwd=folder, env={**os.environ, "PATH": path},
                   check=True)  # fmt: skip

    def run_exported(package: Path, operators: Path, inputs: Tensor) -> Tensor:
        torch.save(inputs, folder / "input.pt")
        files = [package, folder / "input.pt", folder / "output.pt", operators]
        done = subprocess.run([folder / "run_exported", *files], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr)
        return torch.load(folder / "output.pt")

    return run_exported


@pytest.mark.slow
def test_a_package_needs_no_python(run, train, run_exported) -> None:
    ckpt = train("cnn")
    done = run("mode=export", f"ckpt={ckpt}", "format=aoti", "impl=cpp", "trainer=cpu")
    package, operators = done.folder / "model.aoti", done.folder / "operators"
    here = torch._inductor.aoti_load_package(io.BytesIO(package.read_bytes()))
    for count in (1, 5):
        inputs = draw("cnn", count)
        output = run_exported(package, operators, inputs)
        torch.testing.assert_close(output, here(inputs), rtol=0, atol=0)
        torch.testing.assert_close(output, expected(ckpt, inputs), rtol=1e-5, atol=1e-6)
    inputs = draw("cnn", 3).repeat(1, 2, 1, 1)[:, ::2]  # not contiguous
    output = run_exported(package, operators, inputs)
    torch.testing.assert_close(output, here(inputs.contiguous()), rtol=0, atol=0)
    for wrong in (inputs[..., :4], inputs.double()):
        with pytest.raises(RuntimeError, match="unmatched"):
            run_exported(package, operators, wrong)

    # Another model, which calls no operators, in the same folder.
    use = ("mode=export", f"ckpt={ckpt}", "format=aoti", "impl=reference", "trainer=cpu")
    run(*use, folder=done.folder)
    assert not [*operators.iterdir()]
    torch.testing.assert_close(
        run_exported(package, operators, inputs), expected(ckpt, inputs), rtol=1e-5, atol=1e-6
    )


@pytest.mark.slow
def test_operators_compute_the_same_without_python(run_exported, tmp_path: Path) -> None:
    network = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        hoconv.HighOrderConv2d(4, kernel_size=3),
        hoconv.ApproxConv2d(4, 6, 3),
        nn.Flatten(2),
        hoconv.DynamicConv1d(6, kernel_size=3, heads=2),
    )
    hoconv.set_impl(network, "cpp")
    batch = {0: torch.export.Dim("batch")}
    program = torch.export.export(network, (torch.randn(2, 3, 9, 9),), dynamic_shapes=(batch,))
    (tmp_path / "operators").mkdir()
    for path in compile_operators(program):
        shutil.copy(path, tmp_path / "operators")
    package = tmp_path / "all.pt2"
    any_batch = {"aot_inductor.check_lowerbound": False}
    torch._inductor.aoti_compile_and_package(
        program, package_path=str(package), inductor_configs=any_batch
    )
    for count in (1, 3):
        inputs = torch.randn(count, 3, 9, 9)
        output = run_exported(package, tmp_path / "operators", inputs)
        # Of PyTorch's own sums, between the operators, Inductor may choose another order.
        torch.testing.assert_close(output, program.module()(inputs), rtol=1e-5, atol=1e-6)


def test_a_package_has_no_operator_of_python(run, train) -> None:
    if reason := jit.obstacle("cpu"):
        pytest.skip(reason)
    done = run("mode=export", f"ckpt={train('sequence')}", "format=aoti", "impl=cpp", "trainer=cpu")
    assert done.exit_code == 1
    said = " ".join(done.err.split())
    assert "hoconv::recurrent.compiled, which has no compiled code that runs without" in said
    assert not [*done.folder.glob("model.*")]


def test_weights_in_safetensors_are_a_checkpoint(run, train) -> None:
    pytest.importorskip("safetensors")
    ckpt = train("cnn")
    done = run("mode=export", f"ckpt={ckpt}", "format=safetensors", "trainer=cpu")
    assert f"model       {done.folder}/model.safetensors" in done.out.replace("\n", " ")
    file = done.folder / "model.safetensors"
    before, after = saved.read(ckpt), saved.read(file)
    assert after._replace(path=before.path, state_dict={}) == before._replace(state_dict={})
    torch.testing.assert_close(after.state_dict, dict(before.state_dict), rtol=0, atol=0)
    tested = [run("mode=test", f"ckpt={each}", "impl=reference", "trainer=cpu").results["metrics"]
              for each in (ckpt, file)]  # fmt: skip
    assert tested[0] == tested[1]
    again = run("resume=true", f"ckpt={file}", "trainer=cpu")
    assert "has the weights alone" in " ".join(again.err.split())
    file.write_bytes(file.read_bytes()[:100])
    damaged = run("mode=test", f"ckpt={file}", "trainer=cpu")
    assert "damaged, unreadable, or not of a run" in damaged.err


def test_a_program_is_as_accurate_as_the_model(run, train) -> None:
    ckpt = train("cnn")
    tested = run("mode=test", f"ckpt={ckpt}", "impl=reference", "trainer=cpu")
    done = run("mode=export", f"ckpt={ckpt}", "impl=reference", "trainer=cpu")
    program = torch.export.load(done.folder / "model.pt2").module()
    data = instantiate(saved.read(ckpt).config.data)
    data.setup("test")
    right = total = 0
    for batch in data.test_dataloader():
        images, labels = data.on_after_batch_transfer(batch, 0)
        right += int((program(images).argmax(1) == labels).sum())
        total += len(labels)
    assert right / total == pytest.approx(tested.results["metrics"]["test/accuracy"])


def test_what_cannot_be_exported_is_one_line(run, train, tmp_path: Path) -> None:
    done = run("mode=export", f"ckpt={train('cnn')}", "format=tflite")
    assert done.exit_code == 1
    assert "format: expected safetensors, pt2, aoti, onnx; got 'tflite'" in " ".join(
        done.err.split()
    )
    assert not [*done.folder.glob("model.*")]

    captions = run(
        "experiment=coco_captions", "data=coco_tiny", "data.image_size=16", "data.batch_size=4",
        "model.network.width=4", f"data.cache_dir={tmp_path}", "debug=fast", "trainer=cpu",
        "impl=reference",
    )  # fmt: skip
    ckpt = next((captions.folder / "checkpoints").iterdir())
    done = run("mode=export", f"ckpt={ckpt}", "trainer=cpu")
    assert done.exit_code == 1
    assert "a Captioner has no forward" in " ".join(done.err.split())


def test_onnx_has_no_approximate_products(run) -> None:
    pytest.importorskip("onnxscript")
    done = run("experiment=mnist_mbm", "data=digits", "debug=fast", "trainer=cpu")
    ckpt = next((done.folder / "checkpoints").iterdir())
    done = run("mode=export", f"ckpt={ckpt}", "format=onnx", "trainer=cpu")
    assert done.exit_code == 1
    assert "computes what ONNX cannot: No ONNX function found" in " ".join(done.err.split())
