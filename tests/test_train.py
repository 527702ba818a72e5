"""python train.py, as its user sees it: exit code, what it prints, what it leaves."""

from __future__ import annotations

import csv
import json
import os
import sys
from pathlib import Path

import pytest
import torch
import torchvision
from omegaconf import OmegaConf

import hoconv
import train
import training.configuration.resolvers
import training.model
from datamodules.digits import Digits
from hoconv.dispatch.implementations import ImplementationError
from hoconv.lightning import Throughput
from models.tasks.classifier import Classifier
from training.command import run_command

SHORT = ("debug=fast", "impl=reference", "trainer=cpu")
CONF = Path(train.__file__).parent / "conf"


def test_a_run_leaves_results_losses_configuration_and_checkpoint(run):
    done = run(*SHORT, "seed=7", "trainer.limit_train_batches=12")
    assert done.exit_code == 0
    results = done.results
    assert list(results) == [
        "impl", "model", "data", "seed", "overrides", "status", "metrics", "throughput", "capture",
        "environment", "commit",
    ]  # fmt: skip
    assert (results["impl"], results["model"], results["data"]) == ("reference", "cnn", "digits")
    assert (results["seed"], results["status"]) == (7, "finished")
    assert set(results["metrics"]) == {
        "train/loss", "val/loss", "val/accuracy", "test/loss", "test/accuracy",
    }  # fmt: skip
    assert all(value > 0 for value in results["throughput"].values())
    assert results["environment"]["torch"] == torch.__version__
    assert set(results["environment"]["implementations"].values()) == {"reference"}
    assert len(done.losses) == 12
    assert float(done.losses[-1]) == results["metrics"]["train/loss"]
    assert len(list(done.folder.glob("checkpoints/*.ckpt"))) == 1
    saved = OmegaConf.load(done.folder / "config.yaml")
    assert saved.model.network.image_shape == [1, 8, 8]
    assert not OmegaConf.to_yaml(saved).count("${")
    for expected in ("experiment", "network.features.2", "test/accuracy", "results.json"):
        assert expected in done.out


def test_throughput_of_a_run_too_short_to_measure_is_null(run):
    assert set(run(*SHORT).results["throughput"].values()) == {None}


def test_same_seed_same_losses_bit_for_bit(run):
    ten_steps = (*SHORT, "trainer.limit_train_batches=10", "trainer.max_epochs=2")
    losses = run(*ten_steps, "seed=3").losses
    torch.rand(5)  # another state of the global generator
    assert len(losses) == 20
    assert run(*ten_steps, "seed=3").losses == losses
    assert run(*ten_steps, "seed=4").losses != losses


@pytest.mark.parametrize("impl", ["cpp", "cuda"])
def test_implementations_agree_on_the_first_losses(run, impl):
    if (state := hoconv.implementations()[impl]) != "available":
        pytest.skip(state)
    device = "gpu" if impl == "cuda" else "cpu"
    steps = ("debug=fast", f"trainer={device}", "trainer.limit_train_batches=20")
    reference = [float(loss) for loss in run(*steps, "impl=reference").losses]
    losses = [float(loss) for loss in run(*steps, f"impl={impl}").losses]
    assert len(losses) == 20
    assert losses == pytest.approx(reference, rel=1e-4)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("capture", ["auto", "off"])
