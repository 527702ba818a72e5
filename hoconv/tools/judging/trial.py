"""Asks a worker for calls that it does not foresee, and judges what it gives back.

The reference is computed when the answer is there, in the process of the judge.
"""

from __future__ import annotations

import functools
import hashlib
import math
import random
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from hoconv.dispatch.declaration import Sample
from hoconv.tools.check import ENOUGH, LOWER, MUCH_WORSE
from hoconv.tools.checking.row import Row
from hoconv.tools.commands import dtype_name
from hoconv.tools.judging.definition import Definition
from hoconv.tools.judging.session import Misbehaved, Reply, Worker
from hoconv.tools.judging.values import huge, of_another_size
from hoconv.tools.testing.call_forms import forms
from hoconv.tools.testing.cases import of_other_scales, of_special_values
from hoconv.tools.testing.comparison import (
    is_floating,
    named,
    on_cpu,
    output_and_gradients,
    relative_error,
    same_bits,
)

_REPEATED = 1 / 4  # of the calls come again, with the same values
_KEPT = 8  # results of each dtype that are looked at again
_SIZES = 6  # that are not among the samples, for each dtype
_ENOUGH_FINDINGS = 12
# The name of a result that is wrong in a call of each kind.
WRONG = {
    "sample": "wrong result",
    "size": "wrong at another size",
    "form": "wrong with other strides",
    "special": "wrong for special values",
    "scale": "wrong for small values",
    "more": "wrong in one of many calls",
    "timed": "wrong in a timed call",
}


class Ended(Exception):
    """Nothing more can be asked, or need be."""


@dataclass(frozen=True)
class Finding:
    """What is wrong: its name, the call that shows it, and the details."""

    name: str
    call: str
    detail: str


@dataclass
class Record:
    """What a trial found.

    Attributes:
        calls, compared: how many there were, and how many of them were compared.
        errors: dtype -> ``output``, ``gradient`` and ``tolerance``, relative.
        more: how many calls were made of one sample, to find rare faults.
        operations: what was called, as the worker says.
    """

    findings: list[Finding] = field(default_factory=list)
    calls: int = 0
    compared: int = 0
    errors: dict[str, dict[str, float]] = field(default_factory=dict)
    more: int = 0
    operations: list[str] = field(default_factory=list)


