"""Calls of a layer that are like earlier ones, against a layer that was never called."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrize

from hoconv import recurrent as rnn
from hoconv.recurrent import repeats
from hoconv.recurrent.runtime.cpp import obstacle

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
pytestmark = pytest.mark.parametrize("device", DEVICES)


def flat(found: Any) -> list[Tensor]:
    output, state = found
    return [output, *([state] if isinstance(state, Tensor) else state)]


def run(layer: nn.Module, x: Tensor, context: AbstractContextManager[Any]) -> list[Tensor]:
    """Results and, where autograd records them, gradients of x and of the parameters."""
    leaves = [t for t in (x, *layer.parameters()) if t.requires_grad]
    with context:
        found = flat(layer(x))
        if any(t.requires_grad for t in found):
            torch.manual_seed(7)
            cotangents = [torch.randn_like(t) for t in found]
            found += torch.autograd.grad(found, leaves, cotangents, allow_unused=True)
    return [t.detach() for t in found if t is not None]


def fresh(layer: nn.Module) -> nn.Module:
    """A layer with the same parameters and attributes, of which no call is kept."""
    made = copy.deepcopy(layer)
    assert made not in repeats._kept
    return made


def assert_like_fresh(
    layer: nn.Module, x: Tensor, context: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> None:
    for _ in range(2):
        seed = int(torch.randint(1 << 30, ()))
        torch.manual_seed(seed)
        expected = run(fresh(layer), x, context())
        torch.manual_seed(seed)
        got = run(layer, x, context())
        assert len(got) == len(expected)
        for mine, other in zip(got, expected, strict=True):
            assert (mine.dtype, mine.device) == (other.dtype, other.device)
            assert (mine.shape, mine.stride()) == (other.shape, other.stride())
            torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The repeated calls."""
    made: list[Any] = []
    own = repeats._run

    def note(call: Any, *args: Any) -> Any:
        made.append(call)
        return own(call, *args)

    monkeypatch.setattr(repeats, "_run", note)
    return made


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: rnn.LSTM(3, 5),
    "gru": lambda: rnn.GRU(3, 5, batch_first=True),
    "deep": lambda: rnn.LSTM(3, 5, num_layers=3, dropout=0.4),
    "projected": lambda: rnn.LSTM(3, 5, proj_size=2, num_layers=2),
    "peephole": lambda: rnn.RNN(rnn.peephole_lstm, 3, 5, recompute=True),
    "lower schedule": lambda: rnn.RNN(rnn.coupled_lstm, 3, 5, schedule="fused"),
    "half": lambda: rnn.GRU(3, 5, num_layers=2, dtype=torch.bfloat16),
    "reference": lambda: rnn.LSTM(3, 5, impl="reference"),
    "both ways": lambda: rnn.LSTM(3, 5, bidirectional=True),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("context", [nullcontext, torch.no_grad, torch.inference_mode])
def test_repeated_calls_are_like_first_ones(
    device: str, name: str, context: Callable[[], Any], counted: list[Any]
) -> None:
    layer = LAYERS[name]().to(device)
    dtype = next(layer.parameters()).dtype
    for T, B in (4, 2), (1, 1), (7, 2), (4, 3), (4, 2):
        x = torch.randn(T, B, 3, device=device, dtype=dtype)
        assert_like_fresh(layer, x, context)
    assert bool(counted) == (name not in ("reference", "both ways"))


def test_what_changes_between_calls_is_seen(device: str, counted: list[Any]) -> None:
    layer = rnn.LSTM(3, 5, num_layers=2, dropout=0.5).to(device)
    x = torch.randn(4, 4, 3, device=device)

    def changes() -> Iterator[None]:
        yield
        layer.eval()
        yield
        layer.batch_first = True
        yield
        layer.dropout = 0.0
        layer.train()
        yield
        for p in layer.parameters():
            p.requires_grad_(False)
        yield
        x.requires_grad_()
        yield
        layer.requires_grad_()
        yield
        layer.impl = "reference"
        yield
        layer.impl, layer.schedule = "auto", "fused"
        yield
        layer.recompute = True
        yield
        weight = layer.get_parameter("weight_i_l0")
        with torch.no_grad():
            weight.mul_(2)
        yield
        weight.data = torch.randn_like(weight)
        yield
        layer.weight_i_l0 = nn.Parameter(torch.randn_like(weight))
        yield
        layer.register_forward_hook(lambda _, __, out: (out[0] * 2, out[1]))
        yield

    for _ in changes():
        assert_like_fresh(layer, x)
    assert len(counted) > 10


