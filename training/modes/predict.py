"""``mode=predict`` and ``mode=test``: what a trained model says, and how well it does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf
from pytorch_lightning.callbacks import BasePredictionWriter
from pytorch_lightning.utilities import rank_zero_only

from datamodules.images import ImageDataModule
from datamodules.prediction import ImageFolder
from training import console, disk
from training.callbacks.census import Census
from training.callbacks.cost import Cost
from training.callbacks.outcome.evaluated import EvaluatedLosses
from training.callbacks.progress import make_progress
from training.configuration.errors import MisconfigurationException
from training.configuration.instantiation import instantiate
from training.model import build_trained, show_implementations
from training.results.record import Results
from training.results.saved import Saved, class_names, difference
from training.trainer import make_callbacks, new_trainer, notes_of

OF_EVERY_RUN = ("config.yaml", "results.json", "train.log")


def predict(config: DictConfig, run_dir: Path, results: Results, saved: Saved) -> Path:
    """Writes predictions into the folder of the run: of every image of ``config.input``, a folder
    or a file, or, where that is null, of what the data's `predict_dataloader` yields.

    The model's callbacks write; where none of them does, ``predictions.pt`` has the list of what
    its predict step returned. Returns the path of the checkpoint.

    Args:
        config: that of the checkpoint, with what the command names.

    Raises:
        MisconfigurationException: the weights are not those of the model, it has no predict step,
            or there is nothing to predict for.
        DataNotFoundError: ``config.input`` holds no images.
    """
    model = build_trained(saved, config)
    if type(model).predict_step is pl.LightningModule.predict_step:
        raise MisconfigurationException(
            f"ckpt: the model of {saved.path} is a {type(model).__name__}, which predicts nothing: "
            "it has no predict_step; define it"
        )
    data = _to_predict(saved, config)
    trainer = _make_trainer(config, run_dir)
    results.environment["implementations"] = show_implementations(model, trainer, data)

    written = any(isinstance(each, BasePredictionWriter) for each in _callbacks(trainer))
    predictions = trainer.predict(model, datamodule=data, return_predictions=not written)
    if not written:
        _write(predictions, run_dir / "predictions.pt")
    if config.input is not None:
        skipped = sum(map(len, data.skipped.values()))
        results.metrics = {
            "predict/images": float(len(data.images) - skipped),
            "predict/skipped": float(skipped),
        }
    return saved.path


def test(config: DictConfig, run_dir: Path, results: Results, saved: Saved) -> Path:
    """Tests the weights of a checkpoint, and fills in `results`; returns its path.

    Args:
        config: that of the checkpoint, with what the command names.

    Raises:
        MisconfigurationException: the weights are not those of the model, the data has other
            classes, or there is no test step or no test data.
    """
    # As in training, and in its order: data that draws its parts at random has the same ones.
    pl.seed_everything(config.seed, workers=True, verbose=False)
    data = instantiate(config.data)
    model = build_trained(saved, config)
    _require_same_classes(saved, data)
    cost = Cost(config.approx.energies)
    trainer = _make_trainer(config, run_dir, cost)
    if missing := missing_for_test(trainer, model, data):
        raise MisconfigurationException(f"mode=test: {missing}")
    results.environment["implementations"] = show_implementations(model, trainer, data)

    trainer.test(model, datamodule=data, verbose=False)
    if not sum(trainer.num_test_batches):
        raise MisconfigurationException(
            "mode=test: the test loader has no batches; use a smaller data.batch_size, or "
            "drop_last=False in its loader"
        )
    results.notes += notes_of(trainer)
    results.metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    results.cost = cost.summary()
    return saved.path


def _require_same_classes(saved: Saved, data: pl.LightningDataModule) -> None:
    """Raises where the classes of the data are not those that a model was trained to tell apart."""
    names = class_names(data)
    if saved.class_names is None or names is None:
        return
    if other := difference(saved.class_names, names, "the model", "the data"):
        raise MisconfigurationException(f"data: {other}; use data with the classes of {saved.path}")


def missing_for_test(
    trainer: pl.Trainer, model: pl.LightningModule, data: pl.LightningDataModule
) -> str | None:
    """Returns what a test lacks; None where it can run."""
    if trainer.limit_test_batches == 0:
        return "trainer.limit_test_batches is 0; set it to more"
    for part, base, name in (
        (model, pl.LightningModule, "test_step"),
        (data, pl.LightningDataModule, "test_dataloader"),
    ):
        if getattr(type(part), name) is getattr(base, name):
            return f"{type(part).__name__} has no {name}; define it"
    return None


def written(run_dir: Path) -> list[Path]:
    """Returns the files and folders that hold the predictions of a run."""
    return sorted(path for path in run_dir.glob("[!.]*") if path.name not in OF_EVERY_RUN)


def _make_trainer(config: DictConfig, run_dir: Path, *more: pl.Callback) -> pl.Trainer:
    options: Any = OmegaConf.to_container(config.trainer, resolve=True)
    return new_trainer(
        options,
        logger=False,
        callbacks=[
            Census(),
            make_progress(),
            EvaluatedLosses(),
            *more,
            *make_callbacks(config.callbacks).values(),
        ],
        default_root_dir=run_dir,
        enable_progress_bar=console.stdout().is_terminal,
        enable_checkpointing=False,
    )


def _to_predict(saved: Saved, config: DictConfig) -> Any:
    if config.input is not None:
        return _images(config.input, config.data, saved.class_names)
    data = instantiate(config.data)
    if type(data).predict_dataloader is pl.LightningDataModule.predict_dataloader:
        raise MisconfigurationException(
            f"mode=predict needs input=<a folder of images>: a {type(data).__name__} has no "
            "predict_dataloader"
        )
    return data


def _callbacks(trainer: pl.Trainer) -> list[pl.Callback]:
    return trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]


@rank_zero_only
def _write(predictions: Any, path: Path) -> None:
    with disk.replaced(path) as file:
        torch.save(predictions, file)


def _images(source: str, data: DictConfig, names: list[str] | None) -> Any:
    """The images of a folder, or one image, as the model of a checkpoint reads them."""
    dataset = get_class(data._target_)
    if "image_size" in data:
        shape = (3, data.image_size, data.image_size)
        return ImageFolder(
            source, shape, data.batch_size, data.get("num_workers", 0),
            class_names=names,
        )  # fmt: skip
    # Data whose shape depends on its arguments, such as sequences, are not read from pictures.
    if issubclass(dataset, ImageDataModule) and isinstance(dataset.image_shape, tuple):
        return ImageFolder(
            source, dataset.image_shape, data.batch_size,
            normalise=dataset.normalise_file, class_names=names,
        )  # fmt: skip
    raise MisconfigurationException(
        f"input: a {dataset.__name__} says nothing of how its model reads the images of a "
        "folder; give it a data.image_size, or use load_from_checkpoint in a script"
    )
