"""Replacing the layers of a model by approximate ones."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode

from hoconv import approx
from hoconv.ops.approx.layers import quantization

INTEGERS = approx.multiplier(lambda a, b: a * b, bits=4, signed=True)
BYTES = approx.multiplier(lambda a, b: (a >> 2 << 2) * b, bits=8, signed=True)
scales = pytest.mark.parametrize(
    "options", [{}, {"weight_scales": "channel", "learn_scales": True}], ids=["range", "learned"]
)


def make_network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, (3, 1), stride=2, dilation=(2, 1), groups=8, padding_mode="reflect",
                  padding=(2, 0)),
        nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


def make_images() -> Tensor:
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def test_exact_products_give_what_the_model_gave() -> None:
    network, images = make_network(), make_images()
    expected, state = network(images), network.state_dict()
    done = approx.convert(network, "exact", impl="reference")
    assert done.model is network
    assert [*done.replaced] == ["0", "3", "5"]
    assert not done.left
    torch.testing.assert_close(network(images), expected)
    assert network.state_dict().keys() == state.keys()


def test_an_optimizer_of_before_trains_the_converted_model() -> None:
    network, images = make_network(), make_images()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    parameters = [*network.parameters()]
    random = torch.random.get_rng_state()
    approx.convert(network, "mbm16", impl="reference")
    assert torch.equal(torch.random.get_rng_state(), random)
    assert all(a is b for a, b in zip(parameters, network.parameters(), strict=True))
    losses = []
    for _ in range(3):
        loss = F.cross_entropy(network(images), torch.arange(4))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)


def test_patterns_choose_in_their_order_by_names_of_layers_and_of_modules_around_them() -> None:
    body = make_network()
    model = nn.ModuleDict({"body": body, "head": nn.Linear(10, 2)})
    done = approx.convert(
        model, {"body.5": None, "body": "mitchell16", "head": "mbm12", "*": "exact"}
    )
    assert done.replaced == {"body.0": "mitchell16", "body.3": "mitchell16", "head": "mbm12"}
    assert done.left == {"body.5": "'body.5' is None"}
    assert isinstance(body[0], approx.ApproxConv2d)
    assert body[0].multiplier == "mitchell16"
    assert type(body[5]) is nn.Linear
    assert str(done).splitlines() == [
        "body.0  mitchell16",
        "body.3  mitchell16",
        "body.5  left: 'body.5' is None",
        "head    mbm12",
    ]


def test_what_is_left_says_why() -> None:
    class Own(nn.Linear):
        pass

    hooked = nn.Linear(2, 2)
    hooked.register_forward_pre_hook(lambda *_: None)
    model = nn.ModuleDict({
        "first": nn.Linear(2, 2),
        "own": Own(2, 2),
        "norm": parametrizations.spectral_norm(nn.Linear(2, 2)),
        "hooked": hooked,
        "small": nn.Linear(2, 2, dtype=torch.float16),
        "rows": nn.Embedding(3, 2),
        "recurrent": nn.LSTM(2, 2),
        "last": nn.Linear(2, 2),
    })  # fmt: skip
    done = approx.convert(model, "exact", skip_first=True)
    assert [*done.replaced] == ["last"]
    assert done.left == {
        "first": "the first layer",
        "own": "Own may not compute what Linear does",
        "norm": "it has parametrizations",
        "hooked": "it has forward pre hooks",
        "small": "it has torch.float16 parameters",
        "rows": "there is no approximate Embedding",
        "recurrent": "there is no approximate LSTM",
    }


def test_layers_whose_weights_others_read_are_left() -> None:
    """PyTorch's encoder calls them in training only."""
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True).eval()
    model = nn.ModuleDict({"encoder": layer, "head": nn.Linear(8, 2)})
    done = approx.convert(model, {"encoder.self_attn": None, "*": "mbm10"})
    assert [*done.replaced] == ["head"]
    why = done.left["encoder.linear1"]
    assert why == "TransformerEncoderLayer may read its weight without calling it"
    del layer.self_attn
    assert approx.convert(layer, "mbm10").left == {"linear1": why, "linear2": why}


def test_a_layer_of_floats_becomes_one_of_integers_and_back() -> None:
    table = approx.multiplier(lambda a, b: a * b, bits=8, signed=True)
    model, x = nn.Sequential(approx.ApproxLinear(4, 3, multiplier="exact")), torch.randn(5, 4)
    expected = model(x)
    approx.convert(model, table, impl="reference")
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0.05)
    approx.convert(model, "exact", impl="reference")
    torch.testing.assert_close(model(x), expected)


