"""Starting from the weights of a checkpoint, where shapes alone do not say what weights are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from training.callbacks.weights import InitialWeights


class Named(pl.LightningModule):
    """Its rows stand for words, which are part of its state."""

    def __init__(self, words: list[str]) -> None:
        super().__init__()
        self.words = words
        self.rows = nn.Parameter(torch.randn(len(words)))

    def get_extra_state(self) -> list[str]:
        return self.words

    def set_extra_state(self, state: list[str]) -> None:
        self.words = state

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.rows.sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def start(model: Named, of: Named) -> None:
    weights = InitialWeights(Path("other.ckpt"), of.state_dict())
    pl.Trainer(
        callbacks=[weights], max_steps=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, accelerator="cpu",
    ).fit(model, [torch.zeros(1)])  # fmt: skip


@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
def test_weights_of_the_same_words_are_loaded_and_of_others_are_refused() -> None:
    model, same, other = Named(["a", "b"]), Named(["a", "b"]), Named(["b", "a"])
    start(model, same)
    assert torch.equal(model.rows, same.rows)
    with pytest.raises(MisconfigurationException, match="has another _extra_state than the model"):
        start(model, other)
