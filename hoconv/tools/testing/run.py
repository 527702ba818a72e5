"""Runs the tests that every operator must pass: ``hoconv test [OPERATOR ...]``.

They know an operator by its declaration alone (test_operators.py). For an operator of another
package, the tests in the folder ``tests`` beside that package run, too.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Collection, Sequence
from importlib.util import find_spec
from pathlib import Path

from hoconv.dispatch.declaration import Operator, operators
from hoconv.tools.commands import add_operator_option, mark_operators, report_broken_packages
from hoconv.tools.testing.supervision import say

TESTS = Path(__file__).parent / "test_operators.py"


class _Chosen:
    """A plugin of pytest that leaves out the tests of other operators, and notes which runs."""

    def __init__(self, names: Collection[str]) -> None:
        self.names = names

    def pytest_runtest_logstart(self, nodeid) -> None:
        say(nodeid.rpartition("::")[2])

    def pytest_collection_modifyitems(self, config, items) -> None:
        others = [item for item in items if not self._wants(item)]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if self._wants(item)]

    def _wants(self, item) -> bool:
        given = item.callspec.params if hasattr(item, "callspec") else {}
        operator = given.get("operator") or getattr(given.get("variant"), "operator", None)
        return not isinstance(operator, Operator) or operator.name in self.names


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="hoconv test",
        description=__doc__,
        epilog="Other options are pytest's: -x, --tb=short.",
    )
    add_operator_option(parser)
    # An option that is not known here would leave its value to the names of operators.
    parser.add_argument("-k", metavar="EXPR", help="pytest's: the tests whose names match")
    arguments, rest = parser.parse_known_args(mark_operators(argv))
    declared = {operator.name: operator for operator in operators()}
    if report_broken_packages() and not arguments.operator:
        return 1
    if find_spec("pytest") is None:
        print("hoconv test needs pytest; pip install pytest", file=sys.stderr)
        return 1
    import pytest

    chosen = [declared[name] for name in arguments.operator or declared]
    folders = dict.fromkeys(folder for each in chosen for folder in _own_tests(each))
    # Not the settings of the folder from which it is called.
    settings = [
        f"-c{os.devnull}", f"--rootdir={TESTS.parent}", "--import-mode=importlib", "-q",
        "--continue-on-collection-errors", "-pno:cacheprovider", "-phoconv.tools.testing.fixtures",
    ]  # fmt: skip
    names = {operator.name for operator in chosen}
    chosen_tests = ["-k", arguments.k] if arguments.k else []
    tests = [*settings, *chosen_tests, *rest, str(TESTS), *map(str, folders)]
    return int(pytest.main(tests, [_Chosen(names)]))


def _own_tests(operator: Operator) -> list[Path]:
    """The folder of tests beside the package that declares an operator, or beside the folder `src`
    which holds it, unless the package is hoconv."""
    package = operator.function.__module__.partition(".")[0]
    spec = find_spec(package)
    if package == "hoconv" or spec is None or spec.origin is None:
        return []
    beside = Path(spec.origin).parents[1]
    folder = (beside.parent if beside.name == "src" else beside) / "tests"
    return [folder] if folder.is_dir() else []
