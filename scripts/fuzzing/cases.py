"""A case of an operator: a call, a program that runs it, and the comparison with the definition."""

from __future__ import annotations

import importlib
import pkgutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from fuzzing import operators, transforms
from fuzzing.draw import Draw
from fuzzing.memory import LARGE, MemoryUse
from fuzzing.programs import BACKWARD, PROGRAMS, Program, Randoms
from fuzzing.verdicts import Results, Undefined, Verdict, compare, describe_error, is_refusal

_JITTER = 1e-6  # relative; see `verdicts.compare`
_ADDED = 1e-6  # tolerance of a float32 sum of numbers that are compared bit by bit themselves
_COPIES = 64  # of all tensors or tangents at once, over the steps of a composed call
_EXPORTED_IN_1000 = 15
_INVALID_IN_1000 = 60


@dataclass
class Call:
    """A call of an operator, drawn by the operator's generator.

    Attributes:
        function: ``function(*tensors, impl)``, the public function or a layer.
        definition: ``definition(*tensors)``, in float64; in the tensors' own dtype if `exact`.
            Raises `Undefined` where it has no result.
        tensors: the floating-point arguments, in their layouts.
        what: the options, for the reader.
        dtype: of the tensors.
        tolerances: the declared ones, by dtype; 0 compares bits.
        exact: whether the definition computes in the tensors' own dtype.
        in_float32: whether autocast converts to float32 instead of its own dtype.
        loose: the beginning of a result's name -> a tolerance that replaces the declared one.
        invalid: what is wrong with the arguments, which all implementations must refuse; or "".
        like_input: whether the output has the memory format of the first tensor.
        chains: whether the output can be the first tensor of another call.
        special: whether the result is defined for infinities and NaN in the output's gradient.
        casts: whether autocast casts the tensors only, and no intermediate results.
    """

    function: Callable[..., Tensor]
    definition: Callable[..., Tensor]
    tensors: list[Tensor]
    what: str
    dtype: torch.dtype
    tolerances: Mapping[torch.dtype, float]
    exact: bool = False
    in_float32: bool = False
    loose: dict[str, float] = field(default_factory=dict)
    invalid: str = ""
    like_input: bool = False
    chains: bool = True
    special: bool = True
    casts: bool = True

    def __str__(self) -> str:
        shapes = ", ".join(f"{tuple(t.shape)} strides {t.stride()}" for t in self.tensors)
        invalid = f"; invalid: {self.invalid}" if self.invalid else ""
        return f"{self.what}; {str(self.dtype).removeprefix('torch.')} {shapes}{invalid}"


@dataclass(frozen=True)
class Key:
    """All that determines a case."""

    operator: str
    impl: str
    device: str
    seed: int
    number: int


def operator_names() -> list[str]:
    """Returns the names of the operators that have a generator."""
    return sorted(module.name for module in pkgutil.iter_modules(operators.__path__))


