"""Names of before: an error that says what they are now."""

from __future__ import annotations

import importlib
import pickle

import pytest

from hoconv.moved import MOVED


@pytest.mark.parametrize(("before", "now"), MOVED.items())
def test_a_module_that_was_moved_says_where_it_is(before: str, now: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=f"{before} is {now} now"):
        importlib.import_module(before)
    importlib.import_module(now)


def test_a_pickle_of_before_says_what_to_do() -> None:
    of_before = b"choconv.recurrent.cell\nBoundCell\n."
    with pytest.raises(ModuleNotFoundError, match=r"save its state_dict\(\) there"):
        pickle.loads(of_before)


def test_a_module_that_never_was_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'hoconv\.nothing'"):
        importlib.import_module("hoconv.nothing")
