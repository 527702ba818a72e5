"""The language of cells: what its functions compute, and what is said of wrong cells."""

from __future__ import annotations

import copy
import functools
import inspect
import math
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from hoconv import jit
from hoconv import recurrent as rnn
from hoconv.recurrent.ir.random import keep, philox
from hoconv.recurrent.ladder import SCHEDULES
from hoconv.recurrent.schedule import plan
from tests.hoconv.recurrent.shim import shim_loops
from tests.hoconv.recurrent.support import READY, cell_case
from tests.hoconv.recurrent.test_compiler import check_loops

needs_compiler = pytest.mark.skipif(
    jit.obstacle("cpu") is not None, reason=str(jit.obstacle("cpu"))
)

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

    def elsewhere(x, h):
        h = torch.special.digamma(h)
        return h, dict(h=h)

    def nowhere(x, h):
        h = rnn.sinh(h)
        return h, dict(h=h)

    refused(of_torch, "torch.sin(h)", r"torch's sin is outside .*; write rnn.sin\(...\)")
    refused(of_a_method, "h.sigmoid()", r"has no 'sigmoid'; write rnn.sigmoid\(...\)")
    refused(elsewhere, "digamma(h)", "is outside of the language; the language has the functions")
    refused(
        nowhere,
        "rnn.sinh(h)",
        r"has no function 'sinh'; did you mean sin\? docs/use/recurrent.md lists",
    )
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
    refused(features, "h[:, 2:9]", "indexing: expected part of 0:4, got 4:4")


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
    with pytest.raises(rnn.CellError, match=r"expected the arguments \(x, h\), the inputs, the"):
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
    refused(beside, "rnn.cat", "cat: expected values of the step, got 1")
    refused(first, "rnn.cat", "cat: expected values of the step, got 1")
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


