"""Products of two inputs, and attention, through an approximate multiplier."""

from __future__ import annotations

import copy
import io
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hoconv import approx
from hoconv.approx import ApproxMatmul, ApproxMultiheadAttention, LookupTable
from hoconv.ops.approx.operator import MATMUL
from hoconv.tools.testing.variants import Variant, variants

everywhere = pytest.mark.parametrize("variant", variants([MATMUL]), indirect=True)
BITS4, BITS8 = (approx.multiplier(lambda a, b: a * b, bits=bits, signed=False) for bits in (4, 8))


def on_grid(x: Tensor, least: Tensor, most: Tensor, bits: int = 8) -> Tensor:
    """The nearest of 2^bits numbers that cover a range and 0, one of which is 0."""
    low, high = min(least.item(), 0.0), max(most.item(), 0.0)
    steps = (1 << bits) - 1
    step = (high - low) / steps
    shift = round(-low / step)
    return ((x / step).round() + shift).clamp(0, steps).sub(shift) * step


# Products of two inputs


@everywhere
@pytest.mark.parametrize(
    ("a", "b"),
    [((5, 3), (3, 4)), ((2, 5, 3), (3, 4)), ((2, 5, 3), (2, 3, 4)), ((2, 1, 5, 3), (7, 3, 4))],
)
def test_products_of_inputs_are_those_of_the_function(variant: Variant, a: Any, b: Any) -> None:
    x, y = (torch.randn(shape, device=variant.device) for shape in (a, b))
    layer = ApproxMatmul(multiplier="mbm12", impl=variant.impl, device=variant.device)
    assert torch.equal(layer(x, y), approx.matmul(x, y, "mbm12", impl=variant.impl))


