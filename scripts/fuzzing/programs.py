"""Programs that run an operator: calls, gradients, torch.func's transforms, graphs of calls.

A program is a function of the operator's function, its tensors, a source of random numbers and a
module of transforms: torch.func for an implementation, :mod:`fuzzing.transforms` for the
definition. It returns named tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fuzzing.draw import SPECIAL, Draw

Function = Callable[..., Tensor]
Results = dict[str, Tensor]


class Randoms:
    """Random choices and numbers, the same for an implementation and for the definition.

    Args:
        key: of the case.
        dtype: of the case: numbers are rounded to it first.
        jitter: relative size of a disturbance of all numbers, which shows the effect of rounding.
        special: whether a cotangent may have infinities and NaN.
    """

    def __init__(
        self,
        key: Sequence[Any],
        dtype: torch.dtype,
        jitter: float = 0.0,
        special: bool = True,
    ) -> None:
        self.draw = Draw(*key, "program")
        self.dtype = dtype
        self.jitter = jitter
        self.special = special

    def like(self, t: Tensor) -> Tensor:
        """Draws normal numbers in a random layout, at times with zero strides."""
        seed = self.draw.generator()
        values = torch.randn(t.shape, generator=seed, dtype=torch.float64).to(self.dtype)
        layout = self.draw.choice(("dense", "dense", "expanded", "transposed", "one", "offset"))
        values = self.disturbed(values.to(t.device, t.dtype))
        if layout == "expanded" and t.numel():
            for i in range(t.dim()):
                if self.draw.chance(0.5):
                    values = values.narrow(i, 0, 1)
            return values.expand(t.shape)
        if layout == "transposed" and t.dim() > 1:
            return values.transpose(0, -1).contiguous().transpose(0, -1)
        if layout == "one" and t.numel():
            return values.flatten()[0].expand(t.shape)
        if layout == "offset":
            whole = values.new_full((t.numel() + 3,), torch.nan)
            whole[3:] = values.flatten()
            return whole[3:].view(t.shape)
        return values

    def cotangent(self, out: Tensor) -> Tensor:
        """Draws a gradient of the output, at times with an infinity or a NaN."""
        values = self.like(out)
        if not (self.special and values.numel() and self.draw.chance(0.15)):
            return values
        values = values.clone(memory_format=torch.contiguous_format)
        for _ in range(self.draw.integer(1, 3)):
            position = self.draw.integer(0, values.numel() - 1)
            values.view(-1)[position] = torch.tensor(self.draw.choice(SPECIAL)).to(self.dtype)
        return values

    def disturbed(self, t: Tensor) -> Tensor:
        if not self.jitter:
            return t
        noise = torch.randn(t.shape, dtype=t.dtype, generator=torch.Generator().manual_seed(1))
        return t * (1 + self.jitter * noise)

    def some(self, count: int) -> list[int]:
        return self.draw.subset(count) or [self.draw.integer(0, count - 1)]


def _leaves(tensors: Sequence[Tensor], wanted: Sequence[int]) -> list[Tensor]:
    return [t.detach().requires_grad_(i in wanted) for i, t in enumerate(tensors)]


def _named(name: str, tensors: Sequence[Tensor], numbers: Sequence[int]) -> Results:
    return {f"{name} {i}": t for i, t in zip(numbers, tensors, strict=True)}


def forward(f: Function, tensors: list[Tensor], r: Randoms, func: Any) -> Results:
    """Without gradients: under no_grad, in inference mode, or with no tensor that requires one."""
    mode = r.draw.choice(("no_grad", "inference", "plain"))
    if mode == "plain":
        out = f(*tensors)
        assert not out.requires_grad, "the output requires a gradient that no input does"
        return {"output": out}
    with torch.no_grad() if mode == "no_grad" else torch.inference_mode():
        return {"output": f(*tensors)}


def backward(f: Function, tensors: list[Tensor], r: Randoms, func: Any) -> Results:
    """The gradients of some of the tensors, with a cotangent in any layout."""
    wanted = r.some(len(tensors))
    leaves = _leaves(tensors, wanted)
    out = f(*leaves)
    assert out.requires_grad, "the output does not require the gradient that an input does"
    gradients = torch.autograd.grad(
        out, [leaves[i] for i in wanted], r.cotangent(out), materialize_grads=True
    )
    return {"output": out.detach()} | _named("gradient", gradients, wanted)


def accumulate(f: Function, tensors: list[Tensor], r: Randoms, func: Any) -> Results:
    """Two backward passes of one graph, added in ``.grad``."""
    wanted = r.some(len(tensors))
    leaves = _leaves([t.clone() for t in tensors], wanted)
    out = f(*leaves)
    cotangent = r.like(out)
    # A clone for each: PyTorch may keep a view of the cotangent as a gradient, and add to it.
    out.backward(cotangent.clone(), retain_graph=True)
    out.backward(cotangent.clone())
    found = [i for i in wanted if leaves[i].grad is not None]
    return _named("gradient", [g for i in found if (g := leaves[i].grad) is not None], found)


def composed(f: Function, tensors: list[Tensor], r: Randoms, func: Any) -> Results:
    """The output is the next call's input."""
    wanted = r.some(len(tensors))
    leaves = _leaves(tensors, wanted)
    x, *rest = leaves
    out = f(f(x, *rest), *rest)
    gradients = torch.autograd.grad(
        out, [leaves[i] for i in wanted], r.like(out), materialize_grads=True
    )
    return {"output": out.detach()} | _named("gradient", gradients, wanted)


