"""What a step reads of its batch, and does to it."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils import _pytree as pytree
from torchvision import tv_tensors

from tests.training.capture.support import (
    BATCH,
    CHANGED_AT,
    FEATURES,
    STEPS,
    Plain,
    Ran,
    batches,
    check_captured,
    check_eager,
    same,
)


class Weighted(Plain):
    """Multiplies the loss by what it reads of the batch."""

    def weigh(self, batch: Any) -> float:
        raise NotImplementedError

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.network(batch["x"]), batch["y"]) * self.weigh(batch)


@dataclasses.dataclass
class Named:
    x: Tensor
    names: list[str]

    def __post_init__(self) -> None:
        self.count = len(self.names)  # no field


def late(value: Any) -> Any:
    value.late = 0.5
    return value


class Kind(enum.Enum):
    A = 1
    B = 2


Number = enum.IntEnum("Number", {"A": 1})
Other = enum.IntEnum("Other", {"A": 1})


class Unhashable(enum.Enum):
    A = 1
    B = 2

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = None  # pyright: ignore[reportAssignmentType]


# By its name: what a batch has beside tensors, before and after a change; and what is read of it.
READ: dict[str, tuple[Any, Any, Callable[[Any], float]]] = {
    "length": (["a"] * 4, ["a"] * 2, len),
    "key": ({"a": 1}, {"b": 1}, lambda v: 0.5 if "b" in v else 1.0),
    "None": (None, 0.5, lambda v: 1.0 if v is None else 0.5),
    "bool": (False, True, lambda v: 0.5 if v is True else 1.0),
    "member of an Enum": (Kind.A, Kind.B, lambda v: 0.5 if v is Kind.B else 1.0),
    "member of another Enum": (Number.A, Other.A, lambda v: 0.5 if v is Other.A else 1.0),
    "member that cannot be hashed": (
        Unhashable.A,
        Unhashable.B,
        lambda v: 0.5 if v is Unhashable.B else 1.0,
    ),
    "name of a function": (
        torch.relu,
        torch.tanh,
        lambda v: 0.5 if getattr(v, "__name__", "") == "tanh" else 1.0,
    ),
    "attribute that comes": (
        Named(torch.ones(()), []),
        late(Named(torch.ones(()), [])),
        lambda v: getattr(v, "late", 1.0),
    ),
    "attribute of an object that comes": (
        SimpleNamespace(),
        SimpleNamespace(late=0.5),
        lambda v: getattr(v, "late", 1.0),
    ),
    "class": (1, "a", lambda v: 0.5 if isinstance(v, str) else 1.0),
    "number": (1.0, 0.5, lambda v: v),
    "a caught error": (1.0, 0.5, lambda v: attempt(lambda: float(v), 1.0)),
    "attribute that is no field": (
        Named(torch.ones(1), ["a"]),
        Named(torch.ones(1), ["a", "b"]),
        lambda v: 1.0 / v.count,
    ),
}


def attempt(function: Callable[[], float], otherwise: float) -> float:
    try:
        return function()
    except Exception:
        return otherwise


@pytest.mark.parametrize("what", READ)
def test_reads_the_hosts_part(fit: Callable[..., Ran], what: str) -> None:
    first, later, value = READ[what]
    model = type("Reads", (Weighted,), {"weigh": lambda _, batch: value(batch["part"])})

    def data(change: bool) -> list[dict[str, Any]]:
        return [
            {"x": x, "y": y, "part": later if change and i >= CHANGED_AT else first}
            for i, (x, y) in enumerate(batches([BATCH] * STEPS))
        ]

    captured, eager = (fit(model, mode, data=data(True)) for mode in ("auto", "off"))
    assert same(captured, eager)
    assert not same(eager, fit(model, "off", data=data(False)))


class Registered:
    """A batch of a class that PyTorch's trees know."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def to(self, *args: Any, **kwargs: Any) -> Registered:
        return Registered(self.x.to(*args, **kwargs), self.y.to(*args, **kwargs))


pytree.register_pytree_node(
    Registered, lambda batch: ([batch.x, batch.y], None), lambda parts, _: Registered(*parts)
)


def test_registered_class_of_other_sizes(fit: Callable[..., Ran]) -> None:
    class Summed(Plain):
        def loss(self, batch: Any) -> Tensor:
            return F.cross_entropy(self.network(batch.x), batch.y, reduction="sum")

    sizes = [2 if i % 5 == 4 else BATCH for i in range(STEPS)]
    data = [Registered(x, y) for x, y in batches(sizes)]
    assert check_captured(fit, Summed, data=data).capture.captures == 2


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
            loss = super().loss((first, labels))
            return loss if second is first else loss + super().loss((second, labels))

        def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
            x, labels = super().transfer_batch_to_device(batch, device, dataloader_idx)
            return x, x if self.trainer.global_step >= CHANGED_AT else 2 * x, labels

    captured, eager = (fit(Doubled, mode) for mode in ("auto", "off"))
    assert captured.capture.replays
    assert captured.why == "the batch has a tensor twice"
    assert same(captured, eager)


def test_tensor_with_attributes_of_its_own(fit: Callable[..., Ran]) -> None:
    class Tagged(Plain):
        def loss(self, batch: Any) -> Tensor:
            return super().loss(batch) * getattr(batch[0], "scale", 1.0)

        def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
            inputs, labels = super().transfer_batch_to_device(batch, device, dataloader_idx)
            inputs.scale = 0.5 if self.trainer.global_step >= CHANGED_AT else 1.0
            return inputs, labels

    check_eager(fit, Tagged, "a tensor of the batch has attributes of its own")


