"""What is to stay as it is while the graphs of a fit are used."""

from __future__ import annotations

from typing import NamedTuple

from training.capture.attributes import Attributes
from training.capture.fit import Fit

# Of the trainer, beside its callbacks: what Lightning reads in a step.
READ_OF_TRAINER = ("callbacks", "gradient_clip_val", "gradient_clip_algorithm")


class Reads(NamedTuple):
    """What a step has read on the host.

    Attributes:
        attributes: the id of a module, the name.
        of_trainer: names.
    """

    attributes: set[tuple[int, str]]
    of_trainer: set[str]


class Unchanged:
    """What the graphs of a fit have frozen: what their steps read, and the optimizer's options and
    state."""

    def __init__(self, fit: Fit) -> None:
        self._fit = fit
        self._reads = Reads(set(), set())
        self._values = self._options = Attributes(fit.device)

    def add(self, reads: Reads) -> None:
        """Adds what the step of a new graph has read; the rest is as it was."""
        for all_of_them, new in zip(self._reads, reads, strict=True):
            all_of_them |= new
        self._values, self._options = self._find_values(), Attributes(self._fit.device)
        self._fit.optimizer.add_options(self._options)
        self._options.finish()

    def find_changed_option(self) -> str | None:
        """Returns the name of an option of the optimizer that has changed, or None: schedules
        change some from step to step."""
        return self._options.changed()

    def find_changed(self) -> str | None:
        """Returns the name of something else that has changed, or None."""
        return self._values.changed()

    def _find_values(self) -> Attributes:
        model, trainer = self._fit.model, self._fit.trainer
        callbacks = trainer.callbacks
        found = self._fit.read(self._reads.attributes)
        self._fit.optimizer.add_state(found)
        patched = {"training_step", "log"} - vars(model).keys()
        if not self._fit.distributed:  # else Lightning itself sets it in each step
            patched |= {"forward"} - vars(model).keys()
        found.add_absent("self", vars(model), patched)
        found.add_attributes("trainer", trainer, sorted(self._reads.of_trainer))
        found.add_places("trainer", vars(trainer), list(READ_OF_TRAINER))
        found.add_places("trainer.callbacks", callbacks, list(range(len(callbacks))))
        return found.finish()
