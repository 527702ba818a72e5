"""LightweightConv1d and DynamicConv1d against the paper's definitions; decoding step by step.

B batch, C channels, H heads, K taps, T time steps.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hoconv import DynamicConv1d, LightweightConv1d
from hoconv.dispatch.declaration import layers
from hoconv.ops.dynamic_conv1d.operator import OPERATOR
from hoconv.tools.testing.variants import Variant, variants

Layer = LightweightConv1d | DynamicConv1d

everywhere = pytest.mark.parametrize("variant", variants([OPERATOR]), indirect=True)
both = pytest.mark.parametrize("kind", [LightweightConv1d, DynamicConv1d])
PADDINGS: dict[tuple[str, int], tuple[int, int]] = {  # zeros before and after
    ("causal", 1): (0, 0),
    ("causal", 3): (2, 0),
    ("causal", 4): (3, 0),
    ("same", 1): (0, 0),
    ("same", 3): (1, 1),
    ("same", 4): (1, 2),
    ("same", 7): (3, 3),
}


def layer_at(kind: Any, variant: Variant, channels: int = 6, K: int = 3, **options: Any) -> Layer:
    layer = kind(channels, K, impl=variant.impl, **{"heads": 2, "bias": True, **options})
    if layer.bias is not None:
        nn.init.normal_(layer.bias)  # it starts as zeros
    return layer.double().to(variant.device)


def sequence(variant: Variant, *shape: int) -> Tensor:
    return torch.randn(shape or (2, 6, 11), dtype=torch.float64).to(variant.device)


def gradients(layer: nn.Module, x: Tensor, call: Any = None) -> dict[str, Tensor]:
    x = x.detach().requires_grad_()
    layer.zero_grad()
    (layer if call is None else call)(x).square().sum().backward()
    named = {"input": x, **dict(layer.named_parameters())}
    assert all(t.grad is not None for t in named.values())
    return {name: t.grad for name, t in named.items() if t.grad is not None}


def lightweight(layer: LightweightConv1d, x: Tensor, before: int, after: int) -> Tensor:
    """A depthwise convolution with the softmaxed weights of each head repeated."""
    C = x.shape[1]
    weight = layer.weight.softmax(1) if layer.softmax else layer.weight
    weight = weight.repeat_interleave(C // weight.shape[0], 0).unsqueeze(1)
    return F.conv1d(F.pad(x, (before, after)), weight, layer.bias, groups=C)


def dynamic(layer: DynamicConv1d, x: Tensor, before: int, after: int) -> Tensor:
    """Step by step and head by head: generate, normalise, take the mean of the window."""
    H, K, (_, C, T) = layer.heads, layer.kernel_size, x.shape
    padded = F.pad(x, (before, after))
    steps = []
    for t in range(T):
        generated = F.linear(x[:, :, t], layer.generator.weight, layer.generator.bias)  # (B, H * K)
        parts = []
        for h in range(H):
            kernel = generated[:, h * K : (h + 1) * K]
            kernel = kernel.softmax(1) if layer.softmax else kernel
            window = padded[:, h * C // H : (h + 1) * C // H, t : t + K]
            parts.append((window * kernel[:, None]).sum(2))
        steps.append(torch.cat(parts, 1))
    out = torch.stack(steps, 2)
    return out if layer.bias is None else out + layer.bias[:, None]


@everywhere
@pytest.mark.parametrize(("padding", "K"), PADDINGS)
@pytest.mark.parametrize("options", [{}, {"softmax": False, "bias": False}, {"heads": 6}])
def test_lightweight_is_the_depthwise_convolution_of_the_paper(
    variant: Variant, padding: str, K: int, options: dict[str, Any]
) -> None:
    layer = LightweightConv1d(6, K, padding=padding, impl=variant.impl, **{"heads": 2, **options})  # pyright: ignore[reportArgumentType]
    layer, x = layer.double().to(variant.device), sequence(variant)
    expected = lightweight(layer, x, *PADDINGS[padding, K])
    torch.testing.assert_close(layer(x), expected)
    by_hand = gradients(layer, x, lambda x: lightweight(layer, x, *PADDINGS[padding, K]))
    for name, gradient in gradients(layer, x).items():
        torch.testing.assert_close(gradient, by_hand[name])


@everywhere
@pytest.mark.parametrize(("padding", "K"), PADDINGS)
@pytest.mark.parametrize(
    "options", [{}, {"softmax": False, "bias": False, "generator_bias": True}, {"heads": 6}]
)
def test_dynamic_generates_the_kernel_of_a_step_from_its_input(
    variant: Variant, padding: str, K: int, options: dict[str, Any]
) -> None:
    layer = DynamicConv1d(6, K, padding=padding, impl=variant.impl, **{"heads": 2, **options})  # pyright: ignore[reportArgumentType]
    layer, x = layer.double().to(variant.device), sequence(variant)
    expected = dynamic(layer, x, *PADDINGS[padding, K])
    torch.testing.assert_close(layer(x), expected)
    by_hand = gradients(layer, x, lambda x: dynamic(layer, x, *PADDINGS[padding, K]))
    for name, gradient in gradients(layer, x).items():
        torch.testing.assert_close(gradient, by_hand[name])


@everywhere
@both
def test_bias_is_added_to_the_output(variant: Variant, kind: Any) -> None:
    layer, x = layer_at(kind, variant), sequence(variant)
    assert layer.bias is not None
    with_bias, bias = layer(x), layer.bias
    layer.bias = None
    torch.testing.assert_close(with_bias, layer(x) + bias[:, None])


@everywhere
@both
def test_causal_does_not_see_the_future_and_same_does(variant: Variant, kind: Any) -> None:
    x = sequence(variant)
    changed = x.clone()
    changed[:, :, 6:] += 1
    layer = layer_at(kind, variant, K=5)
    assert torch.equal(layer(x)[:, :, :6], layer(changed)[:, :, :6])
    assert not torch.equal(layer(x)[:, :, 6:], layer(changed)[:, :, 6:])
    layer.padding = "same"
    assert torch.equal(layer(x)[:, :, :4], layer(changed)[:, :, :4])
    assert (layer(x) != layer(changed))[:, :, 4:6].all()


# Dropout of weights


@everywhere
def test_lightweight_drops_weights_alike_for_all_sequences_and_steps(
    variant: Variant,
) -> None:
    layer = layer_at(LightweightConv1d, variant, 64, 8, heads=64, bias=False, weight_dropout=0.25)
    # A unit impulse: the output is the kernel, backwards in time.
    x = torch.zeros(2, 64, 30, dtype=torch.float64, device=variant.device)
    x[:, :, [0, 15]] = 1
    out = layer(x)
    kept = out[:, :, :8].flip(2)
    assert torch.equal(kept[0], kept[1])
    assert torch.equal(kept, out[:, :, 15:23].flip(2))
    normalised = layer.weight.softmax(1)  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
    dropped = kept[0] == 0
    assert 0.15 < dropped.double().mean() < 0.35
    torch.testing.assert_close(kept[0][~dropped], normalised[~dropped] / 0.75)
    assert not torch.equal(layer(x), out)  # drawn again


@everywhere
def test_dynamic_drops_weights_of_each_step(variant: Variant) -> None:
    layer = layer_at(DynamicConv1d, variant, 64, 1, heads=64, bias=False, weight_dropout=0.25)
    out = layer(torch.ones(2, 64, 30, dtype=torch.float64, device=variant.device))
    dropped = out == 0  # one tap: its weight is one
    assert 0.2 < dropped.double().mean() < 0.3
    torch.testing.assert_close(out[~dropped], torch.full_like(out[~dropped], 1 / 0.75))
    assert not torch.equal(dropped[0], dropped[1])
    assert not torch.equal(dropped[..., 0], dropped[..., 1])


@everywhere
@both
def test_nothing_is_dropped_in_evaluation(variant: Variant, kind: Any) -> None:
    layer, x = layer_at(kind, variant, weight_dropout=0.5).eval(), sequence(variant)
    expected = layer(x)
    layer.weight_dropout = 0.0
    assert torch.equal(layer.train()(x), expected)


# Step by step


@everywhere
@both
@pytest.mark.parametrize("K", [1, 2, 5, 20])
@pytest.mark.parametrize("cut", [(1,) * 11, (4, 1, 6), (11,), (3, 0, 8)])
def test_step_by_step_equals_the_whole_sequence(
    variant: Variant, kind: Any, K: int, cut: tuple[int, ...]
) -> None:
    layer, x = layer_at(kind, variant, K=K), sequence(variant)
    state, parts = layer.initial_state(2), []
    for steps in x.split(cut, 2):
        out, state = layer.step(steps, state)
        assert out.shape == steps.shape
        assert state.shape == (2, 6, K - 1)
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts, 2), layer(x))


@everywhere
@both
def test_one_step_may_come_without_its_dimension(variant: Variant, kind: Any) -> None:
    layer, x = layer_at(kind, variant), sequence(variant)
    state, outs = layer.initial_state(2), []
    for step in x.unbind(2):
        out, state = layer.step(step, state)
        outs.append(out)
    torch.testing.assert_close(torch.stack(outs, 2), layer(x))


@everywhere
@both
def test_state_is_reordered_by_indexing(variant: Variant, kind: Any) -> None:
    layer, x, order = layer_at(kind, variant), sequence(variant, 3, 6, 8), [2, 0, 0]
    _, state = layer.step(x[:, :, :5], layer.initial_state(3))
    before = state.clone()
    out, _ = layer.step(x[order][:, :, 5:], state[order])
    torch.testing.assert_close(out, layer(x[order])[:, :, 5:])
    assert torch.equal(state, before)  # nothing is kept or changed in place


@everywhere
@both
def test_gradients_flow_through_steps(variant: Variant, kind: Any) -> None:
    layer, x = layer_at(kind, variant), sequence(variant)

    def by_steps(x: Tensor) -> Tensor:
        state, parts = layer.initial_state(2), []
        for steps in x.split(4, 2):
            out, state = layer.step(steps, state)
            parts.append(out)
        return torch.cat(parts, 2)

    expected = gradients(layer, x)
    for name, gradient in gradients(layer, x, by_steps).items():
        torch.testing.assert_close(gradient, expected[name])


@both
def test_step_of_a_centred_layer_is_refused(kind: Any) -> None:
    layer = kind(6, 3, padding="same")
    with pytest.raises(ValueError, match=r"^step: needs padding='causal', got 'same'"):
        layer.step(torch.zeros(2, 6), layer.initial_state(2))


@both
def test_wrong_input_or_state_of_a_step_is_refused_by_name(kind: Any) -> None:
    layer, state = kind(6, 3), torch.zeros(2, 6, 2)
    for shape in ((2, 5), (2, 5, 1), (6,), (2, 6, 1, 1)):
        with pytest.raises(ValueError, match=r"^x: expected \(B, 6\) or \(B, 6, n\), got shape"):
            layer.step(torch.zeros(shape), state)
    for shape in ((1, 6, 2), (2, 6, 3), (2, 6)):
        with pytest.raises(ValueError, match=r"^state: expected shape \(2, 6, 2\), got"):
            layer.step(torch.zeros(2, 6), torch.zeros(shape))


# As a module


@everywhere
@both
@pytest.mark.parametrize("dtype", OPERATOR.tolerances)
def test_moved_to_a_dtype_computes_in_it(variant: Variant, kind: Any, dtype: torch.dtype) -> None:
    layer, x = layer_at(kind, variant), sequence(variant)
    expected = layer(x)
    layer = layer.to(dtype)
    out = layer(x.to(dtype))
    assert out.dtype == layer.initial_state(1).dtype == dtype
    assert (out.double() - expected).norm() / expected.norm() < 20 * torch.finfo(dtype).eps


@everywhere
@both
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_computes_in_half_precision_and_trains_in_float32(
    variant: Variant, kind: Any, dtype: torch.dtype
) -> None:
    layer, x = layer_at(kind, variant).float(), sequence(variant).float()
    expected = layer(x)
    with torch.autocast(variant.device, dtype=dtype):
        out = layer(x)
        stepped, _ = layer.step(x, layer.initial_state(2))
    assert out.dtype == stepped.dtype == dtype
    assert (out - expected).norm() / expected.norm() < 20 * torch.finfo(dtype).eps
    assert (stepped - expected).norm() / expected.norm() < 20 * torch.finfo(dtype).eps
    out.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())


@everywhere
@both
def test_compiled_equals_eager(variant: Variant, kind: Any) -> None:
    torch.compiler.reset()
    layer, x = layer_at(kind, variant), sequence(variant)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x))
    expected = gradients(layer, x)
    for name, gradient in gradients(layer, x, compiled).items():
        torch.testing.assert_close(gradient, expected[name])
    step = torch.compile(layer.step, fullgraph=True, backend="aot_eager")
    state = layer.step(x[:, :, :4], layer.initial_state(2))[1]
    for part in (x[:, :, 4], x[:, :, 4:7]):
        torch.testing.assert_close(step(part, state), layer.step(part, state))


@pytest.mark.parametrize("impl", ["auto", *OPERATOR.implementations])
def test_state_dict_is_the_same_for_every_implementation(impl: str) -> None:
    def shapes(layer: nn.Module) -> dict[str, tuple[int, ...]]:
        return {name: tuple(t.shape) for name, t in layer.state_dict().items()}

    assert shapes(LightweightConv1d(6, 3, heads=2, impl=impl)) == {"weight": (2, 3)}
    light = LightweightConv1d(6, 3, heads=2, bias=True, impl=impl)
    assert shapes(light) == {"weight": (2, 3), "bias": (6,)}
    assert shapes(DynamicConv1d(6, 3, heads=2, impl=impl)) == {"generator.weight": (6, 6)}
    layer = DynamicConv1d(6, 3, heads=2, bias=True, generator_bias=True, impl=impl)
    expected = {"generator.weight": (6, 6), "generator.bias": (6,), "bias": (6,)}
    assert shapes(layer) == expected
    other = DynamicConv1d(6, 3, heads=2, bias=True, generator_bias=True, impl="reference")
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.generator.weight, layer.generator.weight)


@both
def test_empty_batch_and_sequence_give_zero_gradients(kind: Any) -> None:
    layer = layer_at(kind, Variant(OPERATOR, "auto", "cpu"))
    for shape in ((0, 6, 9), (2, 6, 0)):
        x = torch.zeros(shape, dtype=torch.float64)
        assert layer(x).shape == shape
        for name, gradient in gradients(layer, x).items():
            assert not gradient.any(), name


@both
def test_copies_compute_the_same_and_are_found(kind: Any) -> None:
    variant = Variant(OPERATOR, "auto", "cpu")
    layer, x = layer_at(kind, variant), sequence(variant)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x), layer(x))
        assert list(layers(other)) == [("", other)]
        assert other.operator is OPERATOR


@both
def test_shows_its_options(kind: Any) -> None:
    layer = kind(6, 3, heads=2, padding="same", weight_dropout=0.1, bias=True, impl="reference")
    assert layer.extra_repr() == (
        "6, kernel_size=3, heads=2, padding='same', softmax=True, weight_dropout=0.1, bias=True, "
        "impl='reference'"
    )


@both
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"channels": 0}, "channels: expected at least 1, got 0"),
        ({"kernel_size": 0}, "kernel_size: expected at least 1, got 0"),
        ({"heads": 0}, "heads: expected a divisor of channels=6, got 0"),
        ({"heads": 4}, "heads: expected a divisor of channels=6, got 4"),
        ({"padding": 1}, "padding: expected 'causal' or 'same', got 1"),
        ({"padding": "valid"}, "padding: expected 'causal' or 'same', got 'valid'"),
        ({"weight_dropout": 1.0}, "weight_dropout: expected a probability .* got 1.0"),
        ({"weight_dropout": -0.1}, "weight_dropout: expected a probability .* got -0.1"),
        ({"impl": "fast"}, "impl: expected one of auto, .*; got 'fast' for dynamic_conv1d"),
    ],
)
def test_wrong_option_is_refused_by_name(kind: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        kind(**{"channels": 6, "kernel_size": 3, **options})


@both
def test_wrong_number_of_channels_is_refused_by_name(kind: Any) -> None:
    for shape in ((2, 4, 9), (2, 12, 9), (6, 9), (2, 6, 9, 1)):
        with pytest.raises(ValueError, match=r"^x: expected \(B, 6, T\), got shape"):
            kind(6, 3)(torch.zeros(shape))


def test_other_shapes_of_weights_are_refused() -> None:
    """As many numbers in another order would do otherwise."""
    x = torch.randn(2, 6, 5)
    dynamic = DynamicConv1d(6, 3, heads=2)
    dynamic.generator.register_forward_hook(lambda module, given, result: result.mT)
    with pytest.raises(ValueError, match=r"generator returns: expected shape \(2, 5, 6\), got"):
        dynamic(x)
    lightweight = LightweightConv1d(6, 3, heads=2)
    lightweight.weight = nn.Parameter(torch.randn(3, 2))
    with pytest.raises(ValueError, match=r"weight: expected shape \(2, 3\), got \(3, 2\)"):
        lightweight(x)
