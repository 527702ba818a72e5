"""DynamicConv1d as one op that generates its weights and applies them; and its generator called,
where that has hooks or was replaced.

B batch, C channels, H heads, K taps, T time steps.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, weight_norm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from hoconv import DynamicConv1d, dynamic_conv1d
from hoconv.dispatch.implementations import choose
from hoconv.ops.dynamic_conv1d import composed, ops
from hoconv.ops.dynamic_conv1d.operator import OPERATOR, generate_and_convolve
from hoconv.tools.testing.comparison import output_and_gradients, relative_error
from hoconv.tools.testing.variants import Variant, variants

everywhere = pytest.mark.parametrize("variant", variants([OPERATOR]), indirect=True)
with_ops = pytest.mark.parametrize(
    "variant", [p for p in variants([OPERATOR]) if "reference" not in p.id], indirect=True
)
# B, C, T, H, K, softmax, with a bias
CASES = [
    (2, 6, 11, 2, 3, True, True),
    (2, 6, 11, 2, 3, False, True),
    (2, 6, 11, 3, 4, True, False),
    (1, 4, 5, 1, 3, False, False),
    (3, 6, 1, 6, 1, True, True),
    (2, 5, 4, 1, 1, False, True),
    (0, 6, 5, 2, 3, True, True),
    (2, 6, 0, 2, 3, True, True),
]
# Of more steps, taps and channels of a head than the kernels compute at once, and of as many; of
# one step.
LONG = [
    (1, 8, 300, 2, 31, True, False),
    (2, 4, 129, 1, 9, True, True),
    (2, 6, 140, 3, 32, True, True),
    (1, 8, 150, 2, 40, True, True),
    (2, 64, 130, 2, 7, True, False),
    (2, 8, 1, 2, 3, True, True),
]
cases = pytest.mark.parametrize("case", CASES, ids=str)


def draw(variant: Variant, case: Any, dtype: torch.dtype = torch.float64) -> list[Any]:
    """x, the generator's weight and bias."""
    B, C, T, H, K, _, with_bias = case
    shapes = (B, C, T), (H * K, C), (H * K,)
    x, weight, bias = (
        torch.randn(shape, dtype=torch.float64).to(variant.device, dtype) for shape in shapes
    )
    return [x, weight, bias if with_bias else None]


def function(impl: str, case: Any, padding: int | None = None) -> Callable[..., Tensor]:
    _, _, _, H, K, softmax, _ = case
    at = K - 1 if padding is None else padding
    return lambda x, weight, bias=None: generate_and_convolve(x, weight, bias, H, at, softmax, impl)


