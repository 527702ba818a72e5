"""Differentiates a program by reverse-mode differentiation of its IR.

The gradient is a program, too: its steps run backwards in time and carry the gradients of the
states. The gradient of a weight is one product after the loop, over all steps and rows: of the
operands that the forward steps gave to the product, and of the gradients of its results. Of the
values of the forward steps that the backward steps read, :mod:`.saved` chooses which are saved and
which are rematerialised; random masks are drawn again.

Gradients are added up in the dtype of the states; those of products are cast to theirs.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from hoconv.recurrent.frontend import functions
from hoconv.recurrent.frontend.axes import cat
from hoconv.recurrent.frontend.symbol import Builder, Symbol
from hoconv.recurrent.ir.functions import FUNCTIONS
from hoconv.recurrent.ir.kinds import BY_AXES, DELAY, SOURCES, is_elementwise
from hoconv.recurrent.ir.program import (
    Delay,
    Op,
    Program,
    Replay,
    State,
    Value,
    Yield,
    find_operands,
    flat,
)
from hoconv.recurrent.passes.gradient import by_axes
from hoconv.recurrent.passes.gradient.saved import Recompute, choose_saved, select_rematerialized
from hoconv.recurrent.passes.rewrite import substitute
from hoconv.recurrent.passes.simplify import simplify


def differentiate(
    program: Program, recompute: Recompute = "cheap", sparse: bool = False
) -> tuple[Program, Program]:
    """The program, which also returns the saved values, and its gradient.

    The gradient reads the program's params and sequences, ``d_output`` (T, B, n) and what was
    saved, by the names of the results that hold it; its states ``d_<state>`` begin with the
    gradients of the final states and end with those of the initial ones. Its results are
    ``d_<sequence>`` of each real sequence and ``d_<i>`` of the params by number, where they have a
    gradient.

    Args:
        program: without groups; its last op of rate ``step`` may be anything.
        recompute: what the gradient computes again, rather than read what is saved.
        sparse: whether of the states only those at which a segment of steps begins need be saved:
            the gradient computes the others again, from values that are saved and no state.
    """
    steps = _StepAdjoint(program)
    saved = _choose_sparse(program, steps, recompute) if sparse else (
        choose_saved(program, steps.needed(), recompute)
    )  # fmt: skip
    return _with_saved(program, saved, sparse), _backward(program, steps, saved, recompute, sparse)


def _choose_sparse(program: Program, steps: _StepAdjoint, recompute: Recompute) -> list[Value]:
    """Chooses what is saved, so that the next states can be computed again of what is."""
    needed, count = steps.needed() & steps.live(), -1
    saved: list[Value] = []
    while count < len(needed):
        count = len(needed)
        saved = choose_saved(program, needed, recompute, sparse=True)
        again = select_rematerialized(list(flat(program.step)), needed, saved)
        read = needed.union(*(op.values for op in again))
        saved = [v for v in saved if v in read]
        needed |= {s.next for s in _find_replayed(program, saved)}
    return saved


def _find_replayed(program: Program, saved: list[Value]) -> list[State]:
    """The saved states that a step computes."""
    return [s for s in program.states if s.value in saved and s.next.type.rate == "step"]


class _Adjoint:
    """Accumulates the gradients of values, which arrive in parts (ranges of features)."""

    def __init__(self, builder: Builder) -> None:
        self.builder = builder
        self.parts: dict[Value, list[tuple[int, int, Symbol]]] = defaultdict(list)

    def add(self, value: Value, g: Symbol, start: int = 0, stop: int | None = None) -> None:
        if value.type.dtype == "bool":
            return
        if self.builder.rate == "sequence":
            match g.value.type.rate, value.type.rate:
                case (("sequence" | "constant"), "once"):
                    g = self.builder.apply("total", g)
                case "sequence", "constant":
                    g = self.builder.apply("sum_steps", g)
        g = self.builder.cast(g, self.builder.dtype)
        self.parts[value].append((start, value.type.size if stop is None else stop, g))

    def total(self, value: Value) -> Symbol | None:
        """The sum of the parts of a value's gradient; None without parts."""
        remaining = sorted(self.parts.pop(value, []), key=lambda part: part[:2])
        total = None
        while remaining:  # each round concatenates parts that do not overlap
            row, rest, end = [], [], 0
            for start, stop, g in remaining:
                if start < end:
                    rest.append((start, stop, g))
                    continue
                if start > end:
                    row.append(self.builder.zeros(start - end, value))
                width = stop - start
                row.append(g if g.shape[-1] == width else g + self.builder.zeros(width, value))
                end = stop
            if end < value.type.size:
                row.append(self.builder.zeros(value.type.size - end, value))
            whole = cat(*row) if len(row) > 1 else row[0]
            total = whole if total is None else total + whole
            remaining = rest
        return total

    def through(self, op: Op) -> None:
        """Propagates the gradient of an op's result to its operands, except to weights."""
        g = self.total(op.result)
        if g is None or op.kind in SOURCES:
            return
        builder = self.builder
        if op.kind in ("linear", "linear_t"):
            self.product(op, builder.cast(g, op.result.type.dtype))
            return
        if op.kind == "slice":
            start, stop = map(int, op.attrs)
            self.add(op.values[0], g, start, stop)
            return
        if op.kind == "cat":
            start = 0
            for part in op.values:
                stop = start + part.type.size
                self.add(part, g[:, start:stop])
                start = stop
            return
        if op.kind in BY_AXES:
            gradients = by_axes.differentiate(builder, op, g)
            for operand, gradient in zip(op.values, gradients, strict=True):
                self.add(operand, gradient)
            return
        operands = [Symbol(builder, i) if isinstance(i, Value) else i for i in op.inputs]
        derivative = FUNCTIONS[op.kind].derivative
        assert derivative is not None, op.kind  # a condition has no gradient to pass on
        gradients = derivative(functions, g, Symbol(builder, op.result), *operands)
        for operand, gradient in zip(op.inputs, gradients, strict=True):
            if isinstance(operand, Value) and gradient is not None:
                if is_elementwise(op.kind) and operand.type.size < gradient.shape[-1]:
                    gradient = functions.sum(gradient)
                self.add(operand, gradient)

    def product(self, op: Op, g: Symbol) -> None:
        raise NotImplementedError


