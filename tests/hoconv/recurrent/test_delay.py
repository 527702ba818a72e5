"""States that are the inputs of steps before: sequences, made before the loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence

from hoconv import jit
from hoconv import recurrent as rnn
from hoconv.jit import nvrtc
from hoconv.jit.generated import compile_cuda
from hoconv.recurrent.codegen.cuda import emit_cuda
from hoconv.recurrent.codegen.matrix.kernel import MatrixSource, emit_matrix
from hoconv.recurrent.ir.kinds import DELAY, PRODUCTS
from hoconv.recurrent.ir.program import Program, flat
from hoconv.recurrent.ir.verify import verify
from hoconv.recurrent.ladder import SCHEDULES
from hoconv.recurrent.runtime.cpp import compile_loops
from hoconv.recurrent.schedule import plan
from hoconv.tools.testing.cells import CellCase
from tests.hoconv.recurrent.matrix_shim import shim_matrices
from tests.hoconv.recurrent.shim import shim_loops
from tests.hoconv.recurrent.support import gradients, sequence
from tests.hoconv.recurrent.test_compiler import check_loops

needs_compiler = pytest.mark.skipif(
    jit.obstacle("cpu") is not None, reason=str(jit.obstacle("cpu"))
)
needs_nvrtc = pytest.mark.skipif(nvrtc.obstacle() is not None, reason=str(nvrtc.obstacle()))
IMPLS = ["reference", pytest.param("cpp", marks=needs_compiler)]
H, K, V = 2, 5, 4


@rnn.cell(state={"h": "hidden_size", "last": "input_size"})
def shifted(x: Any, h: Any, last: Any, *, mix: float = 0.25) -> Any:
    mixed = mix * x + (1 - mix) * last
    h = rnn.tanh(rnn.linear("h", mixed, h))
    return h, dict(h=h, last=x)


@rnn.cell(state={"S": (H, K, V), "last": "input_size"})
def linear_attention(x: Any, S: Any, last: Any) -> Any:
    """RWKV's token shift, of each of three maps by shares of its own."""

    def mixed(name: str, size: tuple[int, int]) -> Any:
        share = rnn.sigmoid(rnn.parameter(f"share_{name}", x))
        return rnn.linear(name, x + share * (last - x), size=size, bias=False)

    r, k, v = mixed("r", (H, K)), mixed("k", (H, K)), mixed("v", (H, V))
    decay = rnn.sigmoid(rnn.parameter("decay", k))[..., None]
    S = decay * S + rnn.einsum("hk,hv->hkv", k, v)
    return rnn.einsum("hkv,hk->hv", S, r), dict(S=S, last=x)


@rnn.cell(state={"older": 2, "h": "hidden_size", "last": 2})
def of_a_map(x: Any, older: Any, h: Any, last: Any) -> Any:
    """A chain of two, of a function of x; a state that no step computes comes first."""
    new = rnn.tanh(rnn.linear("new", x, size=2))
    h = rnn.tanh(rnn.linear("h", new + last * older, h))
    return h, dict(older=last, h=h, last=new)


@rnn.cell(state={"last": "input_size", "older": "input_size"})
def taps(x: Any, last: Any, older: Any) -> Any:
    """No state is left in the loop."""
    y = rnn.linear("x", x) + rnn.linear("last", last) * rnn.tanh(rnn.linear("older", older))
    return y, dict(last=x, older=last)


@rnn.cell(state={"h": "hidden_size", "last": "input_size"})
def on_change(x: Any, h: Any, last: Any) -> Any:
    """The state before it has no gradient."""
    changed = rnn.where(x > last, 1.0, 0.0)
    h = rnn.tanh(rnn.linear("h", changed * rnn.stop_gradient(last), h))
    return h, dict(h=h, last=x)


CELLS = {
    cell.name: cell.bind(3, 4, {})
    for cell in (shifted, linear_attention, of_a_map, taps, on_change)
}
EVERYTHING: dict[str, Any] = {"masked": True, "resets": True, "reverse": True}
OPTIONS: list[dict[str, Any]] = [
    {}, {"masked": True}, {"resets": True}, {"reverse": True}, {"masked": True, "reverse": True},
    EVERYTHING, {**EVERYTHING, "recompute": "all"}, {"masked": True, "recompute": "functions"},
]  # fmt: skip


