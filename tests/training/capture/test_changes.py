"""What changes long after the capture, of any kind: the graphs are captured anew."""

from __future__ import annotations

import array
import copy
import functools
import math
import pickle
import threading
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tests.training.capture.support import (
    BATCH,
    CHANGED_AT,
    CLASSES,
    Plain,
    Ran,
    check_captured,
    check_eager,
    same,
)
from training.capture import steps as capture
from training.capture.frozen import read_attributes


class Reads(Plain):
    """Reads `holder` in every step, by `value`."""

    def __init__(self) -> None:
        super().__init__()
        self.holder: Any = self.make()

    def make(self) -> Any:
        return 1.0

    def value(self) -> float:
        return self.holder

    def loss(self, batch: Any) -> Tensor:
        inputs, labels = batch
        return F.cross_entropy(self.network(inputs) * self.value(), labels)


def reads(make: Callable[[], Any], value: Callable[[Any], float]) -> type[Reads]:
    members = {"make": lambda _: make(), "value": lambda self: value(self.holder)}
    return type("Reads", (Reads,), members)


def nested(depth: int) -> dict[str, Any]:
    return {"in": nested(depth - 1)} if depth else {"scale": 1.0}


def innermost(value: dict[str, Any]) -> dict[str, Any]:
    return innermost(value["in"]) if "in" in value else value


class Scale:
    def __init__(self) -> None:
        self.factor = 1.0

    def get(self) -> float:
        return self.factor


def with_scale(function: Any) -> Any:
    function.scale = 1.0
    return function


def closed_over() -> Callable[..., float]:
    factor = 1.0

    def get(new: float | None = None) -> float:
        nonlocal factor
        factor = factor if new is None else new
        return factor

    return get


class Absent(Reads):
    late: float

    def value(self) -> float:
        return self.late if hasattr(self, "late") else 1.0


class OfClass(Plain):
    criterion = nn.CrossEntropyLoss()

    def __init__(self) -> None:
        super().__init__()
        self.criterion.label_smoothing = 0.0

    def loss(self, batch: Any) -> Tensor:
        inputs, labels = batch
        return self.criterion(self.network(inputs), labels)


class Transposed(Plain):
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.arange(1.0, 1 + CLASSES**2).reshape(CLASSES, CLASSES))

    def loss(self, batch: Any) -> Tensor:
        inputs, labels = batch
        return F.cross_entropy(self.network(inputs) * self.scale[0], labels)


class OfDictionary(Reads):
    def value(self) -> float:
        return vars(self)["holder"]


class Nested(nn.Module):
    def __init__(self, inner: nn.Module | None = None, factor: float = 1.0) -> None:
        super().__init__()
        self.inner = inner
        self.factor = factor

    def forward(self, values: Tensor) -> Tensor:
        return values * self.factor


class Copying(Plain):
    """Computes with a copy of a module."""

    def __init__(self, make_copy: Callable[[Any], Any]) -> None:
        super().__init__()
        self.make_copy = make_copy
        self.scaling = Nested(Nested())

    def loss(self, batch: Any) -> Tensor:
        inputs, labels = batch
        copied = self.make_copy(self.scaling)
        factor = copied.factor * copied.inner.factor
        return F.cross_entropy(self.network(inputs) * factor, labels)


class OfTrainer(Reads):
    def value(self) -> float:
        return 1.0 / (self.trainer.max_epochs or 1)


