"""The command ``hoconv``: makes a package with an operator; checks, tests, compiles operators, and
reports what they buy."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Command(NamedTuple):
    """A sub-command; modules are imported by the one that needs them.

    Attributes:
        judges: whether it runs code that it is to judge, and so in a process of its own.
    """

    usage: str
    purpose: str
    run: Callable[[list[str]], int | None]
    judges: bool = False


def _new(argv: list[str]) -> int:
    from hoconv.tools import new

    return new.main(argv)


def _check(argv: list[str]) -> int:
    from hoconv.tools import check

    return check.main(argv)


def _benchmark(argv: list[str]) -> int:
    try:
        from hoconv.tools.benchmarking import command
    except ModuleNotFoundError as error:
        if error.name != "rich":
            raise
        print("hoconv benchmark needs rich; pip install 'hoconv[benchmark]'", file=sys.stderr)
        return 1
    return command.main(argv)


def _test(argv: list[str]) -> int:
    from hoconv.tools.testing import run

    return run.main(argv)


def _judge(argv: list[str]) -> int:
    from hoconv.tools.judging import command

    return command.main(argv)


def _doctor(argv: list[str]) -> int:
    from hoconv.tools import doctor

    return doctor.main(argv)


def _build(argv: list[str]) -> None:
    from hoconv.tools import build

    build.main(argv)


def _publish(argv: list[str]) -> int:
    from hoconv.tools import publish

    return publish.main(argv)


def _report(argv: list[str]) -> int:
    from hoconv.tools.report import command

    return command.main(argv)


COMMANDS = {
    "new": Command("NAME [DIR]", "write a package with an operator, a layer and a network", _new),
    "check": Command(
        "[OPERATOR ...]", "compare implementations with the reference", _check, judges=True
    ),
    "benchmark": Command("[OPERATOR ...]", "time it against its floor and its peers", _benchmark),
    "test": Command(
        "[OPERATOR ...]", "gradients, torch.compile, export, threads, ...", _test, True
    ),
    "judge": Command("DEFINITION CANDIDATE", "judge a kernel that you do not trust", _judge),
    "doctor": Command("[--build]", "say what works on this machine, and what is missing", _doctor),
    "report": Command("OPERATOR [PATH ...]", "a page that says what its kernels buy", _report),
    "build": Command("[cpu|cuda] [--wheel DIR]", "compile ahead of use; build a wheel", _build),
    "publish": Command("OPERATOR DIR", "write a kernel repository for Hugging Face", _publish),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a sub-command; returns its exit code."""
    name, *rest = [*(sys.argv[1:] if argv is None else argv), ""][:-1] or ["--help"]
    if name in COMMANDS and COMMANDS[name].judges:
        from hoconv.tools.testing.supervision import supervise

        return supervise(lambda: _run(name, rest))
    if name in COMMANDS:
        return _run(name, rest)
    if name not in ("-h", "--help"):
        print(f"hoconv: expected one of {', '.join(COMMANDS)}; got {name!r}", file=sys.stderr)
        return 2
    width = max(len(f"{name} {each.usage}") for name, each in COMMANDS.items())
    for name, each in COMMANDS.items():
        print(f"hoconv {f'{name} {each.usage}':{width}}  {each.purpose}")
    print("hoconv COMMAND --help says more.")
    return 0


def _run(name: str, argv: list[str]) -> int:
    try:
        try:
            return COMMANDS[name].run(argv) or 0
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # what reads the output, such as head, has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        print(f"\nhoconv {name}: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
