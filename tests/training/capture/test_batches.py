"""Batches of captured steps: their tensors, and what else they hold."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision import tv_tensors

from tests.training.capture.support import (
    BATCH,
    FEATURES,
    STEPS,
    Plain,
    Ran,
    batches,
    check_captured,
    check_eager,
)
from training.capture.steps import MAX_GRAPHS

Pair = collections.namedtuple("Pair", ["x", "y"])


@dataclasses.dataclass
class Named:
    x: Tensor
    y: Tensor


FORMS: dict[str, tuple[Callable[..., Any], Callable[[Any], Any]]] = {
    "dict": (lambda x, y: {"x": x, "y": y}, lambda b: (b["x"], b["y"])),
    "nested": (lambda x, y: {"xy": [x, (y,)], "no": None}, lambda b: (b["xy"][0], b["xy"][1][0])),
    "named tuple": (Pair, lambda b: (b.x, b.y)),
    "dataclass": (Named, lambda b: (b.x, b.y)),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_forms(fit: Callable[..., Ran], form: str) -> None:
    make, take = FORMS[form]

    class Taking(Plain):
        def loss(self, batch: Any) -> Tensor:
            return super().loss(take(batch))

    data = [make(*batch) for batch in batches([BATCH] * 7 + [3])]
    assert check_captured(fit, Taking, data=data, max_epochs=4).capture.captures == 2


def test_another_number_is_another_graph(fit: Callable[..., Ran]) -> None:
    class Weighted(Plain):
        def loss(self, batch: Any) -> Tensor:
            return super().loss(batch["data"]) * (batch["weight"] if batch["name"] == "a" else 1)

    data = [
        {"data": batch, "about": {i}, "weight": [1.0, 0.5][i % 2], "name": "ab"[i // 8]}
        for i, batch in enumerate(batches([BATCH] * STEPS))
    ]
    assert check_captured(fit, Weighted, data=data, max_epochs=3).capture.captures == 4


@pytest.mark.parametrize(
    ("add", "why"),
    [
        (lambda i: i, f"there are more than {MAX_GRAPHS} kinds of steps"),
        (lambda _: torch.empty(1, device="meta"), "a tensor of the batch is on meta"),
    ],
    ids=["numbers", "another device"],
)
def test_what_no_graph_can_have(
    fit: Callable[..., Ran], add: Callable[[int], Any], why: str
) -> None:
    class Taking(Plain):
        def loss(self, batch: Any) -> Tensor:
            return super().loss(batch[:2])

        def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
            moved = super().transfer_batch_to_device(batch[:2], device, dataloader_idx)
            return [*moved, batch[2]]

    data = [[*batch, add(i)] for i, batch in enumerate(batches([BATCH] * (MAX_GRAPHS + 2)))]
    check_eager(fit, Taking, why, data=data)


def test_tensor_that_has_more_than_numbers(fit: Callable[..., Ran]) -> None:
    class Sized(Plain):
        def loss(self, batch: Any) -> Tensor:
            boxes, labels = batch
            inputs = F.pad(boxes.as_subclass(Tensor) / boxes.canvas_size[0], (0, 1))
            return F.cross_entropy(self.network(inputs), labels)

    data = [
        (tv_tensors.BoundingBoxes(x[:, :4].contiguous(), format="XYXY", canvas_size=(i, i)), y)  # pyright: ignore
        for i, (x, y) in enumerate(batches([BATCH] * STEPS), 1)
    ]
    check_eager(fit, Sized, "a tensor of the batch is a BoundingBoxes", data=data)


def test_tensor_that_comes_twice(fit: Callable[..., Ran]) -> None:
    class Doubled(Plain):
        def loss(self, batch: Any) -> Tensor:
            first, second, labels = batch
            return super().loss((first, labels)) + super().loss((second, labels))

        def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
            x, labels = super().transfer_batch_to_device(batch, device, dataloader_idx)
            return x, x, labels

    check_eager(fit, Doubled, "the batch has a tensor twice")


def test_tensors_of_inference(fit: Callable[..., Ran]) -> None:
    class Cloned(Plain):
        def loss(self, batch: Any) -> Tensor:
            return super().loss((batch[0].clone(), batch[1].clone()))

    with torch.inference_mode():
        data = batches([BATCH] * STEPS)
    check_captured(fit, Cloned, data=data)


def test_inputs_with_gradients(fit: Callable[..., Ran]) -> None:
    class Encoded(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Linear(FEATURES, FEATURES)

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return self.encoder(batch[0]), batch[1]

    check_eager(fit, Encoded, "a tensor of the batch requires a gradient")


def test_changed_batch_is_found_by_comparing(fit: Callable[..., Ran]) -> None:
    class Changing(Plain):
        def loss(self, batch: Any) -> Tensor:
            return super().loss((batch[0].mul_(2), batch[1]))

    # Each fit changes its own data.
    captured, eager = (fit(Changing, mode) for mode in ("auto", "off"))
    assert "a captured step differs from an eager one" in captured.why
    assert captured.losses == eager.losses