@everywhere
@pytest.mark.parametrize(
    ("a", "b"),
    [((5, 3), (3, 4)), ((2, 5, 3), (3, 4)), ((2, 5, 3), (2, 3, 4)), ((2, 1, 5, 3), (7, 3, 4))],
)
def test_integers_multiply_both_inputs_on_grids(variant: Variant, a: Any, b: Any) -> None:
    x, y = (torch.randn(shape, device=variant.device).requires_grad_() for shape in (a, b))
    layer = ApproxMatmul(multiplier=BITS8, impl=variant.impl, device=variant.device)
    out = layer(x, y)
    rounded = [on_grid(t.detach(), t.min(), t.max()).requires_grad_() for t in (x, y)]
    expected = rounded[0] @ rounded[1]
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    grad = torch.randn_like(out)
    for found, wanted in zip(
        torch.autograd.grad(out, (x, y), grad),
        torch.autograd.grad(expected, rounded, grad),
        strict=True,
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_the_ranges_of_both_inputs_are_tracked() -> None:
    """In evaluation, a matrix does not change what comes of another."""
    layer = ApproxMatmul(multiplier=BITS8)
    with pytest.raises(RuntimeError, match="range is not known"):
        copy.deepcopy(layer).eval()(torch.randn(2, 2), torch.randn(2, 2))
    layer(torch.tensor([[-1.0, 2.0]]), torch.tensor([[-3.0], [4.0]]))
    assert layer.quantizer is not None
    assert layer.quantizer.other is not None
    found = [layer.quantizer.input.least, layer.quantizer.input.most]
    found += [layer.quantizer.other.least, layer.quantizer.other.most]
    assert torch.equal(torch.stack(found), torch.tensor([-1.0, 2.0, -3.0, 4.0]))
    layer.eval()
    a, b = torch.randn(6, 3, 5), 5 * torch.randn(6, 5, 2)
    assert torch.equal(layer(a, b)[2:3], layer(a[2:3], b[2:3]))


def test_matrices_that_do_not_fit_are_refused() -> None:
    for multiplier in ("mbm10", BITS8):
        layer = ApproxMatmul(multiplier=multiplier)
        with pytest.raises(ValueError, match=r"expected \(K, N\) or .* got \(4, 5\) for \(2, 3\)"):
            layer(torch.zeros(2, 3), torch.zeros(4, 5))
    with pytest.raises(TypeError, match=r"other: expected float32, got torch\.float64"):
        layer(torch.zeros(2, 3), torch.zeros(3, 5, dtype=torch.float64))


# Attention


def both(**options: Any) -> tuple[nn.MultiheadAttention, ApproxMultiheadAttention]:
    """PyTorch's layer and ours, exact, with the same parameters."""
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(8, 2, **options)
    torch.manual_seed(0)
    ours = ApproxMultiheadAttention(8, 2, **options, multiplier="exact")
    assert layer.state_dict().keys() == ours.state_dict().keys()
    for name, value in layer.state_dict().items():
        assert torch.equal(value, ours.state_dict()[name])
    return layer, ours


def masks(queries: int, keys: int, batch: int | None) -> Any:
    """Masks of padding, and of pairs, in every form; the first key is seen."""
    rows = () if batch is None else (batch,)
    padding = torch.rand(*rows, keys) < 0.3
    pairs, each = torch.rand(queries, keys) < 0.3, torch.rand(2 * (batch or 1), queries, keys) < 0.3
    for mask in (padding, pairs, each):
        mask[..., 0] = False
    scores = torch.randn(*rows, keys), torch.randn(queries, keys)
    return itertools.product((None, padding, scores[0]), (None, pairs, scores[1], each))


@pytest.mark.parametrize("batch", [3, None])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(
    "options",
    [{}, {"bias": False}, {"add_bias_kv": True}, {"add_zero_attn": True},
     {"kdim": 5, "vdim": 7}, {"kdim": 5, "add_bias_kv": True, "add_zero_attn": True}],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask and attn_mask")
def test_exact_attention_is_pytorchs(options: Any, batch_first: bool, batch: int | None) -> None:
    layer, ours = both(batch_first=batch_first, **options)
    sizes = 8, options.get("kdim", 8), options.get("vdim", 8)
    inputs = [torch.randn(batch or 1, 4 if n == 0 else 6, size) for n, size in enumerate(sizes)]
    if batch is None:
        inputs = [t[0] for t in inputs]
    elif not batch_first:
        inputs = [t.transpose(0, 1) for t in inputs]
    for padding, pairs in masks(4, 6, batch):
        for need_weights, averaged in ((False, True), (True, True), (True, False)):
            outs, weights, gradients = [], [], []
            for each in (layer, ours):
                leaves = [t.detach().requires_grad_() for t in inputs]
                out, shown = each(
                    *leaves, key_padding_mask=padding, attn_mask=pairs, need_weights=need_weights,
                    average_attn_weights=averaged,
                )  # fmt: skip
                outs.append(out)
                weights.append(shown)
                named = dict(each.named_parameters())
                leaves += [named[name] for name, _ in layer.named_parameters()]
                gradients.append(torch.autograd.grad((out * out).sum(), leaves))
            torch.testing.assert_close(*outs, rtol=1e-5, atol=2e-6)
            assert (weights[0] is None) == (weights[1] is None) == (not need_weights)
            if need_weights:
                torch.testing.assert_close(*weights, rtol=1e-5, atol=2e-6)
            for a, b in zip(*gradients, strict=True):
                torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)


def test_dropout_is_of_the_weights_in_training() -> None:
    _, ours = both(dropout=1.0)
    x = torch.randn(4, 2, 8)
    assert torch.equal(ours(x, x, x)[0], ours.out_proj.bias.expand(4, 2, 8))
    assert not torch.equal(ours.eval()(x, x, x)[0], ours.out_proj.bias.expand(4, 2, 8))


@everywhere
def test_attention_multiplies_by_the_multiplier(variant: Variant) -> None:
    options: Any = {"multiplier": "mbm10", "impl": variant.impl}
    layer = ApproxMultiheadAttention(8, 2, batch_first=True, **options).to(variant.device)
    x, y = torch.randn(2, 5, 8, device=variant.device), torch.randn(2, 3, 8, device=variant.device)

    def times(a: Tensor, b: Tensor) -> Tensor:
        return approx.matmul(a, b, "mbm10", impl=variant.impl)

    weights, biases = layer.in_proj_weight.chunk(3), layer.in_proj_bias.chunk(3)
    q, k, v = (
        (times(t, w.mT) + b).view(2, -1, 2, 4).transpose(1, 2)
        for t, w, b in zip((x, y, y), weights, biases, strict=True)
    )
    attended = times((times(q * 0.5, k.mT)).softmax(-1), v).transpose(1, 2).reshape(2, 5, 8)
    expected = times(attended, layer.out_proj.weight.mT) + layer.out_proj.bias
    assert torch.equal(layer(x, y, y)[0], expected)


@everywhere
def test_attention_quantises_every_operand(variant: Variant) -> None:
    """With 4 bits an operand that is not rounded shows."""
    torch.manual_seed(0)
    options: Any = {"multiplier": BITS4, "impl": variant.impl}
    layer = ApproxMultiheadAttention(8, 2, batch_first=True, **options).to(variant.device)
    x = torch.randn(2, 5, 8).to(variant.device)  # for which nothing is near a tie

    def rounded(t: Tensor) -> Tensor:
        return on_grid(t, t.min(), t.max(), 4)

    weights, biases = layer.in_proj_weight.chunk(3), layer.in_proj_bias.chunk(3)
    q, k, v = (
        (rounded(x) @ rounded(w).mT + b).view(2, -1, 2, 4).transpose(1, 2)
        for w, b in zip(weights, biases, strict=True)
    )
    scores = rounded(q * 0.5) @ rounded(k).mT
    attended = (rounded(scores.softmax(-1)) @ rounded(v)).transpose(1, 2).reshape(2, 5, 8)
    expected = rounded(attended) @ rounded(layer.out_proj.weight).mT + layer.out_proj.bias
    out = layer(x, x, x)[0]
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    out.square().sum().backward()
    assert all(p.grad is not None and p.grad.norm() > 0 for p in layer.parameters())


def test_attention_in_evaluation_is_the_same_alone_and_in_a_batch() -> None:
    layer = ApproxMultiheadAttention(8, 2, batch_first=True, multiplier=BITS8)
    x = torch.randn(4, 5, 8)
    layer(x, x, x)
    layer.eval()
    assert torch.equal(layer(x, x, x)[0][1:2], layer(x[1:2], x[1:2], x[1:2])[0])
    saved = io.BytesIO()
    torch.save(layer.state_dict(), saved)
    saved.seek(0)
    again = ApproxMultiheadAttention(8, 2, batch_first=True, multiplier=BITS8)
    again.load_state_dict(torch.load(saved))
    assert torch.equal(again.eval()(x, x, x)[0], layer(x, x, x)[0])


@pytest.mark.parametrize("multiplier", ["exact", BITS8], ids=["floats", "integers"])
def test_a_query_that_sees_no_key_has_no_weights(multiplier: str | LookupTable) -> None:
    """As without weights in PyTorch; the ranges of integers are still known."""
    layer = ApproxMultiheadAttention(8, 2, batch_first=True, multiplier=multiplier)
    x = torch.randn(2, 3, 8).requires_grad_()
    padding = torch.tensor([[False, True, False], [True, True, True]])
    out, weights = layer(x, x, x, key_padding_mask=padding)
    assert torch.equal(out[1], layer.out_proj.bias.expand(3, 8))
    assert weights is not None
    assert not weights[1].any()
    torch.testing.assert_close(weights[0].sum(-1), torch.ones(3))
    out.square().sum().backward()
    gradients = [x.grad, *(p.grad for p in layer.parameters())]
    assert all(g is not None and g.isfinite().all() for g in gradients)


def test_wrong_calls_of_attention_are_refused() -> None:
    layer = ApproxMultiheadAttention(8, 2, batch_first=True)
    x = torch.zeros(3, 4, 8)
    with pytest.raises(ValueError, match="key: expected 3 dimensions, or 2 of all three"):
        layer(x, x[0], x)
    for inputs, name in (((x, x, x[:, :2]), "value"), ((x[:1], x, x), "query"),
                         ((x[..., :4], x, x), "query"), ((x, x[..., :4], x), "key")):  # fmt: skip
        with pytest.raises(ValueError, match=rf"^{name}: expected a batch of 3 with 4 vectors of"):
            layer(*inputs)
    with pytest.raises(ValueError, match="is_causal: expected attn_mask, too"):
        layer(x, x, x, is_causal=True)
    for mask in (torch.zeros(3, 4, 4), torch.zeros(1, 4), torch.zeros(1, 3, 2, 4)):
        with pytest.raises(ValueError, match=r"attn_mask: expected shape \(4, 4\) or \(6, 4, 4\)"):
            layer(x, x, x, attn_mask=mask)
    with pytest.raises(
        ValueError, match=r"key_padding_mask: expected shape \(3, 4\), got \(1, 4\)"
    ):
        layer(x, x, x, key_padding_mask=torch.zeros(1, 4))
    with pytest.raises(TypeError, match=r"attn_mask: expected bool.*got torch\.int64"):
        layer(x, x, x, attn_mask=torch.zeros(4, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match="multiplier: "):
        ApproxMultiheadAttention(8, 2, multiplier="no such")


@pytest.mark.parametrize("multiplier", ["mbm10", BITS8], ids=["floats", "integers"])
def test_attention_compiles_and_exports(multiplier: str | LookupTable) -> None:
    layer = ApproxMultiheadAttention(8, 2, batch_first=True, multiplier=multiplier)
    x = torch.randn(2, 5, 8)
    layer(x, x, x)
    layer.eval()
    expected = layer(x, x, x)[0]
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, x, x)[0], expected)
    program = torch.export.export(layer, (x, x, x))
    torch.testing.assert_close(program.module()(x, x, x)[0], expected)


