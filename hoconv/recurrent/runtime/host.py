"""Writes what the host does around the loop of a program, as a function of Python.

A call on small tensors takes as long as its Python. So the instructions of the host are written out
as plain statements: nothing is looked up in a call but the tensors themselves.

B batch, T time steps, n features.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.guards import (
    _reinterpret_tensor,  # pyright: ignore[reportAttributeAccessIssue]
)

from hoconv.recurrent.ir.evaluate import DTYPES, in_dtype
from hoconv.recurrent.ir.program import Group, Op, Program, Value
from hoconv.recurrent.runtime import products
from hoconv.recurrent.runtime.instructions import HostProgram, Instruction
from hoconv.recurrent.runtime.interpret import (
    Loop,
    LoopRun,
    Tensors,
    evaluate_op,
    run_group,
    run_steps,
)
from hoconv.recurrent.runtime.packing import separate

# Yields the arguments of a loop, is sent what that returns, and yields the results.
Steps = Generator[Any, tuple[Tensors, list[Tensor]], None]
GroupLoops = Mapping[Group, tuple[Program, Loop]]


class HostCode:
    """What the host does in a run of a program, without autograd.

    Args:
        loop: runs the steps; without one they run op by op.
    """

    def __init__(self, host: HostProgram, loop: Loop | None) -> None:
        writer = _Writer(host)
        code = compile(writer.write(), f"<host of {host.program.name}>", "exec")
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
            The results of the host's program. Gradients may share memory, other tensors do not.
        """
        steps = self.start(sequences, states, parameters, seed)
        run = next(steps)
        return steps.send(self._loop(run.program, run.values, run.initial, run.seed))

    def start(self, *inputs: Any) -> Steps:
        """As a call, for who runs the loop: yields what that is called with, is sent what it
        returns, and yields the results."""
        return self._steps(*inputs, self._groups)


