"""Values of several axes: what the language accepts, and what cells of them compute."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hoconv import jit
from hoconv import recurrent as rnn
from hoconv.recurrent.codegen.cpp import emit_cpp
from hoconv.recurrent.codegen.cuda import emit_cuda
from hoconv.recurrent.frontend.cell import Cell
from hoconv.recurrent.ladder import SCHEDULES
from hoconv.recurrent.schedule import plan
from tests.hoconv.recurrent.shim import shim_loops
from tests.hoconv.recurrent.support import agree, cell_case, gradients
from tests.hoconv.recurrent.test_compiler import check_loops

needs_compiler = pytest.mark.skipif(
    jit.obstacle("cpu") is not None, reason=str(jit.obstacle("cpu"))
)
IMPLS = ["reference", pytest.param("cpp", marks=needs_compiler)]


@rnn.cell(state={"S": ("H", "K", "V")})
def gated_delta(x: Any, S: Any, *, H: int, K: int, V: int) -> Any:
    """Yang, Kautz and Hatamizadeh, Gated Delta Networks, 2024."""
    q, k = [rnn.normalize(rnn.linear(n, x, size=(H, K))) for n in "qk"]
    v, beta = rnn.linear("v", x, size=(H, V)), rnn.sigmoid(rnn.linear("beta", x, size=(H, 1)))
    S = rnn.sigmoid(rnn.linear("a", x, size=(H, 1, 1))) * S
    S = S + rnn.einsum("hk,hv->hkv", k, beta * (v - rnn.einsum("hkv,hk->hv", S, k)))
    return rnn.einsum("hkv,hk->hv", S, q), dict(S=S)


@rnn.cell(state={"S": ("input_size", "N")})
def mamba(x: Any, S: Any, *, input_size: int, N: int) -> Any:
    """Gu and Dao, Mamba, 2023."""
    dt = rnn.softplus(rnn.linear("dt", x, size=input_size))
    b, c = rnn.linear("B", x, size=N), rnn.linear("C", x, size=N)
    A = -rnn.exp(rnn.parameter("A_log", (input_size, N)))
    S = rnn.exp(dt[..., None] * A) * S + rnn.einsum("d,n->dn", dt * x, b)
    return rnn.einsum("dn,n->d", S, c) + rnn.parameter("D", x, init=1.0) * x, dict(S=S)


@rnn.cell(state={"m": ("H", "K"), "h": "hidden_size"})
def memory(x: Any, m: Any, h: Any, *, H: int, K: int) -> Any:
    """Every way to index, reduce, repeat, permute and join; also noise in training."""
    p = rnn.softmax(m * rnn.parameter("g", (H, 1)), axis=1)
    w = rnn.softmax(rnn.linear("s", x, h, size=(H, K)))
    r = rnn.reshape(rnn.tanh(rnn.linear("r", h, size=K * H)), K, H)
    m = rnn.cat(m[:, 1:] * 0.5, rnn.einsum("kh->hk", r)[:, :1], axis=1) + p * w
    t = rnn.max(m, axis=1)[:, 0] + rnn.mean(m, axis=2)[:, 0] * rnn.sum(w * m, axis=1)[:, -1]
    u = rnn.where(m > rnn.mean(m, axis=1), m, rnn.max(m))
    first, *_ = rnn.chunk(u, H, axis=1)
    h = rnn.tanh(rnn.linear("h", h, u, t, m[..., 1:], first[:, 0, :, None]))
    return rnn.dropout(u, 0.2), dict(h=h, m=m)


CELLS: dict[str, tuple[Cell, dict[str, int]]] = {
    "gated delta": (gated_delta, {"H": 2, "K": 3, "V": 4}),
    "gated delta of one head and value": (gated_delta, {"H": 1, "K": 3, "V": 1}),
    "gated delta of one key": (gated_delta, {"H": 3, "K": 1, "V": 2}),
    "mamba": (mamba, {"N": 3}),
    "mamba of one state": (mamba, {"N": 1}),
    "memory": (memory, {"H": 3, "K": 2}),
    "wide memory": (memory, {"H": 2, "K": 20}),
}


# Each is compiled by itself: a few seconds.
FEW = ["gated delta", "memory"]
MANY = [pytest.param(n, marks=[] if n in FEW else pytest.mark.slow) for n in CELLS]


def make(name: str, **arguments: Any) -> rnn.RNN:
    cell, options = CELLS[name]
    layer = rnn.RNN(cell, 5, 4, dtype=torch.float64, **options, **arguments)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return layer


def define_gated_delta(layer: rnn.RNN, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """By matrices, head by head: S <- a (I - beta k kᵀ) S + beta k vᵀ."""
    H, K, V = (layer.options[n] for n in "HKV")
    weights = dict(layer.named_parameters())

    def generate(name: str, step: Tensor) -> Tensor:
        row = F.linear(step, weights[f"weight_{name}_l0"], weights[f"bias_{name}_l0"])
        return row.view(-1, H, row.shape[1] // H)

    outputs = []
    states = [list(of.unbind(0)) for of in state[0].unbind(1)]  # by head and sequence: K x V
    for step in x:
        q, k = F.normalize(generate("q", step), dim=2), F.normalize(generate("k", step), dim=2)
        v, a = generate("v", step), generate("a", step).sigmoid()
        beta = generate("beta", step).sigmoid()
        rows = torch.zeros(x.shape[1], H, V, dtype=x.dtype)
        read = []
        for b, h in itertools.product(range(x.shape[1]), range(H)):
            shrink = torch.eye(K, dtype=x.dtype) - beta[b, h] * torch.outer(k[b, h], k[b, h])
            S = shrink @ (a[b, h] * states[h][b]) + beta[b, h] * torch.outer(k[b, h], v[b, h])
            states[h][b] = S
            read.append(S.mT @ q[b, h])
        outputs.append(torch.stack(read).view_as(rows).flatten(1))
    final = torch.stack([torch.stack(of) for of in states], 1)
    return torch.stack(outputs), final[None]


def define_mamba(layer: rnn.RNN, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Channel by channel of the input, whose state is a vector of N."""
    w = dict(layer.named_parameters())
    rows = list(state[0].unbind(1))
    outputs = []
    for step in x:
        dt = F.softplus(F.linear(step, w["weight_dt_l0"], w["bias_dt_l0"]))
        b = F.linear(step, w["weight_B_l0"], w["bias_B_l0"])
        c = F.linear(step, w["weight_C_l0"], w["bias_C_l0"])
        out = []
        for d in range(x.shape[2]):
            decay = torch.exp(-dt[:, d, None] * w["A_log_l0"][d].exp())
            rows[d] = decay * rows[d] + dt[:, d, None] * step[:, d, None] * b
            out.append((rows[d] * c).sum(1) + w["D_l0"][d] * step[:, d])
        outputs.append(torch.stack(out, 1))
    return torch.stack(outputs), torch.stack(rows, 1)[None]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", [name for name in CELLS if "memory" not in name])
