"""The values of attributes, to be compared with what they are later."""

from __future__ import annotations

import array
import copy
import functools
import itertools
import operator
import random
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

# What Lightning itself keeps in a module, such as the hook that is running.
LIGHTNINGS_OWN = vars(pl.LightningModule()).keys() - vars(nn.Module()).keys()
# Attributes that are set here and, `forward`, by Lightning in every step of several processes.
SET_BY_OBSERVERS = ("forward", "log", "training_step")
# How deep containers and objects in an attribute are looked into, and how large those may be that
# hold more than numbers and texts: no step that reads a larger one is captured.
MAX_DEPTH, MAX_ITEMS = 8, 1000
# How much is compared in all: what takes longer than a launch is not worth a graph.
MAX_PARTS, MAX_BYTES = 20_000, 2**20


class Attributes:
    """The values of attributes, to be compared with what they are later.

    Containers, plain objects and modules are looked into. Of a tensor only its place in memory
    counts: a graph reads what is there when it runs.

    Args:
        device: that trains. What is in a tensor elsewhere, on the CPU, is frozen: it counts how
            often that was written to.
        selected: whether an attribute of a module is looked at.
    """

    def __init__(
        self, device: torch.device, selected: Callable[[nn.Module, str], bool] = lambda *_: True
    ) -> None:
        self._device = device
        self._selected = selected
        self._seen: set[int] = set()  # the ids of what was looked into
        self._classes: set[type] = set()  # of modules and objects
        # What is compared: parts of owners, containers, tensors; each with its name.
        self._getters: list[Callable[[Any], tuple[Any, ...]]] = []
        self._owners: list[Any] = []
        self._parts: list[Any] = []
        self._part_names: list[str] = []
        self._sized: list[Any] = []
        self._sized_names: list[str] = []
        self._empty: list[Any] = []  # most containers, which are for hooks
        self._empty_names: list[str] = []
        self._tensors: list[Tensor] = []
        self._tensor_names: list[str] = []
        self._foreign: list[Tensor] = []  # those of them that are not on the device
        self._foreign_names: list[str] = []
        self._absent: list[tuple[Any, set[str]]] = []  # dictionaries, and what is not in them
        self._absent_names: list[str] = []
        self._copied: list[tuple[Any, Any]] = []  # arrays and long containers, and copies
        self._copied_names: list[str] = []
        self._count = 0  # of parts of containers and objects within others
        self._ordered: list[tuple[Any, list[Any]]] = []  # dictionaries, and their keys
        self._ordered_names: list[str] = []
        self._measured: Any = None  # by `_measure`
        # Names of what is not compared, and why: an iterator, say, goes on by itself.
        self.unseen: dict[str, str] = {}
        self._unseen: list[Any] = []  # iterators and the like
        self._of_modules: dict[str, tuple[int, str]] = {}  # name -> id of the module, attribute

    def add_modules(self, name: str, root: nn.Module) -> None:
        """Adds a module and those within it, but what Lightning keeps in them."""
        modules = [
            (".".join(filter(None, [name, path])), module)
            for path, module in root.named_modules()
            if id(module) not in self._seen
        ]
        self._seen |= {id(module) for _, module in modules}
        for path, module in modules:
            names = [n for n in _names_of_data(module) if self._selected(module, n)]
            self._of_modules |= {f"{path}.{n}": (id(module), n) for n in names}
            # Its own attributes are found sooner as items of its dictionary.
            own = [n for n in names if n in vars(module)]
            inherited = [n for n in names if n not in vars(module)]
            self._add(vars(module), operator.itemgetter, own, [f"{path}.{n}" for n in own])
            self._add(module, operator.attrgetter, inherited, [f"{path}.{n}" for n in inherited])
            # A parametrization, say, gives a module another class.
            self.add_attributes(path, module, ["__class__"])
            self._add_classes(path, module)

    def add_items(self, name: str, owner: Any, keys: list[Any]) -> None:
        """Adds items of a container; where they are all, there may be no more."""
        self._seen.add(id(owner))
        self._add_size(name, owner, keys)
        names = [f"{name}.{key}" if isinstance(key, str | int) else name for key in keys]
        self._add(owner, _getter_of_items(owner), keys, names)

    def add_places(self, name: str, owner: Any, keys: list[Any]) -> None:
        """As `add_items`, without looking into them."""
        self._seen.add(id(owner))
        self._add_size(name, owner, keys)
        self._add(
            owner, operator.itemgetter, keys, [f"{name}.{key}" for key in keys], MAX_DEPTH + 1
        )

    def add_attributes(self, name: str, owner: Any, keys: list[str]) -> None:
        """Adds attributes of an object without looking into them."""
        names = [f"{name}.{key}" for key in keys]
        self._add(owner, operator.attrgetter, keys, names, MAX_DEPTH + 1)

    def add_inherited(self, name: str, owner: Any) -> None:
        """Adds the data of an object's class."""
        keys = [n for n in _names_of_data(owner) if n not in vars(owner)]
        self._add(owner, operator.attrgetter, keys, [f"{name}.{key}" for key in keys])

    def add_size(self, name: str, container: Any) -> None:
        """Adds how much a container holds."""
        self._sized.append(container)
        self._sized_names.append(name)

    def add_absent(self, name: str, owner: Any, keys: set[str]) -> None:
        """Adds items that a dictionary does not have."""
        self._absent.append((owner, keys))
        self._absent_names.append(name)

    def tensors(self) -> list[Tensor]:
        """Returns the tensors that were found, each once."""
        return list(self._tensors)

    def owners(self) -> list[Any]:
        """Returns the containers and objects whose parts were added, iterators and the like, and
        tensors of the CPU."""
        arrays = (value for value, _ in self._copied)
        own = *self._owners, *self._sized, *self._empty
        return [*own, *arrays, *self._unseen, *self._foreign]

    def unseen_of_modules(self) -> dict[tuple[int, str], str]:
        """Returns `unseen` by the id of the module and the attribute; those of modules only."""
        return {self._of_modules[n]: why for n, why in self.unseen.items() if n in self._of_modules}

    def changed(self) -> str | None:
        """Returns the name of the first part that is no longer what it was when it was added.

        It may run in every step: what does not change is compared in few calls.
        """
        try:
            now = self._now()
        except (AttributeError, IndexError, KeyError):
            return self._find_missing()
        if not all(map(operator.is_, now, self._parts)) and (
            changed := _first_difference(now, self._parts, self._part_names)
        ):
            return changed
        if any(self._empty):
            return next(itertools.compress(self._empty_names, self._empty))
        for (owner, keys), name in zip(self._absent, self._absent_names, strict=True):
            if not keys.isdisjoint(owner):
                return f"{name}.{min(keys.intersection(owner))}"
        for (value, copied), name in zip(self._copied, self._copied_names, strict=True):
            if not _is_equal(value, copied):
                return name
        for (value, keys), name in zip(self._ordered, self._ordered_names, strict=True):
            if not all(map(operator.is_, value, keys)) and not all(map(_is_same, value, keys)):
                return name
        measured = self._measure()
        if measured != self._measured:
            trained = list(itertools.compress(self._tensor_names, self._measured[2]))
            of_tensors = [self._tensor_names] * 4
            names = self._sized_names, *of_tensors, trained, trained, self._foreign_names
            for now, before, of in zip(measured, self._measured, names, strict=True):
                if now != before:
                    return _first_difference(now, before, of)
        return None

    def finish(self) -> Attributes:
        """Measures what was added; returns this object."""
        self._measured = self._measure()
        return self

    def _now(self) -> list[Any]:
        call: Any = operator.call  # whose type pyright does not accept in a map
        return list(itertools.chain.from_iterable(map(call, self._getters, self._owners)))

    def _measure(self) -> tuple[list[Any], ...]:
        """Returns the sizes of containers, and of tensors the place, the shape and strides, whether
        it is trained, and its hooks; of those elsewhere how often they were written to."""
        try:
            places = list(map(Tensor.data_ptr, self._tensors))
        except RuntimeError:  # one has no memory of its own
            places = list(map(_place, self._tensors))
        sizes, trained = map(len, self._sized), list(map(_REQUIRES_GRAD, self._tensors))
        with_gradients = list(itertools.compress(self._tensors, trained))
        hooks = (list(map(each, with_gradients)) for each in _HOOKS)
        shapes, strides = map(_SHAPE, self._tensors), map(Tensor.stride, self._tensors)
        versions = list(map(_VERSION, self._foreign))
        return list(sizes), places, trained, list(shapes), list(strides), *hooks, versions

    def _find_missing(self) -> str | None:
        number = 0
        for get, owner in zip(self._getters, self._owners, strict=True):
            try:
                number += len(get(owner))
            except (AttributeError, IndexError, KeyError):
                return self._part_names[number]
        return None

    def _add_classes(self, name: str, owner: Any) -> None:
        """Adds what the classes of an object have, methods too, without looking into it."""
        for kind in type(owner).__mro__:
            if kind not in self._classes and not is_of_library(kind):
                self._classes.add(kind)
                self.add_places(name, vars(kind), list(vars(kind)))

    def _add_size(self, name: str, owner: Any, keys: list[Any]) -> None:
        if len(keys) == len(owner):
            self.add_size(name, owner)

    def _watch_size(self, name: str, container: Any) -> None:
        falsy = not len(container) and not hasattr(type(container), "__bool__")
        (self._empty if falsy else self._sized).append(container)
        (self._empty_names if falsy else self._sized_names).append(name)

    def _add(
        self, owner: Any, getter: Any, keys: list[Any], names: list[str], depth: int = 0
    ) -> None:
        """Adds the parts of an owner that `getter` gets by their keys."""
        if not keys:
            return
        if len(keys) == 1:  # getters return a tuple of two or more only
            keys, names = keys * 2, names * 2
        get = getter(*keys)
        try:
            parts = get(owner)
        except Exception as error:  # a mapping may refuse to show an item
            for name in dict.fromkeys(names):
                self.unseen[name] = f"cannot be read: {type(error).__name__}"
            return
        self._getters.append(get)
        self._owners.append(owner)
        self._parts += parts
        self._part_names += names
        for name, part in zip(names, parts, strict=True):
            if depth <= MAX_DEPTH:
                self._look_into(part, name, depth)

    def _look_into(self, value: Any, name: str, depth: int) -> None:
        try:
            self._look_at(value, name, depth)
        except Exception as error:  # objects of users do what they like when they are looked at
            self.unseen[name] = f"cannot be read: {type(error).__name__}"

    def _look_at(self, value: Any, name: str, depth: int) -> None:
        plain = isinstance(value, _ATOMS) and not isinstance(value, type)
        if plain or id(value) in self._seen:
            return
        if isinstance(value, tuple) and all(isinstance(each, _ATOMS) for each in value):
            return  # nothing of it can change
        if isinstance(value, nn.Module):
            self.add_modules(name, value)
            return
        self._seen.add(id(value))
        if isinstance(value, _GOING_ON):
            self.unseen[name] = "goes on by itself"
            self._unseen.append(value)
            return
        if isinstance(value, Tensor):
            self._add_tensor(value, name)
            return
        if isinstance(value, np.ndarray | array.array | bytearray):
            seen = value if isinstance(value, np.ndarray) else memoryview(value)
            if seen.nbytes > MAX_BYTES:
                self.unseen[name] = "is very large"
                return
            self._copied.append((value, copy.copy(value)))
            self._copied_names.append(name)
            if not (isinstance(value, np.ndarray) and value.dtype.hasobject):
                return
            value = value.ravel().tolist()
        getter: Any = operator.itemgetter
        container: Any = value
        if isinstance(value, dict) and value:
            self._ordered.append((value, list(value)))
            self._ordered_names.append(name)
        if isinstance(value, Mapping):
            keys, getter = list(value), _getter_of_items(value)
            for key in keys if len(keys) <= MAX_ITEMS and depth < MAX_DEPTH else ():
                if not isinstance(key, Tensor):
                    self._look_into(key, name, depth + 1)
        elif isinstance(value, list | tuple | deque):
            keys = list(range(len(value)))
        elif isinstance(value, set | frozenset):
            keys = []
            self._copied.append((value, value.copy()))
            self._copied_names.append(name)
            for each in value if len(value) <= MAX_ITEMS and depth < MAX_DEPTH else ():
                self._look_into(each, name, depth + 1)
        elif isinstance(value, types.MethodType):
            keys, getter, container = ["__self__"], operator.attrgetter, None
        elif isinstance(value, functools.partial):
            container, getter = vars(value), operator.attrgetter
            keys = ["func", "args", "keywords", *container]
        elif isinstance(value, types.FunctionType):
            cells = [cell for cell in value.__closure__ or () if _is_filled(cell)]
            for cell in cells:
                self._add(cell, operator.attrgetter, ["cell_contents"], [name], depth + 1)
            defaults = ["__defaults__", "__kwdefaults__"]
            self._add(value, operator.attrgetter, defaults, [name] * 2, depth + 1)
            value = container = vars(value)
            keys, getter = list(value), operator.itemgetter
        elif isinstance(value, type):
            if is_of_library(value):
                return
            keys = [n for n, v in vars(value).items() if is_data(n, v)]
            getter, container = operator.attrgetter, None
        elif isinstance(value, types.SimpleNamespace) or not _is_opaque(type(value)):
            self._add_classes(name, value)
            keys, getter = _names_of_data(value), operator.attrgetter
            container = getattr(value, "__dict__", None)  # attributes may come
        else:
            return
        if container is not None:
            self._watch_size(name, container)
        own = getattr(value, "__dict__", None)
        if container is value and isinstance(own, dict):  # of a class that derives from dict, say
            self._watch_size(name, own)
            names = [n for n in own if "." not in n]
            self._add(value, operator.attrgetter, names, [name] * len(names), depth + 1)
        self._count += len(keys) if depth else 0  # a module's own are as many as it has parts
        if self._count > MAX_PARTS or len(keys) > MAX_PARTS:
            self.unseen[name] = "is very large"
        elif len(keys) > MAX_ITEMS and container is not None and _holds_atoms(container):
            self._copied.append((container, copy.copy(container)))
            self._copied_names.append(name)
        elif len(keys) > MAX_ITEMS:
            self.unseen[name] = "is very large"
        elif depth < MAX_DEPTH:
            self._add(value, getter, keys, [name] * len(keys), depth + 1)

    def _add_tensor(self, tensor: Tensor, name: str) -> None:
        if is_lazy(tensor):
            self.unseen[name] = "is not initialized"
            return
        odd = tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta
        if odd or (tensor.device != self._device and tensor.is_inference()):
            self.unseen[name] = "is a tensor of a kind that is not compared"
            return
        self._tensors.append(tensor)
        self._tensor_names.append(name)
        if tensor.device != self._device:
            self._foreign.append(tensor)
            self._foreign_names.append(name)