@pytest.mark.parametrize("impl", ["reference", "cuda"])
@pytest.mark.parametrize(
    "experiment",
    [
        ("digits_cnn",),
        ("mnist_lstm", "data=digits"),
        ("mnist_mbm", "data=digits"),
        ("coco_segmentation", "data=coco_tiny", "data.num_workers=1"),
        ("coco_captions", "data=coco_tiny", "data.num_workers=1"),
        ("coco_denoise", "data=coco_tiny", "data.num_workers=1"),
    ],
    ids=lambda overrides: overrides[0],
)
def test_steps_do_not_wait_for_the_gpu(run, monkeypatch, tmp_path, experiment, impl, capture):
    if (experiment[0], capture) == ("coco_captions", "auto"):
        pytest.skip("captions of another length are captured in between, which waits")

    begin = Throughput.on_train_batch_start

    def watched(self, trainer, *rest):
        # From the eleventh step to the fetching of the twentieth batch: losses are read after it.
        mode = "error" if 10 <= trainer.global_step < 19 else "default"
        torch.cuda.set_sync_debug_mode(mode)
        begin(self, trainer, *rest)

    monkeypatch.setattr(Throughput, "on_train_batch_start", watched)
    name, *overrides = experiment
    try:
        done = run(
            f"experiment={name}", *overrides, f"impl={impl}", f"capture={capture}", "trainer=gpu",
            "logger=csv", "data.batch_size=8", "trainer.max_epochs=1",
            "trainer.limit_train_batches=22", "trainer.limit_val_batches=1",
            "trainer.limit_test_batches=1",
            *([f"data.cache_dir={tmp_path}"] if name.startswith("coco") else []),
        )  # fmt: skip
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert done.exit_code == 0
    assert len(done.losses) == 22


@pytest.mark.gpu
@pytest.mark.parametrize(
    "overrides",
    [
        ("experiment=mnist_lstm", "data=digits"),
        ("trainer.precision=bf16-mixed",),
        ("trainer.precision=16-mixed",),
        ("trainer.gradient_clip_val=0.5",),
        ("trainer.accumulate_grad_batches=2",),
        ("compile=true",),
        ("model=lstm", "channels_last=true"),
    ],
    ids=" ".join,
)
def test_captured_runs_learn_what_eager_ones_do(run, overrides):
    steps = (*overrides, "impl=cuda", "trainer=gpu", "logger=none", "trainer.max_epochs=3")
    captured, eager = run(*steps, "capture=on"), run(*steps, "capture=off")
    assert captured.exit_code == eager.exit_code == 0
    assert captured.results["capture"]["replays"] > 30
    assert eager.results["capture"]["replays"] == 0
    accuracies = [done.results["metrics"]["test/accuracy"] for done in (captured, eager)]
    assert abs(accuracies[0] - accuracies[1]) < 0.1


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("capture=yes", "capture: there is no 'yes'; choose auto, off, on"),
        ("capture.mode=yes", "capture: expected one of auto, on, off; got 'yes'"),
        (
            "capture.verify_every_n_steps=0",
            "capture.verify_every_n_steps: expected a whole number of at least 1, got 0",
        ),
    ],
)
def test_unknown_capture_is_one_line(run, override, message):
    failed = run(*SHORT, override)
    assert failed.exit_code == 1
    assert failed.err == f"Error: {message}\n"


def test_capture_that_is_required_fails_on_a_cpu(run):
    failed = run(*SHORT, "capture=on")
    assert failed.exit_code == 1
    assert "capture=on: a step cannot be captured: the run is on a CPU" in failed.err


def test_losses_and_gradient_norms_of_accumulated_steps_are_those_of_their_batches(run):
    still = (*SHORT, "logger=csv", "model.learning_rate=0", "trainer.limit_train_batches=8")
    each, accumulated = run(*still), run(*still, "trainer.accumulate_grad_batches=3")
    assert accumulated.losses == each.losses
    assert accumulated.results["metrics"] == each.results["metrics"]
    with (accumulated.folder / "csv" / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["train/loss"]]
    assert [row["train/loss"] for row in rows] == each.losses
    norms = [row["train/gradient_norm"] != "" for row in rows]
    assert norms == [False, False, True, False, False, True, False, True]  # where it is whole


def test_gradient_norm_is_that_of_all_parameters_after_clipping(run):
    clipped = run(*SHORT, "logger=csv", "trainer.gradient_clip_val=0.001")
    with (clipped.folder / "csv" / "metrics.csv").open() as file:
        norms = [float(n) for row in csv.DictReader(file) if (n := row["train/gradient_norm"])]
    assert norms
    assert norms == pytest.approx([0.001] * len(norms), rel=1e-3)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_precisions(run, precision):
    assert run(*SHORT, f"trainer.precision={precision}").exit_code == 0


