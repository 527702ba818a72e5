"""``mode=predict``: predictions of a trained model for the images of a folder."""

from __future__ import annotations

import json
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig

from training import console
from training.folder import CONFIG, saved_config
from training.implementations import show_implementations
from training.model import build
from training.results.record import Results
from training.trainer import make_callbacks


def predict(config: DictConfig, run_dir: Path, results: Results) -> Path:
    """Writes a prediction for every image of ``config.input`` into the folder of the run.

    The model and the size of its images are those of the run that made ``config.ckpt``; the
    implementation and the trainer are those of `config`. Returns the path of the checkpoint.

    Raises:
        MisconfigurationException: there is no such checkpoint, no configuration beside it, or its
            model predicts nothing for images of a folder.
        DataNotFoundError: ``config.input`` holds no images.
    """
    if config.ckpt is None or config.input is None:
        raise MisconfigurationException(
            "mode=predict needs ckpt=<a checkpoint of a run> and input=<a folder of images>"
        )
    checkpoint = Path(config.ckpt).resolve()
    saved = _run_of(checkpoint, results)
    model = build(saved.model, config)
    if type(model).predict_step is pl.LightningModule.predict_step:
        raise MisconfigurationException(
            f"ckpt: the model of {checkpoint} is a {type(model).__name__}, which predicts nothing "
            "for a folder of images; use one that was trained with model=segmentation or "
            "model=captions"
        )
    try:
        contents = torch.load(checkpoint, map_location="cpu", weights_only=True)
        model.load_state_dict(contents["state_dict"])
    except (EOFError, KeyError, RuntimeError, UnpicklingError) as error:
        raise MisconfigurationException(
            f"ckpt: {checkpoint} is damaged, or not of the model that is described beside it: "
            f"{' '.join(str(error).split())}"
        ) from error
    from datamodules.coco.folder import ImageFolder  # its package needs pycocotools

    data = ImageFolder(
        config.input, saved.data.image_size, saved.data.batch_size, saved.data.num_workers
    )
    trainer = pl.Trainer(
        **config.trainer,
        logger=False,
        callbacks=[console.make_progress(), *make_callbacks(saved.callbacks)],
        default_root_dir=run_dir,
        enable_progress_bar=console.stdout().is_terminal,
    )
    results.environment["implementations"] = show_implementations(model, trainer)

    trainer.predict(model, datamodule=data, return_predictions=False)
    skipped = sum(map(len, data.skipped.values()))
    results.metrics = {
        "predict/images": float(len(data.images) - skipped),
        "predict/skipped": float(skipped),
    }
    return checkpoint


def _run_of(checkpoint: Path, results: Results) -> Any:
    """Reads the configuration of the run that made a checkpoint; copies its model, data and seed to
    `results`."""
    folder = checkpoint.parent.parent
    if not checkpoint.is_file():
        raise MisconfigurationException(f"ckpt: there is no file {checkpoint}")
    if not (folder / CONFIG).is_file():
        raise MisconfigurationException(
            f"ckpt: {checkpoint} is not in the folder of a run: there is no {folder / CONFIG}"
        )
    record = json.loads((folder / "results.json").read_text())
    results.identity |= {key: record[key] for key in ("model", "data", "seed")}
    return saved_config(folder)
