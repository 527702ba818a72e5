"""Cells that run a step of other cells."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hoconv import jit
from hoconv import recurrent as rnn
from tests.hoconv.recurrent.shim import shim_loops
from tests.hoconv.recurrent.support import cell_case
from tests.hoconv.recurrent.test_compiler import check_loops

IMPLS = [
    "reference",
    pytest.param(
        "cpp",
        marks=pytest.mark.skipif(jit.obstacle("cpu") is not None, reason=str(jit.obstacle("cpu"))),
    ),
]


@rnn.cell(state={"low": "hidden_size", "high": "2 * half"})
def tower(x: Any, low: Any, high: Any, *, half: int) -> Any:
    """Two layers of a GRU in one step; the upper one is wider."""
    middle, lower = rnn.gru("lower", x, low)
    output, upper = rnn.gru("upper", middle, high, hidden_size=2 * half)
    return output, dict(low=lower["h"], high=upper["h"])


@rnn.cell(state=("h", "c"))
def residual(x: Any, h: Any, c: Any) -> Any:
    output, following = rnn.lstm("inner", x, h, c)
    return output + rnn.linear("skip", x), following


def gradients_of(outputs: list[Tensor], leaves: list[Tensor]) -> list[Tensor]:
    loss = torch.stack([(i + t.sin()).sum() for i, t in enumerate(outputs)]).sum()
    return [*outputs, *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("impl", IMPLS)
def test_two_cells_in_a_step_are_two_layers(impl: str) -> None:
    torch.manual_seed(1)
    made = rnn.RNN(tower, 3, 4, half=3, impl=impl, dtype=torch.float64)
    sizes = {"lower": (3, 4), "upper": (4, 6)}
    layers = {name: nn.GRU(*sizes[name], dtype=torch.float64) for name in sizes}
    ours = dict(made.named_parameters())
    assert len(ours) == 16
    with torch.no_grad():
        for name, (inputs, hidden) in sizes.items():
            theirs = dict(layers[name].named_parameters())
            for gate, part in zip("rz", (slice(0, hidden), slice(hidden, 2 * hidden)), strict=True):
                weight, bias = ours[f"weight_{name}_{gate}_l0"], ours[f"bias_{name}_{gate}_l0"]
                theirs["weight_ih_l0"][part] = weight[:, :inputs]
                theirs["weight_hh_l0"][part] = weight[:, inputs:]
                theirs["bias_ih_l0"][part] = bias
                theirs["bias_hh_l0"][part] = 0
            for map, which in (("n", "ih"), ("m", "hh")):
                theirs[f"weight_{which}_l0"][2 * hidden :] = ours[f"weight_{name}_{map}_l0"]
                theirs[f"bias_{which}_l0"][2 * hidden :] = ours[f"bias_{name}_{map}_l0"]
    x = torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)
    output, (low, high) = made(x)
    middle, expected_low = layers["lower"](x)
    expected, expected_high = layers["upper"](middle)
    results = [[output, low, high], [expected, expected_low, expected_high]]
    for found, exact in zip(*(gradients_of(each, [x]) for each in results), strict=True):
        torch.testing.assert_close(found, exact, rtol=0, atol=1e-12)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_cell_around_a_cell_is_a_layer_and_what_is_around_it(impl: str) -> None:
    torch.manual_seed(1)
    made = rnn.RNN(residual, 3, 4, impl=impl, dtype=torch.float64)
    inner = rnn.RNN(rnn.lstm, 3, 4, impl="reference", dtype=torch.float64)
    given = dict(made.named_parameters())
    inner.load_state_dict(
        {name.replace("inner_", ""): p for name, p in given.items() if "inner_" in name}
    )
    x = torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)
    output, states = made(x)
    plain, expected = inner(x)
    skipped = x @ given["weight_skip_l0"].mT + given["bias_skip_l0"]
    results = [[output, *states], [plain + skipped, *expected]]
    for found, exact in zip(*(gradients_of(each, [x]) for each in results), strict=True):
        torch.testing.assert_close(found, exact, rtol=0, atol=1e-12)


def test_loops_of_cells_in_cells_compute_what_these_say() -> None:
    bound = [tower.bind(3, 4, {"half": 2}), residual.bind(3, 4, {})]
    check_loops([cell_case(each, masked=True) for each in bound], "auto", shim_loops)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda x, h: rnn.lstm("a", x, h),
            r"lstm\('a'\): expected the values \(x, h, c\) in this order.*, got 2",
        ),
        (lambda x, h: rnn.gru(), "gru: expected a name as its first argument"),
        (lambda x, h: rnn.gru(x, h), "gru: expected a name as its first argument"),
        (lambda x, h: rnn.gru("a", x, x), r"gru\('a'\): h: expected a value of size 4, got 3"),
        (lambda x, h: rnn.gru("a", 0.5, h), r"gru\('a'\): x: expected a row of features, got 0.5"),
        (lambda x, h: rnn.gru("a", x, 0.0), r"gru\('a'\): h: expected a value of size 4, got 0.0"),
        (lambda x, h: rnn.gru("a", x, h, wide=1), r"gru\('a'\): wide: not an option of the cell"),
        (lambda x, h: [rnn.gru("a", x, h) for _ in "ab"], "parameter 'weight_a_r' is made twice"),
    ],
)
def test_wrong_calls_of_a_cell_are_told_at_the_line_of_the_cell(call: Any, message: str) -> None:
    @rnn.cell(state=("h",))
    def outer(x: Any, h: Any) -> Any:
        call(x, h)
        return h, dict(h=h)

    with pytest.raises(rnn.CellError, match=message) as caught:
        rnn.RNN(outer, 3, 4)
    assert "in the cell outer" in str(caught.value)
    assert "call(x, h)" in str(caught.value)


def test_a_cell_is_called_within_a_cell_only() -> None:
    with pytest.raises(ValueError, match="the cell gru is called outside of a cell"):
        rnn.gru("a", torch.zeros(2, 3), torch.zeros(2, 4))


@pytest.mark.parametrize("size", ["2 * wide", "2 *", "half * 0.5", "-half", "0 * half", 0])
def test_a_size_that_is_no_product_of_numbers_and_options_is_refused(size: str) -> None:
    with pytest.raises(rnn.CellError, match=r"state 'h': its size .*, or a product of them"):

        @rnn.cell(state={"h": size})
        def outer(x: Any, h: Any, *, half: int) -> Any:
            return h, dict(h=h)


def test_a_factor_that_is_no_size_is_named() -> None:
    @rnn.cell(state={"h": ("half * 2",)})
    def outer(x: Any, h: Any, *, half: int) -> Any:
        return h, dict(h=rnn.linear("h", x, size=2 * half))

    assert rnn.RNN(outer, 3, 4, half=3).initial_state(2).shape == (1, 2, 6)  # pyright: ignore
    with pytest.raises(ValueError, match="half: the size of the state 'h' of the cell outer"):
        rnn.RNN(outer, 3, 4, half=0)