def _getter_of_items(container: Any) -> Callable[..., Callable[[Any], tuple[Any, ...]]]:
    """What :class:`operator.itemgetter` does; that would make what a defaultdict lacks."""
    if not hasattr(type(container), "__missing__"):
        return operator.itemgetter

    def make(*keys: Any) -> Callable[[Any], tuple[Any, ...]]:
        return lambda owner: tuple([dict.get(owner, key, _MISSING) for key in keys])

    return make


def is_of_library(kind: type) -> bool:
    """Whether a class is of a library whose classes nobody changes."""
    return kind.__module__.split(".")[0] in _LIBRARIES


def _is_opaque(kind: type) -> bool:
    """Whether a class is a library's whose objects hold nothing that a user sets."""
    return is_of_library(kind) and not kind.__module__.startswith(_SEEN)


def _names_of_data(owner: Any) -> list[str]:
    """Returns the names of the attributes of an object that hold data: its own and those of its
    class, but not what Lightning keeps in a module."""
    names: dict[str, None] = dict.fromkeys(getattr(owner, "__dict__", {}))
    for kind in type(owner).__mro__:
        if is_of_library(kind):
            continue
        for name, value in vars(kind).items():
            slot = isinstance(value, types.MemberDescriptorType)
            if (slot and hasattr(owner, name)) or is_data(name, value):
                names.setdefault(name)
    own = (*LIGHTNINGS_OWN, *SET_BY_OBSERVERS) if isinstance(owner, pl.LightningModule) else ()
    return [n for n in names if n not in own and "." not in n]


