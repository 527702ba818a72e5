"""A loss that is NaN, and debug=find_nan, which says where that began."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader

import hoconv
from hoconv.ops.high_order import layers as high_order
from models.tasks.classifier import Classifier
from tests.test_resume import SHORT, at_step
from training.callbacks.finite import FiniteLayers, NotFiniteError


def break_layer(model: Classifier) -> None:
    weight = next(model.get_submodule("network.features.3").parameters())
    with torch.no_grad():
        weight.view(-1)[0] = torch.nan


def test_a_loss_that_is_nan_stops_the_run_and_says_when(run, monkeypatch):
    at_step(monkeypatch, 5, break_layer)
    failed = run(*SHORT)
    assert failed.exit_code == 1
    (line,) = failed.err.splitlines()
    assert line == (
        "Error: the loss of step 5 is nan; the same command with debug=find_nan says which layer "
        "it began in"
    )
    assert failed.results["status"] == "failed"
    assert failed.losses[-1] == "nan"
    assert [path.name for path in (failed.folder / "resume").iterdir()] == ["step_3.ckpt"]


def test_find_nan_names_the_layer(run, monkeypatch):
    at_step(monkeypatch, 5, break_layer)
    failed = run(*SHORT, "debug=find_nan")
    (line,) = failed.err.splitlines()
    assert line == (
        "Error: step 5: the output of network.features.3.0 (Conv2d) is not finite; its inputs "
        "were finite, but not its parameter network.features.3.0.weight"
    )


def test_find_nan_names_the_layer_of_a_gradient(run, monkeypatch):
    def break_gradient(model: Classifier) -> None:
        def infinite(_: Any, inputs: Any, output: torch.Tensor) -> None:
            output.register_hook(lambda grad: grad * torch.inf)

        model.get_submodule("network.features.3").register_forward_hook(infinite)

    at_step(monkeypatch, 5, break_gradient)
    failed = run(*SHORT, "debug=find_nan")
    (line,) = failed.err.splitlines()
    assert line == (
        "Error: step 5: the backward pass of network.features.3 (Sequential) gives "
        "network.features.3.2 (ReLU) a gradient that is not finite"
    )


@pytest.mark.slow
def test_a_sound_run_passes_debug_nan(run):
    assert run(*SHORT, "debug=find_nan").exit_code == 0


def test_find_nan_and_compile_are_one_line_that_says_what_to_do(run):
    failed = run(*SHORT, "debug=find_nan", "compile=true")
    assert failed.exit_code == 1
    (line,) = failed.err.splitlines()
    assert line.endswith("use compile=false")


# Modules of every kind, in a fit of one step.


class Infinite(torch.autograd.Function):
    """The identity, whose gradient is infinite."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * torch.inf


def sound(x: Tensor) -> Tensor:
    return x


def diverging(x: Tensor) -> Tensor:
    return x + torch.inf


class Parent(nn.Module):
    """Has a child, and does `before` and `after` it what is in no module."""

    def __init__(self, before: Callable = sound, after: Callable = sound, wrap: Callable = sound):
        super().__init__()
        self.child = nn.Linear(3, 3)
        self.before, self.after, self.wrap = before, after, wrap

    def forward(self, x: Any) -> Any:
        return self.wrap(self.after(self.child(self.before(x))))


@dataclasses.dataclass(frozen=True)
class Answer:
    logits: Tensor


class Unwrap(nn.Module):
    """The tensor in whatever it is in."""

    def forward(self, values: Any) -> Tensor:
        match values:
            case Answer():
                return values.logits
            case PackedSequence():
                return values.data
            case dict():
                return self.forward(values["logits"])
            case tuple() | list():
                return self.forward(values[0])
        return values


