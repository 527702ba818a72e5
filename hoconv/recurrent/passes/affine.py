"""Finds steps that are affine in their states: next = A state + b, where A and b read no state.

Such steps compose to one of the same form, so that they need not wait for each other (Blelloch,
Prefix Sums and Their Applications, 1990). What counts is the value of an op and not its gradient:
``stop_gradient(h)`` is affine in h. A state that no step reads is no part of this, nor is a running
sum: both follow from the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hoconv.recurrent.frontend.symbol import Builder, Symbol
from hoconv.recurrent.ir.kinds import LAYOUT, PRODUCTS
from hoconv.recurrent.ir.program import BYTES, Op, Operand, Program, State, Value, flat

# Affine, but not feature by feature.
_MIXING = (*PRODUCTS, *LAYOUT, "arrange", "einsum", "sum")
# A factor of 0 would say the same of finite states only.
_CUT_APART = "where of one state but not of another"


@dataclass(frozen=True, eq=False)
class AffineSteps:
    """Steps whose states are affine in the states before.

    Attributes:
        states: s, those that the steps read.
        mixing: the kind of an op that mixes features, if there is one: then what follows is empty.
        matrix: A of each feature, by rows: numbers, or values of the step.
        offset: b, likewise.
        cut: a condition of the step, where there is one: where it is true the next states are b
            whatever s is, infinite or NaN included.
        before: ops that compute these from parameters alone.
        ops: ops that do from what the step reads and from its other ops.
    """

    states: tuple[State, ...]
    mixing: str = ""
    matrix: tuple[tuple[Operand, ...], ...] = ()
    offset: tuple[Operand, ...] = ()
    cut: Value | None = None
    before: tuple[Op, ...] = ()
    ops: tuple[Op, ...] = ()


def find_affine(program: Program) -> AffineSteps | str:
    """Says how the steps of a program are affine in their states, or in words why they are not."""
    ops = list(flat(program.step))
    read = {v for op in ops for v in op.values} | {y.source for y in program.yields}
    read |= {s.next for s in program.states}
    states = tuple(s for s in program.states if s.total is None and s.value in read)
    if not states:
        return AffineSteps(())
    forms = _Forms(states)
    for op in ops:
        forms.add(op)
    rows: list[_Form] = []
    for state in states:
        found = forms.of(state.next)
        if isinstance(found, str):
            return found
        rows.append(found)
    if mixing := next((row.mixing for row in rows if row.mixing), ""):
        return AffineSteps(states, mixing)
    if len({row.cut for row in rows}) > 1:
        return _CUT_APART
    return AffineSteps(
        states,
        "",
        tuple(tuple(_operand(row.factors.get(s.value, 0.0)) for s in states) for row in rows),
        tuple(_operand(row.offset) for row in rows),
        rows[0].cut,
        tuple(forms.builder.before),
        tuple(forms.builder.ops),
    )


Number = float | Symbol


def _operand(number: Number) -> Operand:
    return number.value if isinstance(number, Symbol) else number


@dataclass(frozen=True)
class _Form:
    """The value Σ factor state + offset, of numbers and of values that read no state.

    Attributes:
        factors: by state; none of a value that reads no state.
        cut: a condition: where it is true, the value is the offset alone.
        mixing: the kind of an op that mixes features: then the value is affine, and the numbers
            say nothing.
    """

    factors: Mapping[Value, Number]
    offset: Number = 0.0
    cut: Value | None = None
    mixing: str = ""


class _Forms:
    """The forms of the values of a step; in words, why a value has none.

    Attributes:
        builder: has the ops that compute factors and offsets.
    """

    def __init__(self, states: Sequence[State]) -> None:
        self.builder = Builder("step", states[0].value.type.dtype)
        self.names = {s.value: s.name for s in states}
        self.found: dict[Value, _Form | str] = {s.value: _Form({s.value: 1.0}) for s in states}

    def of(self, operand: Operand) -> _Form | str:
        if not isinstance(operand, Value):
            return _Form({}, operand)
        return self.found.get(operand) or _Form({}, Symbol(self.builder, operand))

    def add(self, op: Op) -> None:
        """Finds the form of an op's result, unless that reads no state."""
        inputs = op.inputs[:1] if op.kind == "straight_through" else op.inputs
        forms: list[_Form] = []
        for form in map(self.of, inputs):
            if isinstance(form, str):
                self.found[op.result] = form
                return
            forms.append(form)
        if any(form.factors for form in forms):
            self.found[op.result] = self._find(op, forms)

    def _find(self, op: Op, forms: Sequence[_Form]) -> _Form | str:
        if not _is_affine(op, [bool(form.factors) for form in forms]):
            read = {state for form in forms for state in form.factors}
            names = ", ".join(name for state, name in self.names.items() if state in read)
            return f"{op.kind} of what depends on {names}"
        mixing = next((form.mixing for form in forms if form.mixing), "")
        if mixing or self._mixes(op):
            read = (state for form in forms for state in form.factors)
            return _Form(dict.fromkeys(read, 1.0), mixing=mixing or op.kind)
        match op.kind, forms:
            case "neg", [a]:
                return self._map(a, lambda x: self._apply("neg", x))
            case "cast", [a]:
                dtype = op.result.type.dtype
                return self._map(
                    a, lambda x: self.builder.cast(x, dtype) if isinstance(x, Symbol) else x
                )
            case ("add" | "sub") as kind, [a, b]:
                return self._sum(kind, a, b)
            case "mul", [a, b]:
                a, b = (a, b) if a.factors else (b, a)
                return self._scale("mul", a, b.offset)
            case "div", [a, b]:
                return self._scale("div", a, b.offset)
            case "where", [condition, a, b]:
                return self._choose(condition.offset, a, b)
        return forms[0]  # stop_gradient, straight_through

    def _mixes(self, op: Op) -> bool:
        """Returns whether an op reads other features of a state, or one feature for all."""
        repeated = any(v in self.found and v.type.size < op.result.type.size for v in op.values)
        return op.kind in _MIXING or repeated

    def _map(self, form: _Form, function: Callable[[Number], Number]) -> _Form:
        factors = {state: function(factor) for state, factor in form.factors.items()}
        return replace(form, factors=factors, offset=function(form.offset))

    def _scale(self, kind: str, form: _Form, by: Number) -> _Form:
        made = self._map(form, lambda x: self._apply(kind, x, by))
        if form.cut is None or isinstance(form.offset, Symbol) or isinstance(by, float):
            return made
        # A number is the value where the form is cut, and 0 becomes NaN by an infinite factor.
        # Elsewhere 0 stands for no offset at all.
        zero = self.builder.apply(kind, form.offset, by)
        cut = Symbol(self.builder, form.cut)
        return replace(made, offset=self._apply("where", cut, zero, made.offset))

    def _sum(self, kind: str, a: _Form, b: _Form) -> _Form | str:
        states = dict.fromkeys((*a.factors, *b.factors))
        cut = a.cut or b.cut
        if a.factors and b.factors and a.cut is not b.cut:
            if len(states) > 1:
                return _CUT_APART
            cut = None if a.cut is None or b.cut is None else self._and(a.cut, b.cut)
            a, b = self._cut(a), self._cut(b)
        factors = {
            s: self._apply(kind, a.factors.get(s, 0.0), b.factors.get(s, 0.0)) for s in states
        }
        return _Form(factors, self._apply(kind, a.offset, b.offset), cut)

    def _cut(self, form: _Form) -> _Form:
        """The form with factors of 0 where it is cut, which differs for infinite states."""
        if form.cut is None:
            return form
        cut = Symbol(self.builder, form.cut)
        factors = {s: self._apply("where", cut, 0.0, f) for s, f in form.factors.items()}
        return replace(form, factors=factors)

    def _choose(self, condition: Any, a: _Form, b: _Form) -> _Form | str:
        offset = self._apply("where", condition, a.offset, b.offset)
        if not a.factors:
            return _Form(b.factors, offset, self._or(condition.value, b.cut))
        if not b.factors:
            return _Form(a.factors, offset, self._or((~condition).value, a.cut))
        if a.factors.keys() != b.factors.keys():
            return _CUT_APART
        factors = {
            s: self._apply("where", condition, a.factors[s], b.factors[s]) for s in a.factors
        }
        cut = a.cut
        if a.cut is not b.cut:
            cuts = [
                self._and(of.value, each)
                for of, each in ((condition, a.cut), (~condition, b.cut))
                if each is not None
            ]
            cut = cuts[0] if len(cuts) == 1 else self._or(*cuts)
        return _Form(factors, offset, cut)

    def _and(self, a: Value, b: Value) -> Value:
        return self.builder.apply("and", a, b).value

    def _or(self, a: Value, b: Value | None) -> Value:
        return a if b is None else self.builder.apply("or", a, b).value

    def _apply(self, kind: str, *operands: Any) -> Number:
        """Applies an op, or finds what equals it: the factors of most states are 0 or 1."""
        match kind, [x if isinstance(x, float) else None for x in operands]:
            case "neg", [float(x)]:
                return -x
            case "add", [float(x), float(y)]:
                return x + y
            case "sub", [float(x), float(y)]:
                return x - y
            case "mul", [float(x), float(y)]:
                return x * y
            case ("add", [0.0, _]) | ("mul", [1.0, _]):
                return operands[1]
            case ("add" | "sub", [_, 0.0]) | ("mul" | "div", [_, 1.0]):
                return operands[0]
            case ("mul" | "div", [0.0, _]) | ("mul", [_, 0.0]):
                return 0.0
            case "sub", [0.0, _]:
                return -operands[1]
            case "where", [_, float(x), float(y)] if x == y:
                return x
        return self.builder.apply(kind, *operands)


def _is_affine(op: Op, stateful: Sequence[bool]) -> bool:
    """Returns whether an op is affine in its stateful operands."""
    match op.kind:
        case "mul" | "einsum":
            return sum(stateful) == 1
        case "div" | "linear" | "linear_t":
            return not any(stateful[1:])
        case "where":
            return not stateful[0]
        case "cast":  # rounding is not
            return BYTES[op.result.type.dtype] >= BYTES[op.values[0].type.dtype]
    return op.kind in ("neg", "add", "sub", "stop_gradient", "straight_through", *_MIXING)