OTHERS = {
    "h // 2": r"the language has no //; write rnn.floor\(a / b\)",
    "h @ h": "the language has no @; write rnn.linear",
    "2.0 % h": r"the language has no number % value; write a - b \* rnn.floor\(a / b\)",
    "h ^ h": r"the language has no \^",
    "1.0 in h": "the language has no in",
    "h ** 1.5": r"\*\*: expected a whole exponent, but not 0, or 0.5 or -0.5; got 1.5",
    "h ** float('inf')": r"\*\*: expected a whole exponent",
    "rnn.softmax(h, dim=-1)": r"argument 'dim'; it is rnn.softmax\(x, axis=-1\)",
    "rnn.softmax(h, axis=0)": "softmax: axis: expected 1 to 1",
    "h * rnn.mean(2.0)": "mean: expected a value of the step, got 2.0",
    "h * rnn.sum(h, keepdim=True)": r"it is rnn.sum\(x, axis=-1\), and an axis .* of size 1",
    "rnn.linear('a', x, out=4)": r"it is rnn.linear\(name, \*operands, size=None, bias=True\)",
    "rnn.clamp(h, min=0.0)": r"it is rnn.clamp\(x, low, high\)",
    "rnn.where(h > 0, h)": r"where\(\) missing .*'b'; it is rnn.where\(condition, a, b\)",
    "rnn.tanh(h, x)": r"tanh\(\) too many positional arguments; it is rnn.tanh\(x\)",
    "rnn.layer_norm(h)": r"it is rnn.layer_norm\(name, x, eps=1e-05\)",
    "rnn.layer_norm(h, 'norm')": "layer_norm: expected a name as its first argument",
    "rnn.rms_norm(h, 'norm')": "rms_norm: expected a name as its first argument",
    "rnn.group_norm(h, 'norm', 2)": "group_norm: expected a name as its first argument",
    "rnn.group_norm('g', h, 2.0)": "group_norm.'g'.: expected a row, and a divisor",
    "rnn.tahn(h)": r"no function 'tahn'; did you mean tanh\?",
    "rnn.functional(h)": "no function 'functional'; docs/use/recurrent.md lists all",
    "tanh(h)": "name 'tanh' is not defined; write rnn.tanh",
    "h.size(1)": r"no 'size'; write value.shape\[1:\]",
    "h.to(x)": "no 'to'; write nothing: the layer says in which dtype",
    "h.sqrt_()": r"no 'sqrt_'; write rnn.sqrt\(...\)",
    "h.mul(h)": r"no 'mul'; write a \* b",
    "h * h.item()": r"no 'item'; write rnn.where\(condition, a, b\)",
    "torch.zeros_like(h)": "zeros_like is outside of the language; write 0.0",
    "torch.ones(4) * h": r"mul: .* got Tensor; .*, and a value of a tensor by rnn.parameter\(",
    "h + numpy.ones(4)": r"add: .* got ndarray; .*, and a value of a tensor by rnn.parameter\(",
    "numpy.tanh(h)": "does not support ufuncs .*; NumPy's functions are outside of the language",
    "h * rnn.Linear('a')": r"got Linear; a map is called with values, as in W\(h\)",
    "h * 'h'": "mul: expected values of the step or numbers, got str$",
    "rnn.einsum('bh,bh->bh', h, h)": "has 2 axes, .* has 1 beside the batch, which is not written",
    "rnn.einsum('h,kh->k', h, torch.eye(4))": "expected values of the step, got Tensor; what is",
    "rnn.einsum('h,h,h->h', h, h, h)": "got 3; multiply more of them two by two",
    "h[:, ::2]": r"got ::2; rnn.reshape\(value, m, n\)\[..., 0\] has every n-th feature",
    "h[:, : 4 / 2]": "got :2.0; a // b is a whole number",
    "f'{h:.3f}'": "a value has no numbers when a cell is traced; print",
    "round(h)": r"the language has no round; write rnn.floor\(value \+ 0.5\)",
    "h << 2": r"the language has no << and >>; write value \* 2.0\*\*n",
    "divmod(h, 2)": "the language has no divmod",
    "rnn.RNN(rnn.gru, 4, 4)(h)": "a layer runs all steps, and a cell one; write a cell within the",
    "rnn.pad(h, -1)": "pad: before: expected an int of at least 0, got -1",
    "rnn.pad(h, 1.0)": "pad: before: expected an int of at least 0, got 1.0",
    "rnn.reshape(h, 4.0)": "reshape: size: expected an int of at least 1, got 4.0",
    "rnn.roll(h, x)": "roll: shift: expected an int, got <value of the step",
    "rnn.chunk(h, 2.0)[0]": "chunk: chunks: expected an int of at least 1, got 2.0",
    "rnn.cat([h, h])": "cat: expected values, as in cat",
    "rnn.clamp(h, x, 1.0)": "clamp: expected numbers low and high, got <.*; write rnn.maximum",
    "rnn.dropout(h, x)": "dropout: expected a probability from 0 to 1, got <value",
    "rnn.einsum(h, 'h->h')": "einsum: expected an equation first",
    "rnn.matmul(h, h)": "no function 'matmul'; write rnn.einsum",
    "h.unsqueeze(1)": "has no 'unsqueeze'; write rnn.reshape",
    "h ** 0": "but not 0, or 0.5 or -0.5; got 0",
    "rnn.parameter('p', learned='no') * h": "learned: expected True or False, got 'no'",
    "rnn.linear('a', [x, h])": "expected values of the step as arguments, got",
    "h[:, 0]": r"an int removes the last axis; value\[:, i : i \+ 1\] keeps it",
    "rnn.group_norm('g', h, 3)": "group_norm.'g'.: expected a row, and a divisor of its features",
}


