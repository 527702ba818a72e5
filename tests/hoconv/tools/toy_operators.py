"""Operators that a package of its own declares: sound ones, and ones with a fault in each
implementation or in how it is made ready. Some return a tensor, some a tuple of tensors.

test_toy_operator.py installs this module as such a package and runs the tests of
hoconv/tools/testing/test_operators.py over it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_leaves

from hoconv.dispatch import registration
from hoconv.dispatch.declaration import Benchmark, Cost, Implementation, Operator, Sample, declare
from hoconv.dispatch.implementations import resolve


def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64).to(device, dtype)

    yield Sample((draw(3, 4), draw(3, 4)), {"scale": 2.0}, "small")
    yield Sample((draw(4, 3).mT, draw(3, 4)), name="transposed")
    yield Sample((draw(0, 4), draw(0, 4)), name="empty")


def toy(
    name: str,
    implementations: Mapping[str, Callable[..., Any]],
    others: Mapping[str, Implementation] | None = None,
    reference: Callable[..., Any] | None = None,
    **declared: bool,
) -> Operator:
    """Declares what `reference` computes of a, b and scale, ``a * b * scale``, under this name."""
    reference = reference or multiply

    def function(a: Tensor, b: Tensor, *, scale: float = 1.0, impl: str = "auto") -> Any:
        chosen = resolve(name, impl, a.device.type)
        return operator.implementations[chosen].function(a, b, scale)

    def cost(sample: Sample) -> Cost:
        a, outputs = sample.args[0], len(tree_leaves(reference(*sample.args, 1.0)))
        flops = 2 * outputs * a.numel()
        return Cost((2 + outputs) * a.nbytes, (4 + outputs) * a.nbytes, flops, 2 * flops)

    def benchmark_sample(size: int, device: torch.device, dtype: torch.dtype) -> Sample:
        a = torch.ones(size, 16, device=device, dtype=dtype)
        return Sample((a, a), name=f"{size} rows")

    made = {
        name: Implementation(function, () if name == "reference" else ("cpu",))
        for name, function in {"reference": reference, **implementations}.items()
    }
    operator = Operator(
        name=name,
        function=function,
        implementations=made | dict(others or {}),
        samples=samples,
        tolerances={torch.float64: 1e-15, torch.float32: 1e-6},
        cost=cost,
        benchmark=Benchmark(
            "rows", (4, 8), benchmark_sample, {"again": lambda a, b: reference(a, b, 1.0)}
        ),
        **declared,
    )
    return declare(operator)


def multiply(a: Tensor, b: Tensor, scale: float) -> Tensor:
    return a * b * scale


@torch.library.custom_op("hoconv_toy::multiply", mutates_args=())
def registered(a: Tensor, b: Tensor, scale: float) -> Tensor:
    return torch.empty_like(a * b).copy_(a * b * scale)


@registered.register_fake
def _fake(a: Tensor, b: Tensor, scale: float) -> Tensor:
    return torch.empty_like(a * b)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, ctx.scale = inputs
    ctx.save_for_backward(a, b)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    a, b = ctx.saved_tensors
    return grad * b * ctx.scale, grad * a * ctx.scale, None


registered.register_autograd(_differentiate, setup_context=_save)

_library = torch.library.Library("hoconv_toy", "FRAGMENT")


def op_with(
    name: str, fake: Callable[..., Tensor] = _fake, vmap: Callable[..., Any] | None = None
) -> torch._ops.OpOverload:
    """Registers the right function with a fake or a rule for vmap that is wrong."""
    _library.define(f"{name}(Tensor a, Tensor b, float scale) -> Tensor")
    _library.impl(name, multiply, "CompositeExplicitAutograd")
    _library.impl(name, fake, "Meta")
    qualified = f"hoconv_toy::{name}"
    torch.library.register_autograd(qualified, _differentiate, setup_context=_save)
    if vmap:
        torch.library.register_vmap(qualified, vmap)
    return getattr(torch.ops.hoconv_toy, name).default


def first_of_all(info: Any, in_dims: Any, a: Tensor, b: Tensor, scale: float) -> tuple[Tensor, int]:
    out = multiply(a, b, scale)
    return out[:1].expand_as(out), 0


def wrong_output(a: Tensor, b: Tensor, scale: float) -> Tensor:
    return multiply(a, b, scale * (1 + 1e-2))


def wrong_gradient(a: Tensor, b: Tensor, scale: float) -> Tensor:
    out = multiply(a, b, scale)
    return 2 * out - out.detach()


def wrong_second_gradient(a: Tensor, b: Tensor, scale: float) -> Tensor:
    return multiply(a, b.detach(), scale) + multiply(a.detach(), b, scale) - out_of(a, b, scale)


def out_of(a: Tensor, b: Tensor, scale: float) -> Tensor:
    return multiply(a, b, scale).detach()


def not_a_number(a: Tensor, b: Tensor, scale: float) -> Tensor:
    return multiply(a, b, scale) * torch.where(b == b.max(), torch.nan, 1) if b.numel() else a * b


def wrong_dtype(a: Tensor, b: Tensor, scale: float) -> Tensor:
    return multiply(a.double(), b.double(), scale)


def changes_its_input(a: Tensor, b: Tensor, scale: float) -> Tensor:
    out = multiply(a, b, scale)
    a.detach().zero_()
    return out


def contiguous(t: Tensor) -> Tensor:
    """Returns what a kernel sees that takes its argument for contiguous."""
    t = t.detach()
    memory = torch.empty(0, dtype=t.dtype).set_(t.untyped_storage())[t.storage_offset() :]
    return torch.cat([memory, memory.new_zeros(t.numel())])[: t.numel()].view(t.shape)


class _Faulty(torch.autograd.Function):
    """Reads b, and the gradient of the output, by functions; `both` says when it differentiates b:
    only where a is differentiated, too."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, scale: float, *faults: Any) -> Tensor:
        read_b, ctx.read_gradient, ctx.both = faults
        ctx.save_for_backward(a, read_b(b))
        ctx.scale = scale
        return a * read_b(b) * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        grad = ctx.read_gradient(grad) * ctx.scale
        d_b = grad * a if ctx.needs_input_grad[0] or not ctx.both else torch.zeros_like(b)
        return grad * b, d_b, None, None, None, None


