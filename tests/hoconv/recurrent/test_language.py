"""The language of cells: what its functions compute, and what is said of wrong cells."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hoconv import recurrent as rnn
from hoconv.recurrent.ir.random import keep, philox
from tests.hoconv.recurrent.support import READY

x = torch.linspace(-3, 3, 12, dtype=torch.float64).view(2, 6)
y = x.flip(0).cos()


@pytest.mark.parametrize(
    ("ours", "torchs"),
    [
        (rnn.sigmoid(x), torch.sigmoid(x)),
        (rnn.tanh(x), torch.tanh(x)),
        (rnn.relu(x), torch.relu(x)),
        (rnn.gelu(x), F.gelu(x)),
        (rnn.silu(x), F.silu(x)),
        (rnn.softplus(x), F.softplus(x)),
        (rnn.exp(x), x.exp()),
        (rnn.log(rnn.abs(x)), x.abs().log()),
        (rnn.sqrt(rnn.exp(x)), x.exp().sqrt()),
        (rnn.minimum(x, y), torch.minimum(x, y)),
        (rnn.maximum(x, 0.5), x.clamp(min=0.5)),
        (rnn.where((x > 0) & ~(y > 0.5), x, -1.0), torch.where((x > 0) & ~(y > 0.5), x, -1.0)),
        (rnn.clamp(x, -1, 2), x.clamp(-1, 2)),
        (rnn.clamp(x, 0.5, -0.5), x.clamp(0.5, -0.5)),
        (rnn.sum(x), x.sum(1, keepdim=True)),
        (rnn.mean(x), x.mean(1, keepdim=True)),
        (rnn.max(x), x.amax(1, keepdim=True)),
        (rnn.softmax(x), x.softmax(1)),
        (rnn.cat(x, y), torch.cat((x, y), 1)),
        (torch.stack(rnn.chunk(x, 3)), torch.stack(x.chunk(3, 1))),
    ],
)
def test_functions_are_those_of_torch_on_tensors(ours: Tensor, torchs: Tensor) -> None:
    torch.testing.assert_close(ours, torchs)


@pytest.mark.parametrize("impl", ["reference", "cpp"])
def test_powers_and_crossed_bounds_in_a_cell_are_those_of_torch(impl: str) -> None:
    @rnn.cell(state={"h": "input_size"})
    def powers(x, h):
        return rnn.cat(x**3, 2.0**x, rnn.clamp(x, 0.5, -0.5)), dict(h=h * 0.0)

    x = torch.linspace(-3, 3, 12, dtype=torch.float64).view(2, 2, 3).requires_grad_()
    outputs, _ = rnn.RNN(powers, 3, 3, impl=impl, dtype=torch.float64)(x)
    expected = torch.cat((x**3, 2.0**x, x.clamp(0.5, -0.5)), 2)
    torch.testing.assert_close(outputs, expected)
    found, exact = (torch.autograd.grad(y.sum(), x)[0] for y in (outputs, expected))
    torch.testing.assert_close(found, exact)


def refused(function: Callable[..., Any], line: str, message: str, **options: Any) -> None:
    """The cell is refused when a layer is made, at its line that holds `line`, with a message."""
    with pytest.raises(rnn.CellError, match=message) as error:
        rnn.RNN(rnn.cell(state=("h",))(function), 3, 4, **options)
    lines, first = inspect.getsourcelines(function)
    number = first + next(i for i, text in enumerate(lines) if line in text)
    assert str(error.value).startswith(f"{__file__}:{number}: ")
    assert line in str(error.value)


def test_python_if_is_refused_with_where() -> None:
    def bad(x, h):
        if h > 0:
            return h, dict(h=h)
        return x, dict(h=h)

    refused(bad, "if h > 0", r"write rnn\.where\(condition, a, b\)")


def test_assignments_that_write_to_a_value_are_refused() -> None:
    """In the reference they would write to x, to an output of before, or to the caller's state."""

    def to_a_state(x, h):
        h += rnn.linear("h", x)
        return h, dict(h=h)

    def to_x(x, h):
        x *= 2.0
        return x, dict(h=h + rnn.linear("h", x))

    refused(to_a_state, "h += ", r"a \+= b writes to a, .*; write a = a \+ b")
    refused(to_x, "x *= 2.0", r"a \*= b writes to a, .*; write a = a \* b")