@pytest.mark.parametrize("expression", OTHERS)
def test_what_the_language_has_not_is_answered(expression: str) -> None:
    scope: dict[str, Any] = {"rnn": rnn, "torch": torch, "numpy": np}
    exec(compile(f"def cell(x, h):\n    h = {expression}\n", "cell.py", "exec"), scope)
    with pytest.raises(rnn.CellError, match=OTHERS[expression]) as error:
        rnn.RNN(rnn.cell(state=("h",))(scope["cell"]), 3, 4)
    assert "cell.py:2: in the cell cell" in str(error.value)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ("h", r"must return \(output, dict\(h=\.\.\.\)\), got a value"),
        ("h, (h,)", r"got tuple \(a value, tuple \(a value\)\)"),
        ("h, dict(h=h), h", r"got tuple \(a value, dict, a value\)"),
        (
            "[h, h], dict(h=h)",
            r"got list \(a value, a value\); several outputs have names: return d",
        ),
        ("(h, {}), dict(h=h)", r"got tuple .*; a cell within returns two, output, following = "),
        ("{1: h}, dict(h=h)", r"expected names of outputs and states, as in dict\(h=h\), got 1"),
        (
            "None, dict(h=h)",
            "output: expected a value of the step, .* got NoneType; a row of zeros",
        ),
    ],
)
def test_results_that_are_none_are_described(result: str, message: str) -> None:
    scope: dict[str, Any] = {}
    exec(compile(f"def cell(x, h):\n    return {result}\n", "cell.py", "exec"), scope)
    with pytest.raises(rnn.CellError, match=message) as error:
        rnn.RNN(rnn.cell(state=("h",))(scope["cell"]), 3, 4)
    assert "cell.py:2: in the cell cell" in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"state": "h"}, "state: expected a tuple of names, or a dict of names and sizes, got 'h'"),
        ({"state": ()}, r"state: expected a tuple of names, .*, got \(\)"),
        ({"state": {"h", "c"}}, "state: expected a tuple of names"),
        ({"state": 5}, "state: expected a tuple of names, .*, got 5"),
        ({"state": ("h", 5)}, r"expected names of arguments, as in state=\('h',\), got 5"),
        ({"state": ("h", "h")}, "state: a name is there twice"),
        ({"state": {"h": 0}}, "state 'h': its size 0 is none; expected an int of at least 1"),
        ({"state": {"h": -1}}, "state 'h': its size -1 is none; expected an int of at least 1"),
        ({"state": {"h": 1.5}}, "state 'h': its size 1.5 is none; expected an int of at least 1"),
        ({"state": {"h": [2, 3]}}, r"its size \[2, 3\] is none; .*; several are a tuple"),
        ({"state": {"h": "2 *"}}, "its size '2 .' is no option of the cell; .* a product of them"),
        ({"state": ("h",), "inputs": {"m": None}}, "input 'm': its size None is none"),
        ({"state": ("h",), "inputs": ("m",)}, r"inputs: expected names and sizes, .* got \('m',\)"),
        ({"state": ("h",), "inputs": {"h": 1}}, "'h' is the name of an input and of a state"),
    ],
)
def test_wrong_arguments_of_the_decorator_are_told_at_the_cell(
    arguments: dict[str, Any], message: str
) -> None:
    def cell(x, h):
        return h, dict(h=h)

    if arguments.get("inputs", {}) and "m" in arguments["inputs"]:
        scope: dict[str, Any] = {}
        exec(compile("def cell(x, m, h): ...", __file__, "exec"), scope)
        cell = scope["cell"]
    with pytest.raises(rnn.CellError, match=message) as error:
        rnn.cell(**arguments)(cell)
    assert str(error.value).startswith(
        f"{__file__}:{cell.__code__.co_firstlineno}: in the cell cel"
    )


def test_what_is_no_function_is_no_cell() -> None:
    class Callable:
        def __call__(self, x, h): ...

    for other in (Callable(), functools.partial(Callable()), max):
        with pytest.raises(rnn.CellError, match="cell: expected a function, got "):
            rnn.cell(state=("h",))(other)


def test_an_item_is_not_assigned_or_deleted() -> None:
    def deleted(x, h):
        del h[:, 0]
        return h, dict(h=h)

    refused(deleted, "del h[:, 0]", r"the language has no del value\[...\]; write rnn.cat")

    def assigned(x, h):
        h[:, 0] = 1.0
        return h, dict(h=h)

    refused(assigned, "h[:, 0] = 1.0", r"the language has no value\[...\] = ; write rnn.where")


def test_an_error_within_a_helper_shows_both_lines() -> None:
    def helper(value):
        return rnn.tanh(value > 0)

    def calls(x, h):
        h = helper(h)
        return h, dict(h=h)

    with pytest.raises(rnn.CellError, match="tanh: expected numbers, got a condition") as error:
        rnn.RNN(rnn.cell(state=("h",))(calls), 3, 4)
    assert "in the cell helper" in str(error.value)
    assert "in the cell calls: called\n    h = helper(h)" in str(error.value)


def test_a_cell_that_draws_numbers_of_its_own_is_refused() -> None:
    @rnn.cell(state=("h",))
    def noisy(x, h):
        return h, dict(h=rnn.tanh(rnn.linear("h", x, h) + random.gauss(0, 1)))

    with pytest.raises(rnn.CellError, match="another program each time that it is called"):
        rnn.RNN(noisy, 3, 4)


