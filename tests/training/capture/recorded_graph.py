"""A stand-in for a GPU that captures steps: operators of the CPU, recorded and run again.

As a CUDA graph does, it repeats the operators on the same tensors and with the same numbers of the
host, runs nothing while it captures, and refuses to read a tensor then.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class RecordedGraph(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.made: set[int] = set()  # memory that the calls allocated
        self.before: list[tuple[Tensor, Tensor]] = []  # what they overwrote
        self.kept: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        written = [
            value
            for argument, value in zip(func._schema.arguments, [*args, *kwargs.values()])
            if (argument.alias_info is not None and argument.alias_info.is_write)
            or argument.name in ("running_mean", "running_var")  # not declared as written
        ]
        for tensor in tree_leaves(written):
            if isinstance(tensor, Tensor) and memory(tensor) not in self.made:
                self.before.append((tensor, tensor.detach().clone()))
        result = func(*args, **kwargs)
        old = {memory(tensor) for tensor in inputs}
        results = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        fresh = [tensor for tensor in results if memory(tensor) not in old]
        self.made |= {memory(tensor) for tensor in fresh}
        self.kept.append(result)  # so that no memory is used twice
        self.calls.append((func, args, kwargs, results if fresh else []))
        return result

    @torch.no_grad()
    def undo(self) -> None:
        """Leaves what a capture leaves: old memory as it was, and in new memory anything."""
        for tensor, value in reversed(self.before):
            tensor.copy_(value)
        for *_, results in self.calls:
            for tensor in results:
                if tensor.is_floating_point() and tensor.layout is torch.strided:
                    tensor.detach().fill_(torch.nan)

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, results in self.calls:
            again = [t for t in tree_leaves(func(*args, **kwargs)) if isinstance(t, Tensor)]
            for result, value in zip(results, again, strict=bool(results)):
                result.copy_(value)


def memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class RecordingCPU:
    """Has the interface of :class:`training.capture.gpu.Gpu`."""

    type = "cpu"

    def __init__(self, device: torch.device) -> None:
        pass

    @contextmanager
    def beside(self) -> Iterator[None]:
        yield

    @contextmanager
    def capture(self) -> Iterator[RecordedGraph]:
        graph = RecordedGraph()
        state = torch.get_rng_state()
        try:
            with graph:
                yield graph
        finally:
            graph.undo()
            torch.set_rng_state(state)

    def random_state(self) -> Tensor:
        return torch.get_rng_state()

    def set_random_state(self, state: Tensor) -> None:
        torch.set_rng_state(state)