def definition(case: Any, padding: int | None = None) -> Callable[..., Tensor]:
    """In plain PyTorch, of any order of differentiation."""
    _, _, _, H, K, softmax, _ = case

    def compute(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        taps = F.linear(x.mT, weight, bias).mT.unflatten(1, (H, K))
        taps = taps.softmax(2) if softmax else taps
        at = K - 1 if padding is None else padding
        return dynamic_conv1d(x, taps, padding=at, impl="reference")

    return compute


@everywhere
@pytest.mark.parametrize("case", CASES + LONG, ids=str)
@pytest.mark.parametrize("dtype", OPERATOR.tolerances)
def test_it_is_the_definition(variant: Variant, case: Any, dtype: torch.dtype) -> None:
    args = [a for a in draw(variant, case, dtype) if a is not None]
    grad = torch.randn_like(args[0])
    for padding in (0, case[4] - 1):
        found = output_and_gradients(function(variant.impl, case, padding), args, {}, grad)
        exact = [a.double() for a in args]
        expected = output_and_gradients(definition(case, padding), exact, {}, grad.double())
        for name, result in found.items():
            assert result.dtype == dtype
            assert relative_error(result, expected[name]) <= 30 * torch.finfo(dtype).eps, name


@everywhere
@pytest.mark.parametrize("case", [c for c in CASES if c[0] * c[2]], ids=str)
@pytest.mark.parametrize("wanted", [*itertools.product((False, True), repeat=3)][1:])
def test_gradients_of_any_arguments_can_be_differentiated(
    variant: Variant, case: Any, wanted: tuple[bool, ...]
) -> None:
    args = [a for a in draw(variant, (*case[:2], min(case[2], 4), *case[3:])) if a is not None]
    leaves = [a.requires_grad_(want) for a, want in zip(args, wanted, strict=False)]
    if not any(leaf.requires_grad for leaf in leaves):
        return
    assert torch.autograd.gradcheck(function(variant.impl, case), leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(function(variant.impl, case), leaves, fast_mode=True)


@everywhere
@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_derivatives_of_three_orders_of_a_stack(variant: Variant, case: Any) -> None:
    """Of layers one after another, whose weights are the same, and a bias that depends on x."""
    leaves = [a.requires_grad_() for a in draw(variant, case)]

    def compute(layer: Callable[..., Tensor]) -> list[Tensor]:
        x, weight, bias = leaves
        for _ in range(2):
            x = layer(x, weight, bias * (1 + x.tanh().mean())).tanh()
        loss, found = x.sin().mean(), []
        for _ in range(3):
            grads = torch.autograd.grad(loss, leaves, create_graph=True)
            found += grads
            loss = loss + torch.cat([g.sin().square().flatten() for g in grads]).sum()
        return found

    pairs = zip(compute(function(variant.impl, case)), compute(definition(case)), strict=True)
    assert all(relative_error(a.detach(), b.detach()) <= 1e-9 for a, b in pairs)


def forward_mode(f: Any, point: Any) -> Any:
    return torch.func.jvp(f, point, tuple(t.cos() for t in point))


def gradient(f: Any, point: Any) -> Any:
    return torch.func.grad(lambda *t: f(*t).sin().sum(), argnums=(0, 1, 2))(*point)


def forward_over_reverse(f: Any, point: Any) -> Any:
    return torch.func.jvp(lambda *t: gradient(f, t), point, tuple(t.cos() for t in point))


def reverse_over_forward(f: Any, point: Any) -> Any:
    return torch.func.grad(lambda *t: forward_mode(f, t)[1].sin().mean())(*point)


def jacobian(f: Any, point: Any) -> Any:
    return torch.func.jacrev(lambda x: f(x, *point[1:]).flatten()[:5])(point[0])


def batch(f: Any, point: Any) -> Any:
    batched = tuple(torch.stack([t, -t, 2 * t]) for t in point)
    only_x = torch.vmap(f, (0, None, None))(batched[0], *point[1:])
    return torch.vmap(f)(*batched), only_x, torch.vmap(lambda *t: gradient(f, t))(*batched)


def gradients_in_a_batch(f: Any, point: Any) -> Any:
    leaves = [t.clone().requires_grad_() for t in point]
    out = f(*leaves)
    weights = torch.stack([torch.ones_like(out), out.detach().cos()])
    return torch.autograd.grad(out, leaves, weights, is_grads_batched=True)


@everywhere
@pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet")
@pytest.mark.parametrize("case", CASES[:2], ids=str)
@pytest.mark.parametrize(
    "transform",
    [forward_mode, gradient, forward_over_reverse, reverse_over_forward, jacobian, batch,
     gradients_in_a_batch],
)  # fmt: skip
def test_transforms_agree_with_the_definition(variant: Variant, case: Any, transform: Any) -> None:
    point = tuple(draw(variant, case))
    found = transform(function(variant.impl, case), point)
    expected = transform(definition(case), point)
    torch.testing.assert_close(found, expected)


# opcheck looks at the gradients of views among its inputs.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@with_ops
@cases
def test_torch_library_finds_no_fault(variant: Variant, case: Any) -> None:
    choose(OPERATOR, variant.impl, variant.device)  # loads it
    _, _, _, H, K, softmax, _ = case
    for dtype in (torch.float32, torch.bfloat16):
        x, weight, bias = draw(variant, case, dtype)
        forward = ops.LAYER[variant.impl].overload
        backward = getattr(torch.ops.hoconv.dynamic_conv1d_layer_backward, variant.impl)
        with torch.no_grad():
            taps = forward(x, weight, bias, H, K - 1, softmax)[1]
        leaves = [t if t is None else t.requires_grad_() for t in (x, weight, bias)]
        torch.library.opcheck(forward, (*leaves, H, K - 1, softmax))
        for needed in ((True, True, bias is not None), (False, True, False), (True, False, False)):
            args = torch.randn_like(x), *leaves, taps, K - 1, softmax, *needed
            torch.library.opcheck(backward, args, test_utils=("test_schema", "test_faketensor"))


@with_ops
def test_the_weights_that_the_op_returns_have_no_gradient(variant: Variant) -> None:
    """They are for its backward pass; derivatives generate them again."""
    choose(OPERATOR, variant.impl, variant.device)
    x, weight, bias = (a.requires_grad_() for a in draw(variant, CASES[0]))
    out, taps = ops.LAYER[variant.impl](x, weight, bias, 2, 2, True)
    assert out.requires_grad
    assert not taps.requires_grad


@with_ops
@cases
def test_kernels_and_their_composition_give_the_same(variant: Variant, case: Any) -> None:
    """The composition is what `triton` calls, and what derivatives of higher order are of."""
    choose(OPERATOR, variant.impl, variant.device)
    own, (_, _, _, H, K, softmax, with_bias) = getattr(ops, variant.impl), case
    x, weight, bias = draw(variant, case)
    out, taps = ops.LAYER[variant.impl](x, weight, bias, H, K - 1, softmax)
    expected = composed.forward(own.forward, x, weight, bias, H, K - 1, softmax)
    torch.testing.assert_close((out, taps), expected)
    backward = getattr(torch.ops.hoconv.dynamic_conv1d_layer_backward, variant.impl)
    for needed in itertools.product((False, True), (False, True), {False, with_bias}):
        args = torch.randn_like(x), x, weight, bias, taps, K - 1, softmax, *needed
        found = backward(*args)
        torch.testing.assert_close(found, composed.backward(own, *args))
        torch.testing.assert_close(found, composed.backward_of_parameters(own, *args))
        assert [t.numel() > 0 for t in found if x.numel()] == [*needed][: 3 * (x.numel() > 0)]


@with_ops
@pytest.mark.parametrize("case", [case for case in LONG if case[5]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("by_step", [False, True])
@pytest.mark.parametrize("kind", ["contiguous", "expanded", "channels last"])
def test_gradients_of_weights_and_outputs_in_any_layout(
    variant: Variant, case: Any, dtype: torch.dtype, by_step: bool, kind: str
) -> None:
    """A compiler chooses the layout of what it saves; autograd that of a gradient."""
    choose(OPERATOR, variant.impl, variant.device)
    _, _, _, H, K, _, _ = case
    x, weight, bias = draw(variant, case, dtype)
    grad = {
        "contiguous": torch.randn_like(x),
        "expanded": torch.randn_like(x[:1, :1, :1]).expand_as(x),
        "channels last": torch.randn_like(x.mT).mT,
    }[kind]
    exact: list[Any] = [t if t is None else t.double().requires_grad_() for t in (x, weight, bias)]
    taps = F.linear(exact[0].mT, *exact[1:]).mT.unflatten(1, (H, K)).softmax(2)
    found = getattr(torch.ops.hoconv.dynamic_conv1d_layer_backward, variant.impl)(
        grad, x, weight, bias, lay_out(taps.detach().to(dtype), by_step), K - 1, True,
        True, True, bias is not None,
    )  # fmt: skip
    leaves = [t for t in exact if t is not None]
    expected = torch.autograd.grad(
        dynamic_conv1d(exact[0], taps, padding=K - 1, impl="reference"), leaves, grad.double()
    )
    for mine, other in zip(found, expected, strict=False):
        assert relative_error(mine, other) <= 30 * torch.finfo(dtype).eps


def lay_out(taps: Tensor, by_step: bool) -> Tensor:
    """(B, H, K, T), with the taps of a step, or the steps of a tap, contiguous."""
    if by_step:
        return taps.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
    return taps.contiguous()


@with_ops
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, w, b: (x[0], w, b), "x: expected 3 dimensions"),
        (lambda x, w, b: (x, w[:-1], b), r"weight: expected \(heads \* K, C\)"),
        (lambda x, w, b: (x, w[:, :-1], b), r"weight: expected \(heads \* K, C\)"),
        (lambda x, w, b: (x, w.float(), b), "weight: expected the dtype of x"),
        (lambda x, w, b: (x, w, b[1:]), "bias: expected"),
        (lambda x, w, b: (x, w, b.float()), "bias: expected the dtype of x"),
    ],
)
def test_op_called_past_the_checks_refuses(variant: Variant, change: Any, message: str) -> None:
    if variant.impl == "triton":
        pytest.skip("it is composed of PyTorch's ops, which refuse in their own words")
    choose(OPERATOR, variant.impl, variant.device)
    args = change(*draw(variant, CASES[0]))
    with pytest.raises(RuntimeError, match=message):
        ops.LAYER[variant.impl].overload(*args, 2, 2, True)


# The layer


def make(variant: Variant, **options: Any) -> DynamicConv1d:
    options = {"heads": 2, "generator_bias": True, "bias": True, **options}
    return DynamicConv1d(6, 3, impl=variant.impl, **options).double().to(variant.device)


def by_hand(layer: DynamicConv1d, x: Tensor) -> Tensor:
    """Returns what the layer's generator returns, applied."""
    taps = layer.generator(x.mT).mT.unflatten(1, (2, 3)).softmax(2)
    out = dynamic_conv1d(x, taps, padding=2, impl="reference")
    assert layer.bias is not None
    return out + layer.bias[:, None]


class Ops(TorchDispatchMode):
    """Notes the library's ops that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "hoconv":
            self.names.append(func._schema.name.removeprefix("hoconv::"))
        return func(*args, **(kwargs or {}))


def ops_of(layer: DynamicConv1d, x: Tensor) -> list[str]:
    layer(x)
    with Ops() as seen:
        layer(x).sum().backward()
    return seen.names


@with_ops
def test_a_call_is_one_op_each_way(variant: Variant) -> None:
    x = draw(variant, CASES[0])[0]
    fused = ["dynamic_conv1d_layer", "dynamic_conv1d_layer_backward"]
    layer = make(variant)
    assert ops_of(layer, x) == fused
    parametrizations.weight_norm(layer.generator)
    assert ops_of(layer, x) == fused
    dropping = make(variant, weight_dropout=0.3)
    assert fused[0] not in ops_of(dropping, x)
    assert ops_of(dropping.eval(), x) == fused


def hooked(layer: DynamicConv1d) -> None:
    layer.generator.register_forward_hook(lambda module, given, result: result.mul(0.5))


def given_another(layer: DynamicConv1d) -> None:
    layer.generator.register_forward_pre_hook(lambda module, given: (given[0].mul(0.5),))


def deeper(layer: DynamicConv1d) -> None:
    replaced = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 6)).double()
    replaced.to(layer.generator.weight.device)
    setattr(layer, "generator", replaced)  # noqa: B010


def assigned(layer: DynamicConv1d) -> None:
    forward = layer.generator.forward
    setattr(layer.generator, "forward", lambda x: forward(x) + x[..., :1])  # noqa: B010


class Scaled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def derived(layer: DynamicConv1d) -> None:
    layer.generator = Scaled(6, 6).to(layer.generator.weight)


@everywhere
@pytest.mark.parametrize("change", [hooked, given_another, deeper, assigned, derived])
def test_another_generator_is_called(variant: Variant, change: Any) -> None:
    layer, x = make(variant), draw(variant, CASES[0])[0].requires_grad_()
    change(layer)
    leaves = [x, *layer.parameters()]
    found = torch.autograd.grad(layer(x).sin().sum(), leaves)
    expected = torch.autograd.grad(by_hand(layer, x).sin().sum(), leaves)
    torch.testing.assert_close(layer(x), by_hand(layer, x))
    torch.testing.assert_close(found, expected)


@everywhere
def test_backward_hook_of_the_generator_runs(variant: Variant) -> None:
    layer, x = make(variant), draw(variant, CASES[0])[0].requires_grad_()
    seen: list[Any] = []
    layer.generator.register_full_backward_hook(lambda module, given, result: seen.append(result))
    layer(x).sum().backward()
    assert seen


@everywhere
@pytest.mark.parametrize(
    "change",
    [
        weight_norm,
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        lambda generator: prune.random_unstructured(generator, "weight", 0.3),
        lambda generator: prune.random_unstructured(generator, "bias", 0.3),
    ],
)
def test_what_changes_its_parameters_is_heeded(variant: Variant, change: Any) -> None:
    trained, loaded = make(variant), make(variant)
    with warnings.catch_warnings(action="ignore"):  # weight_norm is deprecated
        for layer in (trained, loaded):
            change(layer.generator)
    x = draw(variant, CASES[0])[0]
    loaded.load_state_dict(trained.state_dict())
    trained.eval()
    loaded.eval()
    torch.testing.assert_close(loaded(x), by_hand(trained, x))
    loaded(x).sum().backward()
    assert all(p.grad is not None for p in loaded.parameters())


@everywhere
def test_a_frozen_generator_has_no_gradient(variant: Variant) -> None:
    layer, x = make(variant), draw(variant, CASES[0])[0].requires_grad_()
    layer.generator.requires_grad_(False)
    (found,) = torch.autograd.grad(layer(x).sin().sum(), x)
    (expected,) = torch.autograd.grad(by_hand(layer, x).sin().sum(), x)
    torch.testing.assert_close(found, expected)


@with_ops
def test_x_and_the_weights_are_saved_and_no_copy(variant: Variant) -> None:
    layer, x = make(variant, bias=False), draw(variant, CASES[0])[0]
    packed: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        layer(x)
    parameters = {p.data_ptr() for p in layer.parameters()}
    others = [t for t in packed if t.data_ptr() not in parameters]
    assert [tuple(t.shape) for t in others] == [(2, 6, 11), (2, 2, 3, 11)]
    assert others[0].data_ptr() == x.data_ptr()


@with_ops  # PyTorch's own functions cast in the backward pass
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_around_either_pass(variant: Variant, dtype: torch.dtype) -> None:
    layer, x = make(variant).float(), draw(variant, CASES[0], torch.float32)[0]
    expected = torch.autograd.grad(layer(x).sum(), [*layer.parameters()])
    out = layer(x)
    with torch.autocast(variant.device, dtype=dtype):
        found = torch.autograd.grad(out.sum(), [*layer.parameters()])
        half = layer(x)
    torch.testing.assert_close(found, expected)
    assert half.dtype == dtype
    assert relative_error(half.detach(), out.detach()) < 20 * torch.finfo(dtype).eps
    found = torch.autograd.grad(half.float().sum(), [*layer.parameters()])
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == torch.float32
        assert relative_error(a, b) < 200 * torch.finfo(dtype).eps


@everywhere
def test_wrong_parameters_are_refused_by_name(variant: Variant) -> None:
    x = draw(variant, CASES[0])[0]
    layer = make(variant)
    layer.generator.weight = nn.Parameter(layer.generator.weight[:4].detach())
    with pytest.raises(ValueError, match=r"^generator.weight: expected shape \(6, 6\), got"):
        layer(x)
    layer = make(variant)
    layer.generator.bias = nn.Parameter(layer.generator.bias[:1].detach())
    with pytest.raises(ValueError, match=r"^generator.bias: expected shape \(6,\), got \(1,\)"):
        layer(x)
    with pytest.raises(TypeError, match=r"^weight: expected the dtype of x, torch.float32, got"):
        make(variant)(x.float())
    with pytest.raises(TypeError, match=r"^x: expected one of .*, got torch.int64"):
        make(variant)(x.long())
    with pytest.raises(ValueError, match=r"^weight: expected the device of x, "):
        make(variant).to("meta")(x)


@with_ops
def test_flops_are_those_of_the_generator_and_of_the_convolution(variant: Variant) -> None:
    layer, x = make(variant, bias=False, generator_bias=False), draw(variant, CASES[0])[0]

    def count(x: Tensor) -> int:
        with FlopCounterMode(display=False) as counter:
            layer(x).sum().backward()
        return counter.get_total_flops()

    for leaf in (x, x.clone().requires_grad_()):
        fused = count(leaf)
        hook = layer.generator.register_forward_hook(lambda module, given, result: result)
        assert fused == count(leaf)
        hook.remove()


@with_ops
def test_compiled_equals_eager(variant: Variant) -> None:
    torch.compiler.reset()
    x = draw(variant, CASES[0])[0].requires_grad_()
    layer = make(variant)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    leaves = [x, *layer.parameters()]
    found = torch.autograd.grad(compiled(x).sin().sum(), leaves)
    torch.testing.assert_close(found, torch.autograd.grad(layer(x).sin().sum(), leaves))
    with torch.no_grad():
        torch.testing.assert_close(compiled(x[..., 1:]), layer(x[..., 1:]))


LOAD = """
import sys, torch, hoconv
program = torch.export.load(sys.argv[1]).module()
x, out = torch.load(sys.argv[1] + ".tensors")
torch.testing.assert_close(program(x), out)
"""


@with_ops
def test_exported_and_loaded_where_hoconv_was_imported_alone(
    variant: Variant, tmp_path: Path
) -> None:
    layer, x = make(variant), draw(variant, CASES[0])[0]
    path = str(tmp_path / "layer.pt2")
    program = torch.export.export(layer, (x,))
    assert "dynamic_conv1d_layer" in str(program.graph)
    torch.export.save(program, path)
    torch.save((x, layer(x).detach()), f"{path}.tensors")
    done = subprocess.run(
        [sys.executable, "-c", LOAD, path],
        capture_output=True, text=True, check=False, env=dict(os.environ),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
