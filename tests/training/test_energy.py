"""Accuracy against energy, drawn."""

from __future__ import annotations

import numpy as np
import pytest

from training.results.energy import Point, comparable, draw

A, B, C, D = (
    Point("a", 10e3, 0, [0.90]), Point("b", 20e3, 0, [0.85]), Point("c", 30e3, 0, [0.94, 0.96]),
    Point("d", 5e3, 70, [0.99]),
)  # fmt: skip


def test_energies_that_leave_out_other_multiplications_are_not_compared() -> None:
    assert comparable([A, D, B]) == [A, B]
    assert comparable([D]) == [D]
    assert comparable([]) == []


@pytest.mark.parametrize(
    ("rises", "front"),
    [(True, [(10e-9, 0.9), (30e-9, 0.95)]), (False, [(10e-9, 0.9), (20e-9, 0.85)])],
)
def test_a_line_joins_those_that_none_is_better_than_at_less_energy(rises, front) -> None:
    (panel,) = draw([C, A, B], "test/accuracy", rises).axes
    line = panel.lines[-1].get_xydata()
    assert line == pytest.approx(np.array(front))
    assert [text.get_text() for text in panel.texts] == ["a", "b", "c"]
    assert panel.get_ylabel() == "test/accuracy"
    assert "unknown" not in panel.get_xlabel()


def test_a_long_label_leaves_room_for_the_panel(tmp_path) -> None:
    named = [point._replace(label=300 * point.label) for point in (A, B)]
    draw(named, "test/accuracy", True).savefig(tmp_path / "energy.png")


def test_the_axis_says_what_is_left_out() -> None:
    (panel,) = draw([D], "test/accuracy", True).axes
    assert "without 70 of unknown energy" in panel.get_xlabel()