def test_every_argument_of_a_layer_is_taken() -> None:
    arguments = [*inspect.signature(rnn.RNN.__init__).parameters][1:-1]
    for name in arguments:
        if name in ("input_size", "hidden_size"):
            continue
        scope: dict[str, Any] = {}
        exec(f"def cell(x, h, *, {name}=1): ...", scope)
        with pytest.raises(rnn.CellError, match="is an argument of RNN itself"):
            rnn.cell(state=("h",))(scope["cell"])


def test_a_layer_without_parameters_explains_itself() -> None:
    @rnn.cell(state={"h": "input_size"})
    def running(x, h):
        return h, dict(h=0.9 * h + x)

    assert "layer 0" in rnn.RNN(running, 3, 3).explain()


COMPOSED = {
    "logsigmoid": (rnn.logsigmoid, F.logsigmoid),
    "logaddexp": (lambda x: rnn.logaddexp(x, 1 - x), lambda x: torch.logaddexp(x, 1 - x)),
    "logsumexp": (rnn.logsumexp, lambda x: x.logsumexp(-1, keepdim=True)),
    "logsumexp along 1": (lambda x: rnn.logsumexp(x, 1), lambda x: x.logsumexp(1, keepdim=True)),
    "cumsum": (rnn.cumsum, lambda x: x.cumsum(-1)),
    "cumsum along 1": (lambda x: rnn.cumsum(x, axis=1), lambda x: x.cumsum(1)),
    "roll": (lambda x: rnn.roll(x, 2), lambda x: x.roll(2, -1)),
    "roll back": (lambda x: rnn.roll(x, -1, axis=1), lambda x: x.roll(-1, 1)),
    "pad": (lambda x: rnn.pad(x, 1, 2), lambda x: F.pad(x, (1, 2))),
    "pad along 1": (lambda x: rnn.pad(x, 1, axis=1), lambda x: F.pad(x, (0, 0, 1, 0))),
    "normalize": (rnn.normalize, lambda x: F.normalize(x, dim=-1)),
    "softmax along 1": (lambda x: rnn.softmax(x, axis=1), lambda x: x.softmax(1)),
    "remainder": (lambda x: x % 0.7, lambda x: torch.remainder(x, 0.7)),
    "remainder of two": (lambda x: x % (0.3 + abs(x)), lambda x: torch.remainder(x, 0.3 + x.abs())),
    "square": (lambda x: x**2.0, lambda x: x * x),
    "inverse square": (lambda x: (2 + abs(x)) ** -2, lambda x: (2 + x.abs()) ** -2),
    "inverse": (lambda x: (2 + abs(x)) ** -1, lambda x: 1 / (2 + x.abs())),
    "root": (lambda x: (2 + abs(x)) ** 0.5, lambda x: (2 + x.abs()).sqrt()),
    "inverse root": (lambda x: (2 + abs(x)) ** -0.5, lambda x: (2 + x.abs()).rsqrt()),
    "surrogate": (
        lambda x: rnn.straight_through(rnn.where(x >= 0, 1.0, 0.0), x / (1 + abs(x))),
        lambda x: (x >= 0).double() + x / (1 + x.abs()) - (x / (1 + x.abs())).detach(),
    ),
    "stop_gradient": (lambda x: x * rnn.stop_gradient(x), lambda x: x * x.detach()),
    "no gradient": (lambda x: x * rnn.sign(x) + rnn.floor(x), lambda x: x * x.sign() + x.floor()),
}  # fmt: skip


@pytest.mark.parametrize("impl", ["reference", pytest.param("cpp", marks=needs_compiler)])
def test_composed_functions_are_pytorchs(impl: str) -> None:
    """All in one cell, whose states hold what each gives for x of (3, 4)."""
    x = torch.randn(2, 3, 12, dtype=torch.float64)
    results = {n: of(x.view(6, 3, 4)) for n, (_, of) in COMPOSED.items()}
    names = {name: name.replace(" ", "_") for name in COMPOSED}

    def function(x: Any, *states: Any) -> Any:
        shaped = rnn.reshape(x, 3, 4)
        found = {names[name]: ours(shaped) for name, (ours, _) in COMPOSED.items()}
        return rnn.cat(*(rnn.reshape(v, math.prod(v.shape[1:])) for v in found.values())), {
            name: 0.0 * state + found[name] for name, state in zip(found, states, strict=True)
        }

    scope: dict[str, Any] = {"function": function}
    arguments = ", ".join(("x", *names.values()))
    exec(f"def cell({arguments}):\n    return function({arguments})", scope)
    shapes = {names[name]: tuple(t.shape[1:]) for name, t in results.items()}
    layer = rnn.RNN(rnn.cell(state=shapes)(scope["cell"]), 12, 4, dtype=torch.float64, impl=impl)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    output, states = layer(ours)
    rows = [of(theirs.view(6, 3, 4)).reshape(2, 3, -1) for _, of in COMPOSED.values()]
    torch.testing.assert_close(output, torch.cat(rows, 2), rtol=1e-11, atol=1e-11)
    for name, state in zip(COMPOSED, states, strict=True):
        torch.testing.assert_close(state[0], results[name].view(2, 3, *state.shape[2:])[-1])
    for start, (name, row) in zip(np.cumsum([0, *(r.shape[2] for r in rows)]), zip(COMPOSED, rows)):
        mine = output[..., start : start + row.shape[2]]
        found, expected = (
            torch.autograd.grad(t.sin().sum(), leaf, retain_graph=True)[0]
            for t, leaf in ((mine, ours), (row, theirs))
        )
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10, msg=name)