@pytest.mark.parametrize("base", [0, -2.0, True])
def test_powers_of_other_numbers_are_refused(base: Any) -> None:
    def bad(x, h):
        h = base**h
        return h, dict(h=h)

    refused(bad, "base**h", r"\*\*: expected a positive number before a value, got ")


def test_functions_outside_of_the_language_are_refused_with_the_language() -> None:
    def of_torch(x, h):
        h = torch.sin(h)
        return h, dict(h=h)

    def of_a_method(x, h):
        h = h.sigmoid()
        return h, dict(h=h)

    def of_math(x, h):
        h = math.sin(h)
        return h, dict(h=h)

    def of_numpy(x, h):
        h = np.sin(h)
        return h, dict(h=h)

    def of_a_tensor(x, h):
        h = h * torch.ones(4)
        return h, dict(h=h)

    refused(of_torch, "torch.sin(h)", "torch's sin is outside of the language, which has")
    refused(of_a_method, "h.sigmoid()", "has no 'sigmoid'; the language has the functions of")
    refused(of_math, "math.sin(h)", "is no Python number; the language has")
    refused(of_numpy, "np.sin(h)", "TypeError")
    refused(of_a_tensor, "torch.ones(4)", "mul: expected values of the step or numbers, got Tensor")


def test_sizes_that_do_not_fit_are_refused() -> None:
    def operands(x, h):
        h = rnn.tanh(x + h)
        return h, dict(h=h)

    def state(x, h):
        wide = rnn.cat(x, h)
        return h, dict(h=wide)

    def features(x, h):
        h = h[:, 2:9] + h[:, 4:9]
        return h, dict(h=h)

    refused(operands, "x + h", "add: expected operands of one size, or of size 1; got 3 and 4")
    refused(state, "return h, dict", "the state 'h' has size 4 and becomes a value of size 7")
    refused(features, "h[:, 2:9]", "slice: expected part of 0:4, got 4:4")


def test_states_that_do_not_fit_are_refused() -> None:
    def unknown(x, h):
        return h, dict(h=h, k=h)

    def missing(x, h):
        return h, {}

    def nothing(x, h):
        rnn.tanh(h)

    def learned_alone(x, h):
        return rnn.parameter("p"), dict(h=h)

    refused(unknown, "return h", "returns the state 'k', which it does not have; its states are h")
    refused(missing, "return h", "does not return the state 'h'; return")
    refused(nothing, "def nothing", r"must return \(output, dict\(h=\.\.\.\)\), got NoneType")
    refused(learned_alone, "return", "output: depends on parameters alone")
    with pytest.raises(rnn.CellError, match=r"expected the arguments \(x, h\), the input and"):
        rnn.cell(state=("h",))(lambda x, c: (c, dict(h=c)))
    with pytest.raises(rnn.CellError, match="its size 'wide' is no option of the cell"):
        rnn.cell(state={"h": "wide"})(lambda x, h: (h, dict(h=h)))
    with pytest.raises(rnn.CellError, match="option 'dropout': is an argument of RNN itself"):
        rnn.cell(state=("h",))(lambda x, h, *, dropout=0.1: (h, dict(h=h)))


def test_names_stand_for_one_set_of_weights() -> None:
    def twice(x, h):
        a = rnn.linear("a", x)
        h = a + rnn.linear("a", h)
        return h, dict(h=h)

    def no_name(x, h):
        h = rnn.linear(x, h)
        return h, dict(h=h)

    refused(twice, 'rnn.linear("a", h)', "the parameter 'weight_a' is made twice")
    refused(no_name, "rnn.linear(x, h)", "expected a name as its first argument")


def test_numbers_are_no_rows() -> None:
    def state(x, h):
        return h, dict(h=0.0)

    def output(x, h):
        return 1.0, dict(h=h)

    def beside(x, h):
        h = rnn.cat(h[:, 1:], 1.0)
        return h, dict(h=h)

    def first(x, h):
        h = rnn.cat(1.0, h[:, 1:])
        return h, dict(h=h)

    def alone(x, h):
        h = h * rnn.tanh(0.5)
        return h, dict(h=h)

    refused(state, "return h", r"h: expected a value of the step, \(B, n\), got 0\.0")
    refused(output, "return 1.0", "output: expected a value of the step")
    refused(beside, "rnn.cat", "cat: expected values of the step, got the number 1")
    refused(first, "rnn.cat", "cat: expected values of the step, got the number 1")
    refused(alone, "rnn.tanh(0.5)", r"tanh: expected a value of the step, got numbers alone")


