"""A recurrent layer in one direction as a torch.library op: schema, fake, autograd.

The op runs one of a plan's programs: `inference`; `forward`, which also returns what the gradient
needs; or `backward`. Gradients of higher order come from the definition: the cell is run again, op
by op, in PyTorch.

B batch, T time steps, n features.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from hoconv.recurrent import plans, reference
from hoconv.recurrent.evaluate import DTYPES
from hoconv.recurrent.interpret import interpret
from hoconv.recurrent.packing import packed, unpacked

_library = torch.library.Library("hoconv", "FRAGMENT")

# sequences: what the program reads, in its order. states: before its first step. parameters: of
# the cell, in the order of its declarations. Returns the program's results, the parameters'
# gradients of `backward`, and the states after the last step.
_library.define(
    "recurrent.compiled(Tensor[] sequences, Tensor[] states, Tensor[] parameters, Tensor? seed, "
    "str plan, str program, str impl) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)
op = torch.ops.hoconv.recurrent.compiled


def _run(
    sequences: list[Tensor],
    states: list[Tensor],
    parameters: list[Tensor],
    seed: Tensor | None,
    plan: str,
    which: str,
    impl: str,
) -> list[Tensor]:
    program = plans.program_of(plan, which)
    named = _named(plan, parameters)
    results, final = interpret(
        program,
        packed(program, named),
        dict(zip((name for name, _ in program.sequences), sequences, strict=True)),
        dict(zip((s.name for s in program.states if s.total is None), states, strict=True)),
        seed,
        plans.loop(plan, which, impl, sequences[0].device.type),
    )
    if which == "backward":
        rows = results.get("d_x")
        x = torch.zeros_like(sequences[0]) if rows is None else rows
        found = [x, *unpacked(program, results, named).values(), *final.values()]
    else:
        found = [*results.values(), *final.values()]
    taken = {t.untyped_storage().data_ptr() for t in (*sequences, *states, *parameters)}
    own = []
    for tensor in found:  # an op's results are its own, and none is part of another
        start = tensor.untyped_storage().data_ptr()
        own.append(tensor.clone() if start in taken else tensor.contiguous())
        taken.add(start)
    return own


_library.impl("recurrent.compiled", _run, "CPU")
_library.impl("recurrent.compiled", _run, "CUDA")


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
    program = plans.program_of(plan, which)
    x = sequences[0]
    found = []
    if which == "backward":
        found = [torch.empty_like(t, memory_format=torch.contiguous_format)
                 for t in (x, *parameters)]  # fmt: skip
    else:
        for _, value in program.results:
            leading = () if value.type.rate == "once" else x.shape[:2]
            found.append(x.new_empty((*leading, value.type.size), dtype=DTYPES[value.type.dtype]))
    return [*found, *(torch.empty_like(s, memory_format=torch.contiguous_format) for s in states)]


def _named(plan: str, parameters: list[Tensor]) -> dict[str, Tensor]:
    return dict(zip(plans.parameter_names(plans.parsed(plan).cell), parameters, strict=True))


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    sequences, states, parameters, seed, ctx.plan, ctx.which, ctx.impl = inputs
    ctx.counts = len(sequences), len(states), len(parameters)
    results = output[: len(output) - len(states)]
    ctx.save_for_backward(*sequences, *states, *parameters, seed, *results)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    if ctx.which != "forward":
        raise RuntimeError(f"hoconv::recurrent: the program {ctx.which!r} has no gradient")
    n_sequences, n_states, n_parameters = ctx.counts
    saved = list(ctx.saved_tensors)
    sequences, saved = saved[:n_sequences], saved[n_sequences:]
    states, saved = saved[:n_states], saved[n_states:]
    parameters, saved = saved[:n_parameters], saved[n_parameters:]
    seed, *results = saved
    d_output = grads[0]
    d_states = grads[len(grads) - n_states :]
    if torch.is_grad_enabled():
        d_x, *found = _again(ctx.plan, sequences, states, parameters, seed, d_output, d_states)
        d_parameters, d_initial = found[n_states:], found[:n_states]
    else:
        forward, backward = (plans.program_of(ctx.plan, w) for w in ("forward", "backward"))
        read = dict(zip((name for name, _ in forward.sequences), sequences, strict=True))
        read |= dict(zip((name for name, _ in forward.results), results, strict=True))
        read["d_output"] = torch.zeros_like(results[0]) if d_output is None else d_output
        zeroed = [torch.zeros_like(s) if g is None else g for g, s in zip(d_states, states)]
        d_x, *found = op(
            [read[name] for name, _ in backward.sequences], zeroed, parameters, seed, ctx.plan,
            "backward", ctx.impl,
        )  # fmt: skip
        d_parameters, d_initial = found[:n_parameters], found[n_parameters:]
    d_sequences = [d_x, *(None for _ in sequences[1:])]
    return d_sequences, d_initial, d_parameters, None, None, None, None


def _again(
    plan: str,
    sequences: list[Tensor],
    states: list[Tensor],
    parameters: list[Tensor],
    seed: Tensor | None,
    d_output: Tensor | None,
    d_states: list[Tensor | None],
) -> tuple[Tensor, ...]:
    """The gradients of x, states and parameters as functions that can be differentiated again."""
    request = plans.parsed(plan)
    with torch.enable_grad():
        x, *valid = sequences
        inputs = [t if t.requires_grad else t.detach().requires_grad_()
                  for t in (x, *states, *parameters)]  # fmt: skip
        n = len(states)
        output, final = reference.recurrent(
            plans.registered(request.cell), inputs[0], inputs[1 : 1 + n],
            _named(plan, inputs[1 + n :]), valid=valid[0] if valid else None,
            seed=seed if request.training else None, reverse=request.reverse,
        )  # fmt: skip
        pairs = [(t, g) for t, g in zip((output, *final), (d_output, *d_states)) if g is not None]
        return torch.autograd.grad(
            [t for t, _ in pairs], inputs, [g.to(t.dtype) for t, g in pairs],
            create_graph=True, materialize_grads=True,
        )  # fmt: skip


torch.library.register_autograd("hoconv::recurrent.compiled", _differentiate, setup_context=_save)


def run_reference(
    x: Tensor,
    states: list[Tensor],
    parameters: list[Tensor],
    valid: Tensor | None,
    seed: Tensor | None,
    plan: str,
) -> list[Tensor]:
    """The cell, called at every step: the output and the final states."""
    request = plans.parsed(plan)
    output, final = reference.recurrent(
        plans.registered(request.cell), x, states, _named(plan, parameters), valid=valid,
        seed=seed if request.training else None, reverse=request.reverse,
    )  # fmt: skip
    return [output, *final]


def run_compiled(
    impl: str,
    x: Tensor,
    states: list[Tensor],
    parameters: list[Tensor],
    valid: Tensor | None,
    seed: Tensor | None,
    plan: str,
) -> list[Tensor]:
    """The plan's programs in C++ or CUDA: the output and the final states."""
    wanted = torch.is_grad_enabled() and any(t.requires_grad for t in (x, *states, *parameters))
    wide = torch.promote_types(x.dtype, torch.float32)
    sequences = [x] if valid is None else [x, valid]
    found = op(
        sequences, [s.to(wide) for s in states], parameters, seed, plan,
        "forward" if wanted else "inference", impl,
    )  # fmt: skip
    return [found[0], *(s.to(x.dtype) for s in found[len(found) - len(states) :])]


def run_cuda(
    x: Tensor,
    states: list[Tensor],
    parameters: list[Tensor],
    valid: Tensor | None,
    seed: Tensor | None,
    plan: str,
) -> list[Tensor]:
    """The plan's programs in CUDA, or the library's function that does the same."""
    # torch.compile sees one op.
    if not torch.compiler.is_compiling() and (library := plans.planned(plan).library):
        return library.run(x, states, _named(plan, parameters), plans.parsed(plan).reverse)
    return run_compiled("cuda", x, states, parameters, valid, seed, plan)


RUNS = {
    "reference": run_reference,
    "cpp": functools.partial(run_compiled, "cpp"),
    "cuda": run_cuda,
}
