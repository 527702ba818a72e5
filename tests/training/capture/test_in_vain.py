"""A capture that fails runs the step's Python once more; nothing of that is left."""

from __future__ import annotations

import array
import itertools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils import parametrize

from tests.training.capture.support import BATCH, CHANGED_AT, Plain, Ran, batches, check_eager, same


class CachedMask(Plain):
    """Keeps a mask for the last size of a batch."""

    mask: Tensor | None = None

    def loss(self, batch: Any) -> Tensor:
        inputs, labels = batch
        if self.mask is None or len(self.mask) != len(labels):
            self.mask = torch.linspace(0.5, 1.5, len(labels), device=self.device)
        return (F.cross_entropy(self.network(inputs), labels, reduction="none") * self.mask).mean()


class CachedInBuffer(Plain):
    """Fills a buffer again in every epoch."""

    scale: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", None)

    def on_train_epoch_start(self) -> None:
        self.scale = None

    def loss(self, batch: Any) -> Tensor:
        if self.scale is None:
            self.scale = torch.full((), 0.5, device=self.device)
        return super().loss(batch) * self.scale


class CachedInDictionary(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Any] = {"list": []}

    def on_train_epoch_start(self) -> None:
        self.kept["list"].clear()

    def loss(self, batch: Any) -> Tensor:
        if not self.kept["list"]:
            self.kept["list"].append(torch.full((), 0.5, device=self.device))
        return super().loss(batch) * self.kept["list"][0]


class Slotted:
    __slots__ = ("count", "late")

    def __init__(self) -> None:
        self.count = 0


class Doubling(OrderedDict[str, int]):
    def __setitem__(self, key: str, value: int) -> None:
        super().__setitem__(key, 2 * value)


class Extending(list[int]):
    def extend(self, items: Any) -> None:
        super().extend([*items, 1])


def counter() -> Callable[[bool], int]:
    count = 0

    def get(counts: bool) -> int:
        nonlocal count
        count += counts
        return count

    return get


class CountingInObjects(Plain):
    """Counts in objects of all kinds, in the step that would be captured and long after."""

    class Shared:
        count = 0

    def __init__(self) -> None:
        super().__init__()
        self.slotted, self.shared, self.closed = Slotted(), self.Shared(), counter()
        self.doubling, self.extending = Doubling(a=1), Extending([1])
        self.bytes, self.numbers = bytearray(1), array.array("l", [0])
        type(self.shared).count = 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.counts = batch_idx == 3

    def loss(self, batch: Any) -> Tensor:
        if self.counts:
            self.slotted.count += 1
            self.slotted.late = getattr(self.slotted, "late", 0) + 1
            type(self.shared).count += 1
            self.doubling["b"] = self.doubling.get("b", 0) + 1
            self.extending.append(1)
            self.bytes[0] += 1
            self.numbers[0] += 1
        count = self.slotted.count + getattr(self.slotted, "late", 0) + self.shared.count
        count += sum(self.doubling.values()) + len(self.extending) + self.closed(self.counts)
        return super().loss(batch) / (1 + count + self.bytes[0] + self.numbers[0])


