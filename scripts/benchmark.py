"""Times operators, layers, approximate products, recurrent cells, training steps and the first use.

Every sub-command writes JSON, and some draw a chart beside it. The ``--help`` of a sub-command and
its JSON say how it measures. Its file in ``scripts/benchmarks/`` says what the JSON holds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import common  # noqa: F401  # models/ and training/ are found
from benchmarks.library import approx, calls, layer, profile, recurrent, start
from benchmarks.training import images, loading, scaling, step, table, throughput

from datamodules.images import DataNotFoundError
from hoconv.tools.commands import add_device_option, add_out_option, record, report_broken_packages

# Name -> module, and its line in the help.
COMMANDS = {
    "layer": (layer, "the whole high-order layer against the best of its peers"),
    "approx": (approx, "approximate products with every multiplier, beside PyTorch's"),
    "recurrent": (recurrent, "recurrent layers against PyTorch's, and their schedules"),
    "calls": (calls, "the host's part of a call of every layer, beside PyTorch's layers"),
    "table": (table, "training steps of all models, implementations and batches"),
    "step": (step, "training steps, and the share of them spent in the layers"),
    "images": (images, "1,000 COCO images through the high-order layer"),
    "loading": (loading, "how long training on COCO waits for its data"),
    "profile": (profile, "the GPU's counters of the fused layer and of an approximate product"),
    "scaling": (scaling, "training on several devices"),
    "throughput": (throughput, "what the callback that measures throughput costs"),
    "start": (start, "time of the first use and of later starts"),
}


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    arguments = _parse(argv)
    try:
        arguments.run(arguments, record("python scripts/benchmark.py", argv))
    except DataNotFoundError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    return int(report_broken_packages())


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(name, description=module.METHOD, help=summary)
        add_device_option(command)
        add_out_option(command)
        module.add_options(command)
        command.set_defaults(run=module.run)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
