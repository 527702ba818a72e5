"""Reads a definition: an operator that is declared in a file, in a module or in an installed
package, or a file of another format; and pins it by a hash of its sources."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor

from hoconv.dispatch.declaration import Operator, operators
from hoconv.tools.judging import flashinfer, kernelbench

_SHOWN = 16  # digits of a hash


class UnknownDefinitionError(ValueError):
    """There is no such definition; says what was expected."""


@dataclass(frozen=True)
class Definition:
    """An operator that a candidate must compute, and how it was read.

    Attributes:
        name: by which it is read anywhere: of a file, the path.
        operator: reference, samples, tolerances, cost and sizes.
        files: its sources.
        module: the module that declares it, where it is installed: it cannot be kept from a
            candidate that is installed with it.
        own: whether it is an operator of hoconv's kind, which promises gradients, any strides and
            other sizes than those of its samples; its reference is computed in float64.
        arguments, state, seed: of the model of a KernelBench definition.
    """

    name: str
    operator: Operator
    files: tuple[Path, ...]
    module: str | None = None
    own: bool = True
    arguments: Any = None
    state: Mapping[str, Tensor] = field(default_factory=dict)
    seed: int = 0

    @property
    def digest(self) -> str:
        return digest(*self.files)


def digest(*files: Path) -> str:
    """Returns a hash of the contents of files, in their order."""
    found = hashlib.sha256()
    for path in files:
        found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()[:_SHOWN]


def read(name: str, device: str, seed: int) -> Definition:
    """Reads a definition.

    Args:
        name: a Python file that declares an operator, or is one of KernelBench's; a JSON file of
            FlashInfer-Bench; ``package.module:NAME``; or the name of an installed operator.
        device: of the model of a KernelBench definition.
        seed: of its weights, and of the sizes of FlashInfer-Bench's axes.

    Raises:
        UnknownDefinitionError: there is none.
    """
    path = Path(name).resolve()
    if path.suffix == ".json" and path.exists():
        return Definition(str(path), flashinfer.read(path, seed), (path,), own=False)
    if path.suffix == ".py" and path.exists():
        module = _import_file(path)
        if hasattr(module, "Model") and hasattr(module, "get_inputs"):
            operator, arguments, state = kernelbench.read(module, path.stem, device, seed)
            return Definition(str(path), operator, (path,), None, False, arguments, state, seed)
        return Definition(str(path), _operator_of(module, name), (path,))
    module, _, attribute = name.partition(":")
    if attribute:
        try:
            operator = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise UnknownDefinitionError(f"{name}: {error}") from error
    else:
        named = {operator.name: operator for operator in operators()}
        operator = named.get(name)
    if not isinstance(operator, Operator):
        raise UnknownDefinitionError(
            f"expected a file, package.module:OPERATOR, or an operator that is installed, of "
            f"{', '.join(each.name for each in operators())}; got {name!r}"
        )
    return Definition(name, operator, _sources(operator), operator.function.__module__)


def _import_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _operator_of(module: ModuleType, name: str) -> Operator:
    found = list(dict.fromkeys(v for v in vars(module).values() if isinstance(v, Operator)))
    if len(found) != 1:
        raise UnknownDefinitionError(f"{name}: expected one Operator in it, found {len(found)}")
    return found[0]


def _sources(operator: Operator) -> tuple[Path, ...]:
    """Finds the files of an installed operator's public function, reference, samples, cost and
    sizes, and the ``reference.py`` beside them."""
    functions: list[Any] = [
        operator.function,
        operator.implementations["reference"].function,
        operator.samples,
        operator.cost,
        operator.benchmark.sample,
    ]
    files = set()
    for function in functions:
        while isinstance(function, functools.partial):
            function = function.func
        files.add(Path(inspect.getfile(inspect.unwrap(function))))
    beside = Path(inspect.getfile(operator.function)).parent / "reference.py"
    return tuple(sorted(files | ({beside} if beside.exists() else set())))