class _StepAdjoint(_Adjoint):
    """The adjoint of a step.

    Attributes:
        products: the ``linear`` ops of the step, each with the gradient of its result.
        following: the gradients of the states that the step read.
        outside: the gradients of the sequences and the vectors of parameters that it read.
    """

    def __init__(self, program: Program) -> None:
        super().__init__(Builder("step", program.wide))
        self.program = program
        self.products: list[tuple[Op, Value]] = []
        self.d_output = Value(program.yields[0].sequence.type, "d_output")
        self.carried = [Value(s.value.type, f"d_{s.name}") for s in program.states]
        for state, carried in zip(program.states, self.carried, strict=True):
            self.add(state.next, Symbol(self.builder, carried))
        self.add(program.yields[0].source, Symbol(self.builder, self.d_output))
        for op in reversed(list(flat(program.step))):
            self.through(op)
        self.following = [self._whole(s.value) for s in program.states]
        self.outside: dict[Value, Value] = {}
        for value in list(self.parts):
            g = self._whole(value)
            if value.type.rate == "sequence":
                g = self.builder.cast(Symbol(self.builder, g), value.type.dtype).value
            self.outside[value] = g

    def _whole(self, value: Value) -> Value:
        g = self.total(value)
        return (self.builder.zeros(value.type.size, value) if g is None else g).value

    def product(self, op: Op, g: Symbol) -> None:
        x, weight = op.values[:2]
        self.products.append((op, g.value))
        kind = "linear_t" if op.kind == "linear" else "linear"
        self.add(x, self.builder.apply(kind, g, weight, dtype=g.value.type.dtype))

    def needed(self) -> set[Value]:
        """The values of the forward steps that the backward ones read."""
        made = {op.result for op in self.builder.ops} | {*self.carried, self.d_output}
        read = {v for op in self.builder.ops for v in op.values} | set(self.following)
        read |= {op.values[0] for op, _ in self.products}
        return {v for v in read - made if v.type.rate == "step"}

    def live(self) -> set[Value]:
        """The values of which a gradient is computed: some ops compute those of constants."""
        found = {*self.following, *self.outside.values()}
        found |= {v for op, g in self.products for v in (g, op.values[0])}
        return find_operands(self.builder.ops, found)


class _SequenceAdjoint(_Adjoint):
    """The adjoint of the ops before the loop, on whole sequences.

    Attributes:
        weights: the gradient of each weight.
        delays: by the value of each delayed state, the gradient of its final one, and of its next
            values those that ``delay`` makes of it and of the gradients of the states.
    """

    def __init__(self, wide: str) -> None:
        super().__init__(Builder("sequence", wide))
        self.weights: dict[Value, Value] = {}
        self.delays: dict[Value, tuple[Value, Value]] = {}

    def product(self, op: Op, g: Symbol) -> None:
        self.multiply(op, g, op.values[0])
        x, weight = op.values[:2]
        self.add(x, self.builder.apply("linear_t", g, weight, dtype=g.value.type.dtype))

    def through(self, op: Op) -> None:
        if op.kind != DELAY:
            super().through(op)
            return
        source, initial, *valid = op.values
        g = self.total(op.result)
        if g is None:  # that of the final state, which the caller gives, is passed on all the same
            g = self.builder.zeros(source.type.size, source)
        d_final = Value(initial.type, f"d_{initial.hint}")
        delayed = self.builder.apply(DELAY, g, d_final, *valid)
        self.delays[op.result] = d_final, delayed.value
        for each in valid:  # next values past the end of a sequence are of no step
            delayed = functions.where(Symbol(self.builder, each), delayed, 0.0)
        self.add(source, delayed)

    def multiply(self, op: Op, g: Symbol, x: Value) -> None:
        """The gradients of the weight and bias of a ``linear`` whose operand was the sequence x."""
        weight = op.values[1]
        of_product = g
        if x.type.rate == "constant" and g.value.type.rate == "sequence":
            of_product = self.builder.apply("sum_steps", g, dtype=g.value.type.dtype)
        product = self.builder.apply("outer", of_product, x, dtype=weight.type.dtype)
        if weight in self.weights:  # the step multiplies by it more than once
            product = self.builder.apply(
                "add", Symbol(self.builder, self.weights[weight]), product, dtype=weight.type.dtype
            )
        self.weights[weight] = product.value
        if len(op.values) > 2:
            self.add(op.values[2], self.builder.apply("total", g))