def test_what_a_user_put_into_a_layer_is_kept_or_the_layer_is_left() -> None:
    patched, extended, tagged = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    patched.forward = lambda input: input  # pyright: ignore[reportAttributeAccessIssue]
    extended.register_buffer("mask", torch.ones(2))
    setattr(tagged, "tag", "mine")  # noqa: B010
    double = nn.Linear(2, 2)
    double.bias = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    model = nn.Sequential(patched, extended, tagged, double, nn.GRU(2, 2))
    done = approx.convert(model, "exact")
    assert done.left == {
        "0": "its forward is one of its own",
        "1": "it has 'mask', which a Linear has not",
        "3": "it has torch.float64 parameters",
        "4": "there is no approximate GRU",
    }
    assert getattr(model[2], "tag") == "mine"  # noqa: B009


def test_the_first_name_of_a_shared_layer_chooses_for_all() -> None:
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.Linear(4, 4), shared)
    done = approx.convert(model, {"2": "mbm10", "0": "mbm16", "*": "exact"})
    assert done.replaced == {"0": "mbm16", "1": "exact", "2": "mbm16"}
    assert model[0] is model[2]


def test_layers_and_weights_with_two_names_stay_one() -> None:
    shared, other = nn.Linear(4, 4), nn.Linear(4, 4)
    other.weight = shared.weight
    model = nn.Sequential(shared, other, shared)
    done = approx.convert(model, "exact")
    assert {*done.replaced} == {"0", "1", "2"}
    assert model[0] is model[2]
    assert model[0].weight is model[1].weight is shared.weight


def test_a_layer_by_itself_and_one_that_is_approximate_are_replaced() -> None:
    layer = approx.ApproxLinear(4, 2, multiplier="mbm16").eval()
    done = approx.convert(layer, "exact", gradient="ste", impl="reference")
    assert isinstance(done.model, approx.ApproxLinear)
    assert done.model is not layer
    assert (done.model.multiplier, done.model.gradient) == ("exact", "ste")
    assert done.model.weight is layer.weight
    assert not done.model.training


def test_a_multiplier_of_integers_quantises() -> None:
    network, images = make_network(), make_images()
    expected = network(images)
    table = approx.multiplier(lambda a, b: a * b, bits=8, signed=True)
    done = approx.convert(network, {"3": table, "5": table}, skip_first=True, impl="reference")
    assert [*done.left] == ["0"]
    found = network(images)
    assert 0 < (found - expected).abs().max() < 0.1 * expected.abs().max()
    assert "3.quantizer.input.least" in network.state_dict()


def test_the_weights_of_integers_get_the_scales_that_are_named() -> None:
    network, images = make_network(), make_images()
    table = approx.multiplier(lambda a, b: a * b, bits=4, signed=True)
    last: Any = network[5]
    last.weight.data[0] *= 100  # the other rows are then zeros of one scale
    expected = network(images)
    errors = {}
    for scales in ("tensor", "channel"):
        other = copy.deepcopy(network)
        approx.convert(other, {"5": table, "*": "exact"}, weight_scales=scales, impl="reference")
        errors[scales] = (other(images) - expected)[:, 1:].norm()
    assert errors["channel"] < 0.5 * errors["tensor"]


@pytest.mark.parametrize(
    ("multipliers", "options", "message"),
    [
        ({"features": "exact"}, {}, r"multipliers: 'features' fits no layer; layers are 0, 3, 5"),
        ({"0": "exakt"}, {}, "multiplier"),
        ("exakt", {}, "multiplier"),
        (
            {"5": INTEGERS},
            {"weight_scales": "row"},
            "weight_scales: expected 'tensor' or 'channel'",
        ),
        ({"5": INTEGERS}, {"learn_scales": 1}, "learn_scales: expected True or False, got 1"),
        (
            "exact",
            {"weight_scales": "channel"},
            "weight_scales: expected 'tensor' without a multiplier of integers, got 'channel'",
        ),
        (
            "exact",
            {"learn_scales": True},
            "learn_scales: expected False without a multiplier",
        ),
        ("exact", {"observer": "mse"}, "observer: expected 'moving_average' without a multiplier"),
        ("exact", {"momentum": 1.0}, "momentum: expected 0.01 without a multiplier of integers"),
        (
            "exact",
            {"accumulator": "wrap:bits=9"},
            "accumulator: expected None without a mult",
        ),
        ({"0": "mbm16", "*": "lmul"}, {"gradient": "analytic"}, "gradient"),
        ("exact", {"impl": "cudnn"}, "impl"),
        ({}, {}, "multipliers: expected a multiplier, or patterns with some; got none"),
    ],
)
def test_errors_name_the_argument_and_change_nothing(
    multipliers: Any, options: Any, message: str
) -> None:
    network = make_network()
    with pytest.raises(ValueError, match=message):
        approx.convert(network, multipliers, **options)
    assert type(network[0]) is nn.Conv2d