def changed_in_place(f: Function, tensors: list[Tensor], r: Randoms, func: Any) -> Results:
    """A saved tensor is overwritten: the gradients must not change, or be refused."""
    wanted = r.some(len(tensors))
    changed = r.draw.integer(0, len(tensors) - 1)
    leaves = _leaves(tensors, wanted)
    inner = [t.clone() for t in leaves]
    out = f(*inner)
    cotangent = r.like(out)
    if func is torch.func:  # the definition's gradients are those of the unchanged tensors
        inner[changed].detach().mul_(3)
    gradients = torch.autograd.grad(
        out, [leaves[i] for i in wanted], cotangent, materialize_grads=True
    )
    return _named("gradient", gradients, wanted)


def under_autocast(f: Function, tensors: list[Tensor], r: Randoms, func: Any) -> Results:
    """Under autocast, where the operator casts; the definition gets the cast tensors."""
    wanted = r.some(len(tensors))
    leaves = _leaves(tensors, wanted)
    if func is torch.func:
        with torch.autocast(leaves[0].device.type, torch.bfloat16):
            out = f(*leaves)
    else:
        out = f(*leaves)
    gradients = torch.autograd.grad(
        out, [leaves[i] for i in wanted], r.like(out), materialize_grads=True
    )
    return {"output": out.detach()} | _named("gradient", gradients, wanted)


def func_grad(f: Function, tensors: list[Tensor], r: Randoms, func: Any) -> Results:
    wanted, loss = r.some(len(tensors)), _loss(f, tensors, r)
    return _named("gradient", func.grad(loss, tuple(wanted))(*tensors), wanted)


def func_jacrev(f: Function, tensors: list[Tensor], r: Randoms, func: Any) -> Results:
    wanted = r.some(len(tensors))
    return _named("Jacobian", func.jacrev(f, tuple(wanted))(*tensors), wanted)


def func_jacfwd(f: Function, tensors: list[Tensor], r: Randoms, func: Any) -> Results:
    wanted = r.some(len(tensors))
    return _named("Jacobian", func.jacfwd(f, tuple(wanted))(*tensors), wanted)


def func_jvp(f: Function, tensors: list[Tensor], r: Randoms, func: Any) -> Results:
    tangents = tuple(r.like(t) for t in tensors)
    out, along = func.jvp(f, tuple(tensors), tangents)
    return {"output": out, "derivative": along}


def dual_numbers(f: Function, tensors: list[Tensor], r: Randoms, func: Any) -> Results:
    """Forward mode of torch.autograd, with tangents for some of the tensors."""
    wanted = r.some(len(tensors))
    tangents = {i: r.like(tensors[i]) for i in wanted}
    if func is not torch.func:
        rest = list(tensors)

        def of_wanted(*some: Tensor) -> Tensor:
            for i, t in zip(wanted, some, strict=True):
                rest[i] = t
            return f(*rest)

        along = func.jvp(of_wanted, tuple(tensors[i] for i in wanted), tuple(tangents.values()))[1]
        return {"derivative": along}
    with forward_ad.dual_level():
        duals = [
            forward_ad.make_dual(t, tangents[i]) if i in tangents else t
            for i, t in enumerate(tensors)
        ]
        out, along = forward_ad.unpack_dual(f(*duals))
        return {"derivative": torch.zeros_like(out) if along is None else along}


def func_hessian(f: Function, tensors: list[Tensor], r: Randoms, func: Any) -> Results:
    i = r.draw.integer(0, len(tensors) - 1)
    ((hessian,),) = func.hessian(_loss(_squared(f), tensors, r), (i,))(*tensors)
    return {"Hessian": hessian}


def reverse_over_reverse(f: Function, tensors: list[Tensor], r: Randoms, func: Any) -> Results:
    loss = _loss(_squared(f), tensors, r)
    i, j = (r.draw.integer(0, len(tensors) - 1) for _ in range(2))
    second = func.jacrev(lambda *t: func.grad(loss, (i,))(*t)[0], (j,))(*tensors)
    return {"second derivative": second[0]}