class Trial:
    """The calls of one candidate.

    Args:
        seed: of all values; a candidate must not know it.
        gradients: whether the candidate promises them.
        seconds: that a call may take.
    """

    def __init__(
        self, definition: Definition, worker: Worker, seed: int, gradients: bool, seconds: float
    ) -> None:
        self.definition, self.worker, self.seconds = definition, worker, seconds
        self.operator = definition.operator
        self.gradients = gradients
        self.reference = functools.partial(self.operator.function, impl="reference")
        self.random = random.Random(seed)
        self.record = Record()
        self._outputs: dict[Any, Any] = {}  # what a call is like -> its output, without values
        self._expected: dict[tuple[int, bool], tuple[Sample, dict[str, Tensor]]] = {}
        self._seen: dict[bytes, tuple[str, weakref.ref[Sample]]] = {}

    def judge(self, dtype: torch.dtype) -> None:
        """Judges the results of all samples in a dtype; raises :class:`Ended` where it is over."""
        row = self._row(dtype)
        draws = [self.draw(dtype) for _ in range(2)]
        pairs = [*zip(*draws, strict=True)]
        self._expected.clear()
        plan = [*pairs, *(pair[:1] for pair in pairs if self.random.random() < _REPEATED)]
        self.random.shuffle(plan)
        typical = self._typical(pairs)
        plan = [typical, *plan, typical[:1]]
        cotangents = {id(s): self._cotangent(s) for pair in pairs for s in pair}
        kept: list[tuple[str, Reply]] = []
        for i, sample in enumerate(s for pair in plan for s in pair):
            wanted = self.gradients and (i == 0 or self.random.random() < 0.7)
            cotangent = cotangents[id(sample)] if wanted else None
            keep = len(kept) < _KEPT and (i < 2 or self.random.random() < 0.2)
            reply = self.ask("sample", row, sample, cotangent, keep=keep, traced=i == 0)
            if reply and keep:
                kept.append((sample.name, reply))
        for name, reply in kept:
            again = self._again(reply)
            if any(not same_bits(t, again[what]) for what, t in reply.results.items()):
                self.find("changed result", f"{row.dtype}: {name}",
                          "a result is not what it was: later calls write to its memory, or it is "
                          "in the memory of an argument")  # fmt: skip
        if self.definition.own and not self.record.findings:
            self._vary(row, typical[0], pairs, cotangents[id(typical[0])])
            self._judge_precision(row, dtype, typical[0])
        name = dtype_name(dtype)
        self.record.errors[name] = {
            "output": row.output_error,
            "gradient": row.gradient_error,
            "tolerance": self.operator.tolerances[dtype],
        }

    def call_often(self, dtype: torch.dtype, times: int, seconds: float) -> None:
        """Calls one sample many times, with a few values in random order, to find rare faults."""
        import time

        row, end = self._row(dtype), time.monotonic() + seconds
        drawn = [self.draw(dtype) for _ in range(8)]
        place = min(range(len(drawn[0])), key=lambda i: (not self._size(drawn[0][i]), i))
        while self.record.more < times and time.monotonic() < end:
            sample = self.random.choice(drawn)[place]
            if self.ask("more", row, sample) is None:
                return
            self.record.more += 1

    def draw(self, dtype: torch.dtype) -> list[Sample]:
        """Draws new values for all samples."""
        torch.manual_seed(self.random.getrandbits(60))
        return list(self.operator.samples(torch.device(self.worker.device), dtype))

    def ask(
        self, kind: str, row: Row, sample: Sample, cotangent: Any = None, *,
        positions: tuple[int, ...] | None = None, compared: bool = True, **options: Any,
    ) -> Reply | None:  # fmt: skip
        """Asks for one call and judges the results; returns None where there are none."""
        self.record.calls += 1
        where = f"call {self.record.calls}, {row.dtype}: {sample.name}"
        seed = None if self.definition.own else self.random.getrandbits(31)
        try:
            reply = self.worker.call(
                sample.args, dict(sample.kwargs), cotangent, self.seconds, seed=seed,
                positions=positions, **options,
            )  # fmt: skip
        except Misbehaved as error:
            name = "lazy result" if "dense torch.Tensor" in error.detail else error.name
            self.find(name, where, error.detail)
            if error.name != "error":
                raise Ended from error
            return None
        self.record.operations += [c for c in reply.calls if c not in self.record.operations]
        for i in reply.changed:
            self.find("changed input", where, f"argument {i} is not what it was before the call")
        if compared:
            self.record.compared += 1
            self._compare(kind, where, row, sample, cotangent, positions, seed, reply)
        return reply

    def find(self, name: str, where: str, detail: str) -> None:
        """Notes what is wrong."""
        self.record.findings.append(Finding(name, where, detail))
        if len(self.record.findings) >= _ENOUGH_FINDINGS:
            raise Ended

    def expect(
        self, sample: Sample, cotangent: Any = None, positions: Any = None, seed: int | None = None
    ) -> dict[str, Tensor]:
        """Computes the reference's results for a call."""
        call = sample.args, dict(sample.kwargs)
        if self.definition.own:
            call = on_cpu(call, in_float64=not self.operator.bitwise)
        if seed is not None:
            torch.manual_seed(seed)
        if cotangent is None:
            with torch.no_grad():
                return named(self.reference(*call[0], **call[1]))
        args, kwargs = call
        return output_and_gradients(self.reference, args, kwargs, cotangent, positions=positions)

    def _compare(
        self, kind: str, where: str, row: Row, sample: Sample, cotangent: Any, positions: Any,
        seed: int | None, reply: Reply,
    ) -> None:  # fmt: skip
        kept, expected = self._expected.get((id(sample), cotangent is None), (None, {}))
        if kept is not sample or seed is not None:
            expected = self.expect(sample, cotangent, positions, seed)
            if kind in ("sample", "more"):  # which come again
                self._expected[id(sample), cotangent is None] = sample, expected
        dtypes = {name: t.dtype for name, t in named(self._output(sample)).items()}
        if reply.results.keys() != expected.keys():
            self.find("wrong structure", where, f"expected {[*expected]}, got {[*reply.results]}")
            return
        for what, exact in expected.items():
            result = reply.results[what]
            wanted = tuple(exact.shape), dtypes.get(what, result.dtype)
            if (given := (tuple(result.shape), result.dtype)) != wanted:
                self.find("wrong shape or dtype", where, f"{what}: expected {wanted}, got {given}")
                return
            self._judge(kind, where, row, what, result, exact, sample)

    def _judge(
        self,
        kind: str,
        where: str,
        row: Row,
        what: str,
        result: Tensor,
        exact: Tensor,
        sample: Sample,
    ) -> None:
        before = len(row.failures)
        if kind == "special":
            row.judge_special(what, result, exact)
        elif kind == "scale":
            row.judge_parts(what, result, exact)
        else:
            error = relative_error(result, exact)
            attribute = "output_error" if what.startswith("output") else "gradient_error"
            worst = getattr(row, attribute)
            setattr(row, attribute, error if math.isnan(error) else max(worst, error))
            row.judge_error(what, result, exact)
        print_of = _hash(result)
        earlier, of_sample = self._seen.setdefault(print_of, (where, weakref.ref(sample)))
        for failure in row.failures[before:]:
            if of_sample() is not sample and result.numel() > 1:
                self.find("result of an earlier call", where, f"{failure}; it is that of {earlier}")
            else:
                self.find(WRONG[kind], where, failure)

    def _vary(self, row: Row, typical: Sample, pairs: list[Any], cotangent: Any) -> None:
        """Calls in other forms, with other sizes, and with values that random ones never are."""
        for sample in self._of_other_sizes([pair[0] for pair in pairs]):
            self.ask("size", row, sample, self._cotangent(sample) if self.gradients else None)
        for form in forms(typical, cotangent):
            sample = Sample(form.args, typical.kwargs, f"{typical.name}, {form.name}")
            wanted = form.cotangent if self.gradients and form.positions else None
            self.ask("form", row, sample, wanted, positions=form.positions)
        if row.dtype != "float16":  # which has not the range
            for sample in of_other_scales(typical):
                wanted = self._cotangent(sample) if self.gradients else None
                self.ask("scale", row, sample, wanted)
            self.ask("special", row, huge(typical))
        for sample in of_special_values(typical):
            self.ask("special", row, sample)

    def _of_other_sizes(self, samples: list[Sample]) -> Iterator[Sample]:
        found = 0
        for _ in range(4 * _SIZES):
            sample = of_another_size(self.random.choice(samples), self.random)
            if found < _SIZES and sample is not None and self._is_defined(sample):
                found += 1
                yield sample

    def _is_defined(self, sample: Sample) -> bool:
        try:
            return any(t.numel() for t in tree_leaves(self._output(sample)))
        except Exception:  # the definition refuses such sizes
            return False

    def _judge_precision(self, row: Row, dtype: torch.dtype, typical: Sample) -> None:
        """Notes errors as large as a lower precision's, which the reference does not have."""
        least, lower = LOWER.get(dtype, (math.inf, ""))
        if self.record.findings or row.output_error < least:
            return
        exact = self.expect(typical)
        with torch.no_grad():
            rounded = named(self.reference(*typical.args, **typical.kwargs))
        of_reference = max(relative_error(rounded[what], t) for what, t in exact.items())
        if row.output_error > MUCH_WORSE * of_reference:
            said = f"the error {row.output_error:.1e} is that of {lower}, not of {row.dtype}"
            self.find("lower precision", f"{row.dtype}: all samples", said)

    def _again(self, reply: Reply) -> dict[str, Tensor]:
        try:
            again = self.worker.again(reply.nonce, self.seconds)
        except Misbehaved as error:
            self.find(error.name, "an earlier result", error.detail)
            raise Ended from error
        return again if again.keys() == reply.results.keys() else dict(reply.results)

    def _typical(self, pairs: list[tuple[Sample, ...]]) -> tuple[Sample, ...]:
        """Returns the smallest samples with enough numbers to judge parts of them, or else the
        largest."""
        ordered = sorted(pairs, key=lambda pair: self._size(pair[0]))
        return next((pair for pair in ordered if self._size(pair[0]) >= ENOUGH), ordered[-1])

    def _size(self, sample: Sample) -> int:
        return min((t.numel() for t in tree_leaves(self._output(sample))), default=0)

    def _output(self, sample: Sample) -> Any:
        """Returns the output of the reference for such a call, without values."""
        key = _likeness((sample.args, dict(sample.kwargs)))
        if key not in self._outputs:
            call = sample.args, dict(sample.kwargs)
            args, kwargs = on_cpu(call, in_float64=False) if self.definition.own else call
            with torch.no_grad():
                output = self.reference(*args, **kwargs)
            self._outputs[key] = tree_map(lambda t: t.new_empty(()).expand(t.shape), output)
        return self._outputs[key]

    def _cotangent(self, sample: Sample) -> Any:
        def draw(t: Tensor) -> Tensor:
            return torch.randn(t.shape, dtype=torch.float64).to(self.worker.device, t.dtype)

        return tree_map(draw, self._output(sample))

    def _row(self, dtype: torch.dtype) -> Row:
        tolerance = self.operator.tolerances[dtype]
        return Row(
            self.operator.name, "candidate", self.worker.device, dtype_name(dtype), tolerance
        )


def _likeness(values: Mapping[str, Any] | Any) -> str:
    """Returns what a call is like, without the values of its tensors."""
    return repr(tree_map(lambda v: (v.shape, v.dtype) if isinstance(v, Tensor) else v, values))


def _hash(t: Tensor) -> bytes:
    flat = t.detach().cpu().contiguous().flatten()
    return hashlib.blake2b(flat.view(torch.uint8).numpy().data).digest() if is_floating(t) else b""