class Ordered(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({"a": nn.Tanh(), "b": nn.Softplus()})

    def loss(self, batch: Any) -> Tensor:
        inputs, labels = batch
        for block in self.blocks.values():
            inputs = block(inputs)
        return super().loss((inputs, labels))


class Raising(dict[str, int]):
    def __iter__(self) -> Any:
        raise KeyError("closed")


class RaisingSlots:
    __slots__ = ("value",)

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


def holding_itself() -> list[Any]:
    found: list[Any] = [1]
    found.append(found)
    return found


class Gradients(pl.Callback):
    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        for parameter in pl_module.parameters():
            parameter.grad.clamp_(min=0)


def patch_loss(_: Any, model: Any) -> None:
    original = model.loss
    model.loss = lambda batch: 0.5 * original(batch)


def patch_training_step(_: Any, model: Any) -> None:
    original = model.training_step
    model.training_step = lambda batch, batch_idx: 0.5 * original(batch, batch_idx)


def patch_optimizer(trainer: Any, model: Any) -> None:
    optimizer = trainer.optimizers[0]
    original = optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        for parameter in model.parameters():
            parameter.detach().mul_(0.5)
        return result

    optimizer.step = step


def take_optimizer(trainer: Any, model: Any) -> None:
    trainer.strategy.optimizers = [torch.optim.SGD(model.parameters(), lr=0.5)]


LATE: dict[str, tuple[Callable[[], pl.LightningModule], Callable[[Any, Any], Any]]] = {
    "module of a Sequential": (Plain, lambda _, m: m.network.__setitem__(2, nn.Tanh())),
    "appended module": (Plain, lambda _, m: m.network.append(nn.Tanh())),
    "namespace": (
        reads(lambda: SimpleNamespace(scale=1.0), lambda h: h.scale),
        lambda _, m: setattr(m.holder, "scale", 0.5),
    ),
    "attribute of a namespace that comes": (
        reads(SimpleNamespace, lambda h: getattr(h, "scale", 1.0)),
        lambda _, m: setattr(m.holder, "scale", 0.5),
    ),
    "method of an object": (
        reads(Scale, lambda h: h.get()),
        lambda _, m: setattr(m.holder, "get", lambda: 0.5),
    ),
    "set": (
        reads(lambda: {"a"}, lambda h: 1.0 if "a" in h else 0.5),
        lambda _, m: (m.holder.clear(), m.holder.add("b")),
    ),
    "class": (
        reads(lambda: type("Options", (), {"scale": 1.0}), lambda h: h.scale),
        lambda _, m: setattr(m.holder, "scale", 0.5),
    ),
    "attribute of a dictionary": (
        reads(lambda: type("Options", (dict,), {"scale": 1.0})(), lambda h: h.scale),
        lambda _, m: setattr(m.holder, "scale", 0.5),
    ),
    "event": (
        reads(threading.Event, lambda h: 0.5 if h.is_set() else 1.0),
        lambda _, m: m.holder.set(),
    ),
    "module of the class": (
        OfClass,
        lambda _, m: setattr(m.criterion, "label_smoothing", 0.5),
    ),
    "strides of a buffer": (Transposed, lambda _, m: m.scale.t_()),
    "forward of a module": (
        Plain,
        lambda _, m: setattr(m.network[2], "forward", torch.tanh),
    ),
    "deque": (
        reads(lambda: deque([1.0]), lambda h: h[0]),
        lambda _, m: m.holder.__setitem__(0, 0.5),
    ),
    "array": (
        reads(lambda: np.ones(3), lambda h: float(h[1])),
        lambda _, m: m.holder.__setitem__(1, 0.5),
    ),
    "nested dictionaries": (
        reads(lambda: nested(6), lambda h: innermost(h)["scale"]),
        lambda _, m: innermost(m.holder).update(scale=0.5),
    ),
    "order of a dictionary": (
        reads(lambda: {"a": 1.0, "b": 0.5}, lambda h: next(iter(h.values()))),
        lambda _, m: m.holder.update(a=m.holder.pop("a")),
    ),
    "order of a ModuleDict": (
        Ordered,
        lambda _, m: m.blocks.update({"a": m.blocks.pop("a")}),
    ),
    "object in a set": (
        reads(lambda: {Scale()}, lambda h: next(iter(h)).factor),
        lambda _, m: setattr(next(iter(m.holder)), "factor", 0.5),
    ),
    "object that is a key": (
        reads(lambda: {Scale(): 1}, lambda h: next(iter(h)).factor),
        lambda _, m: setattr(next(iter(m.holder)), "factor", 0.5),
    ),
    "object in an array": (
        reads(lambda: np.array([Scale()], dtype=object), lambda h: h[0].factor),
        lambda _, m: setattr(m.holder[0], "factor", 0.5),
    ),
    "array of Python's": (
        reads(lambda: array.array("d", [1.0]), lambda h: h[0]),
        lambda _, m: m.holder.__setitem__(0, 0.5),
    ),
    "default of a function": (
        reads(lambda: lambda values=[1.0]: values[0], lambda h: h()),
        lambda _, m: m.holder.__defaults__[0].__setitem__(0, 0.5),
    ),
    "distribution": (
        reads(
            lambda: torch.distributions.Normal(0.0, 1.0, validate_args=False),
            lambda h: float(h.loc + 1) if isinstance(h.loc, float) else 1.0,
        ),
        lambda _, m: setattr(m.holder, "loc", -0.5),
    ),
    "option of another optimizer": (
        reads(
            lambda: torch.optim.SGD([torch.zeros(1)], lr=1.0),
            lambda h: h.param_groups[0]["lr"],
        ),
        lambda _, m: m.holder.param_groups[0].update(lr=0.5),
    ),
    "long list": (
        reads(lambda: [1.0] * 2000, lambda h: h[1999]),
        lambda _, m: m.holder.__setitem__(1999, 0.5),
    ),
    "bound method": (
        reads(lambda: Scale().get, lambda h: h()),
        lambda _, m: setattr(m.holder.__self__, "factor", 0.5),
    ),
    "partial": (
        reads(lambda: functools.partial(max, *([0.1, 1.0],)), lambda h: h()),
        lambda _, m: m.holder.args[0].__setitem__(1, 0.5),
    ),
    "attribute of a partial": (
        reads(lambda: with_scale(functools.partial(max, 0.1, 1.0)), lambda h: h.scale),
        lambda _, m: setattr(m.holder, "scale", 0.5),
    ),
    "attribute of a partial that comes": (
        reads(lambda: functools.partial(max, 0.1, 1.0), lambda h: getattr(h, "scale", 1.0)),
        lambda _, m: setattr(m.holder, "scale", 0.5),
    ),
    "class of a module": (Plain, lambda _, m: setattr(m.network[2], "__class__", nn.Tanh)),
    "parametrization": (
        Plain,
        lambda _, m: parametrize.register_parametrization(
            m.network[0], "weight", Nested(factor=0.5)
        ),
    ),
    "closure": (reads(closed_over, lambda h: h()), lambda _, m: m.holder(0.5)),
    "minus zero": (
        reads(lambda: 0.0, lambda h: 1 + math.copysign(0.5, h)),
        lambda _, m: setattr(m, "holder", -0.0),
    ),
    "minus zero in a long list": (
        reads(lambda: [0.0] * 2000, lambda h: 1 + math.copysign(0.5, h[1999])),
        lambda _, m: m.holder.__setitem__(1999, -0.0),
    ),
    "minus zero in an array of Python's": (
        reads(lambda: array.array("d", [0.0]), lambda h: 1 + math.copysign(0.5, h[0])),
        lambda _, m: m.holder.__setitem__(0, -0.0),
    ),
    "another type in a long dictionary": (
        reads(lambda: dict.fromkeys(range(2000), 1), lambda h: 1 / (1 + isinstance(h[7], bool))),
        lambda _, m: m.holder.__setitem__(7, True),
    ),
    "attribute of the class that comes": (
        reads(lambda: type("Options", (), {})(), lambda h: getattr(h, "scale", 1.0)),
        lambda _, m: setattr(type(m.holder), "scale", 0.5),
    ),
    "method of the class": (
        reads(lambda: type("Options", (Scale,), {})(), lambda h: h.get()),
        lambda _, m: setattr(type(m.holder), "get", lambda _: 0.5),
    ),
    "method of a base class": (
        reads(lambda: type("Options", (type("Base", (Scale,), {}),), {})(), lambda h: h.get()),
        lambda _, m: setattr(type(m.holder).__base__, "get", lambda _: 0.5),
    ),
    "method of the model's class": (
        lambda: type("Model", (Plain,), {"loss": lambda self, batch: Plain.loss(self, batch)})(),
        lambda _, m: setattr(type(m), "loss", lambda self, batch: 0.5 * Plain.loss(self, batch)),
    ),
    "attribute that comes": (Absent, lambda _, m: setattr(m, "late", 0.5)),
    "item of the dictionary": (OfDictionary, lambda _, m: setattr(m, "holder", 0.5)),
    "module that is copied": (
        functools.partial(Copying, copy.copy),
        lambda _, m: setattr(m.scaling, "factor", 0.5),
    ),
    "module that is copied with its modules": (
        functools.partial(Copying, copy.deepcopy),
        lambda _, m: setattr(m.scaling.inner, "factor", 0.5),
    ),
    "module that is pickled": (
        functools.partial(Copying, lambda module: pickle.loads(pickle.dumps(module))),
        lambda _, m: setattr(m.scaling.inner, "factor", 0.5),
    ),
    "attribute of the trainer": (OfTrainer, lambda t, _: setattr(t.fit_loop, "max_epochs", 2)),
    "method": (Plain, patch_loss),
    "training_step": (Plain, patch_training_step),
    "step of the optimizer": (Plain, patch_optimizer),
    "optimizer": (Plain, take_optimizer),
    "callback": (Plain, lambda t, _: t.callbacks.append(Gradients())),
    "clipping": (Plain, lambda t, _: setattr(t, "gradient_clip_val", 0.01)),
    "hook of a parameter": (
        Plain,
        lambda _, m: m.network[0].weight.register_hook(lambda gradient: 0.5 * gradient),
    ),
}


@pytest.mark.parametrize("what", LATE)
def test_what_changes_long_after_the_capture_counts(fit: Callable[..., Ran], what: str) -> None:
    model, change = LATE[what]

    class Changes(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            if trainer.global_step == CHANGED_AT:
                change(trainer, pl_module)

    captured, eager, unchanged = (
        fit(model, mode, callbacks=[Changes()] if changes else [])
        for mode, changes in (("auto", True), ("off", True), ("off", False))
    )
    assert captured.capture.replays >= CHANGED_AT - capture.WARMUP_STEPS - capture.TRIALS
    assert same(captured, eager)
    assert not same(eager, unchanged)


def test_number_in_a_tensor_of_the_cpu(fit: Callable[..., Ran], device: str) -> None:
    if device == "cpu":
        pytest.skip("the device that trains")
    model, change = reads(lambda: torch.ones(()), lambda h: h), lambda m: m.holder.mul_(0.5)

    class Changes(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            if trainer.global_step == CHANGED_AT:
                change(pl_module)

    captured, eager = (fit(model, mode, callbacks=[Changes()]) for mode in ("auto", "off"))
    assert captured.capture.captures == 2
    assert same(captured, eager)


def compiled(function: Callable[..., Any]) -> Any:
    return torch.compile(function, backend="eager")


class OfCompiledMethod(Reads):
    @compiled
    def scaled(self, values: Tensor) -> Tensor:
        return values * self.holder

    def loss(self, batch: Any) -> Tensor:
        inputs, labels = batch
        return F.cross_entropy(self.scaled(self.network(inputs)), labels)


class Scaling(nn.Module):
    factor = 1.0

    def forward(self, values: Tensor) -> Tensor:
        return values * self.factor


class OfCompiledModule(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.scaling: Any = compiled(Scaling())

    def loss(self, batch: Any) -> Tensor:
        inputs, labels = batch
        return F.cross_entropy(self.scaling(self.network(inputs)), labels)


@pytest.mark.parametrize(
    ("model", "change"),
    [
        (OfCompiledMethod, lambda m: setattr(m, "holder", 0.5)),
        (OfCompiledModule, lambda m: setattr(m.scaling._orig_mod, "factor", 0.5)),
    ],
)
def test_attribute_that_a_compiled_function_reads(
    model: type[Plain], change: Callable[[Any], None]
) -> None:
    made, device = model(), torch.device("cpu")
    found = read_attributes(made, device, set()).finish()
    change(made)
    assert found.changed() is not None


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(BATCH).to_sparse(),
        lambda: torch.eye(BATCH).to_sparse_csr(),
        lambda: nn.Linear(2, 2, device="meta"),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        lambda: OmegaConf.create({"a": 1, "b": "???", "c": "${nowhere:a}"}),
        lambda: nn.parameter.UninitializedParameter(),
        Raising,
        RaisingSlots,
        holding_itself,
        lambda: np.zeros(2**20),
    ],
    ids=[
        "sparse",
        "rows",
        "meta",
        "nested",
        "configuration",
        "lazy",
        "raises",
        "raises for slots",
        "holds itself",
        "large array",
    ],
)
def test_things_that_cannot_be_compared_and_are_not_read(
    fit: Callable[..., Ran], make: Callable[[], Any]
) -> None:
    class Holding(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.held = [make()]

    check_captured(fit, Holding)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_sparse_tensor_that_is_read(fit: Callable[..., Ran], device: str) -> None:
    class Multiplying(Plain):
        def on_fit_start(self) -> None:
            self.held = torch.eye(BATCH, device=device).to_sparse_csr()

        def loss(self, batch: Any) -> Tensor:
            inputs, labels = batch
            return F.cross_entropy(self.network(self.held @ inputs), labels)

    check_eager(fit, Multiplying, "training_step reads self.held, which is a tensor of a kind")


def test_list_of_too_many_objects(fit: Callable[..., Ran]) -> None:
    model = reads(lambda: [Scale() for _ in range(1001)], lambda h: h[1000].get())
    check_eager(fit, model, "training_step reads self.holder, which is very large")


@pytest.mark.parametrize("kept", ["of itself", "of a group", "of a parameter"])
def test_numbers_that_an_optimizer_counts(fit: Callable[..., Ran], kept: str) -> None:
    class Counting(torch.optim.SGD):
        n = 0

        def step(self, closure: Any = None) -> Any:
            group, state = self.param_groups[0], self.state[self.param_groups[0]["params"][0]]
            if kept == "of itself":
                self.n = count = self.n + 1
            elif kept == "of a group":
                group["n"] = count = group.get("n", 0) + 1
            else:
                state["n"] = count = state.get("n", 0) + 1
            loss = closure()
            for parameter in group["params"]:
                parameter.grad /= count
            super().step()
            return loss

    class Counts(Plain):
        def configure_optimizers(self) -> Any:
            return Counting(self.parameters(), lr=0.5)

    check_eager(fit, Counts, "training_step changes optimizer")