def kinds(program: Program) -> tuple[list[str], list[str]]:
    """Returns the products and delays before the loop and in it."""
    shown = (*PRODUCTS, DELAY)
    before, step = (
        [op.kind for op in flat(region) if op.kind in shown]
        for region in (program.before, program.step)
    )
    return before, step


@pytest.mark.parametrize("name", CELLS)
def test_every_pass_and_plan_is_exact(name: str) -> None:
    for options in OPTIONS:
        case = CellCase(CELLS[name], **options)
        for schedule in ("naive", "hoisted", "auto"):
            made = plan(case.cell, torch.float64, schedule, **case.options)
            case.check_plan(made)
        typed = [name for name, _ in made.common].index("infer dtypes")
        for _, program in made.common[typed:]:
            case.check(program)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_is_exact(schedule: str) -> None:
    for cell in CELLS.values():
        case = CellCase(cell, **EVERYTHING)
        case.check_plan(plan(cell, torch.float64, schedule, **case.options))


def test_what_reads_such_a_state_is_before_the_loop() -> None:
    found = {name: plan(cell, torch.float32, masked=True) for name, cell in CELLS.items()}
    regions = {name: kinds(made.forward) for name, made in found.items()}
    assert regions["shifted"] == (["delay", "linear"], ["linear"])
    assert regions["linear_attention"] == (["delay", "linear", "linear", "linear"], [])
    assert regions["of_a_map"] == (["linear", "delay", "delay", "linear"], ["linear"])
    assert regions["taps"][1] == []
    assert not found["taps"].forward.states
    # Below its rung, the loop has the products of such a state.
    assert kinds(plan(CELLS["shifted"], torch.float32, "fused").forward) == ([], ["linear"] * 2)


def test_the_bias_of_a_map_of_such_a_state_is_in_its_product() -> None:
    for name, maps in (("shifted", 1), ("taps", 3)):
        made = plan(CELLS[name], torch.float32, masked=True)
        assert verify(made.forward)
        products = [op for op in flat(made.forward.before) if op.kind == "linear"]
        assert [len(op.inputs) for op in products] == [3] * maps
        # It is no vector that a step uses, whose gradient is summed step by step.
        assert not [s for s in made.backward.states if s.total is not None]


def test_states_that_need_the_loop_stay_in_it() -> None:
    @rnn.cell(state={"h": "hidden_size", "last": "input_size", "unread": "input_size"})
    def noisy(x: Any, h: Any, last: Any, unread: Any) -> Any:
        h = rnn.tanh(rnn.linear("h", last, h))
        return h, dict(h=h, last=rnn.dropout(x, 0.5), unread=x)

    for training, taken in ((True, []), (False, ["last"])):
        made = plan(noisy.bind(3, 4, {}), torch.float32, training=training).forward
        assert [d.name for d in made.delays] == taken


def test_the_explanation_names_the_states() -> None:
    said = rnn.RNN(shifted, 3, 4).explain()
    assert "states before the loop: last, whose next values depend on no state" in said
    assert "1 delayed sequence" in said
    assert "states before the loop" not in rnn.RNN(shifted, 3, 4, schedule="fused").explain()


@needs_compiler
def test_loops_are_exact() -> None:
    some = EVERYTHING, OPTIONS[-2]
    cases = [CellCase(cell, **options) for cell in CELLS.values() for options in some]
    check_loops(cases, "auto", compile_loops)


@needs_compiler
def test_kernels_for_a_gpu_are_exact() -> None:
    cases = [CellCase(cell, **EVERYTHING) for cell in CELLS.values()]
    check_loops(cases, "auto", shim_loops)


@needs_compiler
def test_matrix_states_stay_in_registers() -> None:
    cell = CELLS["linear_attention"]
    options = ({}, EVERYTHING)
    cases = [CellCase(cell, steps=9, **{**each, "recompute": "functions"}) for each in options]
    check_loops(cases, "auto", shim_matrices)


@needs_nvrtc
def test_kernels_compile() -> None:
    for name in ("shifted", "linear_attention"):
        made = plan(CELLS[name], torch.bfloat16, recompute="functions", masked=True)
        for program in (made.forward, made.backward):
            source = emit_matrix(program)
            text = source.text if isinstance(source, MatrixSource) else emit_cuda(program).text
            assert compile_cuda("recurrent", text, "sm_90").stat().st_size


def make(cell: Any, impl: str, **arguments: Any) -> rnn.RNN:
    torch.manual_seed(2)
    layer = rnn.RNN(cell, 3, 4, impl=impl, dtype=torch.float64, **arguments)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return layer