def test_modules_of_torch_are_refused_at_the_cell_s_own_line() -> None:
    inner = torch.nn.Linear(4, 4)

    def of_a_module(x, h):
        h = inner(h)
        return h, dict(h=h)

    refused(of_a_module, "inner(h)", r"torch's linear is outside of the language.*rnn\.linear")


def test_of_several_returns_none_is_blamed_for_another() -> None:
    def two(x, h, *, short=True):
        if short:
            return h
        return h, dict(h=h)

    refused(two, "def two", r"must return \(output, dict\(h=\.\.\.\)\)")


def test_a_decorator_without_its_argument_is_named() -> None:
    with pytest.raises(rnn.CellError, match=r"as in @rnn\.cell\(state=.*got a function"):

        @rnn.cell  # pyright: ignore[reportArgumentType]
        def bare(x, h):
            return h, dict(h=h)


def test_cells_without_source_code_say_what_is_wrong() -> None:
    scope: dict[str, Any] = {"rnn": rnn}
    exec("def typed(x, h):\n    h = h + x\n    return h, dict(k=h)", scope)
    with pytest.raises(rnn.CellError, match=r"<string>:3: in the cell typed: it returns the state"):
        rnn.RNN(rnn.cell(state=("h",))(scope["typed"]), 3, 3)


def test_other_exceptions_are_told_at_the_line_of_the_cell() -> None:
    def divides(x, h):
        h = h * (1 / 0)
        return h, dict(h=h)

    refused(divides, "1 / 0", "ZeroDivisionError: division by zero")


def test_options_are_checked() -> None:
    with pytest.raises(TypeError, match="wide: not an option of the cell projected_lstm; it has p"):
        rnn.RNN(rnn.projected_lstm, 3, 4, wide=2)
    with pytest.raises(TypeError, match="proj_size: the cell projected_lstm needs this option"):
        rnn.RNN(rnn.projected_lstm, 3, 4)
    with pytest.raises(ValueError, match=r"proj_size: the size of the state 'h' .* got 0"):
        rnn.RNN(rnn.projected_lstm, 3, 4, proj_size=0)


def test_functions_outside_of_a_cell_say_so() -> None:
    with pytest.raises(rnn.CellError, match=r"rnn\.linear is called outside of a cell"):
        rnn.linear("a", x)


@pytest.mark.parametrize("name", READY)
def test_ready_cells_are_short_and_name_their_paper(name: str) -> None:
    function = READY[name][0].function
    lines, _ = inspect.getsourcelines(function)
    assert len(lines) <= 15
    assert re.search(r"\b(19|20)\d\d\b", function.__doc__ or "")


# Philox4x32-10: the published test vectors of Random123, first words.
@pytest.mark.parametrize(
    ("counter", "seed", "word"),
    [
        ((0, 0, 0, 0), 0, 0x6627E8D5),
        ((0xFFFFFFFF,) * 4, -1, 0x408F276D),
        ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), 0x299F31D0A4093822, 0xD16CFE09),
    ],
)
def test_random_words_are_those_of_the_published_generator(
    counter: tuple[int, int, int, int], seed: int, word: int
) -> None:
    c0, c1, c2, c3 = map(torch.tensor, counter)
    assert philox((c0, c1, c2, c3), torch.tensor(seed)) == word


@given(st.floats(0.05, 0.95), st.integers(0, 5), st.integers(-(2**63), 2**63 - 1))
def test_masks_have_the_probability_and_do_not_depend_on_the_batch(
    probability: float, step: int, seed: int
) -> None:
    mask = keep(probability, 1, 256, 64, step, torch.tensor(seed))
    deviation = math.sqrt(probability * (1 - probability) / mask.numel())
    assert abs(mask.double().mean().item() - probability) < 5 * deviation
    assert torch.equal(keep(probability, 1, 256, 3, step, torch.tensor(seed)), mask[:3])
    assert not torch.equal(keep(probability, 1, 256, 64, step + 1, torch.tensor(seed)), mask)
    assert not torch.equal(keep(probability, 2, 256, 64, step, torch.tensor(seed)), mask)
