"""Registers a recurrent layer in one direction as a torch.library op: schema, fake, autograd.

The op runs one program of a plan: `inference`; `forward`, which also returns what the gradient
needs; or `backward`. For gradients of higher order, PyTorch runs the plan's definition op by op.

B batch, T time steps, n features.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hoconv.dispatch.registration import (
    Op,
    call_one_by_one,
    gradients,
    is_plain,
    records_gradients,
    register_gradient,
    register_vmap,
    without_autocast,
)
from hoconv.recurrent import reference
from hoconv.recurrent.frontend.cell import BoundCell
from hoconv.recurrent.ir.evaluate import DTYPES, accumulate_dtype, in_dtype
from hoconv.recurrent.ir.program import Program, count_segments
from hoconv.recurrent.plans import count_constants, find_plan, find_read
from hoconv.recurrent.runtime.interpret import interpret
from hoconv.recurrent.runtime.packing import pack, separate

if TYPE_CHECKING:
    from hoconv.recurrent.compiled_plan import CompiledPlan

_library = torch.library.Library("hoconv", "FRAGMENT")

# sequences: those of the program, in order. states: before the first step. parameters: in the order
# of the cell's declarations. Returns the results of the program, or for `backward` the gradients of
# x, of constants and of parameters; then the states after the last step.
_library.define(
    "recurrent.compiled(Tensor[] sequences, Tensor[] states, Tensor[] parameters, Tensor? seed, "
    "str plan, str program, str impl) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _run(
    sequences: list[Tensor],
    states: list[Tensor],
    parameters: list[Tensor],
    seed: Tensor | None,
    plan: str,
    which: str,
    impl: str,
) -> list[Tensor]:
    """Runs a program. Gradients may share memory; other results and states do not."""
    made, x = find_plan(plan), sequences[0]
    with without_autocast(x.device.type):  # the program chooses its dtypes itself
        return made.find(which, impl, x)(sequences, states, parameters, seed)


class Inputs(NamedTuple):
    """The tensors of a run: ``recurrent.compiled`` says which."""

    sequences: Sequence[Tensor]
    states: Sequence[Tensor]
    parameters: Sequence[Tensor]
    seed: Tensor | None


def _run_apart(
    sequences: list[Tensor], states: list[Tensor], parameters: list[Tensor], *args: Any
) -> list[Tensor]:
    """As :func:`_run`, but nothing shares memory, as PyTorch expects of an op."""
    found = _run(sequences, states, parameters, *args)
    return separate(found, (*sequences, *states, *parameters))


_library.impl("recurrent.compiled", _run_apart, "CPU")
_library.impl("recurrent.compiled", _run_apart, "CUDA")
compiled_op = Op(torch.ops.hoconv.recurrent.compiled, _run)


@torch.library.register_fake("hoconv::recurrent.compiled")
def _fake(
    sequences: list[Tensor],
    states: list[Tensor],
    parameters: list[Tensor],
    seed: Tensor | None,
    plan: str,
    which: str,
    impl: str,
) -> list[Tensor]:
    program = find_plan(plan).program(which)
    x = sequences[0]
    found = []
    if which == "backward":
        inputs = sequences[: 1 + len(program.constants)]
        found = [torch.empty_like(t, memory_format=torch.contiguous_format)
                 for t in (*inputs, *parameters)]  # fmt: skip
    else:
        sparse = {y.sequence for y in program.yields if y.sparse and impl == "cuda"}
        for _, value in program.results:
            leading = {"once": (), "constant": (1, x.shape[1])}.get(value.type.rate, x.shape[:2])
            if value in sparse:
                leading = count_segments(x.shape[0]), x.shape[1]
            found.append(x.new_empty((*leading, value.type.size), dtype=DTYPES[value.type.dtype]))
    return [*found, *(torch.empty_like(s, memory_format=torch.contiguous_format) for s in states)]


def _name_parameters(made: CompiledPlan, parameters: Sequence[Tensor]) -> dict[str, Tensor]:
    return dict(zip(made.names, parameters, strict=True))


def _name_sequences(program: Program, sequences: Sequence[Tensor]) -> dict[str, Tensor]:
    return dict(zip((name for name, _ in program.sequences), sequences, strict=True))


def _name_states(program: Program, states: Sequence[Tensor]) -> dict[str, Tensor]:
    return dict(zip((s.name for s in program.states if s.total is None), states, strict=True))


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    sequences, states, parameters, seed, ctx.plan, ctx.which, ctx.impl = inputs
    ctx.counts = len(sequences), len(states), len(parameters)
    results = output[: len(output) - len(states)]
    ctx.save_for_backward(*sequences, *states, *parameters, seed, *results)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    if ctx.which != "forward":
        raise RuntimeError(f"hoconv::recurrent: the program {ctx.which!r} has no gradient")
    n_sequences, n_states, n_parameters = ctx.counts
    saved = list(ctx.saved_tensors)
    sequences, saved = saved[:n_sequences], saved[n_sequences:]
    states, saved = saved[:n_states], saved[n_states:]
    parameters, saved = saved[:n_parameters], saved[n_parameters:]
    seed, *results = saved
    inputs = Inputs(sequences, states, parameters, seed)
    d_states = grads[len(grads) - n_states :]
    if torch.is_grad_enabled():
        made = find_plan(ctx.plan)
        with without_autocast(sequences[0].device.type):
            d_inputs, d_initial, d_parameters = differentiate_again(
                made, made.plan.definition, inputs, grads[0], d_states
            )
    else:
        given = read_backward(ctx.plan, inputs, results, grads[0], d_states)
        found = compiled_op(*given, ctx.plan, "backward", ctx.impl)
        n = 1 + count_constants(ctx.plan)
        d_inputs, found = found[:n], found[n:]
        d_parameters, d_initial = found[:n_parameters], found[n_parameters:]
    d_sequences = [*d_inputs, *(None for _ in sequences[len(d_inputs) :])]
    return d_sequences, d_initial, d_parameters, None, None, None, None


def read_backward(
    plan: str, inputs: Inputs, results: Sequence[Tensor], d_output: Tensor | None,
    d_states: Sequence[Tensor | None],
) -> Inputs:  # fmt: skip
    """Returns what the program ``backward`` of a plan reads, given what ``forward`` read and
    returned."""
    d_output = torch.zeros_like(results[0]) if d_output is None else d_output
    known = (*inputs.sequences, *results, d_output)
    sequences = [known[i] for i in find_read(plan)]
    zero = inputs.states[0].new_zeros(())  # nothing writes to it: all elements may be it
    states = [
        zero.expand(state.shape) if gradient is None else gradient
        for gradient, state in zip(d_states, inputs.states, strict=True)
    ]
    return Inputs(sequences, states, inputs.parameters, inputs.seed)


def differentiate_again(
    made: CompiledPlan,
    program: Program,
    inputs: Inputs,
    d_output: Tensor | None,
    d_states: Sequence[Tensor | None],
) -> tuple[list[Tensor | None], list[Tensor | None], list[Tensor | None]]:
    """The gradients of x and constants, of states and of parameters, which autograd can
    differentiate again.

    Args:
        program: the plan's definition, of the direction of `inputs`.
    """
    sequences, states, parameters, seed = inputs
    first = 1 + len(program.constants)
    after = first + len(states)

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        results, final = interpret(
            program,
            pack(program, _name_parameters(made, tensors[after:])),
            _name_sequences(program, [*tensors[:first], *sequences[first:]]),
            _name_states(program, tensors[first:after]),
            seed,
        )
        return results["output"], *final.values()

    args = [*sequences[:first], *states, *parameters]
    found = gradients(run, args, [t.requires_grad for t in args], (d_output, *d_states))
    return found[:first], found[first:after], found[after:]


register_gradient(_library, compiled_op, _differentiate, _save)
register_vmap(_library, compiled_op.overload)


class _CudnnFunction(torch.autograd.Function):
    """A call of cuDNN. Its gradient can be differentiated again, which cuDNN's own cannot be."""

    @staticmethod
    def forward(ctx: Any, made: CompiledPlan, n_states: int, x: Tensor, *tensors: Tensor) -> Any:
        ctx.made, ctx.n_states = made, n_states
        ctx.save_for_backward(x, *tensors)
        ctx.set_materialize_grads(False)
        wanted = ctx.needs_input_grad[2:]
        with torch.set_grad_enabled(any(wanted)):
            ctx.inputs = [t.detach().requires_grad_(w) for t, w in zip((x, *tensors), wanted)]
            states, parameters = ctx.inputs[1 : 1 + n_states], ctx.inputs[1 + n_states :]
            cudnn = made.plan.cudnn
            assert cudnn is not None
            ctx.outputs = cudnn.run(
                ctx.inputs[0], states, _name_parameters(made, parameters), made.reverse
            )
        return tuple(t.detach() for t in ctx.outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return None, None, *call_one_by_one(functools.partial(_differentiate_cudnn, ctx), grads)


def _differentiate_cudnn(ctx: Any, *grads: Tensor | None) -> list[Tensor | None]:
    """The gradients of x, states and parameters."""
    x, *tensors = ctx.saved_tensors
    states, parameters = tensors[: ctx.n_states], tensors[ctx.n_states :]
    if torch.is_grad_enabled():
        with without_autocast(x.device.type):
            inputs = Inputs([x], states, parameters, None)
            (d_x,), d_states, d_parameters = differentiate_again(
                ctx.made, ctx.made.plan.definition, inputs, grads[0], grads[1:]
            )
        return [d_x, *d_states, *d_parameters]
    pairs = [(t, g) for t, g in zip(ctx.outputs, grads, strict=True) if g is not None]
    wanted = [t for t in ctx.inputs if t.requires_grad]
    # backward may be called again; ctx frees the graph.
    found = iter(
        torch.autograd.grad(
            [t for t, _ in pairs], wanted, [g for _, g in pairs],
            retain_graph=True, materialize_grads=True,
        )
    )  # fmt: skip
    return [next(found) if t.requires_grad else None for t in ctx.inputs]


@dataclass(eq=False)
class Call:
    """One run of a cell over a sequence in one direction.

    Attributes:
        cell: the cell with its sizes.
        names: of its parameters, in the order of `parameters`.
        plan: the text of :func:`hoconv.recurrent.plans.request`; it agrees with `valid`, `reset`,
            `training` and `reverse`.
        x: (T, B, I).
        states: (B, n) of each state, before the first step.
        parameters: in the dtype of x.
        valid: (T, B, 1) bool, whether a step is within its sequence; None where all are.
        reset: (T, B, 1) bool, whether a step begins with states of zero; None where none does.
        training: whether noise is drawn.
        seed: int64 scalar, of the random masks, where there are any.
        reverse: whether the first step is the last of x.
        constants: (1, B, n) of each constant of the cell.
        program: the program to run: ``forward`` if a gradient may be wanted, else ``inference``.
    """

    cell: BoundCell
    names: Sequence[str]
    plan: str
    x: Tensor
    states: list[Tensor]
    parameters: list[Tensor]
    valid: Tensor | None = None
    reset: Tensor | None = None
    training: bool = False
    seed: Tensor | None = None
    reverse: bool = False
    constants: Sequence[Tensor] = ()
    program: str = field(init=False)

    def __post_init__(self) -> None:
        self.program = self._choose_program()

    def _choose_program(self) -> str:
        if not records_gradients():
            return "inference"
        # Under a transform of torch.func a tensor may not show that an outer transform
        # differentiates it.
        hidden = not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()
        inputs = (self.x, *self.constants, *self.states, *self.parameters)
        return "forward" if hidden or any(t.requires_grad for t in inputs) else "inference"

    @property
    def inputs(self) -> Inputs:
        """Returns what the program reads; it keeps states in the dtype of sums."""
        wide = accumulate_dtype(self.x.dtype)
        masks = [mask for mask in (self.reset, self.valid) if mask is not None]
        sequences = [self.x, *self.constants, *masks]
        states = [in_dtype(s, wide) for s in self.states]
        return Inputs(sequences, states, self.parameters, self.seed)

    def select(self, found: Sequence[Tensor]) -> list[Tensor]:
        """The output and the final states, in the dtype of x, of what the program returns."""
        final = found[len(found) - len(self.states) :]
        return [found[0], *(in_dtype(s, self.x.dtype) for s in final)]


def run_reference(call: Call) -> list[Tensor]:
    """Calls the cell at every step; returns the output and the final states."""
    output, final = reference.recurrent(
        call.cell, call.x, call.states, dict(zip(call.names, call.parameters, strict=True)),
        constants=call.constants, valid=call.valid, reset=call.reset, training=call.training,
        seed=call.seed, reverse=call.reverse,
    )  # fmt: skip
    return [output, *final]


def run_compiled(impl: str, call: Call) -> list[Tensor]:
    """Runs a program of the plan in C++ or CUDA; returns the output and the final states."""
    found = compiled_op(*call.inputs, call.plan, call.program, impl)
    return call.select(found)


def run_cuda(call: Call) -> list[Tensor]:
    """Runs a program of the plan in CUDA, or cuDNN if it computes the same at least as fast."""
    # torch.compile sees one op; torch.func knows how to transform it.
    if not torch.compiler.is_compiling() and (made := find_plan(call.plan)).plan.cudnn:
        tensors = call.x, *call.states, *call.parameters
        if not made.keeps_weights(call.program, call.x) and is_plain(tensors):
            return list(_CudnnFunction.apply(made, len(call.states), *tensors))
    return run_compiled("cuda", call)


RUNS = {
    "reference": run_reference,
    "cpp": functools.partial(run_compiled, "cpp"),
    "cuda": run_cuda,
}
