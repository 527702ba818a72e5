"""Running a step eagerly, and seeing what a CUDA graph of it would do wrong."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from training.callbacks.values import describe, tensors_of
from training.capture.fit import Fit
from training.capture.frozen import recorded_reads
from training.capture.randomness import HostRandomness


class ObservedStep:
    """A step that runs eagerly once, and what it did.

    Args:
        batch: of the step.
        run: runs it.

    Attributes:
        result: what Lightning gets of it.
        changed_batch: whether it changed its batch.
    """

    def __init__(self, fit: Fit, batch: Any, run: Callable[[], dict[str, Any]]) -> None:
        self._fit = fit
        self._attributes, self._randomness = fit.attributes(), HostRandomness(fit.device)
        # Reads are recorded where it matters only: torch.compile, which may compile in this step,
        # would compile the recording.
        self._reads: set[tuple[int, str]] = set()
        unseen = self._attributes.unseen
        recording = recorded_reads() if unseen else nullcontext(self._reads)
        given = describe(batch), _identify(batch)
        with fit.gpu.beside(), recording as self._reads:
            self.result = run()
        self.changed_batch = (describe(batch), _identify(batch)) != given

    def find_changed(self) -> str | None:
        """Returns the name of an attribute of the model or the optimizer that it changed, or
        None."""
        return self._attributes.changed()

    def why_unfit(self) -> str | None:
        """Returns what it did, beside changing attributes, that a graph would not; or None."""
        for name, what in self._attributes.unseen.items():
            if name.startswith("optimizer"):
                return f"the optimizer has {name}, which {what}"
        for name, what in self._fit.read(self._reads).unseen.items():
            return f"training_step reads {name}, which {what}"
        if (used := self._randomness.used()) is not None:
            return f"training_step draws from {used}"
        if not all(isinstance(v, Tensor) for v in tree_leaves(self.result)):
            return "training_step returns values of the host"
        return None if self.result else "training_step returns no loss"


def _identify(batch: Any) -> list[tuple[int, int]]:
    """Which tensors a batch has, and how often they were written to."""
    tensors = tensors_of(batch)
    return [(id(t), 0 if t.is_inference() else t._version) for t in tensors]
