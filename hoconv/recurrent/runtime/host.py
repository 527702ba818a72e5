"""Writes what the host does around the loop of a program, as a function of Python.

A call on small tensors takes as long as its Python. What a program does before and after its loop
is known when the program is, so it is written out as plain statements: nothing is looked up in a
call but the tensors themselves.

B batch, T time steps, n features.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.guards import (
    _reinterpret_tensor,  # pyright: ignore[reportAttributeAccessIssue]
)

from hoconv.recurrent.ir.evaluate import DTYPES, in_dtype
from hoconv.recurrent.ir.program import Group, Op, Piece, Program, Type, Value, flat
from hoconv.recurrent.runtime import products
from hoconv.recurrent.runtime.interpret import (
    Loop,
    LoopRun,
    Tensors,
    evaluate_op,
    run_group,
    run_steps,
)
from hoconv.recurrent.runtime.packing import find_sources, group_params

# Yields the arguments of a loop, is sent what that returns, and yields the results.
Steps = Generator[Any, tuple[Tensors, list[Tensor]], None]
GroupLoops = Mapping[Group, tuple[Program, Loop]]


class HostCode:
    """What the host does in a run of a program, without autograd.

    Args:
        parameters: the names of the cell's parameters, in the order in which they are given.
        backward: whether it returns the gradients of x and of the parameters, instead of the
            program's results.
        loop: runs the steps; without one they run op by op.
    """

    def __init__(
        self, program: Program, parameters: Sequence[str], backward: bool, loop: Loop | None
    ) -> None:
        writer = _Writer(program, parameters)
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
            states: (B, n) before the first step, in the program's order.
            parameters: of the cell.
            seed: int64 scalar, of the random masks.

        Returns:
            The program's results, or the gradients of the first sequence, x, and of the parameters;
            then the states after the last step. Gradients may share memory, other tensors do not.
        """
        steps = self.start(sequences, states, parameters, seed)
        run = next(steps)
        return steps.send(self._loop(run.program, run.values, run.initial, run.seed))

    def start(self, *inputs: Any) -> Steps:
        """As a call, for who runs the loop: yields what that is called with, is sent what it
        returns, and yields the results."""
        return self._steps(*inputs, self._groups)