class Model(pl.LightningModule):
    def __init__(self, network: nn.Module, loss: Callable = sound) -> None:
        super().__init__()
        self.network = network
        self.loss = loss

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(self.network(batch)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fault(network: nn.Module, batch: Tensor | None = None, loss: Callable = sound) -> str:
    """Returns what a fit of one step stops with; nothing where it does not."""
    trainer = pl.Trainer(
        accelerator="cpu", max_steps=1, logger=False, callbacks=FiniteLayers(),
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    batches: Any = [torch.ones(4, 3) if batch is None else batch]
    try:
        trainer.fit(Model(network, loss), DataLoader(batches, batch_size=None))
    except NotFiniteError as error:
        return str(error).removeprefix("step 1: ")
    return ""


WRAPS = {
    "tensor": sound,
    "tuple": lambda x: (x, None),
    "dict": lambda x: OrderedDict(logits=x),
    "nested": lambda x: {"logits": [x, "text"]},
    "dataclass": Answer,
    "packed sequence": lambda x: pack_sequence([x]),
}
each_wrap = pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)


@each_wrap
def test_a_layer_with_children_is_named(wrap):
    made = fault(nn.Sequential(Parent(after=diverging, wrap=wrap), Unwrap(), nn.Identity()))
    assert made == (
        "the output of network.0 (Parent) is not finite; its inputs were finite, and so are its "
        "parameters"
    )


@each_wrap
def test_a_layer_with_children_is_named_backward(wrap):
    first = Parent(wrap=wrap)
    made = fault(nn.Sequential(first, Unwrap(), Parent(after=Infinite.apply), nn.Identity()))
    assert made == (
        "the backward pass of network.2 (Parent) gives network.2.child (Linear) a gradient that is "
        "not finite"
    )


@each_wrap
def test_the_gradient_that_a_layer_gives_back_is_its_own(wrap):
    layers = Parent(wrap=wrap), Unwrap(), Parent(before=Infinite.apply), nn.Identity()
    assert fault(nn.Sequential(*layers)) == (
        "the backward pass of network.2 (Parent) makes a gradient that is not finite"
    )


def test_what_a_layer_gives_to_its_child_is_its_own():
    assert fault(nn.Sequential(nn.Identity(), Parent(before=diverging))) == (
        "the output of network.1.child (Linear) is not finite; its inputs were not finite, "
        "network.1 (Parent) made them; its own inputs were finite, and so are its parameters"
    )


def test_a_branch_beside_a_layer_is_not_the_layer():
    """The gradient of its input, from all that uses it, is infinite; from the layer it is not."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return Infinite.apply(x) + self.second(x)

    assert fault(nn.Sequential(Residual())) == (
        "the backward pass of network.0 (Residual) gives network.0.first (Linear) a gradient that "
        "is not finite"
    )


def test_the_training_step_and_the_batch_are_named():
    assert fault(nn.Linear(3, 3), loss=diverging) == (
        "the loss is not finite; the output of every layer is"
    )
    assert fault(nn.Linear(3, 3), loss=Infinite.apply) == (
        "the backward pass of training_step gives network (Linear) a gradient that is not finite"
    )
    assert fault(nn.Linear(3, 3), torch.full((4, 3), torch.nan)) == (
        "the output of network (Linear) is not finite; its inputs were not finite, like the batch"
    )


def test_an_infinite_mask_does_no_harm():
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.softmax = nn.Linear(3, 3), nn.Softmax(-1)

        def forward(self, x: Tensor) -> Tensor:
            return self.softmax(self.linear(x) + torch.tensor([0.0, 0.0, -torch.inf]))

    assert fault(Masked()) == ""


def test_modules_that_look_for_the_same_tensor_find_it():
    attention = nn.MultiheadAttention(3, 1, batch_first=True)

    class Self(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = attention

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x)[0]

    assert fault(Self(), torch.ones(2, 4, 3)) == ""


def test_the_implementation_is_named(monkeypatch):
    def diverging_layer(x: Tensor, *args: Any, **options: Any) -> Tensor:
        return x * torch.nan

    monkeypatch.setattr(high_order, "high_order_layer", diverging_layer)
    layer = hoconv.HighOrderConv2d(3, kernel_size=3, impl="reference")
    made = fault(nn.Sequential(layer, nn.Identity()), torch.ones(1, 3, 4, 4))
    assert made.startswith(
        "the output of network.0 (HighOrderConv2d, impl=reference) is not finite; its inputs were "
    )
