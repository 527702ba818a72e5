"""Asks a worker for calls that it does not foresee, and judges what it gives back.

The reference is computed when the answer is there, in the process of the judge.
"""

from __future__ import annotations

import hashlib
import math
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hoconv.dispatch.declaration import Sample
from hoconv.tools.check import LOWER, MUCH_WORSE
from hoconv.tools.checking.row import Row
from hoconv.tools.commands import dtype_name
from hoconv.tools.judging import exchange
from hoconv.tools.judging.calls import Calls
from hoconv.tools.judging.definition import Definition
from hoconv.tools.judging.record import WRONG, Asked, Ended, Finding, Record
from hoconv.tools.judging.session import Misbehaved, Reply, Worker
from hoconv.tools.testing.comparison import (
    named,
    on_cpu,
    output_and_gradients,
    relative_error,
    same_bits,
)
from hoconv.tools.testing.many_calls import growth
from hoconv.tools.testing.usages import REFUSABLE, USAGES

_REPEATED = 1 / 4  # of the calls come again, with the same values
_DIFFERENTIATED = 2 / 3  # of the calls, where gradients are promised
_KEPT = 8  # results of each dtype are looked at again
_VALUES = 8  # of the sample that is called often
_MORE = 20  # calls of one sample, longer than a ring of buffers that somebody may reuse
_SMALL = 1 << 26  # bytes of a result that may be hashed
_ENOUGH_FINDINGS = 12
_THREADS, _ROUNDS, _EACH = (2, 4, 9), 5, 4  # threads at once; times; calls of each thread
_SECONDS = 10.0  # of calls with following sizes
_OPEN = 32  # files that a process has opened and not closed, too many to be kept for use
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
# Kinds that no definition vouches for.
_VARIED = "size", "form", "special", "scale", "number", "usage"


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
        self.calls = Calls(definition, worker.device, seed, gradients)
        self.record = Record()
        self._expected: dict[tuple[int, int], tuple[Sample, Any, dict[str, Tensor]]] = {}
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
        seeds = [self.calls.random.getrandbits(60) for _ in range(3)]
        kept: list[tuple[Asked, Reply]] = []
        for i, seed in enumerate([*seeds[:2], seeds[0], seeds[2]]):
            for sample in self.calls.samples(dtype, seed):
                asked, keep = Asked("sample", dtype, sample), self.calls.is_small(sample) and i < 2
                reply = self.ask(asked, keep=keep, traced=not i)
                if reply and keep:
                    kept.append((asked, reply))
        for asked, reply in kept:
            self._look_again(asked, reply)

    def _judge_samples(self, dtype: torch.dtype) -> None:
        self._expected.clear()
        pairs = [*zip(self.calls.samples(dtype), self.calls.samples(dtype), strict=True)]
        typical = self.calls.typical(pairs)
        plan = [*pairs, *(pair[:1] for pair in pairs if self.calls.random.random() < _REPEATED)]
        self.calls.random.shuffle(plan)
        # The results of the first are kept, and looked at after the others.
        order = [(s, self.gradients) for s in typical] + [(s, False) for s in typical]
        order += [(s, self.calls.random.random() < _DIFFERENTIATED) for pair in plan for s in pair]
        order += [(self.calls.random.choice(typical), False) for _ in range(_MORE)]
        cotangents = {id(s): self.calls.cotangent(s) for pair in pairs for s in pair}
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
            samples = [pair[0] for pair in pairs]
            for asked in self.calls.mixtures(dtype, *typical):
                self.ask(asked)
            for asked in self.calls.variants(dtype, typical[0], samples):
                self.ask(asked)
            end = time.monotonic() + _SECONDS
            for asked in self.calls.of_many_sizes(dtype, typical[0]):
                if time.monotonic() > end:
                    break
                self.ask(asked)

    def call_in_programs(self, dtype: torch.dtype) -> None:
        """Judges what programs compute that do more with a call than to read its results."""
        for typical in self._small_calls("usage", dtype)[:1]:
            for asked in self.calls.programs(dtype, typical.sample):
                try:
                    self._compute(asked, exactly=True)
                except Exception:  # the definition cannot be used so
                    continue
                self.ask(asked, may_refuse=asked.usage in REFUSABLE)

    def call_often(self, dtype: torch.dtype, times: int, seconds: float) -> None:
        """Calls one sample many times, with a few values in random order, to find rare faults."""
        end = time.monotonic() + seconds
        if not all(map(self.calls.is_small, self.calls.samples(dtype))):
            return
        drawn = [self.calls.samples(dtype) for _ in range(_VALUES)]
        place = min(range(len(drawn[0])), key=lambda i: (not self.calls.size(drawn[0][i]), i))
        while self.record.more < times and time.monotonic() < end:
            if self.ask(Asked("more", dtype, self.calls.random.choice(drawn)[place])) is None:
                return
            self.record.more += 1

    def call_at_once(self, dtype: torch.dtype) -> None:
        """Calls from several threads at once, with other values in each."""
        asked = self._small_calls("threads", dtype)
        for threads in _THREADS * _ROUNDS if asked else ():
            calls = [self.calls.random.choice(asked) for _ in range(_EACH * threads)]
            if not self.ask_several(calls, f", in {threads} threads at once", threads=threads):
                return

    def call_long(self, dtype: torch.dtype, times: int) -> None:
        """Calls ten times as often, or as often as some seconds allow, and looks whether the memory
        of the candidate grows without end."""
        asked = self._small_calls("many", dtype)[:2]
        where = f"{dtype_name(dtype)}: {asked[0].sample.name}" if asked else ""
        opened = self.worker.descriptors()

        def call(batch: int) -> bool:
            return self.ask_several(asked, ", many calls later", times=batch)

        for again in range(_AGAIN if asked else 0):
            grown, made = growth(call, self.worker.memory, _MANY * times // len(asked), _LONG)
            if (left := self.worker.descriptors() - opened) >= _OPEN:
                self.find("files stay open", where, f"{left} more after {len(asked) * made} calls")
                return
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
        drawn = [self.calls.samples(dtype) for _ in range(_VALUES)]
        samples = self.calls.typical([*zip(*drawn, strict=True)])
        if not self.calls.is_small(samples[0]):
            return []
        return [
            Asked(kind, dtype, s, self.calls.cotangent(s) if self.gradients and i % 2 else None)
            for i, s in enumerate(samples)
        ]

    def ask(
        self, asked: Asked, *, compared: bool = True, may_refuse: bool = False, **options: Any
    ) -> Reply | None:
        """Asks for one call and judges the results; returns None where there are none.

        Args:
            may_refuse: whether an error is no fault.
            options: of :class:`exchange.Call`.
        """
        self.record.calls += 1
        sample = asked.sample
        where = f"call {self.record.calls}, {dtype_name(asked.dtype)}: {sample.name}"
        if not self.definition.own:
            asked = replace(asked, seed=self.calls.random.getrandbits(31))
        with self._finding(where, may_refuse):
            reply = self.worker.call(
                sample.args, dict(sample.kwargs), asked.cotangent, self.seconds, seed=asked.seed,
                positions=asked.positions, usage=asked.usage, reused=asked.reused, **options,
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
    def _finding(self, where: str, may_refuse: bool = False) -> Iterator[None]:
        """Notes how a worker misbehaves meanwhile; raises :class:`Ended` where it has ended."""
        try:
            yield
        except Misbehaved as error:
            if may_refuse and error.name == "error":
                return
            known = (name for said, name in _ERRORS.items() if said in error.detail)
            self.find(next(known, error.name), where, error.detail)
            if error.name != "error":
                raise Ended from error

    def _judge_reply(self, asked: Asked, where: str, reply: Reply, compared: bool) -> None:
        for what in reply.changed:
            self.find("changed input", where, f"{what} is not what it was before the call")
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
            function = (
                USAGES[asked.usage](self.calls.reference) if asked.usage else self.calls.reference
            )
            wanted = asked.cotangent, torch.float64, asked.positions
            return output_and_gradients(function, args, kwargs, *wanted)
        with torch.no_grad():
            return named(self.calls.reference(*args, **kwargs))

    def _compare(self, asked: Asked, where: str, results: dict[str, Tensor]) -> None:
        sample = asked.sample
        key = id(sample), id(asked.cotangent)
        kept, cotangent, expected = self._expected.get(key, (None, None, {}))
        if kept is not sample or cotangent is not asked.cotangent or asked.seed is not None:
            try:
                expected = self._compute(asked, exactly=True)
            except Exception:
                if asked.kind in _VARIED:
                    return  # the definition refuses such a call
                raise
            if asked.kind in _SEVERAL and asked.seed is None:  # which come again
                self._expected[key] = sample, asked.cotangent, expected
        if results.keys() != expected.keys():
            self.find("wrong structure", where, f"expected {[*expected]}, got {[*results]}")
            return
        dtypes = {name: t.dtype for name, t in named(self.calls.output(sample)).items()}
        inputs = [_hash(t) for t in tree_leaves(sample.args) if isinstance(t, Tensor)]
        for what, exact in expected.items():
            result = results[what]
            dtype = dtypes.get(what, result.dtype)
            for name, wanted, given in (
                ("wrong shape", tuple(exact.shape), tuple(result.shape)),
                ("wrong dtype", dtype, result.dtype),
            ):
                if given != wanted:
                    self.find(name, where, f"{what}: expected {wanted}, got {given}")
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
            if of_inputs != inputs and not _is_constant(result):
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
        if asked.kind == "size":  # a sum of n times as many numbers has errors √n times as large
            tolerance = self.operator.tolerances[asked.dtype]
            allowed = max(allowed, tolerance * math.sqrt(max(1, asked.growth)))
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


def _is_constant(t: Tensor) -> bool:
    """Returns whether all numbers of a tensor are the same, or NaN."""
    return bool((t == t.flatten()[0]).all() or t.isnan().all())


def _hash(t: Tensor) -> bytes:
    """Returns a hash of the values of a tensor that is small."""
    if t.nbytes > _SMALL:
        return secrets.token_bytes()
    flat = t.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.blake2b(flat.numpy().data).digest()
