"""Derivatives of every declared operator where its arguments depend on one another, in forward
mode, of higher order and under the transforms of torch.func.

`gradgradcheck` gives arguments that are independent of one another, and so does not see a gradient
that confuses a saved tensor with what it was computed from. Here each case is compared with the
same case of the reference; an operator may refuse one, with an error that says so.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

from hoconv.dispatch.declaration import operators
from hoconv.tools.testing.comparison import differentiable, relative_error
from hoconv.tools.testing.variants import Variant, variants

Function = Callable[..., Tensor]
TOLERANCE = 1e-9
NOT_ROUNDED = 1e-5  # a float32 result that no bfloat16 has been in


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "variant" in metafunc.fixturenames:
        found = [p for p in variants(operators()) if p.values[0].impl != "reference"]
        metafunc.parametrize("variant", found, indirect=True)


def the_dtype(variant: Variant) -> torch.dtype:
    return torch.float64 if torch.float64 in variant.operator.tolerances else torch.float32


def as_one(output: Any) -> Tensor:
    """An output as one tensor: of several, their elements one after another."""
    if isinstance(output, Tensor):
        return output
    return torch.cat([t.flatten() for t in tree_leaves(output)])


def small_cases(variant: Variant, largest: int = 400) -> list[tuple[str, Function, list[Tensor]]]:
    """The smallest samples, three at most: a name, a function of their tensors, and these."""
    cases = []
    for sample in variant.samples(the_dtype(variant)):
        leaves = [a for a in differentiable(sample.args) if isinstance(a, Tensor)]
        # In few dimensions of size 1, in which a derivative that is wrong may look right.
        if all(leaf.numel() > 3 for leaf in leaves):

            def function(impl: str, *tensors: Tensor, sample: Any = sample) -> Tensor:
                given = iter(tensors)
                args = [next(given) if isinstance(a, Tensor) else a for a in sample.args]
                return as_one(variant.operator.function(*args, impl=impl, **sample.kwargs))

            cases.append((sum(a.numel() for a in leaves), sample.name, function, leaves))
    cases.sort(key=lambda case: case[0])
    few = [case for case in cases if case[0] <= largest][:3] or cases[:1]
    return [case[1:] for case in few]


def compare(variant: Variant, name: str, compute: Callable[[str], Any]) -> bool:
    """Compares a variant with the reference; returns whether it refuses instead."""
    try:
        found = tree_leaves(compute(variant.impl))
    except NotImplementedError as refusal:
        if not re.search("derivative|jvp function", str(refusal)):  # ours, or PyTorch's
            raise
        return True
    expected = tree_leaves(compute("reference"))
    assert len(found) == len(expected)
    for result, exact in zip(found, expected, strict=True):
        assert isinstance(result, Tensor) == isinstance(exact, Tensor), name
        if isinstance(exact, Tensor):
            assert relative_error(result.detach(), exact.detach()) <= TOLERANCE, name
    return False


def alone(function: Function, *leaves: Tensor) -> Tensor:
    return function(*leaves)


def entangled(function: Function, *leaves: Tensor) -> Tensor:
    """Every argument computed from the one before it."""
    args = [leaves[0]]
    for leaf in leaves[1:]:
        args.append(leaf * (1 + args[-1].tanh().mean()))
    return function(*args)


def fed_back(function: Function, *leaves: Tensor) -> Tensor:
    """Stacked three times, with the same weights."""
    x, *rest = leaves
    for _ in range(3):
        out = function(x, *rest)
        x = out.tanh() if out.shape == x.shape else x * (1 + out.tanh().mean())
    return x


COMPOSITIONS = (alone, entangled, fed_back)


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_derivatives_of_three_orders(variant: Variant, composition: Any) -> None:
    for name, function, leaves in small_cases(variant):

        def compute(impl: str, function: Any = function, leaves: Any = leaves) -> list[Tensor]:
            out = composition(lambda *t: function(impl, *t), *leaves)
            loss, found = out.sin().mean(), []
            for _ in range(3):
                grads = torch.autograd.grad(loss, leaves, create_graph=True)
                found += grads
                scaled = [g / g.detach().norm() for g in grads]
                loss = loss + torch.cat([g.sin().square().flatten() for g in scaled]).sum()
            return found

        compare(variant, name, compute)


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_gradient_penalty_of_each_subset_of_the_arguments(
    variant: Variant, composition: Any
) -> None:
    name, function, leaves = small_cases(variant)[0]
    for wanted in itertools.product((False, True), repeat=min(len(leaves), 3)):
        if not any(wanted):
            continue
        wanted = *wanted, *(False for _ in leaves[3:])

        def compute(impl: str, wanted: Any = wanted) -> list[Tensor]:
            mixed = [leaf if want else leaf.detach() for leaf, want in zip(leaves, wanted)]
            inputs = [leaf for leaf, want in zip(leaves, wanted) if want]
            loss = composition(lambda *t: function(impl, *t), *mixed).sum()  # a stride of zero
            grads = torch.autograd.grad(loss, inputs, create_graph=True)
            penalty = loss + torch.cat([g.square().flatten() for g in grads]).sum()
            return [*grads, *torch.autograd.grad(penalty, inputs)]

        compare(variant, f"{name}: {wanted}", compute)


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_products_with_the_hessian(variant: Variant, composition: Any) -> None:
    name, function, leaves = small_cases(variant)[0]
    point = tuple(leaf.detach() for leaf in leaves)
    vectors = tuple(leaf.detach().cos() for leaf in leaves)

    def compute(impl: str) -> Any:
        def loss(*tensors: Tensor) -> Tensor:
            return composition(lambda *t: function(impl, *t), *tensors).sin().mean()

        return (
            torch.autograd.functional.vhp(loss, point, vectors),
            torch.autograd.functional.hvp(loss, point, vectors),
            torch.autograd.functional.hessian(lambda x: loss(x, *point[1:]), point[0]),
        )

    compare(variant, name, compute)


def test_autocast_during_the_backward_pass_changes_nothing(variant: Variant) -> None:
    name, function, leaves = small_cases(variant)[0]
    leaves = [leaf.detach().float().requires_grad_() for leaf in leaves]

    def compute(autocast: bool) -> list[Tensor]:
        out = function(variant.impl, *leaves)
        with torch.autocast(variant.device, torch.bfloat16, enabled=autocast):
            grads = torch.autograd.grad(out, leaves, out.detach(), create_graph=True)
        if variant.operator.bitwise:  # and has no second derivative
            return list(grads)
        # Of PyTorch's own functions, which cast when they are differentiated under autocast.
        return [*grads, *torch.autograd.grad(grads, leaves, [g.detach() for g in grads])]

    for result, expected in zip(compute(True), compute(False), strict=True):
        assert relative_error(result, expected) <= NOT_ROUNDED, name


def forward_mode(f: Any, point: Any, vectors: Any) -> Any:
    return torch.func.jvp(f, point, vectors)


def forward_mode_of_one(f: Any, point: Any, vectors: Any) -> Any:
    return torch.func.jvp(lambda x: f(x, *point[1:]), point[:1], vectors[:1])


def forward_mode_of_the_others(f: Any, point: Any, vectors: Any) -> Any:
    return torch.func.jvp(lambda *w: f(point[0], *w), point[1:], vectors[1:])


def dual_numbers(f: Any, point: Any, vectors: Any) -> Any:
    with forward_ad.dual_level():
        leaves = [t.clone().requires_grad_() for t in point]
        out = f(*map(forward_ad.make_dual, leaves, vectors))
        tangent = forward_ad.unpack_dual(out).tangent
        assert tangent is not None
        return tangent, torch.autograd.grad(tangent.sin().sum(), leaves)  # reverse over forward


def jacobian_forwards(f: Any, point: Any, vectors: Any) -> Any:
    return torch.func.jacfwd(lambda x: f(x, *point[1:]).sum())(point[0])


def gradient(f: Any, point: Any, vectors: Any) -> Any:
    every = tuple(range(len(point)))
    return torch.func.grad(lambda *t: f(*t).sin().sum(), argnums=every)(*point)


def pull_back(f: Any, point: Any, vectors: Any) -> Any:
    out, function = torch.func.vjp(f, *point)[:2]
    return out, function(torch.ones_like(out))


def many_cotangents_at_once(f: Any, point: Any, vectors: Any) -> Any:
    leaves = [t.clone().requires_grad_() for t in point]
    out = f(*leaves)
    cotangents = torch.stack([torch.ones_like(out), out.detach().cos()])
    return torch.autograd.grad(out, leaves, cotangents, is_grads_batched=True)


def jacobian_backwards(f: Any, point: Any, vectors: Any) -> Any:
    return torch.func.jacrev(lambda x: f(x, *point[1:]).flatten()[:7])(point[0])


def forward_over_reverse(f: Any, point: Any, vectors: Any) -> Any:
    every = tuple(range(len(point)))
    grad = torch.func.grad(lambda *t: f(*t).sin().mean(), argnums=every)
    return torch.func.jvp(grad, point, vectors)


def reverse_over_forward(f: Any, point: Any, vectors: Any) -> Any:
    return torch.func.grad(lambda *t: torch.func.jvp(f, t, vectors)[1].sin().mean())(*point)


def forward_over_forward(f: Any, point: Any, vectors: Any) -> Any:
    return torch.func.jvp(lambda *t: torch.func.jvp(f, t, vectors)[1], point, vectors)


def reverse_over_reverse(f: Any, point: Any, vectors: Any) -> Any:
    grad = torch.func.grad(lambda *t: f(*t).sin().mean(), argnums=0)
    return torch.func.grad(lambda *t: grad(*t).square().sum(), argnums=0)(*point)


def jacobian_of_a_jacobian(f: Any, point: Any, vectors: Any) -> Any:
    def sliced(x: Tensor) -> Tensor:
        x = torch.cat([x, point[0].flatten()[5:]]).view_as(point[0])
        return f(x, *point[1:]).sin().flatten()[:3]

    return torch.func.jacrev(torch.func.jacrev(sliced))(point[0].flatten()[:5])


def gradient_of_a_pull_back_that_has_ended(f: Any, point: Any, vectors: Any) -> Any:
    leaves = [t.clone().requires_grad_() for t in point]
    out, function = torch.func.vjp(f, *leaves)[:2]
    cotangent = torch.ones_like(out).requires_grad_()
    found = function(cotangent)
    return torch.autograd.grad([g.sin().sum() for g in found], [*leaves, cotangent])


TRANSFORMS = (
    forward_mode,
    forward_mode_of_one,
    forward_mode_of_the_others,
    dual_numbers,
    jacobian_forwards,
    gradient,
    pull_back,
    many_cotangents_at_once,
    jacobian_backwards,
    forward_over_reverse,
    reverse_over_forward,
    forward_over_forward,
    reverse_over_reverse,
    jacobian_of_a_jacobian,
    gradient_of_a_pull_back_that_has_ended,
)


# PyTorch warns of its own forward mode, and of a loop over the batch where an op has no vmap.
@pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet")
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_agree_with_the_reference_or_are_refused(
    variant: Variant, transform: Any
) -> None:
    name, function, leaves = small_cases(variant)[0]
    point = tuple(leaf.detach() for leaf in leaves)
    vectors = tuple(leaf.detach().cos() for leaf in leaves)
    for composition in (alone, entangled):

        def compute(impl: str, composition: Any = composition) -> Any:
            def f(*tensors: Tensor) -> Tensor:
                return composition(lambda *t: function(impl, *t), *tensors)

            return transform(f, point, vectors)

        compare(variant, name, compute)


@pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet")
def test_over_a_batch_of_calls(variant: Variant) -> None:
    name, function, leaves = small_cases(variant)[0]
    batches = [torch.stack([leaf.detach(), -leaf.detach(), 2 * leaf.detach()]) for leaf in leaves]

    def compute(impl: str) -> Any:
        def loss(*tensors: Tensor) -> Tensor:
            return function(impl, *tensors).sin().sum()

        def batched(*tensors: Tensor) -> Tensor:
            return torch.vmap(loss)(*tensors).sum()

        every = tuple(range(len(leaves)))
        first = (0, *(None for _ in leaves[1:]))
        point = [leaf.detach() for leaf in leaves]
        return (
            torch.vmap(lambda *t: function(impl, *t))(*batches),
            torch.vmap(loss, first)(batches[0], *point[1:]),
            torch.vmap(torch.func.grad(loss, every))(*batches),
            torch.func.grad(batched, every)(*batches),
        )

    assert not compare(variant, name, compute)


def test_over_no_calls_at_all(variant: Variant) -> None:
    _, function, leaves = small_cases(variant)[0]
    point = [leaf.detach() for leaf in leaves]
    batches = [t.new_empty(0, *t.shape) for t in point]

    def loss(*tensors: Tensor) -> Tensor:
        return function(variant.impl, *tensors).sin().sum()

    try:
        output = torch.vmap(lambda *t: function(variant.impl, *t))(*batches)
    except RuntimeError as error:
        if "non-positive groups" not in str(error):
            raise
        pytest.skip("made of PyTorch's convolution, which refuses no examples")
    gradients = torch.vmap(torch.func.grad(loss, tuple(range(len(point)))))(*batches)
    assert output.shape == (0, *function(variant.impl, *point).shape)
    assert [g.shape for g in gradients] == [t.shape for t in batches]