def forward_over_reverse(f: Function, tensors: list[Tensor], r: Randoms, func: Any) -> Results:
    """The Hessian times a vector."""
    loss = _loss(_squared(f), tensors, r)
    i = r.draw.integer(0, len(tensors) - 1)
    tangents = tuple(r.like(t) for t in tensors)
    _, along = func.jvp(lambda *t: func.grad(loss, (i,))(*t)[0], tuple(tensors), tangents)
    return {"second derivative": along}


def func_vmap(f: Function, tensors: list[Tensor], r: Randoms, func: Any) -> Results:
    in_dims, stacked = _stacked(tensors, r)
    return {"output": func.vmap(f, in_dims)(*stacked)}


def backward_of_vmap(f: Function, tensors: list[Tensor], r: Randoms, func: Any) -> Results:
    in_dims, stacked = _stacked(tensors, r)
    wanted = r.some(len(tensors))
    leaves = _leaves(stacked, wanted)
    out = func.vmap(f, in_dims)(*leaves)
    gradients = torch.autograd.grad(
        out, [leaves[i] for i in wanted], r.like(out), materialize_grads=True
    )
    return {"output": out.detach()} | _named("gradient", gradients, wanted)


def vmap_of_grad(f: Function, tensors: list[Tensor], r: Randoms, func: Any) -> Results:
    """The gradients of every sample."""
    in_dims, stacked = _stacked(tensors, r)
    wanted, loss = r.some(len(tensors)), _loss(f, tensors, r)
    gradients = func.vmap(func.grad(loss, tuple(wanted)), in_dims)(*stacked)
    return _named("gradient", gradients, wanted)


def penalty(f: Function, tensors: list[Tensor], r: Randoms, func: Any) -> Results:
    """The squared norm of the gradients of some tensors is part of the loss of all."""
    leaves = _leaves(tensors, range(len(tensors)))
    out = f(*leaves)
    of = [leaves[i] for i in r.some(len(tensors))]
    first = torch.autograd.grad(out, of, r.like(out), create_graph=True, materialize_grads=True)
    loss = (out * r.like(out)).sum()
    for g in first:
        loss = loss + g.square().sum()
    second = torch.autograd.grad(loss, leaves, materialize_grads=True)
    return _named("first", [g.detach() for g in first], range(len(of))) | _named(
        "gradient", second, range(len(leaves))
    )


def all_second_derivatives(f: Function, tensors: list[Tensor], r: Randoms, func: Any) -> Results:
    """Second derivatives of a subset, at times also with respect to the cotangent."""
    wanted = r.some(len(tensors))
    leaves = _leaves(tensors, wanted)
    out = f(*leaves)
    cotangent = r.like(out).requires_grad_(r.draw.chance(0.7))
    of = [leaves[i] for i in wanted]
    first = torch.autograd.grad(out, of, cotangent, create_graph=True, materialize_grads=True)
    chosen = [g for g in first if r.draw.chance(0.8)] or list(first)
    loss = sum(((g * r.like(g)).sum() for g in chosen), out.new_zeros(()))
    inputs = [*of, cotangent] if cotangent.requires_grad else of
    second = [torch.zeros_like(t) for t in inputs]
    if loss.requires_grad:
        second = torch.autograd.grad(loss, inputs, materialize_grads=True)
    return _named("gradient", second, range(len(second)))


def chained(f: Function, tensors: list[Tensor], r: Randoms, func: Any) -> Results:
    """The output is the next call's input; then the gradient's norm is differentiated."""
    leaves = _leaves(tensors, range(len(tensors)))
    x, *rest = leaves
    out = f(f(x, *rest), *rest) if r.draw.chance(0.5) else f(f(x, *rest).tanh(), *rest)
    return _twice(out, leaves, r)


def arguments_of_one_another(f: Function, tensors: list[Tensor], r: Randoms, func: Any) -> Results:
    """An argument is computed from another, as a generated kernel is, and so is the output."""
    leaves = _leaves(tensors, range(len(tensors)))
    x, *rest = leaves
    share = x.square().sum().tanh()
    rest = [t * (share + 0.5) for t in rest]
    out = f(x * rest[-1].sum().tanh() if rest and r.draw.chance(0.5) else x, *rest)
    out = out * share if r.draw.chance(0.5) else out
    return _twice(out, leaves, r)


def fed_back(f: Function, tensors: list[Tensor], r: Randoms, func: Any) -> Results:
    """A state passes through several calls; create_graph already in the first derivative."""
    leaves = _leaves(tensors, range(len(tensors)))
    x, *rest = leaves
    state = x
    for _ in range(r.draw.choice((2, 3))):
        state = torch.tanh(f(state, *rest)) + 0.5 * x
    return _twice(state, leaves, r)


