"""Trains a network to describe images. B batch, H height, W width."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from lightning_fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from datamodules.coco.captions import PAD, CaptionBatch, Vocabulary, split_words
from datamodules.prediction import PredictionBatch
from models.arguments import require_share
from models.metrics.captions import bleu4, cider_d
from models.metrics.mean import Mean
from models.networks.attention_decoder import AttentionDecoder
from models.networks.backbone import load_backbones
from models.networks.beam_search import States, beam_search
from models.tasks.optimizer import Optimized, make, warmup_cosine


class Captioner(Optimized):
    """Minimises the cross-entropy of each word, given the image and the words before it.

    The vocabulary comes from the data module and is part of the checkpoint. Logs under ``val/`` and
    ``test/``: ``loss``, of one caption an image, and ``bleu4`` and ``cider_d``, which compare the
    captions that a beam search finds with all captions of each image. Over nothing each is NaN.

    Args:
        network: called with ``weights=``, makes the network.
        beam_width: how many sentences are kept at each step; 1 is greedy search.
        max_length: of a caption, in words.
        weights: the published weights that its backbone starts from, or None for no backbone.
        learning_rate: the highest of the schedule.
        weight_decay: of the optimizer.
        optimizer, scheduler: see :func:`models.tasks.optimizer.configure`; or their descriptions.
        label_smoothing: the part of each target, in training, that is spread over all words.
    """

    def __init__(
        self,
        network: Callable[..., AttentionDecoder],
        learning_rate: float,
        weight_decay: float,
        beam_width: int,
        max_length: int,
        weights: str | None = None,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
        scheduler: Callable[..., LRScheduler] = warmup_cosine,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(learning_rate, weight_decay, optimizer, scheduler)
        self.network = make(network)(weights=weights)
        require_share("label_smoothing", label_smoothing)
        self.label_smoothing = label_smoothing
        self.beam_width = beam_width
        self.max_length = max_length
        self.vocabulary = Vocabulary()
        # The words of each caption found since the epoch began, and those of its references.
        self._found: list[tuple[list[str], list[list[str]]]] = []

    def setup(self, stage: str) -> None:
        if stage == "fit":  # in a test or a prediction both come from the checkpoint
            load_backbones(self)
            datamodule: Any = self.trainer.datamodule  # pyright: ignore
            vocabulary = getattr(datamodule, "vocabulary", None)
            if vocabulary is None:
                raise MisconfigurationException(
                    f"data: expected images with captions, got a {type(datamodule).__name__}; use "
                    "data=coco or data=coco_tiny with model=captions"
                )
            self.set_extra_state(vocabulary.words)

    def get_extra_state(self) -> list[str]:
        return self.vocabulary.words

    def set_extra_state(self, state: list[str]) -> None:
        """Restores the vocabulary, which determines the shapes of the network's weights.

        PyTorch calls it before it loads those weights.
        """
        if state != self.vocabulary.words:
            self.vocabulary = Vocabulary(state)
            self.network.set_vocabulary(len(state))

    def training_step(self, batch: CaptionBatch, batch_idx: int) -> Tensor:
        return self._loss(batch, self.label_smoothing).share()

    def validation_step(self, batch: CaptionBatch, batch_idx: int) -> list[str]:
        return self._evaluate("val", batch)

    def test_step(self, batch: CaptionBatch, batch_idx: int) -> None:
        self._evaluate("test", batch)

    def on_validation_epoch_end(self) -> None:
        self._score("val")

    def on_test_epoch_end(self) -> None:
        self._score("test")

    def predict_step(self, batch: PredictionBatch, batch_idx: int) -> list[str]:
        """Returns a caption of each image."""
        return self.describe(batch.images) if batch.names else []

    def describe(self, images: Tensor) -> list[str]:
        """Returns a caption of each of the images (B, 3, H, W)."""
        grid = self.network.look(images.to(self.dtype))

        def step(last: Tensor, states: States) -> tuple[Tensor, States]:
            outputs, states = self.network.recur(last.flatten()[:, None], states)
            # The W sentences of an image take the place of the T words of a caption in training.
            return self.network.attend(outputs.view(*last.shape, -1), grid), states

        sentences = beam_search(step, grid.state, self.beam_width, self.max_length)
        return [self.vocabulary.decode(sentence) for sentence in sentences.tolist()]

    def _loss(self, batch: CaptionBatch, label_smoothing: float = 0.0) -> Mean:
        """Returns the cross-entropy of the words and the ends of the sentences."""
        logits = self.network(batch.images.to(self.dtype), batch.tokens[:, :-1])
        following = batch.tokens[:, 1:]
        total = F.cross_entropy(
            logits.flatten(0, 1), following.flatten(), ignore_index=PAD, reduction="sum",
            label_smoothing=label_smoothing,
        )  # fmt: skip
        return Mean(total, (following != PAD).sum())

    def _evaluate(self, stage: str, batch: CaptionBatch) -> list[str]:
        """Logs the loss; returns the captions found."""
        self.log_mean(f"{stage}/loss", self._loss(batch))
        captions = self.describe(batch.images)
        for caption, references in zip(captions, batch.references, strict=True):
            self._found.append(
                (caption.split(), [split_words(reference) for reference in references])
            )
        return captions

    def _score(self, stage: str) -> None:
        """Logs the scores of all images together: neither is the mean of its values for batches."""
        found, self._found = self._found, []
        if self.trainer.world_size > 1:
            parts: list[Any] = [None] * self.trainer.world_size
            torch.distributed.all_gather_object(parts, found)
            found = [each for part in parts for each in part]
        candidates = [candidate for candidate, _ in found]
        references = [described for _, described in found]
        scores = {
            "bleu4": bleu4(candidates, references),
            "cider_d": cider_d(candidates, references),
        }
        self.log_dict({f"{stage}/{name}": score for name, score in scores.items()}, prog_bar=True)