# In a model


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.attention(x, x, x, need_weights=False)[0])


def test_convert_replaces_attention() -> None:
    model, x = Block(), torch.randn(2, 5, 8)
    expected, parameters = model(x), dict(model.named_parameters())
    done = approx.convert(model, "exact")
    assert [*done.replaced] == ["attention", "attention.out_proj", "last"]
    assert not done.left
    torch.testing.assert_close(model(x), expected)
    assert all(parameters[name] is p for name, p in model.named_parameters())
    # Again, by another multiplier, which has grids.
    approx.convert(model, BITS8, weight_scales="channel", observer="minmax")
    out = model(x)
    assert (out - expected).norm() < 0.03 * expected.norm()
    names = [name for name, _ in model.named_buffers()]
    assert "attention.scores.quantizer.other.least" in names


@pytest.mark.parametrize("by_hand", [True, False])
def test_pytorchs_encoder_calls_approximate_attention(by_hand: bool) -> None:
    """In evaluation, without gradients, it reads the weights of its own."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    x = torch.randn(2, 5, 8)
    exact = encoder(x)
    if by_hand:
        encoder.use_nested_tensor = False
        for each in encoder.layers:
            ours: Any = ApproxMultiheadAttention(8, 2, batch_first=True, multiplier="mbm10")
            ours.load_state_dict(each.self_attn.state_dict())  # pyright: ignore
            each.self_attn = ours
    else:
        done = approx.convert(encoder, "mbm10")
        assert not done.left
        assert len(done.replaced) == 2 * 4
    encoder.eval()
    out = encoder(x)
    assert not torch.allclose(out, exact, atol=1e-3)
    with torch.no_grad():
        assert torch.equal(encoder(x), out)
        assert torch.equal(encoder(x, src_key_padding_mask=torch.zeros(2, 5).bool()), out)


def test_attention_that_convert_would_change_is_left() -> None:
    class Twice(nn.Linear):
        pass

    model, other = Block(), Block()
    model.attention.out_proj = Twice(8, 8)  # pyright: ignore[reportAttributeAccessIssue]
    other.attention.out_proj.register_forward_hook(lambda *_: None)
    for each, why in ((model, "Twice may not compute what Linear does"), (other, "forward hooks")):
        done = approx.convert(each, "exact")
        assert [*done.replaced] == ["last"]
        assert done.left["attention"].startswith("of its out_proj: ")
        assert why in done.left["attention"]
    again = approx.convert(Block(), "exact").model
    again.attention.mix.register_forward_hook(lambda *_: None)  # pyright: ignore
    assert approx.convert(again, "mbm10").left == {"attention": "its mix has forward hooks"}


def test_convert_replaces_products_of_inputs() -> None:
    model = nn.ModuleDict({"product": ApproxMatmul(multiplier="mbm10"), "last": nn.Linear(2, 2)})
    done = approx.convert(model, {"product": BITS8, "*": "exact"})
    assert [*done.replaced] == ["product", "last"]
    assert model["product"].multiplier is BITS8


def test_patterns_choose_parts_of_attention() -> None:
    model = Block()
    done = approx.convert(model, {"attention.out_proj": None, "attention": BITS8})
    assert [*done.replaced] == ["attention"]
    assert type(model.attention) is ApproxMultiheadAttention
    assert not isinstance(model.attention.out_proj, approx.ApproxLinear)
    model = Block()
    done = approx.convert(model, {"attention.out_proj": "mbm10", "last": "mbm10"})
    assert [*done.replaced] == ["last"]
    why = "MultiheadAttention may read its weight without calling it"
    assert done.left == {"attention": "no pattern fits", "attention.out_proj": why}
    alone = approx.convert(nn.MultiheadAttention(8, 2), "mbm10").model
    assert isinstance(alone, ApproxMultiheadAttention)
    assert isinstance(alone.out_proj, approx.ApproxLinear)


def test_cost_counts_the_products_of_attention() -> None:
    model, x = Block(), torch.randn(3, 5, 8)
    approx.convert(model, BITS8)
    counted = {each.name: each.multiplications for each in approx.cost(model, x).layers}
    square, pairs = 3 * 5 * 8 * 8, 3 * 5 * 5 * 8
    assert counted == {
        "attention.query": square, "attention.key": square, "attention.value": square,
        "attention.scores": pairs, "attention.mix": pairs, "attention.out_proj": square,
        "last": square,
    }  # fmt: skip


@pytest.mark.slow
def test_a_vision_transformer_trains_a_step() -> None:
    import torchvision

    torch.manual_seed(0)
    network = torchvision.models.VisionTransformer(32, 16, 2, 2, 16, 32, num_classes=4)
    nn.init.normal_(network.heads[0].weight)  # pyright: ignore[reportArgumentType]
    images, labels = torch.randn(2, 3, 32, 32), torch.arange(2)
    expected = network(images)
    done = approx.convert(network, BITS8, skip_first=True)
    assert [*done.left] == ["conv_proj"]
    out = network(images)
    assert (out - expected).norm() < 0.1 * expected.norm()
    F.cross_entropy(out, labels).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())