def gradient_fed_back(f: Function, tensors: list[Tensor], r: Randoms, func: Any) -> Results:
    """A step along the gradient is differentiated, as in meta-learning."""
    leaves = _leaves(tensors, range(len(tensors)))
    x, *rest = leaves
    loss = f(x, *rest).square().sum()
    (first,) = torch.autograd.grad(loss, x, create_graph=True, materialize_grads=True)
    return _twice(f(x - 0.1 * first, *rest), leaves, r)


def _twice(out: Tensor, leaves: Sequence[Tensor], r: Randoms) -> Results:
    """Computes first derivatives under create_graph, and the derivatives of their squared norm."""
    first = torch.autograd.grad(out, leaves, r.like(out), create_graph=True, materialize_grads=True)
    loss = sum((g.square().sum() for g in first), out.new_zeros(()))
    second = [torch.zeros_like(t) for t in leaves]
    if loss.requires_grad:
        second = torch.autograd.grad(loss, leaves, materialize_grads=True)
    numbers = range(len(leaves))
    return _named("first", [g.detach() for g in first], numbers) | _named(
        "gradient", second, numbers
    )


def _loss(f: Function, tensors: Sequence[Tensor], r: Randoms) -> Function:
    """Returns the function's inner product with fixed numbers."""
    with torch.no_grad():
        cotangent = r.like(f(*tensors))
    return lambda *t: (f(*t) * cotangent).sum()


def _squared(f: Function) -> Function:
    """Returns f + f², whose second derivative is not zero where f is linear."""

    def function(*tensors: Tensor) -> Tensor:
        out = f(*tensors)
        return out * (1 + out)

    return function


def _stacked(tensors: Sequence[Tensor], r: Randoms) -> tuple[tuple[int | None, ...], list[Tensor]]:
    """Stacks scaled copies of some tensors along any dimension; returns dimensions and tensors."""
    count = r.draw.choice((1, 2, 3))
    mapped = r.some(len(tensors))
    in_dims, stacked = [], []
    for i, t in enumerate(tensors):
        if i not in mapped:
            in_dims.append(None)
            stacked.append(t)
            continue
        dim = r.draw.integer(0, t.dim())
        in_dims.append(dim)
        stacked.append(torch.stack([t * 0.5**n for n in range(count)], dim))
    return tuple(in_dims), stacked


@dataclass(frozen=True)
class Program:
    """A program and its properties.

    Attributes:
        run: the function above.
        often: its weight in the choice of a case's program.
        order: of its highest derivative; more rounding is allowed for higher ones.
        tiny: whether it computes whole Jacobians.
        may_refuse: whether the library may refuse; if not, only where the definition has no result.
        chains: whether the output must have the shape of the first tensor.
        half: whether it also runs in 16 bits.
        forward_mode: whether it uses PyTorch's forward mode.
        adds: whether PyTorch adds the gradients of more than two calls, in an order of its own.
    """

    run: Callable[..., Results]
    often: int = 2
    order: int = 1
    tiny: bool = False
    may_refuse: bool = False
    chains: bool = False
    half: bool = False
    forward_mode: bool = False
    adds: bool = False

    @property
    def name(self) -> str:
        return self.run.__name__


BACKWARD = Program(backward, often=24, half=True)
PROGRAMS = (
    Program(forward, often=12, order=0, half=True),
    BACKWARD,
    Program(accumulate, half=True),
    Program(composed, chains=True),
    Program(changed_in_place, may_refuse=True),
    Program(under_autocast, half=True),
    Program(func_grad, often=3, may_refuse=True),
    Program(func_jacrev, tiny=True, may_refuse=True),
    Program(func_jacfwd, forward_mode=True, tiny=True, may_refuse=True),
    Program(func_jvp, forward_mode=True, often=3, may_refuse=True),
    Program(dual_numbers, forward_mode=True, may_refuse=True),
    Program(func_hessian, forward_mode=True, order=2, tiny=True, may_refuse=True),
    Program(reverse_over_reverse, order=2, tiny=True, may_refuse=True),
    Program(forward_over_reverse, forward_mode=True, order=2, may_refuse=True),
    Program(func_vmap, often=3, order=0, may_refuse=True),
    Program(backward_of_vmap, adds=True, may_refuse=True),
    Program(vmap_of_grad, often=3, may_refuse=True),
    Program(penalty, often=4, order=2),
    Program(all_second_derivatives, often=4, order=2),
    Program(chained, often=3, order=3, chains=True),
    Program(arguments_of_one_another, often=3, order=2),
    Program(fed_back, often=3, order=4, chains=True),
    Program(gradient_fed_back, order=4, chains=True),
)
