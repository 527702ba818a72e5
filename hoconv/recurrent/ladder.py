"""The names of the schedules, which are a ladder. Each one, a rung, adds one optimisation to
the one before, so that its effect can be measured:

- ``naive``: every op by itself, every step;
- ``combined``: products of one operand are one product;
- ``fused``: what is between products is one kernel;
- ``hoisted``: what depends on the input alone is computed for all steps before the loop;
- ``graph``: the whole loop is one call;
- ``persistent``: one kernel runs all steps and keeps the weights on the chip;
- ``auto``: the fastest plan, with the reason.
"""

from __future__ import annotations

SCHEDULES = ("naive", "combined", "fused", "hoisted", "graph", "persistent", "auto")


def reaches(schedule: str, rung: str) -> bool:
    """Returns whether a schedule has the optimisation of a rung."""
    return SCHEDULES.index(schedule) >= SCHEDULES.index(rung)