def is_data(name: str, value: Any) -> bool:
    """Whether an item of a class's dictionary is neither a method nor Python's own."""
    return not (name.startswith("__") or hasattr(type(value), "__get__"))


def _first_difference(now: list[Any], before: list[Any], names: list[str]) -> str | None:
    pairs = zip(names, now, before, strict=True)
    return next((name for name, a, b in pairs if not _is_same(a, b)), None)


def _is_same(a: Any, b: Any) -> bool:
    """Whether they are one object, or equal numbers or texts; 0.0 and -0.0 are not."""
    same = type(a) is type(b) and isinstance(a, _ATOMS) and a == b
    return a is b or (same and (a != 0 or str(a) == str(b)))


def _is_equal(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, array.array | bytearray):
        return bytes(a) == bytes(b)
    if isinstance(a, set | frozenset):
        return bool(a == b)
    # Numbers and texts. Comparing one by one takes long.
    now, before = map(_flatten, (a, b))
    same = now == before and [*map(type, now)] == [*map(type, before)]
    return same and (0 not in now or all(map(_is_same, now, before)))


def _flatten(container: Any) -> list[Any]:
    """The items of a sequence, or the keys and values of a mapping, in order."""
    return [*container, *(container.values() if isinstance(container, Mapping) else ())]


