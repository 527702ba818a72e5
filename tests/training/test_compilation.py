"""When a run with torch.compile compiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from training.callbacks.compilation import CompileFirst


class Network(nn.Module):
    """torch 2.11 compiles no module of its own, a linear layer, say."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Means(pl.LightningModule):
    """Learns from the means of batches; what it computes depends on their shape."""

    def __init__(self) -> None:
        super().__init__()
        self.network = Network()
        self.losses: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.network(batch).mean() ** 2
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.network(batch)

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture
def fit() -> Iterator[Callable[..., tuple[int, list[Tensor]]]]:
    """Fits and tests with batches of given shapes: how often it compiled, and the losses."""

    def run(shapes: list[tuple[int, ...]], compiled: bool = True) -> tuple[int, list[Tensor]]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, counter = Means(), CompileCounter()
        if compiled:
            model.network.compile(backend=counter)
        batches = [torch.rand(*shape, 1) for shape in shapes]
        trainer = pl.Trainer(
            accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, callbacks=[CompileFirst()],
        )  # fmt: skip
        loader: Any = torch.utils.data.DataLoader(batches, batch_size=None)  # pyright: ignore
        trainer.fit(model, loader, loader)
        trainer.test(model, loader, verbose=False)
        return counter.frame_count, model.losses

    yield run
    torch._dynamo.reset()


def test_short_last_batch_runs_uncompiled(fit: Callable[..., tuple[int, Any]]) -> None:
    shapes = [(4,), (4,), (4,), (3,)]
    compilations, losses = fit(shapes)
    assert compilations == 2  # for training and for evaluation
    assert losses == fit(shapes, compiled=False)[1]


def test_lengths_that_change_share_a_program(fit: Callable[..., tuple[int, Any]]) -> None:
    compilations, losses = fit([(4, 5), (4, 7), (4, 6), (4, 9), (3, 8)])
    # Of evaluation for the first length, then for all; of training, which comes later, for all.
    assert compilations == 3
    assert len(losses) == 10


def test_compiling_is_allowed_again_after_the_run(fit: Callable[..., tuple[int, Any]]) -> None:
    fit([(4,), (4,), (4,), (3,)])
    counter = CompileCounter()
    torch.compile(lambda x: x + 1, backend=counter)(torch.ones(2))
    assert counter.frame_count == 1