@dataclasses.dataclass
class Both(dict[str, Tensor]):
    """A dictionary whose items are fields, too."""

    x: Tensor
    y: Tensor

    def __post_init__(self) -> None:
        self.update(x=self.x, y=self.y)


def test_dataclass_that_is_a_dictionary(fit: Callable[..., Ran]) -> None:
    class Named(Plain):
        def loss(self, batch: Any) -> Tensor:
            return super().loss((batch["x"], batch["y"]))

        def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
            inputs, labels = super().transfer_batch_to_device(batch, device, dataloader_idx)
            return Both(inputs, labels)

    check_eager(fit, Named, "the batch has a dataclass that is a container, too")


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_sparse_tensors(fit: Callable[..., Ran]) -> None:
    class Dense(Plain):
        def loss(self, batch: Any) -> Tensor:
            return super().loss((batch[0].to_dense(), batch[1]))

    data = [(x.to_sparse_csr(), y) for x, y in batches([BATCH] * STEPS)]
    check_eager(fit, Dense, "a tensor of the batch is sparse or nested", data=data)


def test_tensors_of_inference(fit: Callable[..., Ran]) -> None:
    class Cloned(Plain):
        def loss(self, batch: Any) -> Tensor:
            return super().loss((batch[0].clone(), batch[1].clone()))

    with torch.inference_mode():
        data = batches([BATCH] * STEPS)
    check_captured(fit, Cloned, data=data)


def test_no_tensors(fit: Callable[..., Ran], device: str) -> None:
    class Drawing(Plain):
        def loss(self, batch: Any) -> Tensor:
            labels = torch.zeros(BATCH, dtype=torch.long, device=device)
            return super().loss((torch.randn(BATCH, FEATURES, device=device), labels))

    check_captured(fit, Drawing, data=list(range(STEPS)))


def pop(batch: Any) -> Tensor:
    return batch.pop("x")


def add(batch: Any) -> Tensor:
    batch["twice"] = 2 * batch["x"]
    return batch["twice"]


def replace(batch: Any) -> Tensor:
    batch["x"] = batch["x"].clamp(-1, 1)
    return batch["x"]


def write(batch: Any) -> Tensor:
    batch["x"].mul_(2)
    return batch["same"]


def differentiate(batch: Any) -> Tensor:
    return batch["x"].requires_grad_()


@pytest.mark.parametrize("change", [pop, add, replace, write, differentiate])
def test_changes_the_batch(fit: Callable[..., Ran], change: Callable[[Any], Tensor]) -> None:
    class Changing(Plain):
        def loss(self, batch: Any) -> Tensor:
            return F.cross_entropy(self.network(change(batch)), batch["y"])

    def data() -> list[dict[str, Any]]:
        return [{"x": x, "same": x, "y": y} for x, y in batches([BATCH] * STEPS)]

    captured, eager = (fit(Changing, mode, data=data()) for mode in ("auto", "off"))
    assert captured.why == "training_step changes the batch"
    assert same(captured, eager)


def test_inputs_with_gradients(fit: Callable[..., Ran]) -> None:
    class Encoded(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Linear(FEATURES, FEATURES)

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return self.encoder(batch[0]), batch[1]

    check_eager(fit, Encoded, "a tensor of the batch requires a gradient")


@dataclasses.dataclass
class Sequences:
    packed: PackedSequence
    labels: Tensor

    def to(self, *args: Any, **kwargs: Any) -> Sequences:
        return Sequences(self.packed.to(*args, **kwargs), self.labels.to(*args, **kwargs))


@pytest.mark.parametrize("make", [lambda packed, y: (packed, y), Sequences], ids=["tuple", "class"])
def test_packed_sequences(fit: Callable[..., Ran], make: Callable[..., Any]) -> None:
    class Recurrent(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(FEATURES, FEATURES)

        def loss(self, batch: Any) -> Tensor:
            packed, labels = (batch.packed, batch.labels) if make is Sequences else batch
            return super().loss((self.lstm(packed)[1][0][0], labels))

    # Of as many steps together.
    lengths = [3, 3, 2, 2, 2, 1, 1, 1], [2, 2, 2, 2, 2, 2, 2, 1]
    data = [
        make(pack_padded_sequence(torch.stack([x, 2 * x, 3 * x]), lengths[i >= CHANGED_AT]), y)
        for i, (x, y) in enumerate(batches([BATCH] * STEPS))
    ]
    check_eager(fit, Recurrent, "the batch has a PackedSequence", data=data)


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("kind", ["expanded", "mapped"])
def test_tensors_that_cannot_be_written_to(
    fit: Callable[..., Ran], kind: str, tmp_path: Path
) -> None:
    np.save(tmp_path / "ones.npy", np.ones(FEATURES, dtype=np.float32))

    class Scaled(Plain):
        def __init__(self) -> None:
            super().__init__()
            if kind == "expanded":
                self.register_buffer("scale", torch.ones(1).expand(FEATURES))
            else:
                self.memory = torch.from_numpy(np.load(tmp_path / "ones.npy", mmap_mode="r"))

    check_captured(fit, Scaled)
