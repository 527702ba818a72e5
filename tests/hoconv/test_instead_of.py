"""docs/use/instead_of.md: its code computes what others' operators do, by their formulas.

B batch, C channels, G groups of channels, H height, W width, k kernel size.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hoconv

PAGE = (Path(__file__).parents[2] / "docs" / "use" / "instead_of.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
B, C, H, W = 2, 4, 7, 6


@pytest.fixture(params=["reference", "cpp"])
def page(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Returns what the code of the page defines, calling one implementation."""
    if (state := hoconv.implementations()[request.param]) != "available":
        pytest.skip(state)
    scope: dict[str, Any] = {}
    for block in BLOCKS:
        exec(compile(block, "docs/use/instead_of.md", "exec"), scope)
    for name in ("high_order_conv2d", "splat", "HighOrderConv2d"):
        scope[name] = functools.partial(getattr(hoconv, name), impl=request.param)
    return scope


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def same(
    ours: Callable[..., Tensor], theirs: Callable[..., Tensor], *inputs: Tensor, crop: int = 0
) -> None:
    """Compares values and gradients, of an image without `crop` pixels at each side."""
    inside = (..., slice(crop, -crop or None), slice(crop, -crop or None))
    found, expected = ours(*inputs)[inside], theirs(*inputs)[inside]
    torch.testing.assert_close(found, expected)
    upstream = torch.randn_like(expected)
    for gradient, gradient_e in zip(
        torch.autograd.grad(found, inputs, upstream),
        torch.autograd.grad(expected, inputs, upstream),
        strict=True,
    ):
        torch.testing.assert_close(gradient, gradient_e)


def taps(k: int) -> list[tuple[int, int, int]]:
    """The number of each tap, its row and its column."""
    return [(i, *divmod(i, k)) for i in range(k * k)]


def test_all_code_of_the_page_is_tested() -> None:
    defined = set(re.findall(r"^def (\w+)", "\n".join(BLOCKS), re.MULTILINE))
    assert defined == {
        "involution", "carafe", "carafe_pack", "gather", "scatter", "dynamic_filter",
        "adaptive_conv", "neighbourhood_av", "volume",
    }  # fmt: skip