@pytest.mark.parametrize("override", ["model=nonsense", "nonsense=1"])
def test_unknown_overrides_get_hydras_own_error(run, override):
    failed = run(*SHORT, override)
    assert failed.exit_code == 1
    assert "nonsense" in failed.err
    assert "Traceback" not in failed.err
    assert ("approx_cnn" in failed.err) == (override == "model=nonsense")  # the options
    assert not failed.folder.exists()


KNOWN = "expected one of auto, reference, cpp, cuda; got 'nonsense'"


@pytest.mark.parametrize(
    ("impl", "message"),
    [
        ("nonsense", KNOWN),
        ("{high_order_layer: nonsense}", f"{KNOWN} for high_order_layer"),
        ("{nonsense: cpp}", "expected names of operators or layers, of high_order_layer, "),
        ("7", "expected the name of an implementation, or {operator or layer: name}; got 7"),
        ("null", "expected the name of an implementation, or {operator or layer: name}; got None"),
        ("{high_order_layer: null}", "expected the name of an implementation, or"),
    ],
)
def test_an_unknown_implementation_is_one_line_before_any_data(run, monkeypatch, impl, message):
    monkeypatch.setattr(Digits, "load", lambda self: pytest.fail("data was loaded"))
    failed = run(*SHORT, f"impl={impl}")
    assert failed.exit_code == 1
    (line,) = failed.err.splitlines()
    assert line.startswith(f"Error: impl: {message}")
    assert failed.results["status"] == "failed"


def test_impl_may_name_an_operator_or_a_layer(run):
    asked = {"network.features.5": "reference", "high_order_layer": "cpp"}
    if (state := hoconv.implementations()["cpp"]) != "available":
        pytest.skip(state)
    text = ", ".join(f"{key}: {name}" for key, name in asked.items())
    done = run(*SHORT, f"impl={{{text}}}")
    assert done.exit_code == 0
    assert done.results["impl"] == asked
    assert done.results["environment"]["implementations"] == {
        "network.features.2": "cpp",
        "network.features.5": "reference",
    }
    assert OmegaConf.load(done.folder / "config.yaml").impl == asked


@pytest.mark.parametrize(
    ("impl", "name"),
    [
        ("cuda", "cuda"),
        ("{high_order_layer: cuda, recurrent: cpp}", "high_order_layer-cuda_recurrent-cpp"),
        ("{" + ", ".join(f"layer{i}: cpp" for i in range(99)) + "}", "layer0-cpp_layer1-cpp_"),
    ],
    ids=["name", "mapping", "long mapping"],
)
def test_folders_are_named_after_the_implementation(monkeypatch, tmp_path, capfd, impl, name):
    monkeypatch.chdir(tmp_path)  # outputs/ is where the user stands
    monkeypatch.setattr(sys, "argv", ["train.py", f"impl={impl}", "logger=none", "mode=none"])
    assert run_command(train.main) == 1
    assert "mode: expected train, test, predict" in capfd.readouterr().err
    (folder,) = tmp_path.glob("outputs/digits_cnn/*")
    _, _, label = folder.name.split("_", 2)
    assert label.startswith(name)
    assert len(label) <= 64


@pytest.mark.parametrize("mode", ["test", "predict"])
def test_folders_without_a_training_are_named_after_the_mode(monkeypatch, tmp_path, capfd, mode):
    monkeypatch.chdir(tmp_path)  # outputs/ is where the user stands
    monkeypatch.setattr(sys, "argv", ["train.py", f"mode={mode}"])
    assert run_command(train.main) == 1
    assert f"mode={mode} needs ckpt=" in capfd.readouterr().err
    assert len(list(tmp_path.glob(f"outputs/{mode}/*"))) == 1


