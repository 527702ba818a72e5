"""Conditions are no numbers and numbers no conditions: one rule, told at the cell's own line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hoconv import jit
from hoconv import recurrent as rnn
from hoconv.recurrent.ladder import SCHEDULES
from tests.hoconv.recurrent.support import agree

needs_compiler = pytest.mark.skipif(
    jit.obstacle("cpu") is not None, reason=str(jit.obstacle("cpu"))
)

AS_NUMBERS: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda x, h: rnn.sum(x > 0),
    "mean": lambda x, h: rnn.mean(x > 0),
    "max": lambda x, h: rnn.max(x > 0),
    "product": lambda x, h: (x > 0) * (h > 0),
    "product with a number": lambda x, h: (x > 0) * 2.0,
    "product with a value": lambda x, h: h * (x > 0),
    "sum of two": lambda x, h: (x > 0) + (h > 0),
    "difference": lambda x, h: 1 - (x > 0),
    "quotient": lambda x, h: h / (x > 0),
    "negative": lambda x, h: -(x > 0),
    "power": lambda x, h: (x > 0) ** 2,
    "minimum": lambda x, h: rnn.minimum(x > 0, h > 0),
    "maximum": lambda x, h: rnn.maximum(h, x > 0),
    "comparison": lambda x, h: (x > 0) == (h > 0),
    "order": lambda x, h: (x > 0) < h,
    "cat": lambda x, h: rnn.cat(x > 0, h),
    "function": lambda x, h: rnn.tanh(x > 0),
    "softmax": lambda x, h: rnn.softmax(x > 0),
    "layer_norm": lambda x, h: rnn.layer_norm("n", x > 0),
    "linear": lambda x, h: rnn.linear("a", x > 0),
    "choice": lambda x, h: rnn.where(x > 0, h > 0, h),
    "clamp": lambda x, h: rnn.clamp(x > 0, 0, 1),
    "dropout": lambda x, h: rnn.dropout(x > 0, 0.5),
    "zoneout": lambda x, h: rnn.zoneout(x > 0, h, 0.5),
}
AS_CONDITIONS: dict[str, Callable[[Any, Any], Any]] = {
    "where": lambda x, h: rnn.where(x, h, 0.0),
    "where of a number": lambda x, h: rnn.where(1.0, h, x),
    "and": lambda x, h: (x > 0) & h,
    "and of a number": lambda x, h: (x > 0) & 1.0,
    "or": lambda x, h: h | (x > 0),
    "not": lambda x, h: ~h,
}


def layer(expression: Callable[[Any, Any], Any], **arguments: Any) -> rnn.RNN:
    @rnn.cell(state=("h",))
    def made(x: Any, h: Any) -> Any:
        value = expression(x, h)
        h = rnn.tanh(x + h + rnn.sum(value))
        return rnn.cat(h, value), dict(h=h)

    return rnn.RNN(made, 4, 4, dtype=torch.float64, **arguments)


@pytest.mark.parametrize("impl", ["reference", "cpp", "auto"])
@pytest.mark.parametrize(
    ("expression", "message"),
    [
        *((e, r"expected numbers, got a condition.*rnn\.where\(cond") for e in AS_NUMBERS.values()),
        *((e, "expected a condition, made by a comparison") for e in AS_CONDITIONS.values()),
    ],
    ids=[*AS_NUMBERS, *AS_CONDITIONS],
)
def test_numbers_as_conditions_and_conditions_as_numbers_are_refused(
    expression: Callable[[Any, Any], Any], message: str, impl: str
) -> None:
    with pytest.raises(rnn.CellError, match=message):
        layer(expression, impl=impl)


@pytest.mark.parametrize(
    "expression",
    [
        lambda x, h: rnn.where((x > 0) & ~(h <= 0.1) | (x == h), x, h * 2),
        lambda x, h: rnn.where(rnn.cat(x > 0, h > 0)[:, 2:6], 1.0, h),
        lambda x, h: rnn.where(rnn.max(x) > h, h, -1.0),
        lambda x, h: rnn.where((rnn.sum(x) > 0) & (h > 0), rnn.where(x > h, 1.0, 0.0), x),
        lambda x, h: rnn.where(rnn.parameter("p") > 0, rnn.parameter("q"), x),
        lambda x, h: rnn.where((rnn.parameter("p") > 0)[:, :1], h, rnn.parameter("q", 1)),
        lambda x, h: rnn.where(rnn.cat(rnn.parameter("p", 2) > 0, (x > h)[:, :2]), h, x),
    ],
)
def test_valid_conditions_agree_with_the_definition(
    expression: Callable[[Any, Any], Any],
) -> None:
    agree(layer(expression))


@pytest.mark.parametrize(
    "expression",
    [
        lambda x, h: rnn.where(x > 0, x, float("-inf")),
        lambda x, h: rnn.minimum(x, float("inf")) + rnn.maximum(h, float("-inf")),
        lambda x, h: rnn.where(x > float("nan"), x, h),
        lambda x, h: rnn.exp(rnn.where(x > 0, h, -1e400)),
        lambda x, h: rnn.clamp(x, -1e400, 1e39),
        lambda x, h: x * np.float32(0.1) + np.float64(0.1) * h + np.int64(2),
        lambda x, h: rnn.where(x > 0, np.float32(0.5), True),
        lambda x, h: x / rnn.where(h > 0, 0.0, -0.0),
        lambda x, h: 1.0 / (h * 0.0) + 1.0 / (h * -0.0),
        lambda x, h: 1.0 / (-rnn.abs(h) * 0.0 + 0.0),
    ],
)
def test_constants_are_those_of_the_definition(expression: Callable[[Any, Any], Any]) -> None:
    agree(layer(expression), equal_nan=True)


def test_infinite_constants_of_float32_and_half_precision() -> None:
    def expression(x: Any, h: Any) -> Any:
        return rnn.where(x > 0, x, 1e39) + rnn.where(h > 1e39, h, 0.5)

    for dtype in (torch.float32, torch.bfloat16):
        agree(layer(expression).to(dtype), tolerance=2e-2, equal_nan=True)


@rnn.cell(state=("h",))
def choosing(x: Any, h: Any) -> Any:
    loud = rnn.linear("loud", x, h) > 0
    h = rnn.where(loud, rnn.tanh(rnn.linear("h", x, h)), h)
    return h, dict(h=h)


@needs_compiler
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_only_chooses_has_no_gradient_whatever_it_reads(schedule: str) -> None:
    """Beside a product that has one, of which an infinite operand makes NaN."""
    made = rnn.RNN(choosing, 3, 4, impl="cpp", schedule=schedule)
    x = torch.randn(4, 2, 3)
    x[1] = torch.inf
    made(x)[0].sum().backward()
    found = {name: p.grad for name, p in made.named_parameters()}
    assert found["weight_loud_l0"] is not None
    assert found["weight_loud_l0"].abs().sum() == 0
    assert found["weight_h_l0"] is not None
    assert found["weight_h_l0"].isnan().any()