def _holds_atoms(container: Any) -> bool:
    values = container.values() if isinstance(container, Mapping) else container
    return all(isinstance(value, _ATOMS) for value in values)


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # a function that its own closure names, before it is made
        return False


def attributes_of(
    model: nn.Module,
    device: torch.device,
    selected: Callable[[nn.Module, str], bool] = lambda *_: True,
) -> Attributes:
    """Returns the attributes of a model and its modules.

    Args:
        device, selected: as of :class:`Attributes`.
    """
    attributes = Attributes(device, selected)
    attributes.add_modules("self", model)
    return attributes.finish()


_MISSING = object()
_SHAPE = operator.attrgetter("shape")
_VERSION = operator.attrgetter("_version")
_REQUIRES_GRAD = operator.attrgetter("requires_grad")
_HOOKS = [operator.attrgetter(each) for each in ("_backward_hooks", "_post_accumulate_grad_hooks")]
_ATOMS = (int, float, complex, str, bytes, type(None), type, torch.dtype, torch.device)
# What goes on without being set: by each read, or by training.
_GOING_ON = (
    Iterator, random.Random, np.random.Generator, np.random.RandomState, torch.Generator,
    pl.Trainer, torch.optim.lr_scheduler.LRScheduler,
)  # fmt: skip
_LIBRARIES = {
    "builtins", "functools", "hoconv", "lightning_fabric", "pathlib", "pytorch_lightning", "torch",
    "torchmetrics", "types", "weakref",
}  # fmt: skip
# Modules of these whose objects users hold and change.
_SEEN = ("torch.distributions", "torch.optim.", "torch.utils.data")


def _place(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # a tensor without memory of its own
        return 0