class _Writer:
    """Writes the function of the host; `constants` are its global names."""

    def __init__(self, host: HostProgram) -> None:
        self.host = host
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
            "program": host.program,
            **DTYPES,
        }

    def constant(self, value: Any, name: str) -> str:
        """The name of a global that is this object."""
        name = f"{name}{len(self.constants)}"
        self.constants[name] = value
        return name

    def write(self) -> str:
        """The text of the generator ``steps``."""
        host, at, lines = self.host, 0, []
        for name in ("sequences", "states", "parameters"):
            count = getattr(host, name)
            lines += _unpack(range(at, at + count), name)
            at += count
        for each in host.instructions:
            lines += self._write(each)
        found = _list(map(_name, host.results))
        if host.separate:
            found = f"separate({found}, (*sequences, *states, *parameters))"
        head = "def steps(sequences, states, parameters, seed, groups):"
        return "\n    ".join((head, *lines, f"yield {found}"))

    def _write(self, each: Instruction) -> Iterable[str]:
        """The statements of an instruction."""
        inputs, attrs = [*map(_name, each.inputs)], each.attrs
        match each.kind:
            case "columns":
                yield from self._view_columns(each)
            case "loop":
                yield from self._run(each)
            case "group":
                yield from self._compute_group(each)
            case "split":
                rows = _list(f"{like}.shape[0]" for like in inputs[1:])
                yield f"{_targets(each.outputs)}= {inputs[0]}.split_with_sizes({rows})"
            case "sum":
                dims, dtype = attrs
                for x, output in zip(inputs, each.outputs, strict=True):
                    yield f"{_name(output)} = {x}.sum({dims}, dtype={dtype})"
            case _:
                yield f"{_name(each.outputs[0])} = {self._compute(each.kind, inputs, attrs)}"

    def _compute(self, kind: str, inputs: Sequence[str], attrs: tuple[Any, ...]) -> str:
        """The expression of an instruction with one result."""
        x = next(iter(inputs), "")  # some ops have only numbers
        match kind:
            case "cat":
                return f"cat({_list(inputs)}, {attrs[0]})"
            case "contiguous":
                return f"{x}.contiguous()"
            case "unsqueeze":
                return f"{x}.unsqueeze(0)"
            case "narrow":
                return f"{x}.narrow(1, {attrs[0]}, {attrs[1]})"
            case "cast":
                return f"in_dtype({x}, {attrs[0]})"
            case "linear":
                return f"linear({', '.join(inputs)})"
            case "outer":
                products = [f"outer({x}, {other})" for other in inputs[1:]]
                return products[0] if len(products) == 1 else f"cat({_list(products)}, -1)"
            case "linear_t":
                return f"linear({x}, {inputs[1]}.mT)"
            case "zero_rows":
                n, dtype = attrs
                return f"{x}.new_zeros((), dtype={dtype}).expand({x}.shape[0], {n})"
            case "zeros":
                return f"{x}.new_zeros({attrs[0]})"
            case "zeros_like":
                return f"zeros_like({x})"
            case "op":
                return self._evaluate(attrs[0], inputs)
            case _:
                raise AssertionError(kind)

    def _evaluate(self, op: Op, inputs: Sequence[str]) -> str:
        tensors = iter(inputs)
        operands = _list(
            next(tensors) if isinstance(i, Value) else self.constant(i, "number") for i in op.inputs
        )
        return f"evaluate_op({self.constant(op, 'op')}, {operands}, {self._device})"

    @property
    def _device(self) -> str:
        return f"{_name(self.host.sequences)}.device"  # of the first state

    def _view_columns(self, each: Instruction) -> Iterator[str]:
        (whole,), (text, shape, first) = map(_name, each.inputs), each.attrs
        yield f"rows, width = {whole}.shape"
        yield f"if rows != {shape[0]} or width < {first + shape[1]}:"
        yield f"    raise ValueError(misfit({text!r}, {shape}, {whole}))"
        # A view that PyTorch does not check: faster than narrow.
        yield f"{_name(each.outputs[0])} = view({whole}, {shape}, (width, 1), {first})"

    def _run(self, each: Instruction) -> Iterator[str]:
        (values,), yields = each.attrs, self.host.program.yields
        inputs, initial = each.inputs[: len(values)], each.inputs[len(values) :]
        given = f"{self._values(values, inputs)}, {_list(map(_name, initial))}"
        yield f"written, final = yield LoopRun(program, {given}, seed)"
        for made, output in zip(yields, each.outputs):
            yield f"{_name(output)} = written[{self.constant(made.sequence, 'V')}]"
        yield from _unpack(each.outputs[len(yields) :], "final")

    def _compute_group(self, each: Instruction) -> Iterator[str]:
        of, read = each.attrs
        group, values = self.constant(of, "group"), self._values(read, each.inputs)
        yield f"found = compute_group({group}, groups.get({group}), {values}, {self._device})"
        # The loop of a group returns only what is read outside of it.
        for op, output in zip(of.ops, each.outputs, strict=True):
            yield f"{_name(output)} = found.get({self.constant(op.result, 'V')})"

    def _values(self, values: Iterable[Value], tensors: Iterable[int]) -> str:
        """A dictionary of these values."""
        pairs = (f"{self.constant(v, 'V')}: {_name(t)}" for v, t in zip(values, tensors))
        return f"{{{', '.join(pairs)}}}"


def _name(tensor: int) -> str:
    return f"t{tensor}"


def _list(items: Iterable[str]) -> str:
    return f"[{', '.join(items)}]"


def _targets(tensors: Iterable[int]) -> str:
    return "".join(f"{_name(t)}, " for t in tensors)


def _unpack(tensors: Iterable[int], of: str) -> list[str]:
    """A statement that gives the elements of a sequence names; none if there are no names."""
    return [f"{text}= {of}"] if (text := _targets(tensors)) else []


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
