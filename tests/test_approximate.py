"""approx= of train.py: networks whose layers become approximate."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from models.tasks.classifier import Classifier
from tests.test_resume import assert_same
from training.results import energy, saved

ROOT = Path(__file__).parents[1]
INTEGERS = str(ROOT / "docs/use/mul7u_truncated.c")
CPU = ("trainer=cpu", "logger=none")
SHORT = (
    *CPU, "data=digits", "debug=fast", "model.network.width=2", "impl=reference",
    "data.batch_size=8",
)  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture
def train(run, runs: Path):
    """The checkpoint of a short run with or without a multiplier, the same for all tests."""

    def train(multiplier: str) -> str:
        folder = runs / Path(multiplier).stem
        if not folder.exists():
            done = run(*SHORT, f"approx.multiplier={multiplier}", folder=folder)
            assert done.exit_code == 0, done.err
        return str(next((folder / "checkpoints").iterdir()))

    return train


def test_patterns_choose_layers_by_their_names_in_the_start_up_table(run) -> None:
    done = run(
        *SHORT, "approx.multiplier={network.features.*: mbm16, network.classifier: null}",
        "approx.skip_first=true", "approx.gradient=ste",
    )  # fmt: skip
    assert done.exit_code == 0, done.err
    lines = done.out.splitlines()
    start = lines.index("Multipliers") + 1
    assert [line.split(maxsplit=1) for line in lines[start : start + 6]] == [
        ["network.features.0.0", "left: the first layer"],
        ["network.features.2.generator", "mbm16"],
        ["network.features.3.0", "mbm16"],
        ["network.features.5.generator", "mbm16"],
        ["network.features.6.0", "mbm16"],
        ["network.classifier", "left: 'network.classifier' is None"],
    ]
    chosen = done.results["environment"]["implementations"]
    assert "network.features.3.0" in chosen
    assert "network.classifier" not in chosen


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("multiplier=mbm17",), "got 'mbm17'"),
        (("multiplier={features.*: mbm16}",), "'features.*' fits no layer; layers are network.fea"),
        (("multiplier=mbm16", "gradient=sted"), "gradient: expected one of approx, ste"),
        (("multiplier=mbm16", "skip_first=1"), "skip_first: expected true or false, got 1"),
        ((f"multiplier={INTEGERS}", "weight_scales=8"), "scales: expected 'tensor' or 'channel'"),
        (("multiplier=mbm16", "weight_scales=channel"), "expected 'tensor' without a multiplier"),
        (("multiplier=mbm16", "observer=mse"), "observer: expected 'moving_average' without a"),
        (("multiplier=mbm16", "momentum=big"), "momentum: expected a number of at least 0, got"),
        (("multiplier=mbm16", "learn_scales=1"), "learn_scales: expected true or false, got 1"),
        (("multiplier=mbm16", "accumulator=8"), "accumulator: expected None without a multiplier"),
        (("energies=3",), "energies: expected null, or pJ of a multiplication by multiplier"),
        (("energies={mbm17: 3}",), "approx.energies: multiplier: expected one of"),
        (("energies={mbm16: 0}",), "pJ of a multiplication by 'mbm16', a number above 0; got 0"),
        (("multplier=mbm16",), "there is no such key; use approx.multiplier"),
        (
            ("multiplier={*: null}",),
            "approx.multiplier: no layer takes it. network.features.0.0:",
        ),
    ],
)
def test_a_mistake_is_one_line_before_data_is_read(run, overrides, said) -> None:
    done = run(*SHORT, *(f"approx.{each}" for each in overrides))
    assert done.exit_code == 1
    (line,) = done.err.splitlines()
    assert line.startswith("Error: approx")
    assert said in line
    assert "train: " not in done.out


@pytest.mark.parametrize("multiplier", ["mbm16", INTEGERS])
def test_a_checkpoint_is_tested_predicts_and_is_exported_with_its_multiplier(
    run, train, tmp_path: Path, multiplier: str
) -> None:
    ckpt = train(multiplier)
    trained = json.loads((Path(ckpt).parents[1] / "results.json").read_text())["metrics"]
    use = (f"ckpt={ckpt}", "impl=reference", "trainer.limit_test_batches=2", *CPU)
    tested = run("mode=test", *use)
    assert tested.results["metrics"]["test/loss"] == trained["test/loss"]

    Image.new("L", (8, 8), 90).save(tmp_path / "grey.png")
    predicted = run("mode=predict", f"input={tmp_path / 'grey.png'}", *use)
    with (predicted.folder / "classes.csv").open() as file:
        (row,) = csv.DictReader(file)
    exact = run("mode=predict", f"input={tmp_path / 'grey.png'}", "approx.multiplier=exact", *use)
    with (exact.folder / "classes.csv").open() as file:
        (other,) = csv.DictReader(file)
    assert row != other

    pytest.importorskip("safetensors")
    exported = run("mode=export", "format=safetensors", *use).folder / "model.safetensors"
    again = run("mode=test", f"ckpt={exported}", *use[1:])
    assert again.results["metrics"] == tested.results["metrics"]


def test_a_file_is_the_same_one_from_another_folder(run, tmp_path: Path, monkeypatch) -> None:
    for folder, row in (("here", 1), ("there", 0)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "m.c").write_text(
            f"#include <stdint.h>\nint16_t mul4s(int8_t a, int8_t b) {{ return {row} * a * b; }}\n"
        )
        (tmp_path / folder / "add.c").write_text(
            f"int add16se(int a, int b) {{ return {row} * (a + b); }}\n"
        )
    monkeypatch.chdir(tmp_path / "here")
    done = run(*SHORT, "approx.multiplier={network.classifier: m.c, *: null}",
               "approx.accumulator=add.c")  # fmt: skip
    assert done.exit_code == 0, done.err
    (ckpt,) = (done.folder / "checkpoints").iterdir()
    monkeypatch.chdir(tmp_path / "there")
    tested = run("mode=test", f"ckpt={ckpt}", "impl=reference", FEW[1], *CPU)
    assert str(tmp_path / "here" / "m.c") in tested.out
    assert (
        f"accumulator: {tmp_path / 'here' / 'add.c'}" in (tested.folder / "config.yaml").read_text()
    )


def test_a_run_that_was_stopped_goes_on_with_the_same_multiplier(run, monkeypatch) -> None:
    still = (
        "trainer=cpu", "data=digits", "logger=csv", "impl=reference", "model.network.width=2",
        "data.batch_size=8", "trainer.max_epochs=2", "trainer.limit_train_batches=4",
        "trainer.limit_val_batches=1", "trainer.limit_test_batches=1",
        "trainer.log_every_n_steps=2", "step_checkpoints.every_n_steps=2",
        f"approx.multiplier={INTEGERS}",
    )  # fmt: skip
    whole = run(*still)
    training_step = Classifier.training_step

    def stop(self: Classifier, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 6:
            raise KeyboardInterrupt
        return training_step(self, batch, batch_idx)

    monkeypatch.setattr(Classifier, "training_step", stop)
    stopped = run(*still)
    assert stopped.results["status"] == "interrupted"
    monkeypatch.undo()
    other = run(*still, "resume=auto", "approx.multiplier=mbm16", folder=stopped.folder)
    assert "approx.multiplier: the run in" in other.err
    done = run(*still, "resume=auto", folder=stopped.folder)
    assert done.exit_code == 0, done.err
    assert_same(stopped.folder, whole.folder)


def test_a_multiplier_of_integers_is_trained_from_exact_weights_and_not_tested_on_them(
    run, train
) -> None:
    ckpt = train("null")
    multiplier = f"approx.multiplier={INTEGERS}"
    tested = run("mode=test", f"ckpt={ckpt}", multiplier, *CPU)
    assert tested.exit_code == 1
    assert "needs the ranges of the layers' inputs, which" in tested.err
    done = run(*SHORT, f"ckpt={ckpt}", multiplier, "model.learning_rate=0")
    assert done.exit_code == 0
    assert done.err == ""
    assert "tensors" in done.out
    (path,) = (done.folder / "checkpoints").iterdir()
    before, after = (saved.read(each).state_dict for each in (ckpt, path))
    assert all(torch.equal(after[name], value) for name, value in before.items()
               if "weight" in name)  # fmt: skip
    assert after["network.classifier.quantizer.input.most"] > 0


def test_learned_scales_are_trained_from_exact_weights_and_saved(run, train) -> None:
    done = run(
        *SHORT, f"ckpt={train('null')}", f"approx.multiplier={INTEGERS}", "approx.observer=mse",
        "approx.momentum=0.1", "approx.weight_scales=channel", "approx.learn_scales=true",
    )  # fmt: skip
    assert done.exit_code == 0, done.err
    assert done.err == ""
    (path,) = (done.folder / "checkpoints").iterdir()
    learned = saved.read(path).state_dict["network.classifier.quantizer.weight_scale.factor"]
    assert learned.shape == (10,)
    assert not torch.equal(learned, torch.ones(10))
    (optimizer,) = torch.load(path, weights_only=False)["optimizer_states"]
    rest, scales = optimizer["param_groups"]
    assert (rest["weight_decay"], scales["weight_decay"]) == (0.01, 0)
    factors = [name for name in saved.read(path).state_dict if name.endswith("_scale.factor")]
    assert len(scales["params"]) == len(factors) > 0
    tested = run(
        "mode=test", f"ckpt={path}", "impl=reference", "trainer.limit_test_batches=2", *CPU
    )
    assert tested.results["metrics"]["test/loss"] == done.results["metrics"]["test/loss"]


def test_a_checkpoint_without_a_multiplier_is_tested_with_one_of_floats(run, train) -> None:
    use = (
        f"ckpt={train('null')}", "mode=test", "impl=reference", "trainer.limit_test_batches=2",
        *CPU,
    )  # fmt: skip
    exact, approximate = run(*use), run(*use, "approx.multiplier=mbm10")
    assert approximate.exit_code == 0, approximate.err
    assert approximate.results["metrics"]["test/loss"] != exact.results["metrics"]["test/loss"]


@pytest.fixture
def circuits(tmp_path: Path) -> list[str]:
    """Two multipliers of 4 bits, with the figures of a circuit: 0.3 and 0.1 pJ, made up."""
    paths = [tmp_path / "mul4u_a.c", tmp_path / "mul4u_b.c"]
    for path, power, cut in zip(paths, (0.2, 0.0666666666666), (0, 1)):
        path.write_text(
            f"// PDK45_PWR = {power} mW\n// PDK45_AREA = 120.5 um2\n// PDK45_DELAY = 1.5 ns\n"
            "#include <stdint.h>\n"
            f"uint8_t {path.stem}(uint8_t a, uint8_t b) {{ return (a >> {cut} << {cut}) * b; }}\n"
        )
    return [str(path) for path in paths]


FEW = ("trainer.limit_train_batches=2", "trainer.limit_test_batches=1", "trainer.max_epochs=1")
# Of digits, 8 x 8: in the convolutions, and in the linear layer.
MULTIPLICATIONS = {
    "network.features.0.0": 64 * 9 * 1 * 2, "network.features.1.0": 16 * 9 * 2 * 4,
    "network.features.2.0": 4 * 9 * 4 * 8, "network.classifier": 8 * 10,
}  # fmt: skip
ALL = sum(MULTIPLICATIONS.values())


def test_a_test_says_what_a_sample_costs(run, circuits) -> None:
    done = run(
        *SHORT[1:], *FEW, "trainer=cpu", "logger=csv", "model=approx_cnn",
        f"approx.multiplier={{network.classifier: mbm16, *: {circuits[0]}}}",
        "approx.energies={mbm16: 2}",
    )  # fmt: skip
    assert done.exit_code == 0, done.err
    cost = done.results["cost"]
    assert {each["name"]: each["multiplications"] for each in cost["layers"]} == MULTIPLICATIONS
    assert [each["area_um2"] for each in cost["layers"]] == [120.5] * 3 + [None]
    picojoules = 0.3 * (ALL - 80) + 2 * 80
    assert cost["energy_pj"] == pytest.approx(picojoules)
    assert (cost["multiplications"], cost["unknown"]) == (ALL, 0)
    shown = " ".join(done.out.split())
    assert f"│ multiplications of a sample │ {ALL:,} │" in shown
    assert f"│ their energy, pJ │ {picojoules:,.0f} │" in shown
    with (done.folder / "csv" / "metrics.csv").open() as file:
        logged = [row for row in csv.DictReader(file) if row["cost/energy_pj"]]
    assert [float(row["cost/energy_pj"]) for row in logged] == [pytest.approx(picojoules)]

    (ckpt,) = (done.folder / "checkpoints").iterdir()
    use = ("mode=test", f"ckpt={ckpt}", "impl=reference", FEW[1], *CPU)
    assert run(*use).results["cost"] == cost
    tested = run(*use, "approx.energies=null").results["cost"]
    assert tested["unknown"] == 80
    assert tested["energy_pj"] == pytest.approx(0.3 * (ALL - 80))


def test_an_exact_network_has_no_cost_and_what_cannot_be_counted_is_a_note(
    run, monkeypatch
) -> None:
    exact = run(*SHORT)
    assert "cost" not in exact.results
    assert "multiplications" not in exact.out

    def fail(*args: Any, **options: Any) -> Any:
        raise RuntimeError("it takes two\nimages")

    monkeypatch.setattr("training.callbacks.cost.cost", fail)
    done = run(*SHORT, "approx.multiplier=mbm16", *FEW)
    assert done.exit_code == 0
    assert "cost" not in done.results
    assert done.results["notes"] == ["multiplications were not counted: it takes two images"]


def test_a_sweep_of_multipliers_ends_in_accuracy_against_energy(run, circuits, monkeypatch) -> None:
    drawn: list[Any] = []
    draw = energy.draw
    monkeypatch.setattr(energy, "draw", lambda *args: drawn.append(args) or draw(*args))
    sweep = run(
        "-m", *SHORT, *FEW, "model=approx_cnn", "seed=1,2",
        f"approx.multiplier={','.join(circuits)},mbm16",
    )  # fmt: skip
    assert sweep.exit_code == 0, sweep.err
    rows = json.loads((sweep.folder / "sweep.json").read_text())
    assert [row["multiplications"] for row in rows] == [ALL] * 6
    assert [row["of unknown energy"] for row in rows] == [0, 0, ALL] * 2
    energies = [pytest.approx(0.3 * ALL), pytest.approx(0.1 * ALL), None]
    assert [row["energy, pJ"] for row in rows] == energies * 2
    table = sweep.out[sweep.out.rindex("Sweep") :]
    assert table.replace("of unknown energy", "").count("unknown") == 2  # of mbm16
    ((points, metric, rises),) = drawn
    assert (metric, rises) == ("test/accuracy", True)
    assert [point.label for point in points] == ["mul4u_a.c", "mul4u_b.c"]
    assert [point.energy for point in points] == energies[:2]
    assert [sorted(point.scores) for point in points] == [
        sorted(row["test/accuracy"] for row in rows[i::3]) for i in range(2)
    ]
    assert (sweep.folder / "energy.png").stat().st_size > 0
    assert "energy.png leaves out mbm16, where" in " ".join(sweep.err.split())
    assert not (
        run("-m", *SHORT, *FEW, "model=approx_cnn", "seed=1,2").folder / "energy.png"
    ).exists()


@pytest.mark.slow
def test_the_commands_of_the_page_end_in_a_picture_on_digits(tmp_path: Path) -> None:
    page = (ROOT / "docs/use/approx_energy.md").read_text()
    (block,) = re.findall(r"^## Four commands\n\n```\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    (digits,) = re.findall(r"`(data=digits [^`]*)`", page)
    few = f"{digits} trainer.limit_train_batches=2 trainer=cpu logger=none"
    for found, own in (
        ("experiment=mnist_mbm", few),
        ("python train.py", f"{sys.executable} {ROOT / 'train.py'}"),
        ("python scripts", f"{sys.executable} {ROOT / 'scripts'}"),
        ("python -c", f"{sys.executable} -c"),
    ):
        assert found in block
        block = block.replace(found, own)
    (tmp_path / "evo").mkdir()
    for name, power in (("mul8s_1KV6", 0.4), ("mul8s_T", 0.3)):
        (tmp_path / "evo" / f"{name}.c").write_text(
            f"// PDK45_PWR = {power} mW\n// PDK45_DELAY = 1.5 ns\n#include <stdint.h>\n"
            f"int16_t {name}(int8_t a, int8_t b) {{ return (int16_t)a * b; }}\n"
        )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(
        ["bash", "-e", "-c", block], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "{'PDK45_PWR': 0.4, 'PDK45_DELAY': 1.5}" in done.stdout
    assert (tmp_path / "multirun" / "evo" / "energy.png").exists()
    assert "energy, pJ" in done.stdout
