"""Finding what a CUDA graph of a training step would freeze.

A graph repeats the kernels of one step with the same host values: attributes of modules, numbers
that are logged, random numbers of the host, and whatever was read from the trainer. What a step
changes on the host is found by comparing before and after it. What it reads is recorded, and may
not change while the graph is in use.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator, Mapping
from types import FunctionType, MappingProxyType
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from training.capture.attributes import (
    LIGHTNINGS_OWN,
    SET_BY_OBSERVERS,
    Attributes,
    attributes_of,
)

# These are what they are for a whole fit, unless somebody sets them.
CONSTANTS_OF_TRAINER = {
    "barebones", "estimated_stepping_batches", "global_rank", "is_global_zero", "local_rank",
    "max_epochs", "max_steps", "node_rank", "num_devices", "num_nodes", "num_training_batches",
    "precision", "training", "world_size",
}  # fmt: skip


class FrozenError(Exception):
    """A step does what a graph of it would freeze; says what."""


class Refusals:
    """What a step did that a graph of it would freeze, also where the step caught the error."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def refuse(self, what: str) -> FrozenError:
        """Returns the error to raise."""
        self.found.append(what)
        return FrozenError(what)


@contextlib.contextmanager
def recorded_reads(
    refused: Mapping[tuple[int, str], str] = MappingProxyType({}), refusals: Refusals | None = None
) -> Iterator[set[tuple[int, str]]]:
    """Records the attributes of modules that are read: the id of the module, the name.

    Args:
        refused: those that may not be read, and why.
        refusals: get to know of such a read.

    Raises:
        FrozenError: by the read.
    """
    reads: set[tuple[int, str]] = set()

    def read(module: nn.Module, name: str) -> Any:
        # A metric is hashed by its state, wherever all modules of a model are listed.
        frame = sys._getframe(1)
        if frame.f_code.co_name != "__hash__":
            package = frame.f_globals.get("__name__", "").split(".")[0]
            whole = name in _OF_COPIES or (name == "__dict__" and package not in _READERS)
            reads.add((id(module), ALL if whole else name))
            if refusals is not None and (why := refused.get((id(module), name))):
                raise refusals.refuse(f"training_step reads {name}, which {why}")
        return object.__getattribute__(module, name)

    nn.Module.__getattribute__ = read  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield reads
    finally:
        del nn.Module.__getattribute__


ALL = "*"  # for the name of an attribute: all of them
_OF_COPIES = ("__reduce_ex__", "__getstate__")  # what copy and pickle read first
_PARTS = ("_parameters", "_buffers", "_modules")  # dictionaries in which a module has its parts
# Packages that read a module's dictionary for one of its items.
_READERS = {"torch", "lightning_fabric", "pytorch_lightning", "torchmetrics", "training"}


def read_attributes(
    model: nn.Module, device: torch.device, reads: set[tuple[int, str]]
) -> Attributes:
    """Returns the attributes that were read, and all of compiled modules, whose programs read
    attributes unseen; `device` as of :class:`Attributes`."""
    compiled = {
        id(part) for module in model.modules() if _is_compiled(module) for part in module.modules()
    }

    def read(module: nn.Module, name: str) -> bool:
        if name not in vars(module):
            return True  # its class's, which is also read without the module
        if {(id(module), name), (id(module), ALL)} & reads or id(module) in compiled:
            return True
        # Python finds parameters, buffers and modules in these by way of __dict__.
        return name in _PARTS and (id(module), "__dict__") in reads

    attributes = attributes_of(model, device, read)
    for path, module in model.named_modules():
        own = (*SET_BY_OBSERVERS, *LIGHTNINGS_OWN) if isinstance(module, pl.LightningModule) else ()
        names = {n for owner, n in reads if owner == id(module) and not n.startswith("__")}
        names -= {*own, *vars(module), *(n for part in _PARTS for n in vars(module)[part])}
        names = {n for n in names if not hasattr(getattr(type(module), n, None), "__set__")}
        # A method may be shadowed, and what hasattr looks for may come.
        shadows = {name for name in names if hasattr(type(module), name)}
        attributes.add_absent(f"self.{path}", vars(module), names)
        for part in _PARTS if names - shadows else ():
            attributes.add_absent(f"self.{path}", vars(module)[part], names - shadows)
    return attributes


