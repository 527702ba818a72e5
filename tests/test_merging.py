"""A command that uses a checkpoint starts from its configuration; what it names overrides that."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from PIL import Image

from training.command import run_command

CPU = ("trainer=cpu", "impl=reference", "logger=none")


def pictures(folder: Path, *shades: int) -> Path:
    """A folder of two classes of grey images."""
    for split in ("train", "val"):
        for name, shade in zip(("dark", "light"), shades, strict=True):
            (folder / split / name).mkdir(parents=True)
            for number in range(3):
                image = Image.new("L", (20, 20), shade)
                image.paste(255 - shade, (number, 0, number + 5, 9))
                image.save(folder / split / name / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, Path, Path]:
    """The folders of a run's images, of other ones, and of the run."""
    folder = tmp_path_factory.mktemp("merging")
    return pictures(folder / "one", 20, 220), pictures(folder / "two", 90, 110), folder / "run"


@pytest.fixture
def ckpt(run, trained) -> Path:
    images, _, folder = trained
    if not folder.exists():
        done = run(
            *CPU, "data=folder", f"data.folder={images}", "data.image_size=16", "seed=3",
            f"data.cache_dir={folder.parent / 'cache'}", "model.network.width=2",
            "trainer.max_epochs=1", "data.batch_size=4", folder=folder,
        )  # fmt: skip
        assert done.exit_code == 0, done.err
    return next((folder / "checkpoints").iterdir())


def test_what_is_not_named_is_the_checkpoints(run, trained, ckpt):
    _, other, _ = trained
    use = ("mode=test", f"ckpt={ckpt}", *CPU)
    named = run(*use, f"data.folder={other}")
    assert named.exit_code == 0, named.err
    chosen = run(*use, "data=folder", f"data.folder={other}")
    repeated = run(
        *use, "experiment=digits_cnn", "data=folder", "model=cnn", f"data.folder={other}", "seed=3"
    )
    for done in (named, chosen, repeated):
        assert done.err == ""
        assert done.results["metrics"] == named.results["metrics"]
        assert (done.results["data"], done.results["seed"]) == ("folder", 3)
        config = OmegaConf.load(done.folder / "config.yaml")
        assert (config.data.image_size, config.data.batch_size) == (16, 4)
        assert (config.data.folder, config.model.network.width) == (str(other), 2)
    assert named.results["metrics"] != run(*use).results["metrics"]


def test_what_differs_in_preprocessing_is_said(run, ckpt):
    done = run("mode=test", f"ckpt={ckpt}", *CPU, "data.image_size=24")
    assert done.err.splitlines() == [
        "Warning: data: images are prepared in another way: image_size is 24, and was 16 in "
        "training"
    ]


def test_that_a_share_of_other_images_is_tested_is_said(run, trained):
    one, other, _ = trained
    made = run(
        *CPU, "data=folder", f"data.folder={one / 'train'}", "data.val_share=0.34",
        "data.image_size=16", f"data.cache_dir={one.parent / 'cache'}", "model.network.width=2",
        "trainer.max_epochs=1",
    )  # fmt: skip
    use = ("mode=test", f"ckpt={next((made.folder / 'checkpoints').iterdir())}", *CPU)
    done = run(*use, f"data.folder={other / 'train'}")
    assert done.err.splitlines() == [
        f"Warning: data.val_share: as in training, 0.34 of the images in {other / 'train'} is "
        "tested; data.val_share=null tests those in its folder test or val"
    ]
    assert "test: 2 images" in done.out
    for named in (f"data.folder={other}", "data.val_share=null"), ():
        assert run(*use, *named).err == ""


def test_a_part_of_the_model_and_its_callbacks_may_be_named(run, trained, ckpt):
    use = ("mode=predict", f"ckpt={ckpt}", f"input={trained[0]}", *CPU)
    done = run(*use, "callbacks.classes=null")
    assert done.exit_code == 0, done.err
    assert not (done.folder / "classes.csv").exists()
    assert (done.folder / "predictions.pt").is_file()
    done = run(*use, "+callbacks.also={_target_: pytorch_lightning.callbacks.Timer}")
    assert done.exit_code == 0, done.err
    assert "also" in OmegaConf.load(done.folder / "config.yaml").callbacks


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("data.foldr=x",), "data.foldr: datamodules.folder.ClassFolder has no such argument; it"),
        (("model.network.widht=3",), "model.network.widht: models.networks.cnn.CNN has no such"),
        (
            ("model=lstm",),
            "and the command names models.tasks.classifier.Classifier with ",
        ),
        (("data=digits",), "data: class 0 of the model is 'dark', of the data '0'"),
        (("~data.image_size",), "it is the checkpoint's; set it to another value, or to null"),
        (("model.network.width=3",), "is damaged, or not of the model that it describes"),
        (("data.batch_size=0",), "data.batch_size: expected a whole number of at least 1, got 0"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_is_one_line(run, ckpt, overrides, message):
    failed = run("mode=test", f"ckpt={ckpt}", *CPU, *overrides)
    assert failed.exit_code == 1
    assert message in failed.err.splitlines()[-1]
    assert "Traceback" not in failed.err


def test_checkpoints_may_be_swept(run, ckpt, tmp_path):
    renamed = tmp_path / "other.ckpt"
    renamed.write_bytes(ckpt.read_bytes())
    done = run("-m", "mode=test", f"ckpt={ckpt},{renamed}", *CPU, "data.batch_size=2")
    assert done.exit_code == 0, done.err
    first, second = (
        json.loads((done.folder / number / "results.json").read_text())["metrics"]
        for number in "01"
    )
    assert first == second


# Files of the user's


@pytest.mark.parametrize("how", ["--config-dir", "hydra.searchpath"])
@pytest.mark.parametrize(
    "name", ["data/digits", "experiment/mnist_cnn", "sweep/cell", "callbacks/ema"]
)
def test_a_file_that_would_never_be_read_is_an_error(capfd, monkeypatch, tmp_path, name, how):
    import train

    own = tmp_path / "it's" / f"{name}.yaml"
    own.parent.mkdir(parents=True)
    own.write_text("seed: 1\n")
    folder = tmp_path / "it's"
    argument = f'hydra.searchpath=["file://{folder}"]' if "." in how else f"{how}={folder}"
    monkeypatch.setattr("sys.argv", ["train.py", argument, "debug=fast"])
    assert run_command(train.main) == 1
    (line,) = capfd.readouterr().err.splitlines()
    conf = Path(train.__file__).parent / "conf"
    assert line == (
        f"Error: {own} would never be read: {conf / name}.yaml has its name and comes first; "
        "rename it"
    )


def test_an_output_is_where_the_user_stands(monkeypatch, tmp_path, capfd):
    import train

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["train.py", "data.folder=it's=x"])
    assert run_command(train.main) == 1
    assert """: 'data.folder="it'"'"'s=x"'""" in capfd.readouterr().err
    monkeypatch.setattr("sys.argv", ["train.py", "-m", "seed=1,2", "mode=none"])
    with pytest.raises(SystemExit):
        run_command(train.main)
    assert len(list(tmp_path.glob("multirun/*/*/results.json"))) == 2
