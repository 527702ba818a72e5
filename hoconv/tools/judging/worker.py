"""The process in which a candidate runs, and the process that starts those: ``python -P -m
hoconv.tools.judging.worker SOCKET``.

The starter is a fresh interpreter that imports PyTorch once, and knows no definition. Each worker
is forked from it, isolated, and serves requests until its judge goes away.
"""

from __future__ import annotations

import array
import ctypes
import functools
import importlib.util
import json
import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from hoconv.dispatch.declaration import Operator
from hoconv.dispatch.implementations import choose
from hoconv.tools.judging import definition, exchange, isolation, provenance
from hoconv.tools.judging.exchange import (
    Again,
    Call,
    Load,
    Placed,
    Report,
    Several,
    cpu_memory,
    place_like,
)
from hoconv.tools.testing.comparison import named, output_and_gradients
from hoconv.tools.testing.many_calls import at_once
from hoconv.tools.testing.usages import USAGES

DESCRIPTORS = 4  # a worker's: connection, memory of the inputs and of the results, what it prints


def main(descriptor: int) -> None:
    """Starts a worker for every message, until the socket is closed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # they are not waited for
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the judge, which ends them
    # This imports what wraps torch.manual_seed, which is no work of a candidate. What asks whether
    # there is a GPU would keep workers from using it.
    torch.compiler.disable()
    torch.backends.cudnn.allow_tf32 = False  # float32 is judged as float32
    starter = socket.socket(fileno=descriptor)
    while True:
        message, ancillary, *_ = starter.recvmsg(1 << 20, socket.CMSG_SPACE(4 * DESCRIPTORS))
        if not message:
            return
        descriptors = array.array("i", ancillary[0][2])
        if os.fork():
            for each in descriptors:
                os.close(each)
            continue
        starter.close()
        _isolate(descriptors, **json.loads(message))


def _isolate(descriptors: Sequence[int], hidden: Sequence[str], device: str) -> NoReturn:
    """Becomes the parent of an isolated worker, and ends with it."""
    connection, inputs, results, printed = descriptors
    judge = Connection(connection)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    entered = isolation.enter_namespaces(own_pids=device == "cpu")  # a GPU shares memory by process
    child = os.fork()
    if child:
        judge.send_bytes(json.dumps({"process": child}).encode())
        os.close(connection)
        try:
            os.waitpid(child, 0)
        finally:
            os._exit(0)
    os.setsid()  # what it sends to its group reaches no other process
    isolation.give_up(entered, hidden)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    judge.send_bytes(json.dumps({"isolated": sorted(entered)}).encode())
    memory = () if device != "cpu" else tuple(cpu_memory(d)[0] for d in (inputs, results))
    _serve(judge, *memory)


def _serve(judge: Connection, *memory: Tensor) -> NoReturn:
    before = provenance.functions()
    worker = None
    while True:
        try:
            request = pickle.loads(judge.recv_bytes())
        except EOFError:
            os._exit(0)
        try:
            if isinstance(request, Load):
                worker, answer = _Worker(request, *memory), {}
            elif isinstance(request, Report):
                answer = {"replaced": provenance.replaced(before)}
            else:
                assert worker is not None
                answer = worker.answer(request)
        except (Exception, SystemExit) as error:
            answer = {"error": f"{type(error).__name__}: {error}", "nonce": _nonce(request)}
        judge.send_bytes(json.dumps(answer).encode())


class _Worker:
    """A candidate that is loaded."""

    def __init__(self, load: Load, *memory: Tensor) -> None:
        torch.set_num_threads(load.threads)
        if load.shared is not None:
            memory = tuple(rebuild(*arguments) for rebuild, arguments in load.shared)
        self.inputs, self.results = memory
        self.kept: dict[str, dict[str, Tensor]] = {}
        self.reused: dict[Placed, Tensor] = {}
        self.definition = None
        sys.meta_path.insert(0, _Refusal(load.refused))
        operator = None
        if load.definition:
            device = self.inputs.device.type
            operator = definition.read(load.definition, device, load.seed).operator
            self.definition = _definition_of(operator)
        self.function = self._load(load, operator)

    def _load(self, load: Load, operator: Operator | None) -> Callable[..., Any]:
        if not load.candidate.endswith(".py"):
            assert operator is not None
            impl = load.candidate or "reference"
            choose(operator, impl, self.inputs.device.type)  # compiles it, or says why not
            return functools.partial(operator.function, impl=impl)
        module = _import_file(Path(load.candidate))
        if load.arguments is None:
            return getattr(module, load.operator)
        torch.manual_seed(load.seed)
        model = module.ModelNew(*load.arguments).to(self.inputs.device)
        state = {name: place.view(self.inputs) for name, place in (load.state or {}).items()}
        if model.state_dict().keys() == state.keys():
            model.load_state_dict(state)
        return model

    def answer(self, request: Call | Several | Again) -> dict[str, Any]:
        calls: list[str] = []
        if isinstance(request, Again):
            results = self.kept.pop(request.call)
        elif isinstance(request, Several):
            results = self._call_several(request)
        elif request.traced:
            with provenance.traced(self.definition) as calls:
                results = self._call(request)
        else:
            results = self._call(request)
        if isinstance(request, Call) and request.keep:
            self.kept[request.nonce] = results
        described = [[name, list(t.shape), str(t.dtype)] for name, t in results.items()]
        places = place_like((tuple(t.shape), t.dtype) for t in results.values())
        for place, t in zip(places, results.values(), strict=True):
            place.view(self.results).copy_(t)
        if self.results.is_cuda:
            torch.cuda.synchronize()
        return {"nonce": request.nonce, "results": described, "calls": calls}

    def _call_several(self, request: Several) -> dict[str, Tensor]:
        results: dict[str, Tensor] = {}
        # What larger calls freed would be taken first: memory that is kept would not show.
        with suppress(AttributeError):  # of another C library
            ctypes.CDLL(None).malloc_trim(0)

        def call_some(first: int) -> None:
            for i in range(first, len(request.calls), request.threads):
                for _ in range(request.times - 1):
                    self._call(request.calls[i])
                for name, t in self._call(request.calls[i]).items():
                    results[exchange.of_several(i, name)] = t

        at_once([functools.partial(call_some, first) for first in range(request.threads)])
        return results

    def _call(self, request: Call) -> dict[str, Tensor]:
        args, kwargs, cotangent = tree_map(
            functools.partial(self._tensor, request.reused),
            (request.args, request.kwargs, request.cotangent),
        )
        function = self.function
        if request.usage:
            function = USAGES[request.usage](function)
        if request.seed is not None:
            torch.manual_seed(request.seed)
        if cotangent is None:
            with torch.no_grad():
                results = named(function(*args, **kwargs))
        else:
            results = output_and_gradients(
                function, args, kwargs, cotangent, positions=request.positions
            )
        for name, t in results.items():
            if type(t) is not Tensor or t.layout is not torch.strided:
                raise TypeError(f"{name}: {exchange.NOT_DENSE}, got {type(t).__name__}")
        return results

    def _tensor(self, reused: bool, value: Any) -> Any:
        """Returns the tensor of a place: a new object, or that of an earlier call."""
        if not isinstance(value, Placed):
            return value
        if not reused:
            return value.view(self.inputs)
        t = self.reused.setdefault(value, value.view(self.inputs))
        torch.autograd.graph.increment_version(t)  # the judge wrote to its memory
        return t


class _Refusal(MetaPathFinder):
    """Refuses to import some modules."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname in self.names:
            raise ImportError(f"{fullname} {exchange.THE_DEFINITION}")


def _definition_of(operator: Operator) -> Any:
    """Returns the code of an installed operator's definition: the function of its name in its
    ``reference.py``, or else that of its reference, unless other implementations share it."""
    folder = operator.function.__module__.rpartition(".")[0]
    module = sys.modules.get(f"{folder}.reference")
    if function := getattr(module, operator.name, None):
        return provenance.code_of(function)
    codes = {n: provenance.code_of(i.function) for n, i in operator.implementations.items()}
    code = codes.pop("reference")
    return None if code in codes.values() else code


def _import_file(path: Path) -> ModuleType:
    sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location("candidate", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["candidate"] = module
    spec.loader.exec_module(module)
    return module


def _nonce(request: Any) -> str:
    return getattr(request, "nonce", "")


if __name__ == "__main__":
    main(int(sys.argv[1]))