def _is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile has compiled a module or one of its methods."""
    if module._compiled_call_impl is not None or "_orig_mod" in module._modules:
        return True
    owners = (module, *type(module).__mro__)
    values = (value for owner in owners for value in vars(owner).values())
    functions = (value for value in values if isinstance(value, FunctionType))
    return any("_torchdynamo_orig_callable" in vars(each) for each in functions)


class Logged(NamedTuple):
    """A call of ``self.log``."""

    name: str
    value: Tensor
    arguments: dict[str, Any]


@contextlib.contextmanager
def watched(
    model: pl.LightningModule, refusals: Refusals
) -> Iterator[tuple[list[Logged], set[str]]]:
    """Watches a call of ``model.training_step``, and yields what it logs, which Lightning does not
    get, and the names of what it reads from the trainer.

    What is logged is copied when it is, since the step may go on to change it.

    Raises:
        FrozenError: by the step: it logs a value of the host, or reads from the trainer what
            changes from step to step.
    """
    logged: list[Logged] = []
    reads: set[str] = set()
    step, trainer = model.training_step, model.trainer
    constant_trainer: Any = _ConstantTrainer(trainer, reads, refusals)

    def log(name: str, value: Any, *args: Any, **arguments: Any) -> None:
        if args or not isinstance(value, Tensor):
            kind = "with positional options" if args else f"as a {type(value).__name__}, no tensor"
            raise refusals.refuse(f"training_step logs {name!r} {kind}")
        for each in (name, *arguments.values()):
            if type(each) is Unread:
                _refuse(each)
        logged.append(Logged(name, value.detach().clone(), arguments))

    @functools.wraps(step)  # Lightning reads its signature
    def training_step(*args: Any, **kwargs: Any) -> Any:
        model.trainer = constant_trainer
        try:
            return step(*args, **kwargs)
        finally:
            model.trainer = trainer

    before = {name: vars(model).get(name) for name in ("log", "training_step")}
    model.training_step, model.log = training_step, log
    try:
        yield logged, reads
    finally:
        for name, value in before.items():
            delattr(model, name)
            if value is not None:
                setattr(model, name, value)


@contextlib.contextmanager
def heard(model: pl.LightningModule) -> Iterator[list[Tensor]]:
    """Yields the tensors, copied, that a step logs; Lightning gets them, too."""
    logged: list[Tensor] = []
    log, own = model.log, vars(model).get("log")

    def log_and_keep(name: str, value: Any, *args: Any, **arguments: Any) -> None:
        if isinstance(value, Tensor):
            logged.append(value.detach().clone())
        log(name, value, *args, **arguments)

    model.log = log_and_keep
    try:
        yield logged
    finally:
        del model.log
        if own is not None:
            model.log = own


class _ConstantTrainer:
    """A trainer of which only what is constant may be read; `reads` gets the names."""

    def __init__(self, trainer: pl.Trainer, reads: set[str], refusals: Refusals) -> None:
        self._trainer = trainer
        self._reads = reads
        self._refusals = refusals

    @property
    def __class__(self) -> Any:  # as isinstance sees it
        return type(self._trainer)

    def __getattr__(self, name: str) -> Any:
        if name not in CONSTANTS_OF_TRAINER:
            raise self._refusals.refuse(f"training_step reads trainer.{name}")
        self._reads.add(name)
        return getattr(self._trainer, name)


class _NoAttributeError(FrozenError, AttributeError):
    """So that hasattr, with which DistributedDataParallel looks for tensors, is False."""


class Unread:
    """Stands for a value of the host that a step gets and may pass on, but not read.

    Args:
        what: it is, for messages.
        value: what it stands for; isinstance sees its class.
        refusals: get to know of a read.
    """

    def __init__(self, what: str, value: Any, refusals: Refusals) -> None:
        object.__setattr__(self, "_about", (what, value, refusals))

    def __getattribute__(self, name: str) -> Any:
        what, value, refusals = object.__getattribute__(self, "_about")
        if name == "__class__":
            return type(value)
        read = f"training_step reads {what}"
        may_come = hasattr(value, "__dict__") and not name.startswith("__")
        if name not in _OF_EVERY_OBJECT and (may_come or hasattr(value, name)):
            refusals.refuse(read)
        raise _NoAttributeError(read)


_OF_EVERY_OBJECT = frozenset(dir(object))


def _refuse(value: Unread, *_: Any) -> Any:
    what, _value, refusals = object.__getattribute__(value, "_about")
    raise refusals.refuse(f"training_step reads {what}")


for _name in (*vars(int), *vars(list)):  # Python looks for operators in the class
    if _name.startswith("__") and _name not in vars(object):
        setattr(Unread, _name, _refuse)
for _name in ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__", "__str__",
              "__repr__", "__format__", "__call__"):  # fmt: skip
    setattr(Unread, _name, _refuse)