def test_the_start_up_table_says_why_a_layer_is_not_fused(run, monkeypatch):
    def why_unfused(self: hoconv.HighOrderConv2d) -> str | None:
        return "5 channels are too many" if self.channels > 16 else None

    monkeypatch.setattr(hoconv.HighOrderConv2d, "why_unfused", why_unfused, raising=False)
    done = run(*SHORT)
    rows = [line for line in done.out.splitlines() if "network.features." in line]
    assert ["not fused: 5 channels are too many" in row for row in rows] == [False, True]


@pytest.mark.parametrize(
    ("precision", "dtype", "autocast"),
    [("bf16-true", "torch.bfloat16", False), ("bf16-mixed", "torch.float32", True)],
)
def test_a_layer_is_asked_in_the_precision_of_the_run(run, monkeypatch, precision, dtype, autocast):
    def why_unfused(self: hoconv.HighOrderConv2d) -> str:
        return f"{self.generator.weight.dtype}, {torch.is_autocast_enabled('cpu')}"

    monkeypatch.setattr(hoconv.HighOrderConv2d, "why_unfused", why_unfused, raising=False)
    done = run(*SHORT, f"trainer.precision={precision}")
    assert done.exit_code == 0
    assert f"not fused: {dtype}, {autocast}" in done.out


