"""Times the calls of one copy of a package, as another process asks: ``python -P worker.py``.

Which copy, the environment says, by ``PYTHONPATH``. Of hoconv it imports the declarations alone, so
that an older copy of hoconv is timed by the same code as a newer one. Requests and answers are
lines of JSON. Each time that it is asked to begin, a fork of it, which has memory in other places,
answers until it is asked to end.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hoconv.dispatch.declaration import find, operators

_TURN = 0.02  # seconds of a turn, about
_FEWEST, _MOST = 3, 100  # calls of a turn
_APART = 1 << 20  # bytes, of which the memory of two forks is apart, at most
# A buffer is read before every call on a GPU: that hides launch latency.
_FLUSH_BYTES, _FLUSH_PASSES = 1 << 28, 16


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a package prints is no answer
    worker, child = _Worker(), -1
    for line in sys.stdin:
        request = json.loads(line)
        what = request.pop("do")
        answer: dict[str, Any] = {}
        if what == "begin":
            child = os.fork()
            if child and os.waitpid(child, 0)[1]:
                answer = {"error": "it ended its process"}
        elif what == "end":
            if not child:
                os._exit(0)
        else:
            try:
                answer = getattr(worker, what)(**request)
            except (Exception, SystemExit) as error:
                answer = {"error": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}
        print(json.dumps(answer), file=answers, flush=True)


class _Worker:
    def find(self, operator: str, device: str, threads: int) -> dict[str, Any]:
        """Finds an operator; says which file has it."""
        torch.set_num_threads(threads)
        torch.backends.cudnn.allow_tf32 = False
        operators()  # imports the package that declares it
        self._operator, self._device = find(operator), torch.device(device)
        return {"file": inspect.getfile(inspect.unwrap(self._operator.function))}

    def call(self, path: str, impl: str, apart: float) -> dict[str, Any]:
        """Takes the arguments of a call from a file; says how many calls make a turn."""
        self._apart = torch.empty(int(apart * _APART), dtype=torch.uint8)
        # It is the other process, not somebody else, that wrote them.
        self._args, self._kwargs = torch.load(path, map_location=self._device, weights_only=False)
        for i, a in enumerate(self._args):
            if isinstance(a, Tensor) and a.is_floating_point():
                self._args[i] = a.detach().requires_grad_()
        self._leaves = [a for a in self._args if isinstance(a, Tensor) and a.requires_grad]
        self._impl = impl
        self._flush = torch.rand(
            _FLUSH_BYTES // 4 if self._device.type == "cuda" else 0, device=self._device
        )
        outputs = self._differentiable(self._forward())
        self._grads = [torch.ones_like(t) for t in outputs]
        self.turn(2)
        took = 1e-3 * sum(self.turn(1).values())
        return {"calls": max(_FEWEST, min(_MOST, int(_TURN / max(took, 1e-9))))}

    def turn(self, calls: int) -> dict[str, float]:
        """Returns the least time of so many calls, forward and backward."""
        times: dict[str, list[float]] = {"forward": [], "backward": []}
        for _ in range(calls):
            output, taken = self._timed(self._forward)
            times["forward"].append(taken)
            if outputs := self._differentiable(output):
                times["backward"].append(self._timed(functools.partial(self._backward, outputs))[1])
        return {way: min(taken) for way, taken in times.items() if taken}

    def _forward(self) -> Any:
        return self._operator.function(*self._args, impl=self._impl, **self._kwargs)

    def _differentiable(self, output: Any) -> list[Tensor]:
        return [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]

    def _backward(self, outputs: list[Tensor]) -> Any:
        return torch.autograd.grad(outputs, self._leaves, self._grads)

    def _timed(self, call: Callable[[], Any]) -> tuple[Any, float]:
        if self._device.type == "cpu":
            begin = time.perf_counter()
            result = call()
            return result, 1e3 * (time.perf_counter() - begin)
        for _ in range(_FLUSH_PASSES):
            self._flush.sum()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        result = call()
        end.record()
        end.synchronize()
        return result, begin.elapsed_time(end)


if __name__ == "__main__":
    main()
