"""Oddities at random: see `tests.datamodules.counted.run`, which makes more of them."""

import pytest

from tests.datamodules.counted import coco, folders
from tests.datamodules.counted.run import outcome

SEEDS, LEAST = 24, 2  # of these so many are trained on


@pytest.mark.parametrize("kind", [folders, coco])
def test_what_counts_is_trained_on_and_nothing_has_no_score(kind):
    outcomes = [outcome(kind.train, seed) for seed in range(SEEDS)]
    assert LEAST < outcomes.count("trained") < SEEDS
