"""Matrix states in chunks of steps, on a CPU by fibers and on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hoconv import jit
from hoconv import recurrent as rnn
from hoconv.jit import nvrtc
from hoconv.jit.generated import compile_cuda
from hoconv.recurrent import cells, reference
from hoconv.recurrent.codegen.matrix.chunks import ChunkSource, emit_chunks
from hoconv.recurrent.frontend.cell import BoundCell
from hoconv.recurrent.frontend.trace import trace
from hoconv.recurrent.ir.program import SEGMENT
from hoconv.recurrent.runtime.chunks import LEAST_STEPS, ChunkLoop
from hoconv.recurrent.runtime.host import HostCode
from hoconv.recurrent.schedule import Plan, plan
from hoconv.tools.testing.cells import run_program
from tests.hoconv.recurrent.chunk_shim import shim_chunks
from tests.hoconv.recurrent.matrix_shim import shim_matrices
from tests.support import has_sanitizers

needs_compiler = pytest.mark.skipif(
    jit.obstacle("cpu") is not None, reason=str(jit.obstacle("cpu"))
)
needs_nvrtc = pytest.mark.skipif(nvrtc.obstacle() is not None, reason=str(nvrtc.obstacle()))

ROOT = Path(__file__).parents[3]
LIBRARY = ["gla", "retnet", "hgrn2", "mamba2"]
# Of an error by rounding inputs and outputs alone: what products in TF32 add.
WORSE = 1.2
Results = dict[str, Tensor]


@rnn.cell(state={"S": ("keys", "values")})
def one_matrix(x: Any, S: Any, *, keys: int, values: int) -> Any:
    """No heads, and nothing decays."""
    q, k = (rnn.linear(name, x, size=(keys,)) for name in "qk")
    S = S + rnn.einsum("k,v->kv", k, rnn.linear("v", x, size=(values,)))
    return rnn.einsum("kv,k->v", S, q), dict(S=S)


@rnn.cell(state={"S": ("heads", "keys", "values")})
def any_decay(x: Any, S: Any, *, heads: int, keys: int, values: int) -> Any:
    """Decays of both signs, and of zero."""
    q, k = (rnn.linear(name, x, size=(heads, keys)) for name in "qk")
    v = rnn.linear("v", x, size=(heads, values))
    d = rnn.clamp(rnn.linear("d", x, size=(heads, keys)), 0.0, 1.0)
    d = d - 0.5 * rnn.sigmoid(rnn.linear("e", x, size=(heads, keys)))
    S = rnn.where(d > 0.2, d, 0.0)[..., None] * S + rnn.einsum("hk,hv->hkv", k, v)
    return rnn.einsum("hkv,hk->hv", S, q), dict(S=S)


@rnn.cell(state={"S": ("values", "heads", "keys")})
def other_order(x: Any, S: Any, *, heads: int, keys: int, values: int) -> Any:
    """Axes of the state, of rows and of the output in other orders."""
    q = rnn.linear("q", x, size=(keys, heads))
    k, v = rnn.linear("k", x, size=(heads, keys)), rnn.linear("v", x, size=(values, heads))
    d = rnn.sigmoid(rnn.linear("d", x, size=(keys,)))
    S = d[:, None, None] * S + rnn.einsum("hk,vh->vhk", k, v)
    return rnn.einsum("vhk,kh->vh", S, q), dict(S=S)


@rnn.cell(state={"S": ("heads", "keys", "values")})
def some_steps(x: Any, S: Any, *, heads: int, keys: int, values: int) -> Any:
    """An input decides which steps change the state, and it is read after all steps. (A product
    would be rounded, on a GPU before its bias is added: to the other side of zero, now and then.)
    """
    q, k = (rnn.linear(name, x, size=(heads, keys)) for name in "qk")
    v, d = rnn.linear("v", x, size=(heads, values)), rnn.linear("d", x, size=(heads,))
    grown = rnn.sigmoid(d)[..., None, None] * S + rnn.einsum("hk,hv->hkv", k, v)
    S = rnn.where(x[:, :1, None, None] > 0, grown, S)
    return rnn.einsum("hkv,hk->hv", S, q), dict(S=S)


@rnn.cell(state={"S": ("heads", "keys", "values")})
def some_heads(x: Any, S: Any, *, heads: int, keys: int, values: int) -> Any:
    """An input for each head; what is multiplied and summed is repeated."""
    q, k = (rnn.linear(name, x, size=(heads, keys)) for name in "qk")
    v = rnn.linear("v", x, size=(heads, values))
    gate = x[:, :heads, None, None] > 0
    S = rnn.where(gate, 0.9 * S - k[..., None] * v[..., None, :], S)
    return rnn.sum(S * q[..., None], -2), dict(S=S)


@rnn.cell(state={"S": ("heads", "keys", "values")})
def delta(x: Any, S: Any, *, heads: int, keys: int, values: int) -> Any:
    """The delta rule on a state whose keys decay each at its own rate, so little that steps reach
    far."""
    q, k = (rnn.normalize(rnn.linear(name, x, size=(heads, keys))) for name in "qk")
    v, beta = rnn.linear("v", x, size=(heads, values)), rnn.linear("beta", x, size=(heads, 1))
    S = (1 - 0.1 * rnn.sigmoid(rnn.linear("d", x, size=(heads, keys))))[..., None] * S
    found = rnn.einsum("hkv,hk->hv", S, k)
    S = S + rnn.einsum("hk,hv->hkv", k, rnn.sigmoid(beta) * (v - found))
    return rnn.einsum("hkv,hk->hv", S, q), dict(S=S)


@rnn.cell(state={"S": ("values", "heads", "keys")})
def other_delta(x: Any, S: Any, *, heads: int, keys: int, values: int) -> Any:
    """Keys for all heads, axes in other orders, decays of both signs, and several predictions,
    before the state decays."""
    q = rnn.linear("q", x, size=(keys, heads))
    k, v = rnn.normalize(rnn.linear("k", x, size=(keys,))), rnn.linear("v", x, size=(values, heads))
    a, b = (rnn.sigmoid(rnn.linear(name, x, size=(1, heads))) for name in "ab")
    one, other = rnn.einsum("vhk,k->vh", S, k), rnn.einsum("k,vhk->vh", k * k, S)
    S = rnn.tanh(2 * rnn.linear("d", x, size=(1, heads, 1))) * S
    S = S + rnn.einsum("k,vh->vhk", k, (v * 0.5 - (a * one - 0.5 * (b * other))) * a)
    return rnn.einsum("vhk,kh->vh", S, q), dict(S=S)


@rnn.cell(state={"S": ("heads", "keys", "values")})
def early(x: Any, S: Any, *, heads: int, keys: int, values: int) -> Any:
    """The output reads the state before the step, as that of RWKV-6 does."""
    q, k, d = (rnn.linear(name, x, size=(heads, keys)) for name in "qkd")
    v = rnn.linear("v", x, size=(heads, values))
    bonus = rnn.sum(q * k * rnn.parameter("bonus", (heads, keys)))
    output = rnn.einsum("hkv,hk->hv", S, q) + bonus * v
    return output, dict(S=rnn.sigmoid(d)[..., None] * S + rnn.einsum("hk,hv->hkv", k, v))


@rnn.cell(state={"S": ("heads", "keys", "values")})
def early_delta(x: Any, S: Any, *, heads: int, keys: int, values: int) -> Any:
    """Reads the state before the step twice: for the output, and for a delta rule."""
    q, k = (rnn.normalize(rnn.linear(name, x, size=(heads, keys))) for name in "qk")
    v, beta, d = (
        rnn.linear("v", x, size=(heads, values)),
        *(rnn.sigmoid(rnn.linear(name, x, size=(heads, 1))) for name in ("beta", "d")),
    )
    found, output = (rnn.einsum("hkv,hk->hv", S, row) for row in (k, q))
    S = d[..., None] * S + rnn.einsum("hk,hv->hkv", k, beta * (v - found))
    return output, dict(S=S)


@rnn.cell(state={"S": ("heads", "keys", "values")})
def block(x: Any, S: Any, *, heads: int, keys: int, values: int) -> Any:
    """Normalises, gates and multiplies what it reads, as published blocks do. (Of what the first
    step reads, k q v, a norm without a constant would leave the sign of k q, which rounding
    changes where it is nearly zero.)"""
    q, k = (rnn.linear(name, x, size=(heads, keys)) for name in "qk")
    v, g = (rnn.linear(name, x, size=(heads, values)) for name in "vg")
    d = rnn.sigmoid(rnn.linear("d", x, size=(heads, 1, 1)))
    S = d * S + rnn.einsum("hk,hv->hkv", k, v)
    read = rnn.einsum("hkv,hk->hv", S, q)
    read = read / rnn.sqrt(rnn.sum(read * read, -1) + 1.0)
    return rnn.linear("o", rnn.reshape(read * rnn.sigmoid(g), heads * values)), dict(S=S)


PREDICT = ["delta_net", "gated_delta_net", delta, other_delta, early_delta]
CELLS = [
    *LIBRARY, one_matrix, any_decay, other_order, some_steps, some_heads, early, block, *PREDICT,
]  # fmt: skip


def name_of(cell: Any) -> str:
    return getattr(cell, "name", cell)


def bind(cell: Any, heads: int, keys: int, values: int) -> BoundCell:
    if isinstance(cell, str):
        cell = getattr(cells, cell)
    sizes = {"heads": heads, "keys": keys, "values": values}
    options = {name: size for name, size in sizes.items() if name in cell.options}
    return cell.bind(8, heads * values, options)


def plan_for_gpu(cell: BoundCell, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Plan:
    return plan(cell, dtype, recompute="functions", **options)


def error(found: Tensor, exact: Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm().clamp_min(1e-30)).item()


def run(made: Plan, given: Results, parameters: Results, loops: Any) -> Results:
    """Returns the results and gradients of a plan."""
    cotangent = {"d_output": given["d_output"]}
    with torch.no_grad():
        read = {name: given[name] for name in ("x", "valid") if name in given}
        found = run_program(made.inference, read, {"S": given["S"]}, parameters, None,
                            loops(made.inference))  # fmt: skip
        kept = run_program(made.forward, read, {"S": given["S"]}, parameters, None,
                           loops(made.forward))  # fmt: skip
        host = HostCode(made.backward, [*parameters], ["S"], True, loops(made.backward))
        known = {**read, **kept, **cotangent}
        gradients = host([known[name] for name, _ in made.backward.sequences], [given["d_S"]],
                         [*parameters.values()], None)  # fmt: skip
    assert torch.equal(found["output"], kept["output"])
    named = {f"d_{name}": t for name, t in zip(("x", *parameters, "S"), gradients, strict=True)}
    return {"output": found["output"], "S": found["S"], **named}


def define(cell: BoundCell, given: Results, parameters: Results, reverse: bool) -> Results:
    """Returns the results and gradients of the definition, in float64."""
    wide = {name: t.double().requires_grad_() for name, t in parameters.items()}
    x, S = (given[name].double().requires_grad_() for name in ("x", "S"))
    valid = given.get("valid")
    output, (last,) = reference.recurrent(cell, x, [S], wide, valid=valid, reverse=reverse)
    leaves = {"d_x": x, **{f"d_{name}": t for name, t in wide.items()}, "d_S": S}
    total = (output * given["d_output"].double()).sum() + (last * given["d_S"].double()).sum()
    found = torch.autograd.grad(total, [*leaves.values()], materialize_grads=True)
    return {"output": output.detach(), "S": last.detach(), **dict(zip(leaves, found, strict=True))}


def check(cell: BoundCell, T: int, B: int, dtype: torch.dtype, *, reversed: bool = False,
          reverse: bool = False, lengths: list[int] | None = None,
          shim: Any = shim_chunks) -> None:  # fmt: skip
    """Asserts that kernels are hardly less exact than steps in float32."""
    torch.manual_seed(T)
    made = plan_for_gpu(cell, dtype, reverse=reverse, masked=lengths is not None)
    programs = {name: getattr(made, name) for name in ("inference", "forward", "backward")}
    loops = {programs[name]: loop for name, loop in shim(programs, reversed).items()}
    parameters = {
        d.name: (torch.randn(d.read_shape) / 2).to(dtype) for d in trace(cell).declarations
    }
    n = cell.state_sizes["S"]
    given = {
        "x": torch.randn(T, B, cell.row_size).to(dtype), "S": torch.randn(B, n),
        "d_S": torch.randn(B, n),
    }  # fmt: skip
    given["d_output"] = torch.randn(T, B, trace(cell).program.results[0][1].type.size).to(dtype)
    if lengths is not None:
        given["valid"] = torch.arange(T)[:, None, None] < torch.tensor(lengths)[:, None]
    found = run(made, given, parameters, loops.__getitem__)
    steps = run(made, given, parameters, lambda _: None)
    exact = define(cell, given, parameters, reverse)
    assert found.keys() == exact.keys()
    for name, t in exact.items():
        assert found[name].dtype == steps[name].dtype
        # Of few numbers, an error is a matter of chance.
        worse, last = (WORSE, 3e-4) if t.numel() > 100 else (2, 2 * torch.finfo(dtype).eps)
        assert error(found[name], t) <= worse * error(steps[name], t) + last, name


@needs_compiler
@pytest.mark.parametrize("cell", CELLS, ids=name_of)
def test_chunks_are_as_exact_as_steps(cell: Any) -> None:
    check(bind(cell, 2, 16, 8), SEGMENT + 6, 2, torch.bfloat16)
    check(bind(cell, 1, 24, 40), 2 * SEGMENT + 9, 1, torch.float16, reversed=True, reverse=True)


@needs_compiler
@pytest.mark.parametrize("T", [1, SEGMENT - 1, SEGMENT, SEGMENT + 1])
@pytest.mark.parametrize(("keys", "values"), [(3, 2), (64, 64), (80, 128), (128, 80)])
@pytest.mark.parametrize("cell", ["hgrn2", "delta_net"])
def test_sizes_need_not_be_those_of_tiles(cell: str, T: int, keys: int, values: int) -> None:
    check(bind(cell, 1, keys, values), T, 1, torch.bfloat16, reversed=keys == 80)


@needs_compiler
@pytest.mark.skipif(not has_sanitizers(), reason="needs g++ and its libasan.so; install them")
def test_no_kernel_reads_memory_that_is_not_its_own() -> None:
    """On a GPU, what a block of the allocator has after a tensor may be read unnoticed."""
    test = f"{__file__}::test_sizes_need_not_be_those_of_tiles"
    of = [f"{test}[{cell}-64-64-65]" for cell in ("hgrn2", "delta_net")]
    command = [sys.executable, str(ROOT / "scripts" / "sanitize.py"), "-m", "pytest", "-q", "-s"]
    done = subprocess.run(
        [*command, "-n0", *of], capture_output=True, text=True, cwd=ROOT,
        env={**os.environ, "CXX": "g++"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-5000:]
    assert "2 passed" in done.stdout


@needs_compiler
@pytest.mark.parametrize("cell", ["mamba2", "other_order", "any_decay"])
def test_blocks_share_the_keys_and_the_columns_of_a_head(cell: str) -> None:
    """The gradient of a decay of a head is a sum of parts, which blocks write."""
    check(bind(globals().get(cell, cell), 2, 40, 70), SEGMENT + 1, 1, torch.bfloat16)


@needs_compiler
@pytest.mark.parametrize("cell", CELLS, ids=name_of)
def test_sequences_may_end_within_a_chunk(cell: Any) -> None:
    lengths = [SEGMENT + 3, 9, 0]
    check(bind(cell, 2, 16, 8), SEGMENT + 6, 3, torch.bfloat16, lengths=lengths)
    check(bind(cell, 1, 8, 8), SEGMENT + 6, 3, torch.bfloat16, lengths=lengths, reverse=True)


@needs_compiler
@pytest.mark.parametrize("cell", ["gated_delta_net", some_heads, early], ids=name_of)
def test_fewer_steps_keep_the_states_of_the_same_programs_in_registers(cell: Any) -> None:
    lengths = [3, 9]
    check(bind(cell, 2, 16, 8), 9, 2, torch.bfloat16, lengths=lengths, shim=shim_matrices)


@needs_compiler
@pytest.mark.parametrize("of", ["gla", "gated_delta_net", early], ids=name_of)
def test_padding_may_hold_anything(of: Any) -> None:
    cell, dtype = bind(of, 2, 16, 8), torch.bfloat16
    made = plan_for_gpu(cell, dtype, masked=True)
    programs = {name: getattr(made, name) for name in ("inference", "forward", "backward")}
    loops = {programs[name]: loop for name, loop in shim_chunks(programs).items()}
    parameters = {d.name: torch.randn(d.read_shape).to(dtype) for d in trace(cell).declarations}
    x, d_output = torch.randn(SEGMENT, 2, 8).to(dtype), torch.randn(SEGMENT, 2, 16).to(dtype)
    S, d_S = torch.randn(2, 2, cell.state_sizes["S"])
    valid = torch.arange(SEGMENT)[:, None, None] < torch.tensor([20, SEGMENT])[:, None]
    zeros, nans = (
        run(made, {"x": x.where(valid, padding), "valid": valid, "S": S, "d_S": d_S,
                   "d_output": d_output.where(valid, padding)}, parameters, loops.__getitem__)
        for padding in (0.0, float("nan"))
    )  # fmt: skip
    for name in ("output", "S", "d_S"):
        assert torch.equal(zeros[name], nans[name]), name
    assert torch.equal(zeros["d_x"].where(valid, 0), nans["d_x"].where(valid, 0))


@rnn.cell(state={"S": ("heads", "keys", "values")})
def rows_of_input(x: Any, S: Any, *, heads: int, keys: int, values: int) -> Any:
    """Kernels read the input itself."""
    q, k, v = (rnn.reshape(row, heads, keys) for row in rnn.chunk(x, 3))
    S = S + rnn.einsum("hk,hv->hkv", k, v)
    return rnn.einsum("hkv,hk->hv", S, q), dict(S=S)


@needs_compiler
@pytest.mark.parametrize("view", ["at an odd address", "of one row", "batch first", "every second"])
def test_the_input_may_be_any_view(view: str) -> None:
    cell, T, B = rows_of_input.bind(48, 16, {"heads": 2, "keys": 8, "values": 8}), SEGMENT + 1, 3
    program = plan_for_gpu(cell).inference
    (loop,) = shim_chunks({"inference": program}).values()
    x = {
        "at an odd address": torch.randn(T * B * 48 + 1).bfloat16()[1:].view(T, B, 48),
        "of one row": torch.randn(T, 1, 48).bfloat16().expand(T, B, 48),
        "batch first": torch.randn(B, T, 48).bfloat16().mT.mT.transpose(0, 1),
        "every second": torch.randn(T, B, 96).bfloat16()[..., ::2],
    }[view]
    S = torch.randn(2 * B, 128)[::2]
    found, exact = (
        run_program(program, {"x": given}, {"S": S}, {}, None, loop)
        for given in (x, x.clone(memory_format=torch.contiguous_format))
    )
    assert all(torch.equal(found[name], t) for name, t in exact.items())


@needs_compiler
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", ["gla", "gated_delta_net"])
def test_two_calls_are_one(name: str, reverse: bool) -> None:
    """Bit for bit, where the first one ends with a chunk."""
    cell, dtype = bind(name, 2, 16, 8), torch.bfloat16
    program = plan_for_gpu(cell, dtype, reverse=reverse).inference
    (loop,) = shim_chunks({"inference": program}).values()
    parameters = {d.name: torch.randn(d.read_shape).to(dtype) for d in trace(cell).declarations}
    x, S = torch.randn(2 * SEGMENT + 9, 2, 8).to(dtype), torch.randn(2, cell.state_sizes["S"])

    def run(x: Tensor, S: Tensor) -> Results:
        return run_program(program, {"x": x}, {"S": S}, parameters, None, loop)

    halves = x[:SEGMENT], x[SEGMENT:]
    if reverse:
        halves = x[-SEGMENT:], x[:-SEGMENT]
    whole, first = run(x, S), run(halves[0], S)
    second = run(halves[1], first["S"])
    parts = [first["output"], second["output"]]
    assert torch.equal(whole["output"], torch.cat(parts[::-1] if reverse else parts))
    assert torch.equal(whole["S"], second["S"])


def test_says_which_steps_are_taken_in_chunks() -> None:
    sizes: Any = {"heads": 2, "keys": 16, "values": 8}
    said = "forward and backward: chunks of 64 steps on tensor cores, from 128 steps on"
    for cell in (cells.gla, cells.gated_delta_net):
        assert said in rnn.RNN(cell, 8, 16, dtype=torch.bfloat16, **sizes).explain()
    for cell, dtype, reason in (
        (cells.gla, torch.float32, "products of f32 would be in TF32"),
        (cells.rwkv7, torch.bfloat16, "the state takes outer products of more than one key"),
    ):
        explained = rnn.RNN(cell, 8, 16, dtype=dtype, **sizes).explain()
        assert f"no chunks of steps: {reason}" in explained


@needs_nvrtc
@pytest.mark.parametrize(
    ("keys", "B", "chunks"), [(32, 8, True), (32, 128, False), (64, 128, True)]
)
def test_many_states_of_few_keys_take_steps(
    keys: int, B: int, chunks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    H100 = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: H100)
    device = torch.device("cuda", 0)
    for cell, always in (("delta_net", False), ("retnet", True)):
        source = emit_chunks(plan_for_gpu(bind(cell, 4, keys, 32)).inference)
        assert isinstance(source, ChunkSource)
        loop = ChunkLoop(source)
        assert loop.serves(LEAST_STEPS, B, device) == (chunks or always)
        assert not loop.serves(LEAST_STEPS - 1, B, device)


@needs_nvrtc
def test_kernels_compile() -> None:
    for name in ("gla", "mamba2", "gated_delta_net"):
        made = plan_for_gpu(bind(name, 2, 128, 128))
        for program in (made.forward, made.backward):
            source = emit_chunks(program)
            assert isinstance(source, ChunkSource), source
            for text in source.texts.values():
                compile_cuda("recurrent", text, "sm_90")


@rnn.cell(state={"S": ("heads", "keys", "values")})
def no_delta(x: Any, S: Any, *, heads: int, keys: int, values: int) -> Any:
    """Writes what is not affine in what it reads."""
    q, k = (rnn.linear(name, x, size=(heads, keys)) for name in "qk")
    S = S + rnn.einsum("hk,hv->hkv", k, rnn.tanh(rnn.einsum("hkv,hk->hv", S, k)))
    return rnn.einsum("hkv,hk->hv", S, q), dict(S=S)


@pytest.mark.parametrize(
    ("cell", "reason"),
    [
        (no_delta, "a step computes an operand"),
        ("rwkv7", "the state takes outer products of more than one key"),
        ("mlstm", "there is more than one state"),
    ],
)
def test_other_cells_say_why_they_take_steps(cell: Any, reason: str) -> None:
    program = plan_for_gpu(bind(cell, 2, 8, 8)).inference
    assert emit_chunks(program) == reason


def test_float32_is_not_computed_in_tf32() -> None:
    program = plan_for_gpu(bind("gla", 2, 8, 8), torch.float32).inference
    assert emit_chunks(program) == "products of f32 would be in TF32"


def check_on_gpu(bound: BoundCell, dtype: torch.dtype, T: int, lengths: list[int] | None = None,
                 bidirectional: bool = False) -> None:  # fmt: skip
    torch.manual_seed(T)
    options: Any = {name: bound.options[name] for name in bound.cell.options}
    layer, exact = (
        rnn.RNN(bound.cell, 8, bound.hidden_size, bidirectional=bidirectional, impl=impl,
                device="cuda", dtype=of, **options)
        for impl, of in (("cuda", dtype), ("reference", torch.float64))
    )  # fmt: skip
    exact.load_state_dict(layer.state_dict())
    x = torch.randn(T, 3, 8, device="cuda", dtype=dtype, requires_grad=True)
    wide = x.detach().double().requires_grad_()
    ends = None if lengths is None else torch.tensor(lengths)
    output, wanted = layer(x, None, ends)[0], exact(wide, None, ends)[0]
    cotangent = torch.randn_like(output)
    (d_x,) = torch.autograd.grad(output, x, cotangent)
    (d_wanted,) = torch.autograd.grad(wanted, wide, cotangent.double())
    assert error(output.detach(), wanted.detach()) <= 3 * torch.finfo(dtype).eps
    assert error(d_x, d_wanted) <= 6 * torch.finfo(dtype).eps


@pytest.mark.gpu
@pytest.mark.parametrize("cell", CELLS, ids=name_of)
@pytest.mark.parametrize("sizes", [(2, 16, 8), (3, 64, 48), (2, 128, 128)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_gpu_is_as_exact(cell: Any, sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    check_on_gpu(bind(cell, *sizes), dtype, 2 * SEGMENT)
    check_on_gpu(bind(cell, *sizes), dtype, 1000, bidirectional=True)


@pytest.mark.gpu
@pytest.mark.parametrize("cell", LIBRARY)
def test_a_gpu_takes_lengths(cell: str) -> None:
    check_on_gpu(bind(cell, 2, 64, 48), torch.bfloat16, 300, [300, 7, 130], bidirectional=True)
