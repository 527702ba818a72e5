"""Cells of several inputs, and of outputs that have names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from hoconv import jit
from hoconv import recurrent as rnn
from hoconv.recurrent import cells
from tests.hoconv.recurrent.shim import shim_loops
from tests.hoconv.recurrent.support import cell_case
from tests.hoconv.recurrent.test_compiler import check_loops

needs_compiler = pytest.mark.skipif(
    jit.obstacle("cpu") is not None, reason=str(jit.obstacle("cpu"))
)
IMPLS = ["reference", pytest.param("cpp", marks=needs_compiler)]


@rnn.cell(inputs={"pair": ("heads", 2), "gap": 1}, state=("h",))
def several(x: Any, pair: Any, gap: Any, h: Any, *, heads: int) -> Any:
    """Its outputs are the state, and what each head answered."""
    answer = rnn.einsum("hp,hn->pn", pair, rnn.linear("a", h, x, size=(heads, 3)))
    h = rnn.exp(-gap * gap) * h + rnn.tanh(rnn.linear("h", answer, x))
    return dict(h=h, answer=answer), dict(h=h)


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def make(impl: str = "reference", **arguments: Any) -> rnn.RNN:
    torch.manual_seed(1)
    layer = rnn.RNN(several, 3, 4, heads=2, impl=impl, dtype=torch.float64, **arguments)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return layer


def define(layer: rnn.RNN, x: Tensor, pair: Tensor, gap: Tensor, h: Tensor) -> tuple[Tensor, ...]:
    w = dict(layer.named_parameters())
    outputs, answers = [], []
    for t in range(x.shape[0]):
        a = torch.cat((h, x[t]), 1) @ w["weight_a_l0"].mT + w["bias_a_l0"]
        answer = pair[t].mT @ a.view(-1, 2, 3)
        row = torch.cat((answer.flatten(1), x[t]), 1)
        h = torch.exp(-(gap[t] ** 2)) * h + torch.tanh(row @ w["weight_h_l0"].mT + w["bias_h_l0"])
        outputs.append(h)
        answers.append(answer.flatten(1))
    return torch.stack(outputs), torch.stack(answers), h


@pytest.mark.parametrize("impl", IMPLS)
def test_outputs_and_gradients_of_all_inputs_are_exact(impl: str) -> None:
    layer = make(impl)
    leaves = [draw(5, 3, 3), draw(5, 3, 2, 2), draw(5, 3, 1), draw(3, 4), *layer.parameters()]
    x, pair, gap, h = leaves[:4]
    outputs, last = layer(x, h[None], pair=pair, gap=gap)
    assert list(outputs) == ["h", "answer"]
    ours, theirs = (*outputs.values(), last[0]), define(layer, x, pair, gap, h)
    for mine, exact in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, exact)
    gradients = [
        torch.autograd.grad(sum((i + t.sin()).sum() for i, t in enumerate(of)), leaves)  # pyright: ignore
        for of in (ours, theirs)
    ]
    for mine, exact in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, exact)


@pytest.mark.parametrize("impl", IMPLS)
def test_layouts_lengths_and_one_sequence(impl: str) -> None:
    layer = make(impl)
    x, pair, gap = draw(5, 3, 3), draw(5, 3, 2, 2), draw(5, 3, 1)
    whole, last = layer(x, pair=pair, gap=gap)
    layer.batch_first = True
    turned, _ = layer(*(t.transpose(0, 1) for t in (x,)), pair=pair.transpose(0, 1),
                      gap=gap.transpose(0, 1))  # fmt: skip
    torch.testing.assert_close(turned["answer"].transpose(0, 1), whole["answer"])
    layer.batch_first = False
    single, state = layer(x[:, 1], pair=pair[:, 1], gap=gap[:, 1])
    torch.testing.assert_close(single["h"], whole["h"][:, 1])
    torch.testing.assert_close(state, last[:, 1])
    with torch.no_grad():
        gap[3:, 0] = float("nan")
    masked, state = layer(x, pair=pair, gap=gap, lengths=[3, 5, 5])
    torch.testing.assert_close(masked["h"][:3, 0], whole["h"][:3, 0])
    assert masked["h"][3:, 0].abs().sum() == 0
    (found,) = torch.autograd.grad(state.sum(), gap)
    assert found.isfinite().all()
    assert found[3:, 0].abs().sum() == 0


@pytest.mark.parametrize("bidirectional", [False, True])
def test_layers_read_the_output_that_is_named(bidirectional: bool) -> None:
    layer = make(num_layers=2, output="answer", bidirectional=bidirectional)
    first = make(bidirectional=bidirectional)
    second = rnn.RNN(several, 6 * (1 + bidirectional), 4, heads=2, impl="reference",
                     bidirectional=bidirectional, dtype=torch.float64)  # fmt: skip
    own = layer.state_dict()
    first.load_state_dict({n: t for n, t in own.items() if "_l0" in n})
    second.load_state_dict({n.replace("_l1", "_l0"): t for n, t in own.items() if "_l1" in n})
    x, pair, gap = draw(5, 3, 3), draw(5, 3, 2, 2), draw(5, 3, 1)
    found, _ = layer(x, pair=pair, gap=gap)
    between, _ = first(x, pair=pair, gap=gap)
    expected, _ = second(between["answer"], pair=pair, gap=gap)
    for name in ("h", "answer"):
        torch.testing.assert_close(found[name], expected[name])
    assert found["h"].shape == (5, 3, 4 * (1 + bidirectional))


@needs_compiler
def test_kernels_for_a_gpu_are_exact() -> None:
    bound = [several.bind(3, 4, {"heads": 2}), cells.gru_d.bind(3, 4, {}),
             cells.attention.bind(3, 4, {"slots": 5, "width": 2})]  # fmt: skip
    check_loops([cell_case(each, masked=True) for each in bound], "auto", shim_loops)


@pytest.mark.parametrize("impl", IMPLS)
def test_missing_values_decay(impl: str) -> None:
    """GRU-D by its formula, written apart."""
    layer = rnn.RNN(cells.gru_d, 3, 4, impl=impl, dtype=torch.float64)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    w = {name.removesuffix("_l0"): p for name, p in layer.named_parameters()}
    x, gap = draw(6, 2, 3), torch.rand(6, 2, 3, dtype=torch.float64)
    mask = (torch.rand(6, 2, 3) < 0.5).double()
    output, _ = layer(x, mask=mask, gap=gap)
    h, last, rows = torch.zeros(2, 4).double(), torch.zeros(2, 3).double(), []

    def apply(name: str, *parts: Tensor) -> Tensor:
        return torch.cat(parts, 1) @ w[f"weight_{name}"].mT + w[f"bias_{name}"]

    for t in range(6):
        present = mask[t].bool()
        fade = torch.exp(-(w["decay_x"] * gap[t] + w["decay_x_bias"]).clamp(min=0))
        last = torch.where(present, x[t], last)
        seen = torch.where(present, x[t], fade * last + (1 - fade) * w["mean"])
        h = torch.exp(-apply("decay_h", gap[t]).clamp(min=0)) * h
        r, z = (apply(name, seen, h, mask[t]).sigmoid() for name in "rz")
        h = (1 - z) * h + z * apply("h", seen, r * h, mask[t]).tanh()
        rows.append(h)
    expected = torch.stack(rows)
    torch.testing.assert_close(output, expected, rtol=1e-11, atol=1e-11)
    leaves = [x, *layer.parameters()]
    found = [torch.autograd.grad(t.sin().sum(), leaves) for t in (output, expected)]
    for mine, exact in zip(*found, strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-11, atol=1e-11)


def attend(layer: rnn.RNN, x: Tensor, memory: Tensor, h: Tensor) -> Tensor:
    """Each step of `attention`, written out; the states after each."""
    w, outputs = dict(layer.named_parameters()), []

    def apply(name: str, *parts: Tensor) -> Tensor:
        return torch.cat(parts, 1) @ w[f"weight_{name}_l0"].mT + w[f"bias_{name}_l0"]

    for t in range(x.shape[0]):
        scores = torch.stack([(slot * apply("query", h)).sum(1) for slot in memory.unbind(1)], 1)
        share = scores.exp() / scores.exp().sum(1, keepdim=True)
        read = (memory * share[..., None]).sum(1)
        r, z = (torch.sigmoid(apply(gate, x[t], read, h)) for gate in "rz")
        h = (1 - z) * torch.tanh(apply("n", x[t], read, r * h)) + z * h
        outputs.append(h)
    return torch.stack(outputs)


def make_attention(impl: str, **arguments: Any) -> rnn.RNN:
    torch.manual_seed(2)
    layer = rnn.RNN(cells.attention, 3, 4, slots=5, width=2, impl=impl, dtype=torch.float64,
                    **arguments)  # fmt: skip
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return layer


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("shared", [False, True])
def test_a_constant_is_the_same_at_every_step(impl: str, shared: bool) -> None:
    layer = make_attention(impl)
    x, memory, h = draw(6, 3, 3), draw(1 if shared else 3, 5, 2), draw(3, 4)
    outputs, _ = layer(x, h[None], memory=memory)
    exact = attend(layer, x, memory.expand(3, -1, -1), h)
    torch.testing.assert_close(outputs, exact, rtol=1e-11, atol=1e-11)
    leaves = [x, memory, h, *layer.parameters()]
    ours, theirs = (torch.autograd.grad(of.sin().sum(), leaves) for of in (outputs, exact))
    for mine, defined in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, defined, rtol=1e-11, atol=1e-11)


def test_constants_in_steps_layouts_layers_and_one_sequence() -> None:
    layer = make_attention("reference")
    x, memory = draw(4, 3, 3), draw(3, 5, 2)
    whole, last = layer(x, memory=memory)
    found, state = [], layer.initial_state(3)
    for step in x:
        out, state = layer.step(step, state, memory=memory)
        found.append(out)
    torch.testing.assert_close(torch.stack(found), whole)
    torch.testing.assert_close(state, last)
    single, _ = layer(x[:, 1], memory=memory[1])
    torch.testing.assert_close(single, whole[:, 1])
    layer.batch_first = True
    torch.testing.assert_close(layer(x.transpose(0, 1), memory=memory)[0].transpose(0, 1), whole)
    shorter, _ = layer(x.transpose(0, 1), memory=memory, lengths=[4, 2, 1])
    torch.testing.assert_close(shorter[1, :2], whole[:2, 1])

    deep = make_attention("reference", num_layers=2, bidirectional=True)
    outputs, _ = deep(x, memory=memory)
    assert outputs.shape == (4, 3, 8)
    reads = torch.autograd.grad(outputs.sum(), memory)[0]
    assert (reads != 0).all()


@needs_compiler
def test_constants_through_layers_resets_and_second_derivatives() -> None:
    x, memory = draw(4, 3, 3), draw(3, 5, 2)
    reset = torch.tensor([[0, 0, 1], [1, 0, 0], [0, 1, 1], [0, 0, 0]], dtype=torch.bool)
    found = []
    for impl in ("reference", "cpp"):
        layer = make_attention(impl, num_layers=2, bidirectional=True)
        output = layer(x, memory=memory, reset=reset, lengths=[4, 2, 3])[0]
        first = torch.autograd.grad(output.sin().sum(), (x, memory), create_graph=True)
        second = torch.autograd.grad(first[0].square().sum() + first[1].square().sum(), (x, memory))
        found.append([output, *first, *second])
    for ours, exact in zip(*found, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-11, atol=1e-11)


def test_mistakes_are_answered() -> None:
    layer = make()
    x, pair, gap = draw(5, 3, 3), draw(5, 3, 2, 2), draw(5, 3, 1)
    for error, message, given in (
        (TypeError, "gap: the cell several needs this input", {"pair": pair}),
        (TypeError, "mask: not an input of the cell several; beside x it has pair, gap",
         {"pair": pair, "gap": gap, "mask": gap}),
        (ValueError, r"gap: expected a tensor of shape \(5, 3, 1\), laid out as x is, got \(5, 3\)",
         {"pair": pair, "gap": gap[..., 0]}),
        (ValueError, "gap: expected a tensor of shape .*, got float", {"pair": pair, "gap": 1.0}),
        (TypeError, "gap: expected torch.float64 on cpu, as x is",
         {"pair": pair, "gap": gap.float()}),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            layer(x, **given)
    packed = pack_sequence([draw(3, 3), draw(2, 3)])
    with pytest.raises(ValueError, match="takes no PackedSequence; pad it"):
        layer(packed, pair=pair, gap=gap)
    with pytest.raises(ValueError, match="output: expected the one that the next layer reads, of"):
        make(num_layers=2)
    with pytest.raises(ValueError, match="output: expected one of h, answer, got 'c'"):
        make(num_layers=2, output="c")
    with pytest.raises(ValueError, match="output: the cell names no outputs"):
        rnn.RNN(rnn.gru, 3, 4, output="h")
    with pytest.raises(rnn.CellError, match=r"expected the arguments \(x, m, h\), the inputs, the"):
        rnn.cell(inputs={"m": 1}, state=("h",))(lambda x, h, m: None)
    with pytest.raises(rnn.CellError, match="constants: expected names and sizes, as in"):
        rnn.cell(constants=("m",), state=("h",))(lambda x, m, h: (h, dict(h=h)))  # pyright: ignore
    with pytest.raises(rnn.CellError, match="'m' is the name of an input and of a constant"):
        rnn.cell(inputs={"m": 1}, constants={"m": 1}, state=("h",))(lambda x, m, h: None)
    with pytest.raises(ValueError, match=r"gap: expected a tensor of shape .*, got float"):
        layer.step(x[0], pair=pair[0], gap=1.0)  # pyright: ignore
    attentive = make_attention("reference")
    for memory in (draw(4, 3, 5, 2), draw(2, 5, 2)):
        with pytest.raises(
            ValueError, match=r"memory: expected a tensor of shape \(3, 5, 2\), the "
        ):
            attentive(draw(4, 3, 3), memory=memory)
    with pytest.raises(rnn.CellError, match="input 'lengths': is an argument of a layer's call"):
        rnn.cell(inputs={"lengths": 1}, state=("h",))(lambda x, lengths, h: None)
    with pytest.raises(rnn.CellError, match="input 'm': its size 'M' is no option of the cell"):
        rnn.cell(inputs={"m": "M"}, state=("h",))(lambda x, m, h: None)