def test_cells_are_what_papers_define(name: str, impl: str) -> None:
    definition = define_mamba if "mamba" in name else define_gated_delta
    layer = make(name, impl=impl)
    x = torch.randn(6, 3, 5, dtype=torch.float64)
    shape = next(iter(layer.runs[0][0].state_shapes.values()))
    state = torch.randn(1, 3, *shape, dtype=torch.float64, requires_grad=True)

    def defined(x: Tensor) -> tuple[Tensor, Tensor]:
        return definition(layer, x, state)

    def found(of: Any) -> list[Tensor]:
        x_ = x.clone().requires_grad_()
        output, final = of(x_)
        loss = output.sin().sum() + 2 * final.cos().sum()
        return [output, final, *torch.autograd.grad(loss, [x_, state, *layer.parameters()])]

    ours = found(lambda x: layer(x, state))
    assert ours[1].shape == state.shape
    for mine, exact in zip(ours, found(defined), strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", CELLS)
def test_programs_of_every_schedule_are_exact(name: str, schedule: str) -> None:
    cell, options = CELLS[name]
    for given in ({"masked": True}, {"reverse": True}, {"resets": True}):
        case = cell_case(cell.bind(5, 4, options), **given)
        case.check_plan(plan(case.cell, torch.float64, schedule, **case.options))


@needs_compiler
@pytest.mark.parametrize("option", ["masked", "reverse", "resets"])
def test_kernels_for_a_gpu_are_exact(option: str) -> None:
    cases = [cell_case(cell.bind(5, 4, o), **{option: True}) for cell, o in CELLS.values()]
    check_loops(cases, "auto", shim_loops)


@needs_compiler
@pytest.mark.parametrize("recompute", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MANY)
def test_layers_in_cpp_are_exact(name: str, recompute: bool) -> None:
    agree(make(name, recompute=recompute, bidirectional="mamba" not in name))


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FEW)
def test_layers_in_cpp_keep_states_in_float32(name: str, dtype: torch.dtype) -> None:
    agree(make(name).to(dtype), tolerance=1e-4 if dtype == torch.float32 else 0.08)