class Case:
    """The case of a key. The constructor draws it and computes nothing."""

    def __init__(self, key: Key) -> None:
        self.key = key
        # Without the implementation: all implementations run the same cases.
        self._draw_key = (key.seed, key.operator, key.number)
        draw = Draw(*self._draw_key, device=key.device)
        self.exported = draw.integer(1, 1000) <= _EXPORTED_IN_1000
        self.program = BACKWARD if self.exported else _choose(draw)
        draw.tiny = self.program.tiny
        # torch.export copies the parameters of a saved program with their strides.
        draw.plain_layouts = self.program.forward_mode or self.exported
        draw.without_gaps = self.exported and key.device == "cuda"
        self.invalid = not self.exported and draw.integer(1, 1000) <= _INVALID_IN_1000
        module = importlib.import_module(f"{operators.__name__}.{key.operator}")
        self.call: Call = module.draw(draw, self.program, self.invalid)
        unusable = (self.program.chains and not self.call.chains) or (
            self.program.name == "under_autocast" and not self.call.casts
        )
        if unusable:
            self.program = BACKWARD
        self.kind = (
            "invalid" if self.call.invalid else "export" if self.exported else self.program.name
        )

    def __str__(self) -> str:
        return f"{self.kind}: {self.call}"

    def judge(self, folder: Path) -> Verdict:
        """Runs the case; saves an exported program in the folder, for another process to load."""
        with warnings.catch_warnings(action="ignore"):
            if self.call.invalid:
                return _must_refuse(lambda: self._function(*self.call.tensors))
            if self.exported:
                return self._export(folder)
            return self._compare()

    def _compare(self) -> Verdict:
        call, program = self.call, self.program
        try:
            expected = self._expected()
        except Undefined:
            return _must_refuse(
                lambda: program.run(self._function, call.tensors, self._randoms(), torch.func)
            )
        inner = [t.clone() if t.numel() < 10**6 else t for t in call.tensors]
        memory = MemoryUse(self.key.device)
        try:
            results = program.run(self._function, call.tensors, self._randoms(), torch.func)
        except Exception as error:
            if is_refusal(error) and program.may_refuse:
                return Verdict("refused", describe_error(error))
            return Verdict("wrong", describe_error(error))
        if (held := memory.most()) > self._most_memory():
            return Verdict("wrong", f"held {held >> 20} MiB for tensors of a few numbers")
        for i, (t, old) in enumerate(zip(call.tensors, inner, strict=True)):
            if not torch.equal(t.nan_to_num(), old.nan_to_num()):
                return Verdict("wrong", f"tensor {i} was changed")
        if call.like_input and "output" in results and results["output"].dim() == 4:
            verdict = self._layout(results["output"])
            if verdict:
                return verdict
        return compare(
            results, expected, {name: self._dtype(name) for name in expected},
            {name: self._tolerance(name) for name in expected},
            lambda: self._expected(_JITTER), _JITTER, self._rounded,
            torch.finfo(self._rounded_to()).eps if program.order > 1 else 0.0,
        )  # fmt: skip

    def _most_memory(self) -> int:
        """Returns the bytes that a case may hold: a Jacobian has a tangent for every number."""
        numbers = sum(t.numel() for t in self.call.tensors)
        copied = numbers**2 if self.program.tiny else numbers
        return LARGE + _COPIES * copied * self.call.dtype.itemsize

    def _layout(self, output: Tensor) -> Verdict | None:
        x = self.call.tensors[0]
        # PyTorch has other rules where the stride of a dimension of one element is unusual.
        strides = torch.empty_like(x, memory_format=torch.channels_last).stride()
        asked = x.stride() == strides and not x.is_contiguous()
        compared = self.program.name in ("forward", "backward")
        if compared and asked and not output.is_contiguous(memory_format=torch.channels_last):
            return Verdict("wrong", f"output: strides {output.stride()}, x's are {x.stride()}")
        return None

    def _export(self, folder: Path) -> Verdict:
        """Saves the program and its expected results, for :func:`fuzzing.exported.judge`."""
        call = self.call
        as_parameters = Draw(*self._draw_key, "parameters").chance(0.5)
        as_parameters &= all(t.numel() for t in call.tensors)  # PyTorch may fail to save empty ones
        given = call.tensors[:1] if as_parameters else call.tensors
        module = _Module(self._function, call.tensors[len(given) :])
        try:
            expected = self._expected()
        except Undefined:
            return Verdict("equal", "not exported")
        try:
            made = torch.export.export(module, tuple(t.detach() for t in given), strict=False)
        except Exception as error:
            return Verdict("wrong", f"export: {describe_error(error)}")
        name = f"{self.key.operator}-{self.key.impl}-{self.key.number}"
        torch.export.save(made, folder / f"{name}.pt2")
        contents = {
            "what": str(self), "tensors": call.tensors, "draw": self._draw_key,
            "dtype": self._rounded_to(), "special": call.special,
            "may_refuse": call.in_float32, "expected": expected,
            "dtypes": {name: self._dtype(name) for name in expected},
            "tolerances": {name: self._tolerance(name) for name in expected},
            "disturbed": self._expected(_JITTER), "jitter": _JITTER, "rounded": self._rounded(),
        }  # fmt: skip
        torch.save(contents, folder / f"{name}.pt")
        return Verdict("exported", name)

    def _expected(self, jitter: float = 0.0, dtype: torch.dtype | None = None) -> Results:
        r = self._randoms(jitter)
        tensors = [r.disturbed(t).to(dtype or t.dtype) for t in self._exact()]
        return self.program.run(self.call.definition, tensors, r, transforms)

    def _rounded(self) -> Results:
        """Returns the definition's results with every step rounded, to float32 at the lowest."""
        if self._rounded_to() == torch.float64:
            return self._expected(2e-16)
        return self._expected(dtype=torch.float32)

    def _function(self, *tensors: Tensor) -> Tensor:
        return self.call.function(*tensors, impl=self.key.impl)

    def _randoms(self, jitter: float = 0.0) -> Randoms:
        return Randoms(self._draw_key, self._rounded_to(), jitter, self.call.special)

    def _rounded_to(self) -> torch.dtype:
        """Returns the dtype that all numbers are rounded to: the tensors', or that of autocast."""
        autocast = self.program.name == "under_autocast"
        if not autocast or self.call.in_float32 or self.call.dtype == torch.float64:
            return self.call.dtype
        return torch.bfloat16

    def _dtype(self, name: str) -> torch.dtype:
        """Returns the expected dtype of a result. A gradient has its tensor's, before autocast."""
        if name != "output":
            return self.call.dtype
        return torch.float32 if self.call.in_float32 else self._rounded_to()

    def _exact(self) -> list[Tensor]:
        """Returns the tensors as the definition takes them."""
        plain_ones = [t.detach().cpu().resolve_neg().clone() for t in self.call.tensors]
        if self.call.exact:
            return [t.contiguous() for t in plain_ones]
        return [t.to(self._rounded_to()).double().contiguous() for t in plain_ones]

    def _tolerance(self, name: str) -> float:
        for start, tolerance in self.call.loose.items():
            if name.startswith(start):
                return tolerance
        adds = self.program.adds or self.program.order > 1
        if self.call.exact and adds and name != "output":
            return _ADDED
        order = self.program.order
        return self.call.tolerances[self._rounded_to()] * (1 + 3 * order if order > 1 else 1)


class _Module(nn.Module):
    """A call as a module, which torch.export needs."""

    def __init__(self, function: Callable[..., Tensor], held: Sequence[Tensor]) -> None:
        super().__init__()
        self.function = function
        self.held = nn.ParameterList([nn.Parameter(t.detach()) for t in held])

    def forward(self, *given: Tensor) -> Tensor:
        return self.function(*given, *self.held)


def _must_refuse(run: Callable[[], object]) -> Verdict:
    try:
        run()
    except Exception as error:
        if is_refusal(error):
            return Verdict("refused", describe_error(error))
        return Verdict("wrong", f"refused by an internal error: {describe_error(error)}")
    return Verdict("wrong", "accepted, although the definition has no result")


def _choose(draw: Draw) -> Program:
    return draw.choice([p for p in PROGRAMS for _ in range(p.often)])


def judge(key: Key, folder: Path, say: Callable[[str], None]) -> Verdict:
    """Runs a case; `say` is told which one before it runs."""
    case = Case(key)
    say(str(case))
    return case.judge(folder)