def takes_b_for_contiguous(a: Tensor, b: Tensor, scale: float) -> Tensor:
    return _Faulty.apply(a, b, scale, contiguous, torch.clone, False)


def takes_rows_for_contiguous(a: Tensor, b: Tensor, scale: float) -> Tensor:
    return _Faulty.apply(
        a, b, scale, lambda b: contiguous(b) if b.stride(-1) == 1 else b.clone(), torch.clone, False
    )


def takes_the_gradient_for_contiguous(a: Tensor, b: Tensor, scale: float) -> Tensor:
    return _Faulty.apply(a, b, scale, torch.clone, contiguous, False)


def differentiates_b_only_with_a(a: Tensor, b: Tensor, scale: float) -> Tensor:
    return _Faulty.apply(a, b, scale, torch.clone, torch.clone, True)


_calls = itertools.count()


def takes_b_for_an_a(a: Tensor, b: Tensor, scale: float) -> Tensor:
    if a.dtype != b.dtype:
        b = b.contiguous().flatten().view(torch.uint8).view(a.dtype)[: a.numel()].view(a.shape)
    return multiply(a, b, scale)


def never_twice_the_same(a: Tensor, b: Tensor, scale: float) -> Tensor:
    return multiply(a, b, scale) * (1 + torch.finfo(a.dtype).eps * (next(_calls) % 2))


def depends_on_threads(a: Tensor, b: Tensor, scale: float) -> Tensor:
    return multiply(a, b, scale) * (1 + torch.finfo(a.dtype).eps * (torch.get_num_threads() % 2))


def untraceable(a: Tensor, b: Tensor, scale: float) -> Tensor:
    return multiply(a, b, scale) if a.sum().item() < 1e9 else a


def does_not_load() -> None:
    raise ImportError("no such library")


