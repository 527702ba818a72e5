"""HighOrderConv2d with a generator that has hooks, or that another module has replaced."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, weight_norm

from hoconv import HighOrderConv2d, high_order_conv2d

IMPLEMENTATIONS = ["reference", "cpp"]


def definition(layer: HighOrderConv2d, x: Tensor) -> Tensor:
    """Returns what the layer's generator returns, applied."""
    taps = layer.generator(x).unflatten(1, (9, 2))
    taps = taps.softmax(1) if layer.normalize else taps
    return x + high_order_conv2d(x, taps.transpose(0, 1), impl="reference")


def make(impl: str) -> HighOrderConv2d:
    layer = HighOrderConv2d(4, 3, groups=2, normalize="softmax", residual=True, impl=impl)
    return layer.double()


def hooked(layer: HighOrderConv2d) -> None:
    layer.generator.register_forward_hook(lambda module, given, result: result.mul(0.5))


def reflecting(layer: HighOrderConv2d) -> None:
    layer.generator = nn.Conv2d(4, 18, 3, padding=1, padding_mode="reflect").double()


def deeper(layer: HighOrderConv2d) -> None:
    replaced = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU(), nn.Conv2d(4, 18, 3, padding=1))
    setattr(layer, "generator", replaced.double())  # noqa: B010


def assigned(layer: HighOrderConv2d) -> None:
    forward = layer.generator.forward
    setattr(layer.generator, "forward", lambda x: forward(x) + x[:, :1])  # noqa: B010


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("change", [hooked, reflecting, deeper, assigned])
def test_it_is_called(change: Callable[[HighOrderConv2d], None], impl: str) -> None:
    layer, x = make(impl), torch.randn(2, 4, 6, 7, dtype=torch.float64)
    change(layer)
    torch.testing.assert_close(layer(x), definition(layer, x))
    assert (
        layer.why_unfused() == "its generator has hooks, or is no convolution as the layer makes it"
    )


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "change", [weight_norm, lambda conv: prune.random_unstructured(conv, "weight", 0.3)]
)
def test_hooks_that_change_its_weight_run(change: Callable[[nn.Module], object], impl: str) -> None:
    trained, loaded = make(impl), make(impl)
    with warnings.catch_warnings(action="ignore"):  # weight_norm is deprecated
        for layer in (trained, loaded):
            change(layer.generator)
    loaded.load_state_dict(trained.state_dict())
    x = torch.randn(2, 4, 6, 7, dtype=torch.float64)
    assert torch.equal(loaded(x), trained(x))
    loaded(x).sum().backward()


def test_parametrizations_keep_it_fused() -> None:
    layer = make("cpp")
    parametrizations.weight_norm(layer.generator)
    assert layer.why_unfused() is None
    x = torch.randn(2, 4, 6, 7, dtype=torch.float64)
    torch.testing.assert_close(layer(x), definition(layer, x))


def test_another_shape_is_refused() -> None:
    layer = make("cpp")
    layer.generator = nn.Conv2d(4, 18, 3).double()
    with pytest.raises(ValueError, match=r"generator returns: expected shape \(2, 18, 6, 7\), got"):
        layer(torch.randn(2, 4, 6, 7, dtype=torch.float64))