def test_an_implementation_that_cannot_run_is_one_line_before_any_data(run, monkeypatch):
    def refuse(*args):
        raise ImplementationError("the reason; the fix")

    monkeypatch.setattr(training.model, "choose", refuse)
    monkeypatch.setattr(Digits, "load", lambda self: pytest.fail("data was loaded"))
    failed = run(*SHORT)
    assert failed.exit_code == 1
    assert failed.err.splitlines() == ["Error: the reason; the fix"]
    assert failed.results["status"] == "failed"
    assert failed.results["error"] == "ImplementationError: the reason; the fix"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("experiment=mnist_lstm", "model.network.cell=nosuch"), "cell: expected one of"),
        (("model.network.width=-3",), "width: expected a whole number of at least 1, got -3"),
        (("model.network.width=abc",), "model.network.width: expected a number, got 'abc'"),
        (("model.label_smoothing=3",), "label_smoothing: expected a number from 0 to 1, got 3"),
        (("model=approx_cnn", "model.network.gradient=nonsense"), "gradient: expected one of"),
        (("data.batch_size=0",), "data.batch_size: expected a whole number of at least 1, got 0"),
        (
            ("model.learning_rate=-1",),
            "model.learning_rate: expected a number of at least 0, ",
        ),
        (("compile=yes",), "compile: expected true or false, got 'yes'"),
        (("tf32=1",), "tf32: expected true or false, got 1"),
        (("unavailable=skp",), "unavailable: expected error or skip, got 'skp'"),
        (("ckpt=",), "ckpt: there is no file "),
        (("seed=abc",), "seed: expected a whole number of at least 0, got 'abc'"),
        (("seed=null",), "seed: expected a whole number of at least 0, got None"),
        (("trainer.max_epochs=abc",), "trainer.max_epochs: expected a whole number of at least -1"),
        (("model.learning_rate=abc",), "model.learning_rate: expected a number of at least 0, got"),
        (("trainer.precision=fp16",), "trainer: Precision 'fp16' is invalid. Allowed precision"),
        (("trainer.accelerator=tpu",), "trainer: Requirement 'torch_xla"),
        (("+trainer.nonsense=1",), "trainer: got an unexpected keyword argument 'nonsense'"),
        (("data.device=tpu",), "device: expected one of auto, gpu, cpu; got 'tpu'"),
        (
            ("data=coco_tiny",),
            "task: expected one of ('segmentation', 'detection', 'captions', 'denoise')",
        ),
        (("model.network.width=${nosuch}",), "model.network.width: Interpolation key 'nosuch'"),
        (("+callbacks.mine=7",), "callbacks.mine: expected the _target_ of a Lightning callback"),
        (("+callbacks.mine._target_=builtins.dict",), "callbacks.mine: expected the _target_ of a"),
        (
            ("+callbacks.mine._target_=no.such.Thing",),
            "callbacks.mine._target_: there is no module",
        ),
        (
            ("+callbacks.mine._target_=torch",),
            "callbacks.mine._target_: expected a class or a func",
        ),
        (
            ("+callbacks.mine._target_=torch.nn.ReLUU",),
            "callbacks.mine._target_: torch.nn has no 'ReLUU'; did you mean ReLU?",
        ),
        (
            ("+callbacks.mine={_target_: pytorch_lightning.callbacks.EarlyStopping, moniter: x}",),
            "callbacks.mine.moniter: pytorch_lightning.callbacks.EarlyStopping has no such arg",
        ),
        (
            ("+callbacks.mine._target_=pytorch_lightning.callbacks.EarlyStopping",),
            "callbacks.mine: pytorch_lightning.callbacks.EarlyStopping needs monitor",
        ),
        (
            ("model._target_=torch.nn.Identity",),
            "model: expected the _target_ of a pytorch_lightning.LightningModule; got torch",
        ),
        (
            (
                "data._target_=torch.nn.Identity",
                "model.num_classes=10",
                "model.network.image_shape=[1,8,8]",
                "model.network.num_classes=10",
            ),
            "data: expected the _target_ of a pytorch_lightning.LightningDataModule; got torch.nn",
        ),
    ],
    ids=[
        "network",
        "width",
        "kind of width",
        "smoothing",
        "model",
        "data",
        "below zero",
        "flag",
        "flag as a number",
        "word",
        "checkpoint without a name",
        "seed",
        "no seed",
        "epochs",
        "learning rate",
        "precision",
        "accelerator",
        "trainer",
        "device of the data",
        "model for other data",
        "interpolation",
        "callback",
        "other object",
        "no module",
        "a module",
        "no such name",
        "argument",
        "no argument",
        "no model",
        "no data",
    ],
)
def test_a_value_that_is_not_allowed_is_one_line(run, overrides, message):
    failed = run(*SHORT, *overrides)
    assert failed.exit_code == 1
    (line,) = failed.err.splitlines()
    assert line.startswith(f"Error: {message}")
    assert failed.results["error"] == line.replace("Error", "MisconfigurationException", 1)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("callbacks.early_stopping.patience=abc", "a number, got 'abc'"),
        ("callbacks.early_stopping.stopping_threshold=abc", "a number or null, got 'abc'"),
        ("callbacks.early_stopping.monitor=7", "text, got 7"),
        ("callbacks.early_stopping.monitor=null", "text, got None"),
        ("scheduler.warmup_fraction=abc", "a number from 0 to 1, got 'abc'"),
        ("scheduler.warmup_fraction=2", "a number from 0 to 1, got 2"),
        ("checkpoint.monitor=7", "text or null, got 7"),
        ("+checkpoint.save_top_k=abc", "a number, got 'abc'"),
        ("checkpoint=null", "its keys, got None"),
        ("step_checkpoints=null", "its keys, got None"),
        ("trainer.num_sanity_val_steps=abc", "a number or null, got 'abc'"),
        ("trainer.deterministic=abc", "true or false or null or 'warn', got 'abc'"),
        ("+trainer.max_time=3", "text or null, got 3"),
        ("trainer.val_check_interval=0", "a number above 0, got 0"),
        ("seed=5000000000", "less than 4294967296, got 5000000000"),
        ("logger.csv.path=null", "text, got None"),
    ],
    ids=lambda part: part.partition("=")[0] if "=" in part else None,
)
def test_a_value_of_another_kind_is_one_line(run, override, message):
    failed = run(
        "callbacks=early_stopping", "impl=reference", "trainer=cpu", "logger=csv", override
    )
    assert failed.exit_code == 1
    (line,) = failed.err.splitlines()
    name = override.partition("=")[0].lstrip("+")
    assert line.startswith("Error: ")
    assert f"{name.removeprefix('scheduler.')}: expected {message}" in line
    assert not (failed.folder / "losses.csv").exists()


