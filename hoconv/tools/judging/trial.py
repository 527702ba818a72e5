"""Asks a worker for calls that it does not foresee, and judges what it gives back.

The reference is computed when the answer is there, in the process of the judge.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import random
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from hoconv.dispatch.declaration import Sample
from hoconv.tools.check import ENOUGH, LOWER, MUCH_WORSE
from hoconv.tools.checking.row import Row
from hoconv.tools.commands import dtype_name
from hoconv.tools.judging import exchange
from hoconv.tools.judging.definition import Definition
from hoconv.tools.judging.record import WRONG, Asked, Ended, Finding, Record
from hoconv.tools.judging.session import Misbehaved, Reply, Worker
from hoconv.tools.testing.call_forms import forms
from hoconv.tools.testing.comparison import (
    named,
    on_cpu,
    output_and_gradients,
    relative_error,
    same_bits,
)
from hoconv.tools.testing.many_calls import growth
from hoconv.tools.testing.variations import of_another_size, of_other_scales, of_special_values

_REPEATED = 1 / 4  # of the calls come again, with the same values
_DIFFERENTIATED = 2 / 3  # of the calls, where gradients are promised
_KEPT = 8  # results of each dtype are looked at again
_VALUES = 8  # of the sample that is called often
_MORE = 20  # calls of one sample, longer than a ring of buffers that somebody may reuse
_SIZES = 6  # that are not among the samples, for each dtype
_SMALL = 1 << 26  # bytes of the tensors of a call, or of one of them
_ENOUGH_FINDINGS = 12
_THREADS, _ROUNDS, _EACH = (2, 3, 4), 5, 4  # threads at once; times; calls of each thread
_MANY = 10  # times as many calls show whether memory grows, as look for rare faults
_LONG = 10.0  # seconds of these
_AGAIN = 3  # times that memory has to grow, if nothing else of the machine is to be blamed
_AS_THE_REFERENCE = 8  # times its error a result may have where no definition vouches for a call
# What an error of a worker says, and the name of that.
_ERRORS = {
    exchange.NOT_DENSE: "lazy result",
    exchange.THE_DEFINITION: "calls its definition",
}
_SEVERAL = "sample", "more", "threads", "many"  # kinds whose calls come again
_VARIED = "size", "form", "special", "scale"  # kinds that no definition vouches for


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
        self._outputs: dict[str, Any] = {}  # what a call is like -> its output, without values
        self._expected: dict[tuple[int, bool], tuple[Sample, dict[str, Tensor]]] = {}
        self._seen: dict[bytes, tuple[str, list[bytes]]] = {}

    def judge(self, dtype: torch.dtype) -> None:
        """Judges the results of all samples in a dtype; raises :class:`Ended` where it is over."""
        self.record.errors[dtype_name(dtype)] = {
            "output": 0.0, "gradient": 0.0, "tolerance": self.operator.tolerances[dtype]
        }  # fmt: skip
        if self.definition.own:
            self._judge_samples(dtype)
        else:
            self._judge_draws(dtype)

    def _judge_draws(self, dtype: torch.dtype) -> None:
        """Judges the samples of a definition whose samples may fill a memory: drawn when they are
        asked for, those of some calls with values of before."""
        seeds = [self.random.getrandbits(60) for _ in range(3)]
        kept: list[tuple[Asked, Reply]] = []
        for i, seed in enumerate([*seeds[:2], seeds[0], seeds[2]]):
            for sample in self.draw(dtype, seed):
                asked, keep = Asked("sample", dtype, sample), self.is_small(sample) and i < 2
                reply = self.ask(asked, keep=keep, traced=not i)
                if reply and keep:
                    kept.append((asked, reply))
        for asked, reply in kept:
            self._look_again(asked, reply)

    def _judge_samples(self, dtype: torch.dtype) -> None:
        self._expected.clear()
        pairs = [*zip(self.draw(dtype), self.draw(dtype), strict=True)]
        typical = self._typical(pairs)
        plan = [*pairs, *(pair[:1] for pair in pairs if self.random.random() < _REPEATED)]
        self.random.shuffle(plan)
        # The results of the first are kept, and looked at after the others.
        order = [(s, self.gradients) for s in typical] + [(s, False) for s in typical]
        order += [(s, self.random.random() < _DIFFERENTIATED) for pair in plan for s in pair]
        order += [(self.random.choice(typical), False) for _ in range(_MORE)]
        cotangents = {id(s): self.cotangent(s) for pair in pairs for s in pair}
        kept: list[tuple[Asked, Reply]] = []
        for i, (sample, differentiated) in enumerate(order):
            cotangent = cotangents[id(sample)] if differentiated and self.gradients else None
            asked = Asked("sample", dtype, sample, cotangent)
            reply = self.ask(asked, keep=i < _KEPT, traced=i == 0)
            if reply and i < _KEPT:
                kept.append((asked, reply))
        for asked, reply in kept:
            self._look_again(asked, reply)
        if not self.record.findings:
            self._judge_precision(dtype, typical[0])
            for asked in self._variants(dtype, typical[0], [pair[0] for pair in pairs]):
                self.ask(asked)

    def call_often(self, dtype: torch.dtype, times: int, seconds: float) -> None:
        """Calls one sample many times, with a few values in random order, to find rare faults."""
        end = time.monotonic() + seconds
        if not all(map(self.is_small, self.draw(dtype))):
            return
        drawn = [self.draw(dtype) for _ in range(_VALUES)]
        place = min(range(len(drawn[0])), key=lambda i: (not self._size(drawn[0][i]), i))
        while self.record.more < times and time.monotonic() < end:
            if self.ask(Asked("more", dtype, self.random.choice(drawn)[place])) is None:
                return
            self.record.more += 1

    def call_at_once(self, dtype: torch.dtype) -> None:
        """Calls from several threads at once, with other values in each."""
        asked = self._small_calls("threads", dtype)
        for threads in _THREADS * _ROUNDS if asked else ():
            calls = [self.random.choice(asked) for _ in range(_EACH * threads)]
            if not self.ask_several(calls, f", in {threads} threads at once", threads=threads):
                return

    def call_long(self, dtype: torch.dtype, times: int) -> None:
        """Calls ten times as often, or as often as some seconds allow, and looks whether the memory
        of the candidate grows without end."""
        asked = self._small_calls("many", dtype)[:2]
        where = f"{dtype_name(dtype)}: {asked[0].sample.name}" if asked else ""

        def call(batch: int) -> bool:
            return self.ask_several(asked, ", many calls later", times=batch)

        for again in range(_AGAIN if asked else 0):
            grown, made = growth(call, self.worker.memory, _MANY * times // len(asked), _LONG)
            if not grown:
                return
            if again == _AGAIN - 1:
                said = f"{grown >> 10} KiB more after the second half of {len(asked) * made} calls"
                self.find("memory grows", where, said)

    def _small_calls(self, kind: str, dtype: torch.dtype) -> list[Asked]:
        """Draws calls of the typical sample, every other one with gradients; none where something
        is wrong already, or where a definition draws random numbers in the order of its calls."""
        if not self.definition.own or self.record.findings:
            return []
        drawn = [self.draw(dtype) for _ in range(_VALUES)]
        samples = self._typical([*zip(*drawn, strict=True)])
        if not self.is_small(samples[0]):
            return []
        return [
            Asked(kind, dtype, s, self.cotangent(s) if self.gradients and i % 2 else None)
            for i, s in enumerate(samples)
        ]

    def draw(self, dtype: torch.dtype, seed: int | None = None) -> list[Sample]:
        """Draws values for all samples: new ones, or those of a seed."""
        torch.manual_seed(self.random.getrandbits(60) if seed is None else seed)
        return list(self.operator.samples(torch.device(self.worker.device), dtype))

    def cotangent(self, sample: Sample) -> Any:
        """Draws a gradient of the output."""

        def draw(t: Tensor) -> Tensor:
            return torch.randn(t.shape, dtype=torch.float64).to(self.worker.device, t.dtype)

        return tree_map(draw, self._output(sample))

    def ask(self, asked: Asked, *, compared: bool = True, **options: Any) -> Reply | None:
        """Asks for one call and judges the results; returns None where there are none."""
        self.record.calls += 1
        sample = asked.sample
        where = f"call {self.record.calls}, {dtype_name(asked.dtype)}: {sample.name}"
        if not self.definition.own:
            asked = replace(asked, seed=self.random.getrandbits(31))
        with self._finding(where):
            reply = self.worker.call(
                sample.args, dict(sample.kwargs), asked.cotangent, self.seconds, seed=asked.seed,
                positions=asked.positions, **options,
            )  # fmt: skip
            self.record.operations += [c for c in reply.calls if c not in self.record.operations]
            self._judge_reply(asked, where, reply, compared)
            return reply
        return None

    def ask_several(self, asked: Sequence[Asked], said: str, **options: int) -> bool:
        """Asks for several calls and judges the results.

        Args:
            said: what is special about them.
            options: of :class:`exchange.Several`.

        Returns:
            Whether there are results.
        """
        self.record.calls += len(asked) * options.get("times", 1)
        where = f"{dtype_name(asked[0].dtype)}: {asked[0].sample.name}{said}"
        calls = [(each.sample.args, dict(each.sample.kwargs), each.cotangent) for each in asked]
        with self._finding(where):
            replies = self.worker.call_several(calls, self.seconds, **options)
            for each, reply in zip(asked, replies, strict=True):
                self._judge_reply(each, where, reply, compared=True)
            return True
        return False

    @contextmanager
    def _finding(self, where: str) -> Iterator[None]:
        """Notes how a worker misbehaves meanwhile; raises :class:`Ended` where it has ended."""
        try:
            yield
        except Misbehaved as error:
            known = (name for said, name in _ERRORS.items() if said in error.detail)
            self.find(next(known, error.name), where, error.detail)
            if error.name != "error":
                raise Ended from error

    def _judge_reply(self, asked: Asked, where: str, reply: Reply, compared: bool) -> None:
        for i in reply.changed:
            self.find("changed input", where, f"argument {i} is not what it was before the call")
        if compared:
            self.record.compared += 1
            self._compare(asked, where, reply.results)

    def find(self, name: str, where: str, detail: str) -> None:
        """Notes what is wrong."""
        self.record.findings.append(Finding(name, where, detail))
        if len(self.record.findings) >= _ENOUGH_FINDINGS:
            raise Ended

    def _compute(self, asked: Asked, exactly: bool) -> dict[str, Tensor]:
        """Computes the reference's results, of an operator of hoconv's kind exactly or not."""
        call = asked.sample.args, dict(asked.sample.kwargs)
        if self.definition.own:
            call = on_cpu(call, in_float64=exactly and not self.operator.bitwise)
        if asked.seed is not None:
            torch.manual_seed(asked.seed)
        args, kwargs = call
        if asked.cotangent is not None:
            wanted = asked.cotangent, torch.float64, asked.positions
            return output_and_gradients(self.reference, args, kwargs, *wanted)
        with torch.no_grad():
            return named(self.reference(*args, **kwargs))

    def _compare(self, asked: Asked, where: str, results: dict[str, Tensor]) -> None:
        sample = asked.sample
        kept, expected = self._expected.get((id(sample), asked.cotangent is None), (None, {}))
        if kept is not sample or asked.seed is not None:
            expected = self._compute(asked, exactly=True)
            if asked.kind in _SEVERAL and asked.seed is None:  # which come again
                self._expected[id(sample), asked.cotangent is None] = sample, expected
        if results.keys() != expected.keys():
            self.find("wrong structure", where, f"expected {[*expected]}, got {[*results]}")
            return
        dtypes = {name: t.dtype for name, t in named(self._output(sample)).items()}
        inputs = [_hash(t) for t in tree_leaves(sample.args) if isinstance(t, Tensor)]
        for what, exact in expected.items():
            result = results[what]
            wanted = tuple(exact.shape), dtypes.get(what, result.dtype)
            if (given := (tuple(result.shape), result.dtype)) != wanted:
                self.find("wrong shape", where, f"{what}: expected {wanted}, got {given}")
                return
            if same_bits(result, exact):
                continue
            failure = self._failure(asked, what, result, exact)
            if failure and self.definition.own and not self.operator.bitwise:
                nearest = self._nearest(asked, what, result, exact)
                if not self._failure(asked, what, result, nearest):
                    failure, exact = None, nearest
            self._note_error(asked, what, result, exact)
            earlier, of_inputs = self._seen.setdefault(_hash(result), (where, inputs))
            if not failure or (
                asked.kind in _VARIED and self._is_ill_conditioned(asked, what, result, exact)
            ):
                continue
            if of_inputs != inputs and bool((result != result.flatten()[0]).any()):
                name, failure = "result of an earlier call", f"{failure}; it is that of {earlier}"
            else:
                name = WRONG[asked.kind]
            self.find(name, where, failure)

    def _failure(
        self, asked: Asked, what: str, result: Tensor, exact: Tensor, least: float = 0.0
    ) -> str | None:
        """Returns what is wrong with a result, by the declared tolerance or a larger one."""
        name, tolerance = dtype_name(asked.dtype), self.operator.tolerances[asked.dtype]
        row = Row(self.operator.name, "candidate", self.worker.device, name, max(tolerance, least))
        judges = {"special": row.judge_special, "scale": row.judge_parts}
        judges.get(asked.kind, row.judge_error)(what, result, exact)
        return row.failures[0] if row.failures else None

    def _note_error(self, asked: Asked, what: str, result: Tensor, exact: Tensor) -> None:
        """Notes the error of a sample's result, if it is the largest."""
        if asked.kind == "sample":
            errors = self.record.errors[dtype_name(asked.dtype)]
            kind, error = what.partition(" ")[0].partition("[")[0], relative_error(result, exact)
            errors[kind] = error if math.isnan(error) else max(errors[kind], error)

    def _is_ill_conditioned(self, asked: Asked, what: str, result: Tensor, exact: Tensor) -> bool:
        """Returns whether the definition itself, in the dtype of the call, fails so, or nearly."""
        own = self._compute(asked, exactly=False)[what]
        allowed = _AS_THE_REFERENCE * relative_error(own, exact)
        fails = self._failure(asked, what, own, exact)
        return bool(fails) or not self._failure(asked, what, result, exact, allowed)

    def _nearest(self, asked: Asked, what: str, result: Tensor, exact: Tensor) -> Tensor:
        """Returns of each number what is nearer to the result: that of the definition in float64,
        or that of the definition in the dtype of the call. Where it rounds or compares at a tie,
        neither is more exact."""
        own = self._compute(asked, exactly=False)[what].cpu().double()
        result, exact = result.cpu().double(), exact.cpu().double()
        return torch.where((result - own).abs() < (result - exact).abs(), own, exact)

    def _look_again(self, asked: Asked, reply: Reply) -> None:
        where = f"{dtype_name(asked.dtype)}: {asked.sample.name}"
        try:
            again = self.worker.again(reply.nonce, self.seconds)
        except Misbehaved as error:
            self.find(error.name, where, error.detail)
            raise Ended from error
        if any(
            what in again and not same_bits(t, again[what]) for what, t in reply.results.items()
        ):
            self.find("changed result", where, "a result is not what it was: later calls write to "
                      "its memory, or it is in the memory of an argument")  # fmt: skip

    def _variants(
        self, dtype: torch.dtype, typical: Sample, samples: list[Sample]
    ) -> Iterator[Asked]:
        """Yields calls with other sizes, in other forms, and with values that random ones never
        are."""

        def wanted(sample: Sample) -> Any:
            return self.cotangent(sample) if self.gradients else None

        for sample in self._of_other_sizes(samples):
            yield Asked("size", dtype, sample, wanted(sample))
        for form in forms(typical, self.cotangent(typical)):
            sample = Sample(form.args, typical.kwargs, f"{typical.name}, {form.name}")
            cotangent = form.cotangent if self.gradients and form.positions else None
            yield Asked("form", dtype, sample, cotangent, form.positions)
        if dtype != torch.float16:  # which has not the range
            for sample in of_other_scales(typical):
                yield Asked("scale", dtype, sample, wanted(sample))
        for sample in of_special_values(typical):
            yield Asked("special", dtype, sample)

    def _of_other_sizes(self, samples: list[Sample]) -> Iterator[Sample]:
        drawn = (
            of_another_size(self.random.choice(samples), self.random) for _ in range(4 * _SIZES)
        )
        defined = (sample for sample in drawn if sample is not None and self._is_defined(sample))
        return itertools.islice(defined, _SIZES)

    def _is_defined(self, sample: Sample) -> bool:
        try:
            return self._size(sample) > 0
        except Exception:  # the definition refuses such sizes
            return False

    def _judge_precision(self, dtype: torch.dtype, typical: Sample) -> None:
        """Notes errors as large as a lower precision's, which the reference does not have."""
        (least, lower), name = LOWER.get(dtype, (math.inf, "")), dtype_name(dtype)
        error, asked = self.record.errors[name]["output"], Asked("sample", dtype, typical)
        if error < least:
            return
        exact, rounded = (self._compute(asked, exactly) for exactly in (True, False))
        of_reference = max(relative_error(rounded[what], t) for what, t in exact.items())
        if error > MUCH_WORSE * of_reference:
            said = f"the error {error:.1e} is that of {lower}, not of {name}"
            self.find("lower precision", f"{name}: all samples", said)

    def _typical(self, pairs: list[tuple[Sample, ...]]) -> tuple[Sample, ...]:
        """Returns the smallest samples with enough numbers to judge parts of them, or else the
        largest."""
        ordered = sorted(pairs, key=lambda pair: self._size(pair[0]))
        return next((pair for pair in ordered if self._size(pair[0]) >= ENOUGH), ordered[-1])

    def is_small(self, sample: Sample) -> bool:
        """Returns whether the tensors of several such calls fit into memory."""
        tensors = tree_leaves((sample.args, self._output(sample)))
        return sum(t.nbytes for t in tensors if isinstance(t, Tensor)) < _SMALL

    def _size(self, sample: Sample) -> int:
        return min((t.numel() for t in tree_leaves(self._output(sample))), default=0)

    def _output(self, sample: Sample) -> Any:
        """Returns the output of the reference for such a call, without values."""
        call = sample.args, dict(sample.kwargs)
        key = repr(tree_map(lambda v: (v.shape, v.dtype) if isinstance(v, Tensor) else v, call))
        if key not in self._outputs:
            args, kwargs = on_cpu(call, in_float64=False) if self.definition.own else call
            with torch.no_grad():
                output = self.reference(*args, **kwargs)
            self._outputs[key] = tree_map(lambda t: t.new_empty(()).expand(t.shape), output)
        return self._outputs[key]


def _hash(t: Tensor) -> bytes:
    """Returns a hash of the values of a tensor that is small."""
    if t.nbytes > _SMALL:
        return secrets.token_bytes()
    flat = t.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.blake2b(flat.numpy().data).digest()