@pytest.mark.parametrize(("k", "stride", "dilation"), [(3, 1, 1), (5, 2, 1), (3, 1, 2), (7, 3, 2)])
def test_involution(page: dict[str, Any], k: int, stride: int, dilation: int) -> None:
    """Y[i, j, c] = sum of H[i, j, u, v, c // (C / G)] * X[i + u, j + v, c]."""
    G = 2

    def theirs(x: Tensor, weight: Tensor) -> Tensor:
        windows = F.unfold(x, k, dilation, dilation * (k // 2), stride)
        windows = windows.view(B, G, C // G, k, k, *weight.shape[-2:])
        return torch.einsum("bgcuvhw,bguvhw->bgchw", windows, weight).flatten(1, 2)

    size = -(-H // stride), -(-W // stride)
    ours = functools.partial(page["involution"], stride=stride, dilation=dilation)
    same(ours, theirs, draw(B, C, H, W), draw(B, G, k, k, *size))


def test_weights_of_an_involution_s_last_convolution_in_our_order(page: dict[str, Any]) -> None:
    """As the page says to reorder them; the layer then applies what theirs generates."""
    G, k = 2, 3
    theirs = nn.Conv2d(C, G * k * k, 1, bias=False, dtype=torch.float64)
    layer = page["HighOrderConv2d"](C, k, groups=G, generator_kernel_size=1, bias=False).double()
    (reorder,) = re.findall(r"`(weight\.unflatten.*)`", PAGE)
    values = {"weight": theirs.weight.detach(), "G": G, "k": k}
    layer.generator.weight.data = eval(reorder, values)
    x = draw(B, C, H, W)
    generated = theirs(x).view(B, G, k, k, H, W)
    torch.testing.assert_close(layer(x), page["involution"](x, generated))


def reassemble(features: Tensor, masks: Tensor, k: int, G: int, scale: int) -> Tensor:
    """X'[l'] = sum of W[l'](n, m) * X(i + n, j + m) with l = floor(l' / scale)."""
    B, C, H, W = features.shape
    padded = F.pad(features, [k // 2] * 4)
    rows = []
    for h in range(scale * H):
        row = []
        for w in range(scale * W):
            y, x = h // scale, w // scale
            window = padded[:, :, y : y + k, x : x + k].reshape(B, G, C // G, k * k)
            kernel = masks[:, :, h, w].view(B, G, 1, k * k)
            row.append((kernel * window).sum(-1).flatten(1))
        rows.append(torch.stack(row, -1))
    return torch.stack(rows, -2)


@pytest.mark.parametrize(("k", "G", "scale"), [(5, 1, 2), (3, 2, 2), (3, 4, 3)])
def test_carafe(page: dict[str, Any], k: int, G: int, scale: int) -> None:
    options = {"k": k, "G": G, "scale": scale}
    same(
        functools.partial(page["carafe"], kernel_size=k, groups=G, scale=scale),
        functools.partial(reassemble, **options),
        draw(B, C, H, W),
        draw(B, G * k * k, scale * H, scale * W),
    )


def test_carafe_s_layer(page: dict[str, Any]) -> None:
    """Compress, encode, shuffle, softmax, reassemble."""
    k, scale = 3, 2
    layer = page["carafe_pack"](C, scale, kernel_size=k, compressed=5).double()

    def theirs(x: Tensor) -> Tensor:
        masks = F.pixel_shuffle(layer.generator(x), scale).softmax(1)
        return reassemble(x, masks, k, 1, scale)

    same(layer, theirs, draw(B, C, H, W))


def gather(data: Tensor, kernels: Tensor) -> Tensor:
    """The sum of softmax(kernels)[tap] * data, over the neighbourhood (Bako et al.)."""
    k = round(kernels.shape[1] ** 0.5)
    padded = F.pad(data, [k // 2] * 4)
    weights = kernels.softmax(1)
    return sum(weights[:, i : i + 1] * padded[:, :, y : y + H, x : x + W] for i, y, x in taps(k))  # pyright: ignore


@pytest.mark.parametrize("k", [3, 5])
def test_kernels_that_gather(page: dict[str, Any], k: int) -> None:
    same(page["gather"], gather, draw(B, C, H, W), draw(B, k * k, H, W))


def test_kernels_that_gather_21_by_21_and_the_valid_part(page: dict[str, Any]) -> None:
    data, kernels = draw(1, 3, 24, 23), draw(1, 441, 4, 3)

    def theirs(data: Tensor, kernels: Tensor) -> Tensor:
        weights = kernels.softmax(1).flatten(2)
        return torch.einsum("bcil,bil->bcl", F.unfold(data, 21).unflatten(1, (3, 441)), weights)

    def ours(data: Tensor, kernels: Tensor) -> Tensor:
        valid = functools.partial(page["high_order_conv2d"], padding="valid")
        return valid(data, kernels[:, :, None].transpose(0, 1), normalize="softmax").flatten(2)

    same(ours, theirs, data, kernels)


def scatter(data: Tensor, kernels: Tensor) -> Tensor:
    """Every pixel adds exp(kernel) times its value to its neighbours; what arrives is divided by
    the sum of the weights (Gharbi et al.)."""
    k = round(kernels.shape[1] ** 0.5)
    total = data.new_zeros(B, C, H + k - 1, W + k - 1)
    weights = data.new_zeros(B, 1, H + k - 1, W + k - 1)
    for i, y, x in taps(k):
        weight = kernels[:, i : i + 1].exp()
        around = (x, k - 1 - x, y, k - 1 - y)
        total = total + F.pad(weight * data, around)
        weights = weights + F.pad(weight, around)
    inside = (..., slice(k // 2, k // 2 + H), slice(k // 2, k // 2 + W))
    return total[inside] / weights[inside]


@pytest.mark.parametrize("k", [3, 5])
def test_kernels_that_splat(page: dict[str, Any], k: int) -> None:
    same(page["scatter"], scatter, draw(B, C, H, W), draw(B, k * k, H, W))


def test_kernels_that_splat_are_normalised_as_ones_that_gather(page: dict[str, Any]) -> None:
    """Theirs: the logit with which pixel p + o sends to p is that with which p gathers by o, 0
    outside the image; then a softmax. The same where no tap is outside."""
    k = 3

    def theirs(data: Tensor, kernels: Tensor) -> Tensor:
        padded = F.pad(kernels, [k // 2] * 4)
        turned = [padded[:, k * k - 1 - i, y : y + H, x : x + W] for i, y, x in taps(k)]
        return gather(data, torch.stack(turned, 1))

    data, kernels = draw(B, C, H, W), draw(B, k * k, H, W)
    same(page["scatter"], theirs, data, kernels, crop=k // 2)
    assert not torch.allclose(page["scatter"](data, kernels), theirs(data, kernels)), "the border"


@pytest.mark.parametrize("k", [3, 5])
def test_dynamic_filters(page: dict[str, Any], k: int) -> None:
    """G(i, j) = F(i, j) applied to the k x k x C pixels around (i, j) of the image."""

    def theirs(image: Tensor, filters: Tensor) -> Tensor:
        windows = F.unfold(image, k, padding=k // 2)  # channel, then tap
        return (windows * filters.flatten(2)).sum(1).view(B, 1, H, W)

    same(page["dynamic_filter"], theirs, draw(B, C, H, W), draw(B, C * k * k, H, W))


def adaptive_conv(padded: Tensor, filters: Tensor) -> Tensor:
    """out[h, w] = sum of filters[h, w, i, j] * padded[h + i, w + j]."""
    k = filters.shape[-1]
    return sum(
        filters[:, None, ..., y, x] * padded[..., y : y + H, x : x + W] for _, y, x in taps(k)
    )  # pyright: ignore


@pytest.mark.parametrize("k", [3, 7])
def test_adaptive_convolution(page: dict[str, Any], k: int) -> None:
    same(page["adaptive_conv"], adaptive_conv, draw(B, C, H + k - 1, W + k - 1),
         draw(B, H, W, k, k))  # fmt: skip


def test_adaptive_convolution_of_a_reflected_image(page: dict[str, Any]) -> None:
    k = 7

    def ours(x: Tensor, filters: Tensor) -> Tensor:
        weight = filters.flatten(3).permute(3, 0, 1, 2)[:, :, None]
        return page["high_order_conv2d"](x, weight, padding="reflect")

    def theirs(x: Tensor, filters: Tensor) -> Tensor:
        return adaptive_conv(F.pad(x, [k // 2] * 4, mode="reflect"), filters)

    same(ours, theirs, draw(B, C, H, W), draw(B, H, W, k, k))


@pytest.mark.parametrize(("k", "dilation"), [(3, 1), (5, 1), (3, 2)])
def test_neighbourhood(page: dict[str, Any], k: int, dilation: int) -> None:
    """Pixel i of a line attends the k pixels of its residue that are nearest, all inside it."""
    heads, D, H, W = 2, 3, 9, 8

    def window(i: int, length: int) -> list[int]:
        line = range(i % dilation, length, dilation)
        first = min(max(i // dilation - k // 2, 0), len(line) - k)
        return list(line[first : first + k])

    def theirs(attn: Tensor, value: Tensor) -> Tensor:
        rows = []
        for h in range(H):
            row = []
            for w in range(W):
                near = value[:, :, window(h, H)][:, :, :, window(w, W)].flatten(2, 3)
                row.append((attn[:, :, h, w, :, None] * near).sum(2))
            rows.append(torch.stack(row, 2))
        return torch.stack(rows, 2)

    def image(function: Callable[..., Tensor], **options: int) -> Callable[..., Tensor]:
        return lambda *inputs: function(*inputs, **options).movedim(-1, 2)

    attn, value = draw(B, heads, H, W, k * k), draw(B, heads, H, W, D)
    ours = image(page["neighbourhood_av"], dilation=dilation)
    same(ours, image(theirs), attn, value, crop=dilation * (k // 2))
    assert not torch.allclose(ours(attn, value), theirs(attn, value).movedim(-1, 2)), "the border"


@pytest.mark.parametrize(("kd", "k"), [(3, 3), (1, 5), (5, 1)])
def test_volume(page: dict[str, Any], kd: int, k: int) -> None:
    """out[p] = sum of weight[tap, p] * x[p + tap - middle]."""
    D = 4

    def by_taps(x: Tensor, weight: Tensor) -> Tensor:
        padded = F.pad(x, [k // 2] * 4 + [kd // 2] * 2)
        out = torch.zeros_like(x)
        for n in range(kd):
            for i, row, column in taps(k):
                moved = padded[:, :, n : n + D, row : row + H, column : column + W]
                out = out + weight[n, i][:, None] * moved
        return out

    same(page["volume"], by_taps, draw(B, C, D, H, W), draw(kd, k * k, B, D, H, W))