def test_a_parametrization_and_other_parameters_are_seen(device: str) -> None:
    class Double(nn.Module):
        def forward(self, t: Tensor) -> Tensor:
            return 2 * t

    layer, x = rnn.GRU(3, 5).to(device), torch.randn(4, 2, 3, device=device)
    assert_like_fresh(layer, x)
    own = {name: torch.randn_like(p) for name, p in layer.named_parameters()}
    expected = flat(torch.func.functional_call(fresh(layer), own, (x,)))
    for mine, other in zip(flat(torch.func.functional_call(layer, own, (x,))), expected):
        torch.testing.assert_close(mine, other)
    parametrize.register_parametrization(layer, "weight_r_l0", Double())
    before, after = flat(layer(x)), None
    parametrize.remove_parametrizations(layer, "weight_r_l0")
    after = flat(layer(x))
    for mine, other in zip(before, after, strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("name", [name for name in LAYERS if name != "half"])
def test_parameters_in_another_order_are_taken_by_name(device: str, name: str) -> None:
    layer = LAYERS[name]().to(device).eval()
    x = torch.randn(4, 2, 3, device=device)
    expected = flat(layer(x))
    first, *_ = [*layer._parameters]
    weight = layer._parameters[first]
    assert weight is not None
    delattr(layer, first)
    layer.register_parameter(first, weight)  # the last one now
    for _ in range(3):
        for mine, other in zip(flat(layer(x)), expected, strict=True):
            torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("frozen", ["l0", "l1", "l2"])
def test_a_stack_that_is_partly_frozen(device: str, frozen: str) -> None:
    layer, x = rnn.LSTM(3, 5, num_layers=3).to(device), torch.randn(4, 2, 3, device=device)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(not name.endswith(frozen))
    assert_like_fresh(layer, x)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name.endswith(frozen))
    assert_like_fresh(layer, x)


def test_modes_of_the_dispatcher_are_seen(device: str) -> None:
    layer, x = rnn.GRU(3, 5).to(device), torch.randn(4, 2, 3, device=device)
    for _ in range(2):
        layer(x)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(layer(x)[0], FakeTensor)
    graph = make_fx(lambda y: layer(x)[0] + y)(torch.zeros(4, 2, 5, device=device)).graph
    assert any("hoconv" in str(node.target) for node in graph.nodes)


def test_what_does_not_fit_is_refused_as_in_a_first_call(device: str) -> None:
    layer, x = rnn.LSTM(3, 5).to(device), torch.randn(4, 2, 3, device=device)
    assert_like_fresh(layer, x)
    wrong: list[Any] = [
        x[..., :2], x[:0], x[0, 0], x.double(), x.int(), x.to_sparse(), None, [x], x.to("meta"),
    ]  # fmt: skip
    for each in wrong:
        with pytest.raises((ValueError, TypeError)) as expected:
            fresh(layer)(each)
        with pytest.raises(type(expected.value)) as got:
            layer(each)
        assert str(got.value) == str(expected.value)
    layer.weight_i_l0.data = torch.randn(5, 7, device=device)
    with pytest.raises(ValueError, match="weight_i_l0: expected shape"):
        layer(x)


def test_modes_and_transforms_are_seen(device: str) -> None:
    layer, x = rnn.LSTM(3, 5).to(device), torch.randn(4, 2, 3, device=device)
    assert_like_fresh(layer, x)
    assert_like_fresh(layer, x, lambda: torch.autocast(device, torch.bfloat16))
    assert_like_fresh(layer, x, lambda: torch.device("meta"))
    with torch.no_grad():
        many = torch.randn(6, *x.shape, device=device)
        found = torch.func.vmap(lambda x: layer(x)[0])(many)
        for one, each in zip(many, found, strict=True):
            torch.testing.assert_close(each, layer(one)[0])
    gradient = torch.func.grad(lambda x: layer(x)[0].square().sum())(x)
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(layer(leaf)[0].square().sum(), leaf)
    torch.testing.assert_close(gradient, expected)


def test_second_derivatives_of_repeated_calls(device: str, counted: list[Any]) -> None:
    layer = rnn.LSTM(3, 5).to(device).double()
    x = torch.randn(4, 2, 3, device=device, dtype=torch.float64)

    def second(layer: nn.Module) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        leaves = [leaf, *layer.parameters()]
        loss = flat(layer(leaf))[0].square().sum()
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        again = sum(t.square().sum() for t in first)
        assert isinstance(again, Tensor)
        return [*torch.autograd.grad(again, leaves)]

    second(layer)
    found = second(layer)
    assert counted
    for mine, other in zip(found, second(fresh(layer)), strict=True):
        torch.testing.assert_close(mine, other)


def test_a_layer_with_kept_calls_is_copied_pickled_and_freed(device: str) -> None:
    layer, x = rnn.LSTM(3, 5).to(device), torch.randn(4, 2, 3, device=device)
    layer(x)
    expected = layer(x)[0]
    for made in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        torch.testing.assert_close(made(x)[0], expected)
    assert layer in repeats._kept
    count = len(repeats._kept)
    del layer, made
    assert len(repeats._kept) < count


def test_results_are_the_callers(device: str) -> None:
    """Whoever writes to them changes no later call."""
    layer, x = rnn.LSTM(3, 5).to(device), torch.randn(4, 2, 3, device=device)
    with torch.no_grad():
        expected = [t.clone() for t in flat(layer(x))]
        for _ in range(3):
            for mine, other in zip(flat(layer(x)), expected, strict=True):
                torch.testing.assert_close(mine, other)
                mine.fill_(7)
