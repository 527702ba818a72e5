"""Writes what the host does around the loop of a program, as a function of Python.

A call on small tensors takes as long as its Python. What a program does before and after its loop
is known when the program is. So it is written out as plain statements: nothing is looked up in a
call but the tensors themselves.

B batch, T time steps, n features.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.guards import (
    _reinterpret_tensor,  # pyright: ignore[reportAttributeAccessIssue]
)

from hoconv.recurrent.ir.evaluate import DTYPES, delay, in_dtype
from hoconv.recurrent.ir.program import Group, Op, Param, Piece, Program, Value, flat
from hoconv.recurrent.runtime import products
from hoconv.recurrent.runtime.interpret import (
    GroupLoops,
    Loop,
    LoopRun,
    Tensors,
    evaluate_op,
    run_group,
    run_steps,
)
from hoconv.recurrent.runtime.packing import find_sources, group_params, separate

# Yields the arguments of a loop, is sent what that returns, and yields the results.
Steps = Generator[Any, tuple[Tensors, list[Tensor]], None]


class HostCode:
    """The host's part of a run of a program, without autograd.

    Args:
        parameters, states: the names of the cell's, in the order in which they are given.
        backward: whether a run returns the gradients of x, of constants and of parameters, instead
            of the program's results; then the states after the last step.
        loop: runs the steps; without one they run op by op.
    """

    def __init__(
        self,
        program: Program,
        parameters: Sequence[str],
        states: Sequence[str],
        backward: bool,
        loop: Loop | None,
    ) -> None:
        writer = _Writer(program, parameters, [f"{'d_' * backward}{name}" for name in states])
        code = compile(writer.write(backward), f"<host of {program.name}>", "exec")
        exec(code, writer.constants)
        self._steps: Callable[..., Steps] = writer.constants["steps"]
        self._loop = loop or run_steps
        self._groups: GroupLoops = loop.groups if loop else {}

    def __call__(
        self,
        sequences: Sequence[Tensor],
        states: Sequence[Tensor],
        parameters: Sequence[Tensor],
        seed: Tensor | None,
    ) -> list[Tensor]:
        """Runs the program.

        Args:
            sequences: (T, B, n), or (n,) if made of parameters alone, in the program's order.
            states: (B, n) before the first step.
            parameters: of the cell.
            seed: int64 scalar, of the random masks.

        Returns:
            The results, and the states after the last step. Gradients may share memory, other
            tensors do not.
        """
        steps = self.start(sequences, states, parameters, seed)
        run = next(steps)
        return steps.send(self._loop(run.program, run.values, run.initial, run.seed))

    def start(self, *inputs: Any) -> Steps:
        """As a call, for who runs the loop: yields what that is called with, is sent what it
        returns, and yields the results."""
        return self._steps(*inputs, self._groups)


class _Writer:
    """Writes the function of the host. Its variables are tensors.

    Attributes:
        constants: its global names.
        last: the states after the last step, by name.
    """

    def __init__(self, program: Program, parameters: Sequence[str], states: Sequence[str]) -> None:
        self.program = program
        self.constants: dict[str, Any] = {
            "cat": torch.cat,
            "stack": torch.stack,
            "zeros_like": torch.zeros_like,
            "view": _reinterpret_tensor,
            "delay": delay,
            "linear": products.linear,
            "outer": products.outer,
            "in_dtype": in_dtype,
            "evaluate_op": evaluate_op,
            "compute_group": _compute_group,
            "explain": _explain,
            "separate": separate,
            "LoopRun": LoopRun,
            "program": program,
            **DTYPES,
        }
        self.lines = ["def steps(sequences, states, parameters, seed, groups):"]
        self.count = 0
        sequences = self.unpack("sequences", len(program.sequences))
        self.variables = dict(zip((v for _, v in program.sequences), sequences))
        self.states = dict(zip(states, self.unpack("states", len(states))))
        self.like = self.states[states[0]]
        self.last: dict[str, str] = {}
        self.parameters = dict(zip(parameters, self.unpack("parameters", len(parameters))))

    def write(self, backward: bool) -> str:
        """The text of the generator ``steps``; `backward` as of :class:`HostCode`."""
        self.pack_params()
        for each in self.program.delays:
            initial = self.cast(self.states[each.name], each.initial.type.dtype)
            self.variables[each.initial] = initial
        for item in self.program.before:
            self.compute(item)
        self.run_loop()
        for item in self.program.after:
            self.compute(item)
        values = [value for _, value in self.program.results]
        found = self.unpack_gradients() if backward else [self.variables[v] for v in values]
        results = _list((*found, *(self.last[name] for name in self.states)))
        # The loop writes each yield to memory of its own; of gradients, some may share memory.
        written = {y.sequence for y in self.program.yields}
        if not (backward or (len({*values}) == len(values) and written.issuperset(values))):
            results = f"separate({results}, (*sequences, *states, *parameters))"
        return "\n    ".join((*self.lines, f"yield {results}"))

    def constant(self, value: Any, name: str) -> str:
        """The name of a global that is this object."""
        name = f"{name}{len(self.constants)}"
        self.constants[name] = value
        return name

    def new(self) -> str:
        self.count += 1
        return f"t{self.count}"

    def let(self, expression: str) -> str:
        """Names the value of an expression."""
        self.lines.append(f"{(name := self.new())} = {expression}")
        return name

    def unpack(self, expression: str, count: int) -> list[str]:
        """Names the elements of a sequence."""
        names = [self.new() for _ in range(count)]
        if names:
            self.lines.append(f"{''.join(f'{name}, ' for name in names)}= {expression}")
        return names

    def pack_params(self) -> None:
        """Makes the params of the program: :func:`hoconv.recurrent.runtime.packing.pack`."""
        p = self.program
        used = {v for op in flat((*p.before, *p.after)) for v in op.values} | p.read
        used |= p.returned
        wholes: dict[tuple[str, ...], str] = {}
        for param, names in zip(p.params, group_params(p)[0], strict=True):
            if param.value not in used:
                continue
            if names is None:
                packed = self.concatenate([self.read_piece(piece) for piece in param.pieces])
            else:
                if names not in wholes:
                    wholes[names] = self.concatenate([self.parameters[name] for name in names])
                packed = self.view_columns(wholes[names], param)
            self.variables[param.value] = packed

    def read_piece(self, piece: Piece) -> str:
        whole = self.parameters[piece.parameter]
        if piece.columns is None:
            return whole
        start, stop = piece.columns
        return self.let(f"{whole}.narrow(1, {start}, {stop - start})")

    def view_columns(self, whole: str, param: Param) -> str:
        piece, shape = param.pieces[0], param.value.type.shape
        if piece.columns is None:
            return whole
        first, stop = piece.columns
        self.lines += [
            f"rows, width = {whole}.shape",
            f"if rows != {shape[0]} or width < {stop}:",
            f"    raise ValueError(explain({str(piece)!r}, {shape}, {whole}))",
        ]
        # A view that PyTorch does not check: faster than narrow.
        return self.let(f"view({whole}, {shape}, (width, 1), {first})")

    def concatenate(self, tensors: Sequence[str], dim: int = 0) -> str:
        if len(tensors) == 1:
            return self.let(f"{tensors[0]}.contiguous()")
        return self.let(f"cat({_list(tensors)}, {dim})")

    def run_loop(self) -> None:
        """Runs the loop."""
        p = self.program
        # Running sums begin with zeros, which nothing writes to: those of one type share them.
        zeros: dict[Any, str] = {}
        for state in p.states:
            if state.total is not None and (type := state.value.type) not in zeros:
                zeros[type] = self.let(
                    f"{self.like}.new_zeros((), dtype={type.dtype})"
                    f".expand({self.like}.shape[0], {type.size})"
                )
        initial = [
            zeros[s.value.type] if s.total else self.cast(self.states[s.name], s.value.type.dtype)
            for s in p.states
        ]
        params = (each.value for each in p.params if each.value in p.read)
        values = dict.fromkeys((*params, *(v for _, v in p.sequences), *p.made_before))
        run = f"LoopRun(program, {self.dictionary(values)}, {_list(initial)}, seed)"
        self.lines.append(f"written, final = yield {run}")
        for each in p.yields:
            sequence = self.constant(each.sequence, "V")
            self.variables[each.sequence] = self.let(f"written[{sequence}]")
        last = dict(zip(p.states, self.unpack("final", len(p.states)), strict=True))
        self.add_rows({s.total: name for s, name in last.items() if s.total})
        self.last |= {s.name: name for s, name in last.items() if s.total is None}

    def add_rows(self, sums: Mapping[Value, str]) -> None:
        """Adds running sums over the batch, those of one type at once; the ops after the loop read
        the others as sequences of one step."""
        ops = [*flat(self.program.after)]
        read = {v for op in ops if op.kind != "total" for v in op.values}
        read |= self.program.returned
        alike: dict[Any, list[Op]] = defaultdict(list)
        for op in ops:
            if op.kind == "total" and (value := op.values[0]) in sums.keys() - read:
                alike[value.type, op.result.type.dtype].append(op)
        for (_, dtype), of in alike.items():
            parts = _list(sums[op.values[0]] for op in of)
            names = self.unpack(f"stack({parts}).sum(1, dtype={dtype}).unbind()", len(of))
            self.variables |= zip((op.result for op in of), names, strict=True)
        for value, name in sums.items():
            if value in read:
                self.variables[value] = self.let(f"{name}.unsqueeze(0)")

    def compute(self, item: Op | Group) -> None:
        if isinstance(item, Group):
            self.compute_group(item)
        elif item.result not in self.variables:
            self.variables[item.result] = self.compute_op(item)

    def compute_op(self, op: Op) -> str:
        operands, dtype = [self.variables[v] for v in op.values], op.result.type.dtype
        match op.kind:
            case "linear" | "outer":
                return self.let(f"{op.kind}({', '.join(operands)})")
            case "linear_t":
                return self.let(f"linear({operands[0]}, {operands[1]}.mT)")
            case "total":
                return self.let(f"{operands[0]}.sum((0, 1), dtype={dtype})")
            case "cast":
                return self.cast(operands[0], dtype)
            case "delay":
                return self.delay(op, operands)
        given = _list(
            self.variables[i] if isinstance(i, Value) else self.constant(i, "number")
            for i in op.inputs
        )
        return self.let(f"evaluate_op({self.constant(op, 'op')}, {given}, {self.like}.device)")

    def delay(self, op: Op, operands: Sequence[str]) -> str:
        x = self.variables[self.program.sequences[0][1]]
        options = f"steps={x}.shape[0], reverse={self.program.reverse}"
        found, last = self.unpack(f"delay({', '.join(operands)}, {options})", 2)
        self.last |= {d.name: last for d in self.program.delays if d.value is op.result}
        return found

    def compute_group(self, group: Group) -> None:
        made = [op.result for op in group.ops]
        read = dict.fromkeys(v for op in group.ops for v in op.values if v not in made)
        name, device = self.constant(group, "group"), f"{self.like}.device"
        values = self.dictionary(read)
        self.lines.append(f"found = compute_group({name}, groups.get({name}), {values}, {device})")
        # The loop of a group returns only what is read outside of it.
        for value in made:
            self.variables[value] = self.let(f"found.get({self.constant(value, 'V')})")

    def cast(self, tensor: str, dtype: str) -> str:
        return self.let(f"in_dtype({tensor}, {dtype})")

    def dictionary(self, values: Iterable[Value]) -> str:
        """A dictionary of these values."""
        pairs = (f"{self.constant(v, 'V')}: {self.variables[v]}" for v in values)
        return f"{{{', '.join(pairs)}}}"

    def unpack_gradients(self) -> list[str]:
        """The gradients of x, of constants and of parameters, 0 where the program has none; some
        are rows of one tensor, beside each other."""
        values = dict(self.program.results)
        found: dict[str, str] = {}
        for of, sources in find_sources(self.program):
            parts = []
            for i, number in sources:
                param = self.program.params[i]
                pieces = [self.parameters[piece.parameter] for piece in param.pieces]
                if value := values.get(f"d_{i}"):
                    part = self.variables[value]
                else:
                    part = self.let(f"{pieces[0]}.new_zeros({param.value.type.shape})")
                if number is not None and len(pieces) > 1:
                    part = self.split(part, pieces)[number]
                parts.append(part)
            whole = self.concatenate(parts, -1)
            rows = self.split(whole, [self.parameters[n] for n in of]) if len(of) > 1 else [whole]
            found |= zip(of, rows, strict=True)
        inputs = [
            self.variables[values[f"d_{name}"]]
            if f"d_{name}" in values
            else self.let(f"zeros_like({self.variables[value]})")
            for name, value in (self.program.sequences[0], *self.program.constants)
        ]
        return [*inputs, *(found[name] for name in self.parameters)]

    def split(self, whole: str, like: Sequence[str]) -> list[str]:
        """Names rows of a tensor, as many as each of some others has."""
        rows = _list(f"{tensor}.shape[0]" for tensor in like)
        return self.unpack(f"{whole}.split_with_sizes({rows})", len(like))


def _list(items: Iterable[str]) -> str:
    return f"[{', '.join(items)}]"


def _explain(piece: str, shape: tuple[int, ...], whole: Tensor) -> str:
    return (
        f"hoconv::recurrent: {piece}: the program reads {shape} of it and of the parameters below "
        f"it; got {tuple(whole.shape)}"
    )


def _compute_group(
    group: Group, found: tuple[Program, Loop] | None, values: Tensors, device: torch.device
) -> Tensors:
    """The results of a group before or after the loop, given what it reads."""
    if found and (written := run_group(*found, values)):
        return written
    results: Tensors = {}
    for op in group.ops:
        operands = [
            (results[i] if i in results else values[i]) if isinstance(i, Value) else i
            for i in op.inputs
        ]
        results[op.result] = evaluate_op(op, operands, device)
    return results