@rnn.cell(state=("h",))
def deep(x: Any, h: Any) -> Any:
    """A map of x and h, and one of h, that are used three times and twice."""
    W, V = rnn.Linear("w"), rnn.Linear("v", bias=False)
    a = rnn.tanh(W(x, h))
    b = rnn.tanh(W(x, a) + V(h) + rnn.linear("once", h))
    h = W(x, V(b)) * 0.5 + h
    return h, dict(h=h)


@pytest.mark.parametrize("impl", ["reference", pytest.param("cpp", marks=needs_compiler)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_map_is_used_any_number_of_times(impl: str, dtype: torch.dtype) -> None:
    layer = rnn.RNN(deep, 3, 4, impl=impl, dtype=dtype)
    names = {name for name, _ in layer.named_parameters()}
    assert names == {"weight_w_l0", "bias_w_l0", "weight_v_l0", "weight_once_l0", "bias_once_l0"}
    W, V = nn.Linear(7, 4).double(), nn.Linear(4, 4, bias=False).double()
    once, w = nn.Linear(4, 4).double(), dict(layer.named_parameters())
    with torch.no_grad():
        for name, module in (("w", W), ("v", V), ("once", once)):
            for own, parameter in module.named_parameters():
                parameter.copy_(w[f"{own}_{name}_l0"])
    x = torch.randn(5, 2, 3).to(dtype).requires_grad_()
    h, rows = torch.zeros(2, 4).double(), []
    for step in x.double():
        a = torch.tanh(W(torch.cat((step, h), 1)))
        b = torch.tanh(W(torch.cat((step, a), 1)) + V(h) + once(h))
        h = W(torch.cat((step, V(b)), 1)) * 0.5 + h
        rows.append(h)
    output, _ = layer(x)
    tolerance = 1e-10 if dtype == torch.float64 else 0.1
    expected = torch.stack(rows)
    torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance)
    output.double().sin().sum().backward()
    found = [x.grad, *(w[f"{n}_l0"].grad for n in ("weight_w", "bias_w", "weight_v"))]
    x.grad = None
    expected.sin().sum().backward()
    for mine, exact in zip(found, (x.grad, W.weight.grad, W.bias.grad, V.weight.grad)):
        assert mine is not None
        assert exact is not None
        torch.testing.assert_close(mine.double(), exact.double(), rtol=tolerance, atol=tolerance)


@needs_compiler
def test_kernels_use_a_map_any_number_of_times() -> None:
    for schedule in SCHEDULES:
        case = cell_case(deep.bind(3, 4, {}), masked=True)
        case.check_plan(plan(case.cell, torch.float64, schedule, **case.options))
    check_loops([cell_case(deep.bind(3, 4, {}), resets=True)], "auto", shim_loops)
    assert "the same weights more than once" in rnn.RNN(deep, 3, 4).explain()


def test_parameters_begin_with_what_the_cell_says() -> None:
    table = torch.arange(6.0).view(2, 3)

    @rnn.cell(state={"h": (2, 3)})
    def begun(x: Any, h: Any) -> Any:
        h = rnn.parameter("fixed", init=table, learned=False) * h
        h = h + rnn.parameter("drawn", h, init=lambda t: nn.init.constant_(t, 0.25))
        return h, dict(h=h + rnn.sum(x)[..., None] * rnn.parameter("scale", (1, 1), init=2.0))

    layer = rnn.RNN(begun, 3, 4)
    assert {n for n, _ in layer.named_parameters()} == {"drawn_l0", "scale_l0"}
    assert {n for n, _ in layer.named_buffers()} == {"fixed_l0"}
    with torch.no_grad():
        layer.get_buffer("fixed_l0").zero_()
    layer.reset_parameters()
    torch.testing.assert_close(layer.get_buffer("fixed_l0"), table)
    torch.testing.assert_close(layer.get_parameter("drawn_l0"), torch.full((2, 3), 0.25))
    x = torch.randn(2, 3, 3, requires_grad=True)
    found, _ = layer(x)
    assert found.shape == (2, 3, 6)
    copied, _ = copy.deepcopy(layer)(x)
    torch.testing.assert_close(copied, found)
    found.sum().backward()
    assert layer.get_parameter("scale_l0").grad is not None

    def several(x, h):
        h = rnn.parameter("p", (2, 2), init=table) * h
        return h, dict(h=h)

    def strange(x, h):
        zeros: Any = "zeros"
        h = rnn.parameter("p", init=zeros) * h
        return h, dict(h=h)

    refused(several, "init=table", r"expected a tensor of shape \(2, 2\), got \(2, 3\)")
    refused(
        strange, "init=zeros", "init: expected a number, a tensor, or a function that fills one"
    )


def test_a_map_that_is_used_again_keeps_its_sizes() -> None:
    def again(x, h):
        W = rnn.Linear("w")
        h = W(h) + W(rnn.cat(h, h))
        return h, dict(h=h)

    refused(again, "W(h) + W", r"expected operands of the sizes \[4\], as at its first use, got")


def test_a_value_of_another_call_is_refused() -> None:
    kept: list[Any] = []

    def keeps(x, h):
        kept.append(rnn.tanh(h))
        h = h + kept[0]
        return h, dict(h=h)

    refused(keeps, "h + kept[0]", "a value of another call of a cell")


def test_flags_and_names_of_a_layer_are_checked() -> None:
    for name in ("bidirectional", "batch_first", "recompute"):
        arguments: Any = {name: "no"}
        with pytest.raises(TypeError, match=f"{name}: expected True or False, got 'no'"):
            rnn.RNN(rnn.gru, 3, 4, **arguments)
    lengths: Any = 2
    with pytest.raises(TypeError, match="lengths: expected 2 ints, as many as sequences, got 2"):
        rnn.RNN(rnn.gru, 3, 4)(torch.zeros(3, 2, 3), lengths=lengths)

    @rnn.cell(state=("h",))
    def begun(x: Any, h: Any) -> Any:
        makes: Any = torch.zeros
        h = h * rnn.parameter("p", init=makes)
        return h, dict(h=h + x)

    with pytest.raises(TypeError) as error:
        rnn.RNN(begun, 4, 4)
    said = "the init of p_l0: it is given a tensor of shape (4,) to fill"
    assert said in error.value.__notes__


def test_an_init_that_returns_another_tensor_leaves_no_garbage() -> None:
    def begun(init: Any) -> rnn.RNN:
        def cell(x: Any, h: Any) -> Any:
            h = h * rnn.parameter("p", init=init)
            return h, dict(h=h + x)

        return rnn.RNN(rnn.cell(state=("h",))(cell), 4, 4)

    with pytest.raises(ValueError, match="the init of p_l0: it returns a tensor of its own"):
        begun(torch.ones_like)
    for init in (
        nn.init.ones_,
        lambda t: t.fill_(1.0)[1:],
        lambda t: None if t.fill_(1.0) is t else 0,
    ):
        assert begun(init).state_dict()["p_l0"].tolist() == [1.0] * 4


SHARED = rnn.Linear("shared")


def test_a_map_may_be_made_outside_of_a_cell() -> None:
    @rnn.cell(state=("h",))
    def outside(x: Any, h: Any) -> Any:
        h = rnn.tanh(SHARED(h) + SHARED(rnn.tanh(rnn.linear("x", x))))
        return h, dict(h=h)

    layers = [rnn.RNN(outside, 3, 4, num_layers=2, impl="reference") for _ in range(2)]
    for made in layers:
        assert {n for n, _ in made.named_parameters() if "shared" in n} == {
            f"{of}_shared_l{layer}" for of in ("weight", "bias") for layer in (0, 1)
        }
        made(torch.randn(2, 3, 3))