def _with_saved(program: Program, saved: list[Value], sparse: bool) -> Program:
    """The program that also returns the values that its steps save, as ``saved_<i>``."""
    yields = []
    states = {s.value for s in _find_replayed(program, saved)} if sparse else set()
    for i, value in enumerate(saved):
        sequence = Value(replace(value.type, rate="sequence"), f"saved_{i}")
        yields.append(Yield(f"saved_{i}", value, sequence, value in states))
    # The backward steps may read what is computed before the loop as it is.
    made = [(f"kept_{i}", op.result) for i, op in enumerate(flat(program.before))]
    return replace(
        program,
        yields=(*program.yields, *yields),
        results=(*program.results, *((y.name, y.sequence) for y in yields), *made),
    )


def _backward(
    program: Program, steps: _StepAdjoint, saved: list[Value], recompute: Recompute, sparse: bool
) -> Program:
    replayed = _find_replayed(program, saved) if sparse else []
    needed = steps.needed() & steps.live() if sparse else steps.needed()
    needed |= {s.next for s in replayed}
    again = select_rematerialized(list(flat(program.step)), needed, saved)
    values = {
        value: Value(replace(value.type, rate="sequence"), f"saved_{i}")
        for i, value in enumerate(saved)
    }
    sequences = [*program.sequences, ("d_output", steps.d_output)]
    sequences += [(f"saved_{i}", values[value]) for i, value in enumerate(saved)]
    before = []
    for i, op in enumerate(flat(program.before)):
        if recompute == "all" and op.kind != DELAY:  # of which the initial states are not here
            before.append(op)
        else:
            sequences.append((f"kept_{i}", op.result))
    step = []
    for op in [*again, *steps.builder.ops]:
        clone = substitute(op, values)
        values[op.result] = Value(op.result.type, op.result.hint)
        step.append(Op(clone.kind, clone.inputs, values[op.result], clone.attrs))

    yields: dict[Value, Yield] = {}

    def sequence(value: Value) -> Value:
        """The sequence of a value over all steps; a yield writes what the steps compute."""
        value = values.get(value, value)
        if value.type.rate != "step":
            return value
        if value not in yields:
            whole = Value(replace(value.type, rate="sequence"))
            yields[value] = Yield(f"written_{len(yields)}", value, whole)
        return yields[value].sequence

    after = _SequenceAdjoint(steps.builder.dtype)
    for op, g in steps.products:
        after.multiply(op, Symbol(after.builder, sequence(g)), sequence(op.values[0]))
    for value, g in steps.outside.items():
        after.add(value, Symbol(after.builder, sequence(g)))
    for op in reversed(list(flat(program.before))):
        after.through(op)

    results: list[tuple[str, Value]] = []
    for name, value in (
        *program.sequences, *((str(i), p.value) for i, p in enumerate(program.params))
    ):  # fmt: skip
        g = after.weights.get(value)
        if g is None and (total := after.total(value)) is not None:
            g = total.value
        if g is not None:
            g = after.builder.cast(Symbol(after.builder, g), value.type.dtype)
            results.append((f"d_{name}", g.value))
    program = Program(
        name=program.name.replace("forward", "backward"),
        params=program.params,
        sequences=tuple(sequences),
        states=tuple(
            State(f"d_{s.name}", carried, values.get(g, g))
            for s, carried, g in zip(program.states, steps.carried, steps.following, strict=True)
        ),
        before=(*before, *steps.builder.before),
        step=tuple(step),
        after=tuple(after.builder.ops),
        delays=tuple(Delay(f"d_{d.name}", *after.delays[d.value]) for d in program.delays),
        yields=tuple(yields.values()),
        replays=tuple(Replay(values[s.value], values.get(s.next, s.next)) for s in replayed),
        results=tuple(results),
        reverse=not program.reverse,
    )
    return simplify(program)