def define(layer: rnn.RNN, x: Tensor, h: Tensor, last: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`shifted` on whole sequences, as its formula says."""
    w, b = layer.get_parameter("weight_h_l0"), layer.get_parameter("bias_h_l0")
    before = torch.cat((last[None], x[:-1]))
    driven = F.linear(0.25 * x + 0.75 * before, w[:, :3], b)
    outputs = []
    for row in driven.unbind():
        h = torch.tanh(row + h @ w[:, 3:].mT)
        outputs.append(h)
    return torch.stack(outputs), h, x[-1]


@pytest.mark.parametrize("T", [1, 2, 6])
@pytest.mark.parametrize("impl", IMPLS)
def test_outputs_and_both_orders_of_gradients_are_those_of_the_formula(impl: str, T: int) -> None:
    layer = make(shifted, impl)
    x, h, last = (sequence(*n).requires_grad_() for n in ((T, 2, 3), (2, 4), (2, 3)))
    leaves = [x, h, last, *layer.parameters()]
    output, final = layer(x, (h[None], last[None]))
    ours, theirs = (output, *(t[0] for t in final)), define(layer, x, h, last)
    found = []
    for of in (ours, theirs):
        loss = torch.stack([(i + t.sin()).sum() for i, t in enumerate(of)]).prod()
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        second = torch.autograd.grad(torch.stack([g.sin().sum() for g in first]).sum(), leaves)
        found.append([*of, *first, *second])
    for mine, exact in zip(*found, strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-10, atol=1e-10)


@needs_compiler
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", CELLS)
def test_layers_directions_lengths_and_resets(name: str, recompute: bool) -> None:
    # The last input of two layers has two sizes, unless they agree.
    deep = {"num_layers": 2} if name == "of_a_map" else {}
    options = {"bidirectional": True, **deep}
    exact = make(CELLS[name].cell, "reference", **options)
    layer = make(CELLS[name].cell, "cpp", recompute=recompute, **options)
    shapes = exact.runs[0][0].state_shapes.values()
    state = tuple(sequence(len(exact.runs), 3, *shape) for shape in shapes)
    x = sequence(5, 3, 3)
    x[2:, 1] = torch.nan  # past the end
    reset = torch.tensor([[1, 0, 0], [0, 0, 1], [1, 0, 1], [0, 0, 0], [0, 0, 1]]).bool()
    given = {"lengths": [5, 2, 4], "reset": reset}
    for mine, defined in zip(*(gradients(of, x, state, **given) for of in (layer, exact))):
        assert defined.isfinite().all()
        torch.testing.assert_close(mine, defined, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("impl", IMPLS)
def test_steps_calls_and_packed_sequences_give_the_same(impl: str) -> None:
    layer, x = make(shifted, impl), sequence(5, 2, 3)
    output, final = layer(x)
    state, rows = layer.initial_state(2), []
    for row in x:
        out, state = layer.step(row, state)
        rows.append(out)
    torch.testing.assert_close((torch.stack(rows), state), (output, final))
    first, between = layer(x[:2])
    second, end = layer(x[2:], between)
    torch.testing.assert_close((torch.cat((first, second)), end), (output, final))
    assert isinstance(between, tuple)
    assert between[1].untyped_storage().nbytes() == between[1].nbytes  # not the whole sequence
    packed, last = layer(pack_sequence([x[:3, 1], x[:, 0]], enforce_sorted=False))
    padded, _ = pad_packed_sequence(packed)
    torch.testing.assert_close(padded[:, 1], output[:, 0])
    torch.testing.assert_close(padded[:3, 0], output[:3, 1])
    torch.testing.assert_close(last[1][0], torch.stack((x[2, 1], x[4, 0])))


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_defined(dtype: torch.dtype) -> None:
    found = []
    for impl in ("cpp", "reference"):
        layer = make(shifted, impl).to(dtype)
        torch.manual_seed(1)
        x, state = torch.randn(5, 2, 3).to(dtype), (torch.randn(1, 2, 4), torch.randn(1, 2, 3))
        found.append(gradients(layer, x, state))
    for mine, exact in zip(*found, strict=True):
        torch.testing.assert_close(mine, exact, rtol=3e-2, atol=3e-2)


@needs_compiler
def test_exported_programs_are_exact() -> None:
    layer, x = make(shifted, "cpp"), sequence(5, 2, 3)
    exported = torch.export.export(layer, (x,)).module()
    torch.testing.assert_close(exported(x), layer(x))
