"""A layer computes what its cell is, whatever happens to names, options, modules and processes."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from hoconv import recurrent as rnn
from hoconv.recurrent import cells
from hoconv.recurrent.frontend.serialize import from_text, to_text
from hoconv.recurrent.frontend.trace import trace
from hoconv.recurrent.ir.program import flat
from hoconv.recurrent.plans import find_plan
from hoconv.tools.testing.random_cells import random_cell
from tests.hoconv.recurrent.support import READY, bound, layer, sequence

EXPORTED = Path(__file__).with_name("exported.py")


def scaled(factor: float) -> rnn.Cell:
    """Cells of one name, with other numbers in them."""

    @rnn.cell(state=("h",))
    def same_name(x: Any, h: Any) -> Any:
        h = rnn.tanh(factor * rnn.linear("h", x, h))
        return h, dict(h=h)

    return same_name


@pytest.mark.parametrize("which", [*READY, *range(20)])
def test_a_trace_is_read_back_from_its_text(which: str | int) -> None:
    cell = bound(which) if isinstance(which, str) else random_cell(which)
    for training in (False, True):
        traced = trace(cell, training)
        again = from_text(to_text(traced))
        assert to_text(again) == to_text(traced)
        assert str(again.program) == str(traced.program)
        for ours, read in zip(traced.declarations, again.declarations, strict=True):
            assert read == dataclasses.replace(ours, shape=ours.read_shape, init=None, learned=True)


def test_a_text_of_another_version_is_refused() -> None:
    text = to_text(trace(bound("lstm"))).replace('"version":1', '"version":0')
    with pytest.raises(ValueError, match="exported by another version of hoconv"):
        from_text(text)


def test_a_text_with_an_op_of_another_version_is_refused() -> None:
    text = to_text(trace(bound("lstm"))).replace('"sigmoid"', '"sigmoid2"')
    with pytest.raises(ValueError, match="another version of hoconv, which has the op 'sigmoid2'"):
        from_text(text)


def test_a_plan_of_another_version_is_refused() -> None:
    """Options used to be written one by one: nothing of them may be lost."""
    for options in ("False/True", "masked+unheard"):
        text = f"float32/auto/{options}/{to_text(trace(bound('lstm')))}"
        with pytest.raises(ValueError, match="another version of hoconv, which has the option"):
            find_plan(text)


def test_constants_are_kept_to_the_last_bit() -> None:
    cell = scaled(0.1 + 0.2).bind(3, 4, {})
    (constant,) = {i for op in flat(from_text(to_text(trace(cell))).program.step)
                   for i in op.inputs if isinstance(i, float)}  # fmt: skip
    assert constant == 0.1 + 0.2


@pytest.mark.slow
def test_exported_programs_run_in_a_process_that_never_saw_their_cells(tmp_path: Path) -> None:
    """Two cells of one name among them; lengths and resets, with two directions."""
    cases: dict[str, tuple[rnn.RNN, tuple[Any, ...]]] = {
        "half": (rnn.RNN(scaled(0.5), 3, 4, impl="cpp"), (torch.randn(5, 2, 3),)),
        "twice": (rnn.RNN(scaled(2.0), 3, 4, impl="cpp"), (torch.randn(5, 2, 3),)),
        "lstm": (rnn.LSTM(3, 4, 2, impl="cpp"), (torch.randn(5, 2, 3),)),
        "lengths": (
            rnn.RNN(rnn.gru, 3, 4, bidirectional=True, impl="cpp"),
            (torch.randn(5, 2, 3), None, torch.tensor([5, 3])),
        ),
        "resets": (
            rnn.RNN(rnn.gru, 3, 4, bidirectional=True, impl="cpp"),
            (torch.randn(5, 2, 3), None, None, torch.rand(5, 2) < 0.4),
        ),
    }
    expected: dict[str, Any] = {}
    for name, (made, inputs) in cases.items():
        made.eval()
        with torch.no_grad():
            torch.export.save(torch.export.export(made, inputs), tmp_path / f"{name}.pt2")
            expected[name] = made(*inputs)
        torch.save(inputs, tmp_path / f"{name}.inputs")
    paths = [str(tmp_path / name) for name in cases]
    done = subprocess.run([sys.executable, EXPORTED, *paths], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name, exact in expected.items():
        torch.testing.assert_close(torch.load(tmp_path / f"{name}.outputs"), exact)


def taps(x: Any, h: Any, *, weights: Any) -> Any:
    h = h * float(weights[0]) + float(weights[1]) * rnn.tanh(rnn.linear("h", x))
    return h, dict(h=h)


@pytest.mark.parametrize("make", [list, np.array, torch.tensor], ids=["list", "array", "tensor"])
def test_options_are_those_of_when_the_layer_was_made(make: Callable[[Any], Any]) -> None:
    cell = rnn.cell(state=("h",))(taps)
    weights = make([0.5, 2.0])
    x = sequence(4, 2, 3)
    layers = []
    for impl in ("cpp", "reference"):
        torch.manual_seed(0)
        layers.append(rnn.RNN(cell, 3, 4, weights=weights, impl=impl, dtype=torch.float64))
    before = [made(x)[0] for made in layers]
    weights[0] = weights[1] = 1.0
    for made, exact in zip(layers, before):
        torch.testing.assert_close(made(x)[0], exact)
        torch.testing.assert_close(made(x)[0], before[0])
    torch.manual_seed(0)
    changed = rnn.RNN(cell, 3, 4, weights=weights, impl="cpp", dtype=torch.float64)
    reference = rnn.RNN(cell, 3, 4, weights=weights, impl="reference", dtype=torch.float64)
    reference.load_state_dict(changed.state_dict())
    torch.testing.assert_close(changed(x), reference(x))
    assert not torch.allclose(changed(x)[0], before[0])


def test_only_importable_cells_are_pickled_and_others_say_why_not() -> None:
    made = rnn.RNN(scaled(0.5), 3, 4)
    with pytest.raises(pickle.PicklingError, match=r"the cell same_name cannot be pickled.*top of"):
        pickle.dumps(made)
    x = torch.randn(4, 2, 3)
    torch.testing.assert_close(copy.deepcopy(made)(x), made(x))
    ready = layer("gru")
    assert torch.equal(pickle.loads(pickle.dumps(ready))(sequence(4, 2, 3).zero_())[0],
                       ready(sequence(4, 2, 3).zero_())[0])  # fmt: skip


def test_threads_make_and_run_layers_at_once() -> None:
    wrong: list[Any] = []

    def work(number: int) -> None:
        try:
            for i in range(8):
                factor = (number * 8 + i + 1) / 64
                made = rnn.RNN(scaled(factor), 3, 4, impl="reference", dtype=torch.float64)
                x = torch.ones(2, 1, 3, dtype=torch.float64)
                program = trace(made.runs[0][0]).program
                assert f"{factor:g}" in str(program), factor
                made(x)[0].sum().backward()
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def replace(made: rnn.RNN) -> None:
    made.weight_i_l0 = nn.Parameter(torch.randn(4, 7))


def freeze(made: rnn.RNN) -> None:
    made.requires_grad_(False)
    assert isinstance(made.bias_f_l0, nn.Parameter)
    made.bias_f_l0.requires_grad_(True)


def write(made: rnn.RNN) -> None:
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(2)


def lay_out_anew(made: rnn.RNN) -> None:
    for parameter in made.parameters():
        if parameter.dim() == 2:
            parameter.data = parameter.data.t().contiguous().t()


def negate(made: rnn.RNN) -> None:
    z = torch.randn(4, 7, dtype=torch.complex64)
    del made.weight_f_l0
    made.weight_f_l0 = z.conj().imag  # its memory holds the other sign


CHANGES: dict[str, Callable[[rnn.RNN], Any]] = {
    "replaced": replace,
    "written": write,
    "frozen": freeze,
    "negated": negate,
    "transposed in memory": lay_out_anew,
    "pruned": lambda made: prune.random_unstructured(made, "weight_g_l0", 0.5),
    "parametrized": lambda made: parametrizations.orthogonal(made, "weight_o_l0"),
    "cast": lambda made: made.double(),
    "in training mode no more": lambda made: made.eval(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_call_reads_a_layer_as_it_is_now(change: str) -> None:
    torch.manual_seed(0)
    made = rnn.RNN(rnn.peephole_lstm, 3, 4, impl="cpp")

    def run() -> list[torch.Tensor]:
        """Outputs, final states and gradients, and the outputs without a gradient."""
        x = torch.linspace(-1, 1, 30).view(5, 2, 3).to(next(made.parameters()).dtype)
        x.requires_grad_()
        output, state = made(x)
        leaves = [x, *(p for p in made.parameters() if p.requires_grad)]
        loss = output.sin().sum() + sum(s.cos().sum() for s in state)
        grads = torch.autograd.grad(loss, leaves)
        with torch.no_grad():
            return [output, *state, *grads, made(x)[0], *made(x.detach())[1]]

    before = run()
    CHANGES[change](made)
    found = run()
    made.impl = "reference"
    torch.testing.assert_close(found, run())
    if change in ("replaced", "written", "negated", "pruned", "parametrized"):
        assert not torch.allclose(found[0], before[0])


def test_a_call_reads_the_settings_of_now() -> None:
    made = rnn.LSTM(3, 4, impl="cpp")
    x, threads = torch.randn(5, 2, 3), torch.get_num_threads()
    output = made(x)[0]
    assert output.requires_grad
    with torch.no_grad():
        assert not made(x)[0].requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        assert made(x)[0].dtype == torch.bfloat16
    try:
        torch.set_num_threads(1)
        alone = made(x)[0]
        torch.set_num_threads(2)
        assert torch.equal(made(x)[0], alone)
    finally:
        torch.set_num_threads(threads)
    h = torch.randn(1, 2, 4)
    made.impl = "reference"
    expected = made(x, (h, h.clone()))[0]
    made.impl = "cpp"
    torch.testing.assert_close(made(x, (h, h))[0], expected)  # one tensor twice
    assert torch.equal(made(x)[0], output)


def test_a_bound_cell_of_another_version_is_bound_again() -> None:
    """Whatever was pickled beside its cell, sizes and options."""
    made = bound("projected_lstm")
    state = {n: vars(made)[n] for n in ("cell", "input_size", "hidden_size", "options")}
    again = object.__new__(type(made))
    again.__setstate__(state | {"state_sizes": {"h": 99}})
    assert again.state_shapes == made.state_shapes == {"h": (3,), "c": (4,)}
    assert again.state_sizes == {"h": 3, "c": 4}
    assert again.row_size == 3


def test_layers_of_matrices_are_pickled_and_exported(tmp_path: Path) -> None:
    layer = rnn.RNN(cells.retnet, 5, 4, num_layers=2, heads=2, keys=3, values=4)
    x = torch.randn(6, 2, 5)
    exact = layer(x)
    torch.testing.assert_close(pickle.loads(pickle.dumps(layer))(x), exact)
    program = torch.export.export(layer, (x,))
    torch.export.save(program, path := tmp_path / "layer.pt2")
    torch.testing.assert_close(torch.export.load(path).module()(x), exact)