def test_errors_of_other_types() -> None:
    with pytest.raises(TypeError, match=r"model: expected a torch.nn.Module, got str"):
        approx.convert("resnet", "exact")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"multipliers: expected patterns that are strings, got 0"):
        approx.convert(make_network(), {0: "exact"})  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="model: it has no layers with weights"):
        approx.convert(nn.ReLU(), "exact")


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2"])
def test_a_network_of_torchvision_trains_a_step(name: str) -> None:
    import torchvision

    torch.manual_seed(0)
    network = getattr(torchvision.models, name)(num_classes=4)
    done = approx.convert(network, "exact", skip_first=True)
    layers = [m for m in network.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert len(done.left) == 1
    assert len(done.replaced) == len(layers) - 1
    loss = F.cross_entropy(network(torch.randn(2, 3, 32, 32)), torch.arange(2))
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())


def test_all_layers_of_a_vision_transformer_are_replaced() -> None:
    import torchvision

    with torch.device("meta"):
        network = torchvision.models.vit_b_16()
    done = approx.convert(network, "mbm16")
    assert len(done.replaced) == 1 + 12 * 4 + 1  # patches, four layers a block, classes
    assert not done.left


# CUDA graphs


def train(network: nn.Module, images: Tensor) -> Any:
    """Returns a step of training, which returns the loss."""
    labels = torch.arange(len(images), device=images.device)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(network(images), labels)
        loss.backward()
        optimizer.step()
        return loss

    return step


class Unread(TorchDispatchMode):
    """Fails where the host reads a number of a tensor, as a CUDA graph does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@scales
def test_what_a_graph_records_reads_no_tensor_and_has_the_same_bits(
    options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, images = make_network(), make_images()
    approx.convert(network, BYTES, impl="reference", **options)
    network(images)  # finds the ranges
    recorded = copy.deepcopy(network)
    expected = [train(network, images)() for _ in range(2)]
    for name in ("_is_captured", "_is_on_gpu"):
        monkeypatch.setattr(quantization, name, lambda t: True)
    with Unread():
        found = [train(recorded, images)() for _ in range(2)]
    assert found == expected
    for name, value in network.state_dict().items():
        assert torch.equal(recorded.state_dict()[name], value), name


@scales
@pytest.mark.parametrize("training", [True, False])
def test_known_ranges_are_not_read_again(
    options: Any, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, images = make_network(), make_images()
    approx.convert(network, BYTES, impl="reference", **options)
    network(images)
    network(images)  # in which the host finds the scales that the first batch gave
    monkeypatch.setattr(quantization, "_is_on_gpu", lambda t: True)
    network.train(training)
    with Unread():
        network(images)
    loaded = copy.deepcopy(network.eval())
    for value in (state := network.state_dict()):
        if value.endswith((".least", ".most", "_scale.first")):
            state[value] = torch.full_like(state[value], torch.nan)
    loaded.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"^input: its range is not known"):
        loaded(images)


@scales
def test_ranges_are_read_again_where_other_buffers_take_their_place(options: Any) -> None:
    network, fresh, images = make_network(), make_network(), make_images()
    for each in (network, fresh):
        approx.convert(each, BYTES, impl="reference", **options)
    network(images)
    expected = network.eval()(images)
    state, unknown = network.state_dict(), fresh.eval().state_dict()
    assert torch.equal(torch.func.functional_call(fresh, state, images), expected)
    with pytest.raises(RuntimeError, match=r"^input: its range is not known"):
        fresh(images)
    with pytest.raises(RuntimeError, match=r"^input: its range is not known"):
        torch.func.functional_call(network, unknown, images)
    assert torch.equal(network(images), expected)


@pytest.mark.gpu
@scales
def test_a_training_step_is_captured_in_a_cuda_graph(options: Any) -> None:
    network, images = make_network().cuda(), make_images().cuda()
    approx.convert(network, BYTES, **options)
    step = train(network, images)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # what a capture needs to find ready, and the ranges
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    batches = torch.randn(3, *images.shape, device="cuda")
    start = copy.deepcopy(network.state_dict())

    def repeat(call: Any) -> tuple[list[float], dict[str, Tensor]]:
        network.load_state_dict(start)
        losses = []
        for batch in batches:
            images.copy_(batch)
            losses.append(call().item())
        return losses, copy.deepcopy(network.state_dict())

    expected = repeat(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()

    def replay() -> Tensor:
        graph.replay()
        return loss

    torch.testing.assert_close(repeat(replay), expected)