class Halving(Plain):
    """Gives a parameter other memory in the step that would be captured."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.halves = batch_idx == 3

    def loss(self, batch: Any) -> Tensor:
        if self.halves:
            weight: Any = self.network[0].weight
            weight.data = weight.data * 0.5
        return super().loss(batch)


class DrawsFromItsOwn(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(0)
        self.numbers = itertools.count(1)

    def on_train_epoch_start(self) -> None:
        self.draws = self.current_epoch > 0

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        return loss * self.generator.uniform() / next(self.numbers) if self.draws else loss


class CountingInContainers(Plain):
    """Counts in containers of all kinds, in the step that would be captured and long after."""

    def __init__(self) -> None:
        super().__init__()
        self.ordered: OrderedDict[int, int] = OrderedDict()
        self.named: defaultdict[int, int] = defaultdict(int)
        self.queue: deque[int] = deque(maxlen=99)
        self.values: list[int] = [1]
        self.members: set[int] = set()
        self.array, self.scalar = np.zeros(1), np.zeros(())
        self.held = SimpleNamespace()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.counts = batch_idx == 3

    def loss(self, batch: Any) -> Tensor:
        if self.counts:
            n = len(self.queue)
            self.ordered[n] = self.named[n] = n
            self.queue.append(n)
            self.values[0] += 1
            self.members.add(n)
            self.array[0] += 1
            self.scalar[...] += 1
            self.held.count = getattr(self.held, "count", 0) + 1
        count = sum(self.ordered) + len(self.named) + len(self.queue) + self.values[0]
        count += len(self.members) + self.array[0] + self.scalar + getattr(self.held, "count", 0)
        return super().loss(batch) / float(1 + count)


class Thawed(Plain):
    """Its optimizer makes state for a layer in the step that would be captured."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=2**-4, momentum=0.5)

    def on_train_epoch_start(self) -> None:
        self.network[0].requires_grad_(self.current_epoch > 0)


class Counting(Plain):
    """Counts in the step that would be captured."""

    counts, count = False, 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.counts = batch_idx == 3

    def loss(self, batch: Any) -> Tensor:
        self.count += self.counts
        return super().loss(batch) / (1 + self.count)


class Parametrizing(Plain):
    """Gives a layer another class in the step that would be captured."""

    late = False

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.late = batch_idx >= 3

    def loss(self, batch: Any) -> Tensor:
        if self.late and not parametrize.is_parametrized(self.network[0]):
            parametrize.register_parametrization(self.network[0], "weight", torch.nn.Tanh())
        return super().loss(batch)


class DrawsLater(Plain):
    def loss(self, batch: Any) -> Tensor:
        drawn = np.random.beta(1.0, 1.0) if self.draws else 1.0  # noqa: NPY002
        return super().loss(batch) * float(drawn)

    def on_train_epoch_start(self) -> None:
        self.draws = self.current_epoch > 0


@pytest.mark.parametrize(
    ("model", "sizes", "why"),
    [
        (CachedMask, [BATCH, BATCH, BATCH, 4], "training_step changes self.mask"),
        (CachedInBuffer, [BATCH] * 3, "training_step changes self"),
        (CachedInDictionary, [BATCH] * 3, "training_step changes self.kept"),
        (CountingInObjects, [BATCH] * 8, "training_step changes self."),
        (Halving, [BATCH] * 8, "training_step changes self.network"),
        (DrawsFromItsOwn, [BATCH] * 3, "training_step reads generator, which goes on by itself"),
        (CountingInContainers, [BATCH] * 8, "training_step changes self."),
        (Thawed, [BATCH] * 3, "training_step changes optimizer.state"),
        (Counting, [BATCH] * 8, "training_step changes self.count"),
        (Parametrizing, [BATCH] * 8, "training_step changes self.network"),
        (DrawsLater, [BATCH] * 3, "training_step draws from NumPy's random"),
    ],
)
def test_nothing_is_left(
    fit: Callable[..., Ran], model: type[Plain], sizes: list[int], why: str
) -> None:
    check_eager(fit, model, why, data=batches(sizes), max_epochs=4)


@pytest.mark.parametrize("keys", ["of the model", "of the optimizer"])
def test_comparing_makes_no_items(fit: Callable[..., Ran], keys: str) -> None:
    class Kept(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.seen = defaultdict(float, {CHANGED_AT: 1.0})

        def loss(self, batch: Any) -> Tensor:
            return super().loss(batch) / (1 + len(self.seen))

    class Clears(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            if trainer.global_step == CHANGED_AT:
                pl_module.network[0].requires_grad_(False)
                (pl_module.seen if keys == "of the model" else trainer.optimizers[0].state).clear()

    captured, eager = (fit(Kept, mode, callbacks=[Clears()]) for mode in ("auto", "off"))
    assert captured.capture.replays
    assert same(captured, eager)
    found, expected = (ran.trainer.optimizers[0].state_dict()["state"] for ran in (captured, eager))
    assert found.keys() == expected.keys()
