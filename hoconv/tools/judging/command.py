"""Judges a kernel that one does not trust: `hoconv judge DEFINITION CANDIDATE`.

The candidate runs in a process of its own that never holds an expected result; answers come through
shared memory, and everything is compared and timed here. What this cannot show: native code that
attacks the operating system, or code that tells this judge from a user.

DEFINITION is a Python file that declares one Operator, ``package.module:OPERATOR``, the name of an
installed operator, a file of KernelBench, or a JSON file of FlashInfer-Bench. CANDIDATE is a Python
file with a function of the operator's name, ``ModelNew`` for KernelBench, or ``run`` for
FlashInfer-Bench; or ``OPERATOR:IMPL``, an implementation of the installed operator. A file that
says ``FORWARD_ONLY = True`` promises no gradients.

The exit code is 0 if the candidate passed; 1 if it is wrong or was refused; 2 for a wrong command
line; 3 if it could not be judged.
"""

from __future__ import annotations

import argparse
import ast
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hoconv.tools import commands
from hoconv.tools.judging.definition import Definition, UnknownDefinitionError, digest, read
from hoconv.tools.judging.exchange import Load, Report
from hoconv.tools.judging.isolation import unreadable
from hoconv.tools.judging.record import Ended, Finding, Record
from hoconv.tools.judging.session import Misbehaved, Starter, Worker
from hoconv.tools.judging.timing import time_candidate, time_reference
from hoconv.tools.judging.trial import Trial
from hoconv.tools.judging.verdict import EXIT_CODES, Verdict


@dataclass(frozen=True)
class Options:
    """How a candidate is judged.

    Attributes:
        seed: of all values.
        more: calls of one sample, to find rare faults.
        seconds: that a call may take.
        times: whether it is timed.
    """

    device: str = "cpu"
    seed: int = 0
    more: int = 1000
    seconds: float = 120
    times: bool = True


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    arguments = _parse(argv)
    torch.backends.cudnn.allow_tf32 = False
    options = Options(arguments.device, arguments.seed, arguments.calls, arguments.timeout)
    try:
        definition = read(arguments.definition, options.device, options.seed)
        candidate = _candidate(arguments.candidate, definition)
    except UnknownDefinitionError as error:
        print(f"hoconv judge: {error}", file=sys.stderr)
        return 2
    except (Exception, SystemExit) as error:
        print(f"hoconv judge: DEFINITION: {type(error).__name__}: {error}", file=sys.stderr)
        return EXIT_CODES["not judged"]
    with Starter() as starter:
        verdict = judge(definition, candidate, starter, options)
    verdict.show()
    if arguments.json:
        head = commands.record("hoconv judge", argv)
        commands.write_json(arguments.json, head | verdict.for_json())
    return EXIT_CODES[verdict.outcome]


def judge(definition: Definition, candidate: str, starter: Starter, options: Options) -> Verdict:
    """Judges a candidate: a file, or the name of an implementation."""
    file = Path(candidate).resolve() if candidate.endswith(".py") else None
    pinned = definition.digest, digest(file) if file else None
    gradients = definition.own and not (file and _promises_no_gradients(file))
    dtypes = list(definition.operator.tolerances)
    timed = torch.float32 if torch.float32 in dtypes else dtypes[0]
    record, times, why = Record(), {}, ""
    if options.times:
        times["reference before"] = time_reference(
            definition, starter, options.device, timed, gradients
        )
    hidden = () if definition.module else definition.files
    replaced: list[str] = []
    processes = 0
    with unreadable():
        worker = starter.start(options.device, hidden)
        try:
            why = _load(worker, definition, str(file or candidate))
            if not why:
                trial = Trial(definition, worker, options.seed, gradients, options.seconds)
                record = trial.record
                for dtype in dtypes:
                    trial.judge(dtype)
                trial.call_in_programs(timed)
                trial.call_at_once(timed)
                trial.call_long(timed, options.more)
                trial.call_often(timed, options.more, options.seconds)
                if options.times:
                    times["candidate"] = time_candidate(trial, timed)
                processes = worker.processes()
                replaced = [*map(str, worker.ask(Report(), options.seconds)["replaced"])]
        except Ended:
            pass
        except Misbehaved as error:
            record.findings.append(Finding(error.name, "loading it", error.detail))
        finally:
            worker.close()
    if options.times:
        times["reference after"] = time_reference(
            definition, starter, options.device, timed, gradients
        )
    if definition.digest != pinned[0]:
        record.findings.append(Finding("changed definition", "its file", "it was written to"))
    return Verdict(
        definition, candidate, options.device, options.seed, gradients, record, times,
        worker.isolated, replaced, processes, why, pinned,
    )  # fmt: skip


def _load(worker: Worker, definition: Definition, candidate: str) -> str:
    installed = definition.module is not None
    load = Load(
        candidate,
        definition.operator.name,
        definition.name if installed else None,
        () if installed else tuple(path.stem for path in definition.files),
        torch.get_num_threads(),
        definition.arguments,
        seed=definition.seed,
    )
    return worker.load(load, dict(definition.state)) or ""


def _candidate(name: str, definition: Definition) -> str:
    """Returns the file of a candidate, or the name of an implementation."""
    if name.endswith(".py"):
        if not Path(name).exists():
            raise UnknownDefinitionError(f"CANDIDATE: there is no file {name}")
        return name
    operator, _, impl = name.partition(":")
    if operator != definition.operator.name or impl not in definition.operator.implementations:
        known = ", ".join(
            f"{definition.operator.name}:{i}" for i in definition.operator.implementations
        )
        raise UnknownDefinitionError(f"CANDIDATE: expected a Python file or {known}; got {name!r}")
    if definition.module is None:
        raise UnknownDefinitionError(f"CANDIDATE: {name}: the definition is not installed")
    return impl


def _promises_no_gradients(file: Path) -> bool:
    """Reads ``FORWARD_ONLY`` without running the candidate."""
    try:
        body = ast.parse(file.read_text()).body
    except SyntaxError:  # which the worker will say
        return False
    for node in body:
        if isinstance(node, ast.Assign) and [ast.unparse(t) for t in node.targets] == [
            "FORWARD_ONLY"
        ]:
            return bool(ast.literal_eval(node.value))
    return False


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="hoconv judge",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("definition", metavar="DEFINITION")
    parser.add_argument("candidate", metavar="CANDIDATE")
    parser.add_argument("--device", type=commands.device, default="cpu", metavar="cpu|cuda")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the verdict here too")
    parser.add_argument("--seed", type=int, default=secrets.randbits(40),
                        help="of all values; default: one that nobody knows")  # fmt: skip
    parser.add_argument("--calls", type=commands.count, default=1000,
                        help="of one sample, to find rare faults; default: 1000")  # fmt: skip
    parser.add_argument("--timeout", type=float, default=120.0,
                        help="seconds that a call may take; default: 120")  # fmt: skip
    return parser.parse_args(argv)