def test_what_runs_set_of_their_checkpoints_is_left_to_them(run):
    failed = run(*SHORT, "+checkpoint.dirpath=elsewhere")
    assert failed.exit_code == 1
    assert failed.err == "Error: checkpoint.dirpath: runs set it; leave it out\n"


def test_data_on_a_gpu_that_the_run_does_not_have_is_one_line(run):
    failed = run(*SHORT, "trainer=cpu", "data.device=gpu")
    assert failed.exit_code == 1
    (line,) = failed.err.splitlines()
    assert line.startswith("Error: data.device: expected auto or cpu for a run on cpu, got 'gpu'")


def test_null_switches_a_callback_off(run, tmp_path):
    segment = (
        *SHORT, "data=coco_tiny", "model=segmentation", "data.image_size=16", "data.batch_size=4",
        "model.network.width=4", f"data.cache_dir={tmp_path / 'cache'}",
    )  # fmt: skip
    assert (run(*segment).folder / "pictures").exists()
    done = run(*segment, "callbacks.pictures=null")
    assert done.exit_code == 0
    assert not (done.folder / "pictures").exists()


def test_a_callback_of_the_user_s_is_called(run):
    stop = (
        "+callbacks.stop._target_=pytorch_lightning.callbacks.EarlyStopping",
        "+callbacks.stop.monitor=val/loss", "+callbacks.stop.stopping_threshold=1000",
    )  # fmt: skip
    done = run(*SHORT, "trainer.max_epochs=2", *stop)
    assert done.exit_code == 0
    assert len(done.losses) == 4  # of one epoch


@pytest.mark.parametrize("sweep", [False, True])
def test_a_folder_that_cannot_be_written_is_one_line(run, tmp_path, sweep):
    (tmp_path / "file").touch()
    overrides = ("-m", "seed=1,2") if sweep else ()
    failed = run(*overrides, *SHORT, folder=tmp_path / "file" / "run")
    name = "hydra.sweep.dir" if sweep else "hydra.run.dir"
    assert failed.exit_code == 1
    assert failed.err.splitlines() == [
        f"Error: {name}: {failed.folder} cannot be written (Not a directory); set {name} to a "
        "folder that can be"
    ]


def test_missing_data_is_one_line_that_says_what_to_do(run, monkeypatch, tmp_path):
    nowhere = (tmp_path / "nowhere").as_uri() + "/"
    monkeypatch.setattr(torchvision.datasets.MNIST, "mirrors", [nowhere])
    failed = run(*SHORT, "data=mnist", f"data_dir={tmp_path / 'data'}")
    assert failed.exit_code == 1
    (line,) = failed.err.splitlines()
    assert line.startswith("Error: MNIST is not in")
    assert "t10k-labels-idx1-ubyte.gz" in line
    assert failed.results["status"] == "failed"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_trainer_for_hardware_that_is_not_there_is_one_line(run):
    failed = run(*SHORT, "trainer=gpu")
    assert failed.exit_code == 1
    assert len(failed.err.splitlines()) == 1


def test_a_failure_while_training_is_recorded_and_shown(run, monkeypatch):
    training_step = Classifier.training_step

    def fail_at_third(self, batch, batch_idx):
        if batch_idx == 2:
            raise RuntimeError("third batch")
        return training_step(self, batch, batch_idx)

    monkeypatch.setattr(Classifier, "training_step", fail_at_third)
    failed = run(*SHORT, "trainer.log_every_n_steps=10")
    assert failed.exit_code == 1
    assert "RuntimeError: third batch" in failed.err
    assert failed.results["status"] == "failed"
    assert failed.results["error"] == "RuntimeError: third batch"
    assert len(failed.losses) == 2