@needs_compiler
@pytest.mark.parametrize("name", ["gated delta", "mamba", "memory"])
def test_gradients_of_gradients(name: str) -> None:
    layer = make(name, impl="cpp").eval()
    x = torch.randn(2, 2, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: layer(x)[0], x)


@pytest.mark.parametrize("impl", IMPLS)
def test_what_one_operand_alone_has_is_summed_before_the_product(impl: str) -> None:
    """As PyTorch does: the sum of an infinite and a finite number is infinite."""

    @rnn.cell(state={"h": "input_size"})
    def alone(x: Any, h: Any) -> Any:
        return rnn.einsum("i,j->i", x, x[:, :2]), dict(h=h)

    x = torch.tensor([[[2.0, -1.0, torch.inf, 0.5]]])
    found, _ = rnn.RNN(alone, 4, 4, impl=impl)(x)
    torch.testing.assert_close(found, torch.einsum("tbi,tbj->tbi", x, x[..., :2]))
    assert found[0, 0, 2].isinf()


@pytest.mark.parametrize("impl", IMPLS)
def test_states_have_their_axes(impl: str) -> None:
    layer = make("gated delta", impl=impl, num_layers=2)
    x = torch.randn(4, 3, 5, dtype=torch.float64)
    whole, last = layer(x)
    first, state = layer(x[:2])
    second, final = layer(x[2:], state)
    assert state.shape == (2, 3, 2, 3, 4)
    torch.testing.assert_close(torch.cat((first, second)), whole)
    torch.testing.assert_close(final, last)
    assert whole.shape == (4, 3, 8)  # outputs are rows
    single, state = layer(x[:, 0])
    assert state.shape == (2, 2, 3, 4)
    torch.testing.assert_close(single, whole[:, 0])
    with pytest.raises(ValueError, match=r"state S: expected shape \(2, 3, 2, 3, 4\), got"):
        layer(x, torch.zeros(2, 3, 24, dtype=torch.float64))


def test_parameters_have_their_axes() -> None:
    layer, x = make("mamba"), torch.ones(1, 1, 5, dtype=torch.float64)
    logs = layer.get_parameter("A_log_l0")
    assert logs.shape == (5, 3)
    found = torch.func.functional_call(layer, {"A_log_l0": torch.zeros_like(logs)}, (x,))[0]
    with torch.no_grad():
        logs.zero_()
    torch.testing.assert_close(found, layer(x)[0])


@needs_compiler
def test_code_does_not_grow_with_sizes() -> None:
    def lines(K: int) -> list[int]:
        cell = gated_delta.bind(8, 8, {"H": 2, "K": K, "V": K})
        programs = (getattr(plan(cell, torch.float32), n) for n in ("forward", "backward"))
        texts = [text for p in programs for text in (emit_cpp(p, "f").text, emit_cuda(p).text)]
        return [len(text.splitlines()) for text in texts]

    assert lines(32) == lines(64)


@needs_compiler
def test_outer_products_stay_in_the_loop() -> None:
    """Before it they would be written for all steps."""
    cell = mamba.bind(8, 8, {"N": 16})
    program = plan(cell, torch.float32).forward
    made = [v.type.size for v in program.made_before if v.type.rate == "sequence"]
    assert max(made) <= 2 * 8 + 2 * 16


def test_a_batch_of_none_and_of_one() -> None:
    for B in (0, 1):
        found = [
            gradients(make_equal(impl), torch.randn(3, B, 5, dtype=torch.float64))[0].shape
            for impl in ("reference", "cpp")
            if impl == "reference" or jit.obstacle("cpu") is None
        ]
        assert set(found) == {(3, B, 8)}


