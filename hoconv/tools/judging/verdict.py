"""The verdict on a candidate: its merit, and, apart from that, where its results come from."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from hoconv.tools.judging.definition import Definition
from hoconv.tools.judging.record import Finding, Record
from hoconv.tools.tables import print_line

CORRECT, WRONG, REFUSED, NOT_JUDGED = "correct", "wrong", "refused", "not judged"
EXIT_CODES = {CORRECT: 0, WRONG: 1, REFUSED: 1, NOT_JUDGED: 3}
_SHOWN = 12  # operations on the page


@dataclass
class Verdict:
    """The judgement of a candidate: merit and provenance.

    Attributes:
        why: why it was refused or not judged, or empty.
        times: ``candidate``, and ``reference`` before and after it, milliseconds by what was timed.
        isolated: what the kernel kept from the worker.
        replaced: functions that the candidate replaced in its process.
        processes: how many the candidate had started and not ended.
        digests: of the definition before the candidate was loaded, and of the candidate's file.
    """

    definition: Definition
    candidate: str
    device: str
    seed: int
    gradients: bool
    record: Record
    times: dict[str, dict[str, float]]
    isolated: list[str]
    replaced: list[str]
    processes: int = 0
    why: str = ""
    digests: tuple[str, str | None] = ("", None)

    @property
    def outcome(self) -> str:
        if self.why:
            return NOT_JUDGED
        if self.record.findings:
            return WRONG
        return REFUSED if self.replaced else CORRECT

    @property
    def findings(self) -> list[Finding]:
        """What is wrong, and what a candidate is refused for."""
        refused = [Finding("replaced function", "its process", name) for name in self.replaced]
        return self.record.findings + refused

    def for_json(self) -> dict[str, Any]:
        """Returns the verdict as JSON has it: merit and provenance apart."""
        record = self.record
        return {
            "definition": {
                "name": self.definition.operator.name,
                "sha256": self.digests[0],
                "files": [str(path) for path in self.definition.files],
            },
            "candidate": {"name": self.candidate, "sha256": self.digests[1]},
            "device": self.device,
            "seed": self.seed,
            "merit": {
                "verdict": self.outcome,
                "why": self.why,
                "findings": [asdict(finding) for finding in self.findings],
                "gradients": self.gradients,
                "calls": record.calls,
                "compared": record.compared,
                "more_calls": record.more,
                "errors": {d: {k: str(v) if v != v else v for k, v in errors.items()}
                           for d, errors in record.errors.items()},
                "milliseconds": self.times,
                "ratio": self.ratio(),
            },
            "provenance": {
                "calls": record.operations,
                "summary": self.provenance(),
                "replaced": self.replaced,
                "processes": self.processes,
                "isolated_by_the_kernel": self.isolated,
            },
        }  # fmt: skip

    def ratio(self) -> dict[str, float]:
        """Returns how many times as fast as the reference the candidate is."""
        if "candidate" not in self.times or "reference after" not in self.times:
            return {}
        before, after = self.times["reference before"], self.times["reference after"]
        return {
            what: min(before[what], after[what]) / taken
            for what, taken in self.times["candidate"].items()
        }

    def rarest(self) -> float:
        """Returns the share of calls with a fault that would have been seen with 95%."""
        return 1 - 0.05 ** (1 / self.record.more) if self.record.more else 1.0

    def provenance(self) -> list[str]:
        """Says in a few words where the results come from."""
        called = self.record.operations
        aten = [each.removeprefix("aten::") for each in called if each.startswith("aten::")]
        others = [each for each in called if not each.startswith("aten::")]
        said = ["calls its definition"] if "its definition" in others else []
        if aten:
            more = f" and {len(aten) - _SHOWN} more" if len(aten) > _SHOWN else ""
            said.append(f"calls ATen: {', '.join(aten[:_SHOWN])}{more}")
        if ops := [each for each in others if each != "its definition"]:
            said.append(f"calls {', '.join(ops[:_SHOWN])}")
        if aten and not others:
            said.append("no kernel of its own was seen")
        said = said or ["calls nothing that PyTorch computes"]
        return said + [f"leaves processes running: {self.processes}"] * bool(self.processes)

    def show(self) -> None:
        """Prints the verdict on one page."""
        name, (pinned, of_candidate) = self.definition.operator.name, self.digests
        print(f"definition  {name} {pinned}")
        print(f"candidate   {self.candidate} {of_candidate or ''} on {self.device}")
        self._show_merit()
        print("provenance  as its own process reports it")
        for line in self.provenance():
            print_line(f"  {line}", indent=4)
        kept = ", ".join(self.isolated) or "nothing"
        print_line(f"  the kernel keeps from it: {kept}", indent=4)
        if "network" not in self.isolated:
            print_line("  its network is blocked in Python alone", indent=4)
        print(f"seed        {self.seed}")

    def _show_merit(self) -> None:
        record = self.record
        print(f"merit       {self.outcome}{': ' if self.why else ''}{self.why}")
        for finding in self.findings:
            print_line(f"  {finding.name}: {finding.call}: {finding.detail}", indent=4)
        print(f"  {record.calls} calls, {record.compared} compared"
              f"{'' if self.gradients else '; without gradients'}")  # fmt: skip
        for dtype, errors in record.errors.items():
            of_gradient = f", gradient {errors['gradient']:.1e}" if self.gradients else ""
            print(f"  {dtype}: error {errors['output']:.1e}{of_gradient} (tolerance "
                  f"{errors['tolerance']:.1e})")  # fmt: skip
        for what, ratio in self.ratio().items():
            taken = self.times["candidate"][what]
            print(f"  {'forward' if what == 'forward' else 'forward and gradients'}: {taken:.3g} "
                  f"ms, {ratio:.3g} times as fast as the reference")  # fmt: skip
        if record.more:
            print(f"  a fault in one call of {1 / self.rarest():.0f} would have been seen with 95%")
