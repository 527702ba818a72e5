"""Names that changed: what earlier commands, configurations and checkpoints call things.

State dicts did not change: weights of any earlier run load into the model of today.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from omegaconf import OmegaConf

from training.configuration.errors import MisconfigurationException

CLASSIFIER = "models.tasks.classifier.Classifier"
SEGMENTER = "models.tasks.segmenter.Segmenter"
CAPTIONER = "models.tasks.captioner.Captioner"
# A _target_ of before -> that of today.
TARGETS = {
    "models.approx_cnn.ApproxClassifier": CLASSIFIER,
    "models.networks.approx_cnn.ApproxClassifier": CLASSIFIER,
    "models.attention_decoder.AttentionDecoder": (
        "models.networks.attention_decoder.AttentionDecoder"
    ),
    "models.captioner.Captioner": CAPTIONER,
    "models.classifier.Classifier": CLASSIFIER,
    "models.cnn.CNN": "models.networks.cnn.CNN",
    "models.encoder_decoder.EncoderDecoder": "models.networks.encoder_decoder.EncoderDecoder",
    "models.lstm.ImageReader": "models.networks.lstm.ImageReader",
    "models.segmenter.Segmenter": SEGMENTER,
    "reporting.loggers.CSVMetrics": "training.results.loggers.CSVMetrics",
    "reporting.loggers.wandb_logger": "training.results.loggers.wandb_logger",
}
# What the user sets on the command line: the name of before -> that of today.
OVERRIDES = {
    "logger.group": "logger.wandb.group",
    "logger.name": "logger.wandb.name",
    "logger.project": "logger.wandb.project",
    "logger.save_dir": "logger.wandb.save_dir",
    "model.gradient": "model.network.gradient",
    "model.image_shape": "model.network.image_shape",
    "model.impl": "impl",
    "model.multiplier": "model.network.multiplier",
    "model.network.impl": "impl",
    "model.width": "model.network.width",
}
# The callbacks of these models, where an earlier configuration has none: they were no part of it,
# or classifiers had none.
CALLBACKS = {
    CLASSIFIER: {"classes": {"_target_": "training.callbacks.classes.ClassWriter"}},
    SEGMENTER: {
        "pictures": {"_target_": "training.callbacks.pictures.SegmentationPictures"},
        "masks": {"_target_": "training.callbacks.masks.MaskWriter"},
    },
    CAPTIONER: {
        "pictures": {"_target_": "training.callbacks.pictures.CaptionPictures"},
        "captions": {"_target_": "training.callbacks.captions.CaptionWriter"},
    },
}
# The optimizer and the schedule, where an earlier configuration has none.
OPTIMIZER = {"_target_": "torch.optim.AdamW", "_partial_": True, "betas": [0.9, 0.999]}
SCHEDULER = {
    "_target_": "models.tasks.optimizer.warmup_cosine", "_partial_": True, "warmup_fraction": 0.1,
}  # fmt: skip


def require_current_targets(config: Any) -> None:
    """Checks what is to be instantiated.

    Raises:
        MisconfigurationException: a ``_target_`` has a name of before; says which it has now.
    """
    for node in _mappings(OmegaConf.to_container(config)):
        if (target := node.get("_target_")) in TARGETS:
            raise MisconfigurationException(f"_target_: {target} is {TARGETS[target]} now")


def renamed(override: str) -> str:
    """An override under the name that it has today."""
    name, equals, value = override.partition("=")
    return OVERRIDES.get(name, name) + equals + value


def upgrade(config: Any) -> Any:
    """The configuration of an earlier run, as the same run has it today.

    Raises:
        AttributeError, KeyError, TypeError: it is not that of a run.
    """
    config = OmegaConf.to_container(config) if OmegaConf.is_config(config) else config
    if "callbacks" not in config:  # all names changed before callbacks became part of it
        _rename(config)
    config["callbacks"] = config.get("callbacks") or CALLBACKS.get(config["model"]["_target_"], {})
    if "optimizer" not in config:
        _add_groups(config)
    return OmegaConf.create(config)


def _rename(config: dict[str, Any]) -> None:
    model = config["model"]
    model.pop("impl", None)
    if model["_target_"].endswith(".ApproxClassifier"):
        model["network"] = {"_target_": "models.networks.approx_cnn.ApproxCNN"}
        for name in ("image_shape", "width", "multiplier", "gradient"):
            model["network"][name] = model.pop(name)
        model["network"]["num_classes"] = model["num_classes"]
    model["network"].pop("impl", None)
    for node in _mappings(config):
        if (target := node.get("_target_")) in TARGETS:
            node["_target_"] = TARGETS[target]


def _add_groups(config: dict[str, Any]) -> None:
    """Adds what was fixed before it could be chosen."""
    config |= {
        "optimizer": OPTIMIZER,
        "scheduler": SCHEDULER,
        "print_config": False,
        "unavailable": "error",
    }
    if config["model"]["_target_"] in CALLBACKS:
        groups = {"optimizer": OPTIMIZER, "scheduler": SCHEDULER, "label_smoothing": 0.0}
        config["model"] |= groups
    logger = config.get("logger") or {}
    if "_target_" in logger:
        name = "csv" if logger["_target_"].endswith(".CSVMetrics") else "wandb"
        config["logger"] = {name: logger}
    else:
        config["logger"] = logger


def _mappings(value: Any) -> Iterator[dict[Any, Any]]:
    """The dicts in a value, itself included."""
    if isinstance(value, dict):
        yield value
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, dict | list):
            yield from _mappings(item)