def product_and_sum(a: Tensor, b: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return a * b * scale, (a + b) * scale


@torch.library.custom_op("hoconv_toy::product_and_sum", mutates_args=())
def registered_pair(a: Tensor, b: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    product, total = product_and_sum(a, b, scale)
    return torch.empty_like(product).copy_(product), torch.empty_like(total).copy_(total)


@registered_pair.register_fake
def _fake_pair(a: Tensor, b: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(a * b), torch.empty_like(a + b)


def _differentiate_pair(ctx: Any, d_product: Tensor, d_sum: Tensor) -> tuple[Any, ...]:
    a, b = ctx.saved_tensors
    return (d_product * b + d_sum) * ctx.scale, (d_product * a + d_sum) * ctx.scale, None


registered_pair.register_autograd(_differentiate_pair, setup_context=_save)


def wrong_second_output(a: Tensor, b: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    product, total = product_and_sum(a, b, scale)
    return product, total * (1 + 1e-2)


def wrong_gradient_of_the_second_output(a: Tensor, b: Tensor, scale: float) -> Any:
    product, total = product_and_sum(a, b, scale)
    return product, 2 * total - total.detach()


def one_output(a: Tensor, b: Tensor, scale: float) -> Any:
    return (product_and_sum(a, b, scale)[0],)


def second_output_of_another_dtype(a: Tensor, b: Tensor, scale: float) -> Any:
    product, total = product_and_sum(a, b, scale)
    return product, total.double() if total.dtype == torch.float32 else total.float()


def second_output_never_the_same(a: Tensor, b: Tensor, scale: float) -> Any:
    return a * b * scale, never_twice_the_same(a, torch.ones_like(b), scale) + b * scale


@torch.library.custom_op("hoconv_toy::multiply_once", mutates_args=())
def registered_once(a: Tensor, b: Tensor, scale: float) -> Tensor:
    return torch.empty_like(a * b).copy_(a * b * scale)


@registered_once.register_fake
def _fake_once(a: Tensor, b: Tensor, scale: float) -> Tensor:
    return torch.empty_like(a * b)


@torch.library.custom_op("hoconv_toy::backward_once", mutates_args=())
def backward_once(grad: Tensor, a: Tensor, b: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    d_a, d_b = torch.empty_like(b), torch.empty_like(a)
    return d_a.copy_(grad * b * scale), d_b.copy_(grad * a * scale)


@backward_once.register_fake
def _fake_backward(grad: Tensor, a: Tensor, b: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(b), torch.empty_like(a)


@once_differentiable
def _differentiate_once(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    return *backward_once(grad, *ctx.saved_tensors, ctx.scale), None


registered_once.register_autograd(_differentiate_once, setup_context=_save)


def ignores_a_second_derivative(a: Tensor, b: Tensor, scale: float) -> Tensor:
    return _Detached.apply(a, b, scale)


class _Detached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.scale = scale
        return a * b * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        a, b = (t.detach() for t in ctx.saved_tensors)
        return grad * b * ctx.scale, grad * a * ctx.scale, None


def drops_a_second_derivative(a: Tensor, b: Tensor, scale: float) -> Tensor:
    return _Dropped.apply(a, b, scale)


class _Dropped(_Detached):
    """Its gradient calls an op that has none, as those of C++ do if nothing is registered."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        a, b = ctx.saved_tensors
        multiply = torch.ops.hoconv_toy.multiply_without_gradient
        return multiply(grad, b, ctx.scale), multiply(grad, a, ctx.scale), None


_library.define("multiply_without_gradient(Tensor a, Tensor b, float scale) -> Tensor")
_library.impl("multiply_without_gradient", lambda a, b, scale: a * b * scale, "CPU")
torch.library.register_fake("hoconv_toy::multiply_without_gradient", _fake_once)


FIRST = toy(
    "toy_first",
    {
        "registered": registered_once._opoverload,
        "ignored": ignores_a_second_derivative,
        "dropped": drops_a_second_derivative,
    },
    first_order=True,
)


def _fake_single(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _save_single(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate_single(ctx: Any, grad: Tensor) -> Tensor:
    return 2 * grad * ctx.saved_tensors[0]


squared = registration.define(
    _library, "square", "registered", "(Tensor x) -> Tensor", _fake_single
)
registration.register_gradient(_library, squared, _differentiate_single, _save_single)
_library.impl("square.registered", lambda x: (x * x).contiguous(), "CPU")


def square(x: Tensor, *, impl: str = "auto") -> Tensor:
    """Takes one tensor, and returns one, as all functions in it do."""
    registration.check_dense(x)
    x = registration.autocast(x.device.type, x)
    registration.check_dtypes(x, SINGLE.tolerances)
    return SINGLE.implementations[resolve("toy_single", impl, x.device.type)].function(x)


SINGLE = declare(
    Operator(
        name="toy_single",
        function=square,
        implementations={
            "reference": Implementation(lambda x: x * x),
            "registered": Implementation(squared, ("cpu",)),
        },
        samples=lambda device, dtype: (
            Sample(sample.args[:1], name=sample.name) for sample in samples(device, dtype)
        ),
        tolerances={torch.float64: 1e-15, torch.float32: 1e-6, torch.bfloat16: 1e-2},
        cost=lambda sample: Cost(2 * sample.args[0].nbytes, 3 * sample.args[0].nbytes, 0, 0),
        benchmark=Benchmark(
            "rows", (4,), lambda n, device, dtype: Sample((torch.ones(n, 16).to(device, dtype),))
        ),
    )
)


def in_one_dtype(a: Tensor, b: Tensor, scale: float) -> Tensor:
    if a.dtype == torch.bfloat16 or b.dtype == torch.bfloat16:
        raise TypeError("a: expected torch.float32, got torch.bfloat16")
    return multiply(a, b, scale)


ONE_DTYPE = toy("toy_one_dtype", {"same": in_one_dtype})


def rounded(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Rounds to multiples of an eighth; the gradient is that of the product."""
    out = multiply(a, b, scale)
    return out + ((8 * out).round() / 8 - out).detach()


def half_the_surrogate(a: Tensor, b: Tensor, scale: float) -> Tensor:
    out = rounded(a, b, scale)
    return 0.5 * out + 0.5 * out.detach()


def rounded_once(a: Tensor, b: Tensor, scale: float) -> Tensor:
    out = drops_a_second_derivative(a, b, scale)
    return out + ((8 * out).round() / 8 - out).detach()


SURROGATE = toy(
    "toy_surrogate",
    {"same": rounded, "half": half_the_surrogate, "dropped": rounded_once},
    reference=rounded,
    surrogate_gradient=True,
)
SOUND = toy("toy_sound", {"registered": registered._opoverload})
FAULTY = toy(
    "toy_faulty",
    {
        "wrong_output": wrong_output,
        "wrong_gradient": wrong_gradient,
        "wrong_second_gradient": wrong_second_gradient,
        "not_a_number": not_a_number,
        "wrong_dtype": wrong_dtype,
        "takes_b_for_contiguous": takes_b_for_contiguous,
        "takes_rows_for_contiguous": takes_rows_for_contiguous,
        "takes_the_gradient_for_contiguous": takes_the_gradient_for_contiguous,
        "differentiates_b_only_with_a": differentiates_b_only_with_a,
        "takes_b_for_an_a": takes_b_for_an_a,
        "changes_its_input": changes_its_input,
        "never_twice_the_same": never_twice_the_same,
        "depends_on_threads": depends_on_threads,
        "untraceable": untraceable,
        "fake_with_wrong_strides": op_with(
            "strides", lambda a, b, scale: a.new_empty(a.mT.shape).mT
        ),
        "fake_with_wrong_shape": op_with("shape", lambda a, b, scale: a.new_empty(a.shape[:1])),
        "wrong_rule_for_vmap": op_with("vmap", vmap=first_of_all),
    },
    {
        "does_not_compile": Implementation(multiply, ("cpu",), lambda: "t.cpp:7: error"),
        "does_not_load": Implementation(multiply, ("cpu",), does_not_load),
        "is_missing": Implementation(multiply, ("cpu",), obstacle=lambda: "it needs a licence"),
    },
)
PAIR = toy("toy_pair", {"registered": registered_pair._opoverload}, reference=product_and_sum)
FAULTY_PAIR = toy(
    "toy_faulty_pair",
    {
        "wrong_second_output": wrong_second_output,
        "wrong_gradient_of_the_second_output": wrong_gradient_of_the_second_output,
        "one_output": one_output,
        "second_output_of_another_dtype": second_output_of_another_dtype,
        "second_output_never_the_same": second_output_never_the_same,
    },
    reference=product_and_sum,
)