def make_equal(impl: str) -> rnn.RNN:
    torch.manual_seed(2)
    return make("gated delta", impl=impl)


# What the language answers to mistakes: state S of (2, 3), x of 3 features.

MISTAKES = {
    "S * x": r"mul: \(B, 2, 3\) and \(B, 3\): expected as many axes of each; write value\[",
    "S + S[:, :1, :2]": r"add: \(B, 2, 3\) and \(B, 1, 2\): expected operands of one size along",
    "rnn.einsum('hk,hk', S, S)": "einsum\\('hk,hk'\\): expected letters alone",
    "rnn.einsum('hk,hk->', S, S)": "expected letters alone",
    "rnn.einsum('bhk->bh', S)": r"'bhk' has 3 axes, its operand \(B, 2, 3\)",
    "rnn.einsum('hk,h->k', S, x)": "'h' has the sizes 2 and 3",
    "rnn.einsum('hk->hv', S)": "no operand has the axis 'v' of the result",
    "rnn.einsum('hh->h', S)": "'hh' has a letter twice",
    "rnn.einsum('hk,k->h', S)": "expected one or two operands, as many as it has, got 1",
    "rnn.einsum('hk,uv->hkuv', S, S)": "'hkuv': expected at most 3 axes",
    "rnn.sum(S, axis=0)": "axis: expected 1 to 2, or -2 to -1, got 0; 0 is the batch",
    "rnn.softmax(S, axis=3)": "max: axis: expected 1 to 2, or -2 to -1, got 3",
    "rnn.reshape(S, 4)": r"reshape: \(B, 2, 3\) does not fit \(B, 4\)",
    "rnn.cat(S, x)": r"cat: \(B, 2, 3\) and \(B, 3\): expected the same axes but one",
    "S[0]": r"indexing \(B, 2, 3\): expected value\[:, ...\]",
    "S[:, 0, 0]": "indexing: an int removes the last axis",
    "S[:, 2]": "indexing an axis of size 2: expected start:stop of ints, an int, or None",
    "S[..., ::2]": "indexing an axis of size 3: expected start:stop",
    "S[:, None, None]": "indexing: expected 1 to 3 axes beside the batch, got 4",
    "S[:, :, :, 0]": r"indexing \(B, 2, 3\): expected",
    "S.shape[0] * S": "the batch size is not known when a cell is traced",
    "S * (S.shape[0] + 1)": "the batch size is not known when a cell is traced",
    "rnn.linear('w', x, size=(2, 0))": r"size: expected an int of at least 1, or several in a",
    "rnn.linear('w', x, size=(1, 1, 1, 6))": "expected 1 to 3 axes",
    "rnn.linear('w', x, size=(2, 3), bias=1.0)": "bias: expected True or False, got 1.0",
    "rnn.parameter('p', (2, -3)) * S": "like: expected an int of at least 1",
    "rnn.parameter('p', S, init=rnn.sum(S)) * S": "init: expected a number",
}


@pytest.mark.parametrize("expression", MISTAKES)
def test_mistakes_are_answered(expression: str) -> None:
    scope: dict[str, Any] = {"rnn": rnn}
    text = f"def cell(x, S):\n    S = {expression}\n    return x, dict(S=S)\n"
    exec(compile(text, "cell.py", "exec"), scope)
    cell = rnn.cell(state={"S": (2, 3)})(scope["cell"])
    with pytest.raises(rnn.CellError, match=MISTAKES[expression]) as error:
        rnn.RNN(cell, 3, 4)
    assert "cell.py:2: in the cell cell" in str(error.value)


def test_a_state_of_another_shape_is_refused() -> None:
    @rnn.cell(state={"S": (2, 3)})
    def turned(x: Any, S: Any) -> Any:
        return x, dict(S=rnn.einsum("hk->kh", S))

    with pytest.raises(rnn.CellError, match=r"'S' has size \(2, 3\) and becomes a value of size"):
        rnn.RNN(turned, 3, 4)
    with pytest.raises(rnn.CellError, match="state 'S': expected 1 to 3 sizes"):
        rnn.cell(state={"S": (1, 1, 1, 1)})(lambda x, S: (x, dict(S=S)))