def test_an_interrupted_run_says_so_and_keeps_what_there_is(run, monkeypatch):
    statuses = []
    training_step = Classifier.training_step

    def interrupt_at_third(self, batch, batch_idx):
        if batch_idx == 2:
            (path,) = Path(self.trainer.default_root_dir).glob("results.json")
            statuses.append(json.loads(path.read_text())["status"])
            raise KeyboardInterrupt
        return training_step(self, batch, batch_idx)

    monkeypatch.setattr(Classifier, "training_step", interrupt_at_third)
    interrupted = run(*SHORT)
    assert statuses == ["running"]
    assert interrupted.exit_code == 130
    assert interrupted.results["status"] == "interrupted"
    assert len(interrupted.losses) == 2
    assert "Traceback" not in interrupted.err


@pytest.mark.parametrize("logger", ["csv", "none"])
def test_other_loggers_need_no_wandb(run, monkeypatch, logger):
    monkeypatch.setitem(sys.modules, "wandb", None)
    done = run(*SHORT, f"logger={logger}", "trainer.limit_train_batches=12")
    assert done.exit_code == 0
    assert (done.folder / "csv" / "metrics.csv").exists() == (logger == "csv")
    if logger == "csv":
        header = (done.folder / "csv" / "metrics.csv").read_text().splitlines()[0]
        assert "throughput/samples_per_sec" in header.split(",")


def test_a_logger_counts_the_epoch_of_the_test_as_that_of_the_last_validation(run):
    done = run(*SHORT, "logger=csv", "trainer.max_epochs=2")
    with (done.folder / "csv" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    epochs = {
        stage: {float(row["epoch"]) for row in rows if row[f"{stage}/loss"]}
        for stage in ("val", "test")
    }
    assert epochs == {"val": {0, 1}, "test": {1}}


def test_wandb_that_is_not_installed_is_one_line_with_the_fix(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    failed = run(*SHORT, "logger=wandb")
    assert failed.exit_code == 1
    (line,) = failed.err.splitlines()
    assert "pip install wandb" in line


@pytest.mark.parametrize("experiment", sorted(p.stem for p in CONF.glob("experiment/*.yaml")))
def test_every_experiment_composes(monkeypatch, capfd, experiment):
    arguments = ["train.py", f"experiment={experiment}", "--cfg", "job"]
    monkeypatch.setattr(sys, "argv", arguments)
    train.main()
    assert "_target_: datamodules." in capfd.readouterr().out


def test_arguments_of_the_trainer_that_come_with_a_model_are_its(monkeypatch, capfd):
    for trainer in ("default", "cpu", "ddp"):
        arguments = ["train.py", "experiment=mnist_lstm", f"trainer={trainer}", "--cfg", "job"]
        monkeypatch.setattr(sys, "argv", arguments)
        train.main()
        assert "  gradient_clip_val: 1.0\n" in capfd.readouterr().out


@pytest.mark.slow
def test_the_default_experiment_learns_to_read_digits(run):
    done = run("logger=none", "trainer=cpu")
    assert done.results["metrics"]["test/accuracy"] >= 0.96


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.skipif("HOCONV_DATA_DIR" not in os.environ, reason="HOCONV_DATA_DIR is not set")
def test_mnist_learns_within_a_hundred_steps(run):
    done = run(
        "experiment=mnist_cnn", "logger=none", "trainer=cpu", "trainer.max_epochs=1",
        "trainer.limit_train_batches=100", "trainer.limit_test_batches=20",
    )  # fmt: skip
    assert done.results["data"] == "mnist"
    assert done.results["metrics"]["test/accuracy"] >= 0.9


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.skipif("HOCONV_DATA_DIR" not in os.environ, reason="HOCONV_DATA_DIR is not set")
def test_mnist_learns_with_approximate_products_within_sixty_steps(run):
    done = run(
        "experiment=mnist_mbm", "logger=none", "trainer=cpu", "trainer.max_epochs=1",
        "model.network.width=16", "trainer.limit_train_batches=60", "trainer.limit_test_batches=10",
    )  # fmt: skip
    assert (
        done.results["metrics"]["test/accuracy"] >= 0.7
    )  # 0.79 to 0.83, as exact ones; chance: 0.1