class _Writer:
    """Writes the function of a program; `constants` are its global names."""

    def __init__(self, program: Program, parameters: Sequence[str]) -> None:
        self.program = program
        self.states = [s for s in program.states if s.total is None]  # those that are given
        self.first = [f"first{i}" for i in range(len(self.states))]
        self.last = {s: f"last{i}" for i, s in enumerate(program.states)}
        # Running sums of which nothing but the total over the rows is read.
        others = (op for op in flat((*program.before, *program.after)) if op.kind != "total")
        read = {v for op in others for v in op.values} | {v for _, v in program.results}
        totals = ((s.total, s) for s in program.states if s.total is not None)
        self.summed = {total: self.last[s] for total, s in totals if total not in read}
        self.parameters = {name: f"p{i}" for i, name in enumerate(parameters)}
        self.constants: dict[str, Any] = {
            "cat": torch.cat,
            "zeros_like": torch.zeros_like,
            "separate": separate,
            "misfit": _explain_misfit,
            "view": _reinterpret_tensor,
            "linear": products.linear,
            "outer": products.outer,
            "in_dtype": in_dtype,
            "evaluate_op": evaluate_op,
            "compute_group": _compute_group,
            "LoopRun": LoopRun,
            "program": program,
        }
        self.names: dict[Value, str] = {}

    def constant(self, value: Any, name: str) -> str:
        """The name of a global that is this object."""
        name = f"{name}{len(self.constants)}"
        self.constants[name] = value
        return name

    def name(self, value: Value) -> str:
        return self.names.setdefault(value, f"v{len(self.names)}")

    def write(self, backward: bool) -> str:
        """The text of the generator ``steps``."""
        lines = [
            *_unpack([self.name(v) for _, v in self.program.sequences], "sequences"),
            *_unpack(self.first, "states"),
            *_unpack(self.parameters.values(), "parameters"),
            *self._pack(),
            *self._run(),
            *(self._return_gradients() if backward else self._return_results()),
        ]
        head = "def steps(sequences, states, parameters, seed, groups):"
        return "\n    ".join((head, *lines))

    def _pack(self) -> list[str]:
        """Makes the params of the program: :func:`hoconv.recurrent.runtime.packing.pack`."""
        groups, _ = group_params(self.program)
        wholes: dict[tuple[str, ...], str] = {}
        lines = []
        p = self.program
        used = {v for op in flat((*p.before, *p.after)) for v in op.values} | p.read
        used |= {value for _, value in p.results}
        for i, (param, names) in enumerate(zip(p.params, groups, strict=True)):
            if param.value not in used:
                continue
            made = f"a{i}"
            if names is None:
                pieces = [self.parameters[p.parameter] + _columns(p) for p in param.pieces]
                lines.append(f"{made} = {_concatenate(pieces)}")
            else:
                if names not in wholes:
                    wholes[names] = f"w{i}"
                    own = [self.parameters[name] for name in names]
                    lines.append(f"w{i} = {_concatenate(own)}")
                made, of = wholes[names], param.pieces[0]
                if of.columns:
                    whole, made, shape = made, f"a{i}", param.value.type.shape
                    # A view that PyTorch does not check: faster than narrow.
                    lines += [
                        f"rows, width = {whole}.shape",
                        f"if rows != {shape[0]} or width < {of.columns[1]}:",
                        f"    raise ValueError(misfit({str(of)!r}, {shape}, {whole}))",
                        f"{made} = view({whole}, {shape}, (width, 1), {of.columns[0]})",
                    ]
            self.names[param.value] = made
        return lines

    def _run(self) -> list[str]:
        p = self.program
        lines = [line for item in p.before for line in self._compute(item)]
        # Running sums begin with zeros, which nothing writes to: those of one type share them.
        zeros = {s.value.type: f"zeros{i}" for i, s in enumerate(p.states) if s.total is not None}
        lines += [
            f"{name} = {self.first[0]}.new_zeros((), dtype={self._dtype(type)})"
            f".expand({self.first[0]}.shape[0], {type.size})"
            for type, name in zeros.items()
        ]
        given = iter(self.first)
        initial = [
            f"in_dtype({next(given)}, {self._dtype(s.value.type)})"
            if s.total is None
            else zeros[s.value.type]
            for s in p.states
        ]
        params = (each.value for each in p.params if each.value in p.read)
        values = self._values((*params, *(v for _, v in p.sequences), *p.made_before))
        lines += [
            f"written, final = yield LoopRun(program, {values}, {_list(initial)}, seed)",
            *(f"{self.name(y.sequence)} = written[{self.constant(y.sequence, 'V')}]"
              for y in p.yields),
            *_unpack(self.last.values(), "final"),
            *(f"{self.name(s.total)} = {self.last[s]}.unsqueeze(0)"
              for s in p.states if s.total is not None and s.total not in self.summed),
        ]  # fmt: skip
        return [*lines, *(line for item in p.after for line in self._compute(item))]

    def _dtype(self, type: Type) -> str:
        self.constants[type.dtype] = DTYPES[type.dtype]
        return type.dtype

    def _values(self, values: Iterable[Value]) -> str:
        """A dictionary of these values."""
        pairs = (f"{self.constant(v, 'V')}: {self.name(v)}" for v in dict.fromkeys(values))
        return f"{{{', '.join(pairs)}}}"

    def _compute(self, item: Op | Group) -> list[str]:
        if isinstance(item, Group):
            made = [op.result for op in item.ops]
            read = (v for op in item.ops for v in op.values if v not in made)
            group = self.constant(item, "group")
            return [
                f"found = compute_group({group}, groups.get({group}), {self._values(read)}, "
                f"{self.first[0]}.device)",
                # The loop of a group returns only what is read outside of it.
                *(f"{self.name(v)} = found.get({self.constant(v, 'V')})" for v in made),
            ]
        operands = [
            self.name(i) if isinstance(i, Value) else self.constant(i, "number")
            for i in item.inputs
        ]
        match item.kind:
            case "linear" | "outer":
                given = f"{item.kind}({', '.join(operands)})"
            case "linear_t":
                given = f"linear({operands[0]}, {operands[1]}.mT)"
            case "total" if item.inputs[0] in self.summed:
                dtype = self._dtype(item.result.type)
                given = f"{self.summed[item.values[0]]}.sum(0, dtype={dtype})"
            case "total":
                given = f"{operands[0]}.sum((0, 1), dtype={self._dtype(item.result.type)})"
            case _:
                op = self.constant(item, "op")
                given = f"evaluate_op({op}, {_list(operands)}, {self.first[0]}.device)"
        return [f"{self.name(item.result)} = {given}"]

    def _return_results(self) -> list[str]:
        values = [value for _, value in self.program.results]
        found = _list([*map(self.name, values), *(self.last[s] for s in self.states)])
        written = [y.sequence for y in self.program.yields]
        if len({*values}) == len(values) and {*values}.issubset(written):
            return [f"yield {found}"]  # the loop writes each to memory of its own
        return [f"yield separate({found}, (*sequences, *states, *parameters))"]

    def _return_gradients(self) -> list[str]:
        """Returns the gradient of x and of each parameter, 0 where the program has none; some are
        rows of one tensor, beside each other."""
        names = {name: self.name(value) for name, value in self.program.results}
        lines: list[str] = []

        def rows(of: Iterable[str]) -> str:
            return _list([f"{self.parameters[name]}.shape[0]" for name in of])

        found: dict[str, str] = {}
        for of, sources in find_sources(self.program):
            parts = []
            for i, number in sources:
                param = self.program.params[i]
                pieces = [piece.parameter for piece in param.pieces]
                like = self.parameters[pieces[0]]
                part = names.get(f"d_{i}", f"{like}.new_zeros({param.value.type.shape})")
                if number is not None and len(pieces) > 1:
                    part = f"{part}.split_with_sizes({rows(pieces)})[{number}]"
                parts.append(part)
            whole = _concatenate(parts, -1)
            if len(of) == 1:
                found[of[0]] = whole
            else:
                own = [f"of_{self.parameters[name]}" for name in of]
                lines.append(f"{', '.join(own)} = {whole}.split_with_sizes({rows(of)})")
                found |= zip(of, own, strict=True)
        d_x = names.get("d_x", f"zeros_like({self.name(self.program.sequences[0][1])})")
        own = [found[name] for name in self.parameters]
        return [*lines, f"yield {_list([d_x, *own, *(self.last[s] for s in self.states)])}"]


def _unpack(names: Iterable[str], of: str) -> list[str]:
    """A statement that gives the elements of a sequence names; none if there are no names."""
    text = "".join(f"{name}, " for name in names)
    return [f"{text}= {of}"] if text else []


def _list(items: Sequence[str]) -> str:
    return f"[{', '.join(items)}]"


def _concatenate(tensors: Sequence[str], dim: int = 0) -> str:
    if len(tensors) == 1:
        return f"{tensors[0]}.contiguous()"
    return f"cat({_list(tensors)}, {dim})"


def _columns(piece: Piece) -> str:
    if piece.columns is None:
        return ""
    start, stop = piece.columns
    return f".narrow(1, {start}, {stop - start})"


def separate(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    """Copies what shares memory with an earlier tensor, or with one of `others`."""
    taken = {t.untyped_storage().data_ptr() for t in others}
    found = []
    for tensor in tensors:
        start = tensor.untyped_storage().data_ptr()
        found.append(tensor.clone() if start in taken else tensor.contiguous())
        taken.add(start)
    return found


def _explain_misfit(read: str, shape: tuple[int, ...], whole: Tensor) -> str:
    return (
        f"hoconv::recurrent: {read}: the program reads {shape} of it and of the parameters below "
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
