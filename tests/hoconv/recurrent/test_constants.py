"""Constants of sequences: no step has a copy, and what depends on them alone is computed once."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

from hoconv import jit
from hoconv import recurrent as rnn
from hoconv.jit import nvrtc
from hoconv.jit.generated import compile_cuda
from hoconv.recurrent import cells
from hoconv.recurrent.codegen.cluster.kernel import emit_cluster
from hoconv.recurrent.codegen.cluster.layout import ClusterLayout, ClusterShape
from hoconv.recurrent.codegen.cuda import emit_cuda
from hoconv.recurrent.codegen.matrix.kernel import MatrixSource, emit_matrix
from hoconv.recurrent.codegen.scan import emit_scan
from hoconv.recurrent.ir.kinds import PRODUCTS
from hoconv.recurrent.ir.program import Program, Value, flat
from hoconv.recurrent.ir.verify import verify
from hoconv.recurrent.ladder import SCHEDULES
from hoconv.recurrent.runtime.clusters import H200, Clusters
from hoconv.recurrent.runtime.cpp import compile_loops
from hoconv.recurrent.schedule import plan
from hoconv.tools.testing.cells import CellCase
from tests.hoconv.recurrent.cluster_shim import shim_clusters
from tests.hoconv.recurrent.matrix_shim import shim_matrices
from tests.hoconv.recurrent.scan_shim import shim_scans
from tests.hoconv.recurrent.shim import shim_loops
from tests.hoconv.recurrent.support import gradients, sequence
from tests.hoconv.recurrent.test_compiler import check_loops

needs_compiler = pytest.mark.skipif(
    jit.obstacle("cpu") is not None, reason=str(jit.obstacle("cpu"))
)
needs_nvrtc = pytest.mark.skipif(nvrtc.obstacle() is not None, reason=str(nvrtc.obstacle()))
IMPLS = ["reference", pytest.param("cpp", marks=needs_compiler)]


@rnn.cell(state=("h",), constants={"memory": (5, 3), "offset": 4})
def additive(x: Any, memory: Any, offset: Any, h: Any) -> Any:
    """Bahdanau's attention, whose keys depend on the memory alone; an offset, and its tanh times
    what depends on x."""
    keys = rnn.linear("keys", memory, size=(5, 4))
    compared = rnn.tanh(keys + rnn.linear("query", h)[:, None])
    scores = rnn.einsum("sn,n->s", compared, rnn.linear("score", x, size=4))
    read = rnn.einsum("sw,s->w", memory, rnn.softmax(scores))
    driven = rnn.tanh(offset) * rnn.linear("x", x)
    h = rnn.tanh(rnn.linear("h", read, h) + driven + offset)
    return h, dict(h=h)


@rnn.cell(state=("h",), constants={"rate": "hidden_size"})
def faded(x: Any, rate: Any, h: Any) -> Any:
    """A step is elementwise, and affine in its state."""
    h = rnn.sigmoid(rate) * h + rnn.linear("x", x)
    return h, dict(h=h)


@rnn.cell(state={"S": (2, 5, 4)}, constants={"query": (2, 5), "gate": 2})
def recalled(x: Any, query: Any, gate: Any, S: Any) -> Any:
    k, v = rnn.linear("k", x, size=(2, 5)), rnn.linear("v", x, size=(2, 4))
    decay = rnn.reshape(rnn.sigmoid(gate), 2, 1, 1)
    S = decay * S + rnn.einsum("hk,hv->hkv", rnn.normalize(k), v)
    return rnn.einsum("hkv,hk->hv", S, query), dict(S=S)


@rnn.cell(state=("h",), constants={"first": "hidden_size"})
def returned(x: Any, first: Any, h: Any) -> Any:
    """A constant is the output, and a next state."""
    return first, dict(h=first)


CELLS = {cell.name: cell.bind(3, 4, {}) for cell in (additive, faded, recalled, returned)}
CELLS["attention"] = cells.attention.bind(3, 4, {"slots": 5, "width": 2})
EVERYTHING: dict[str, Any] = {"masked": True, "resets": True, "reverse": True}
OPTIONS: list[dict[str, Any]] = [
    {}, EVERYTHING, {"masked": True, "recompute": "all"},
    {"resets": True, "recompute": "functions"},
]  # fmt: skip


@pytest.mark.parametrize("name", CELLS)
def test_every_pass_and_plan_is_exact(name: str) -> None:
    for options in OPTIONS:
        case = CellCase(CELLS[name], **options)
        for schedule in ("naive", "fused", "auto"):
            case.check_plan(plan(case.cell, torch.float64, schedule, **case.options))
        made = plan(case.cell, torch.float64, **case.options)
        typed = [name for name, _ in made.common].index("infer dtypes")
        for _, program in made.common[typed:]:
            case.check(program)


def list_values(program: Program) -> Iterable[Value]:
    """Lists what a program reads, computes, and writes for all steps."""
    yield from (value for _, value in program.sequences)
    yield from (each.sequence for each in program.yields)
    yield from (op.result for op in flat((*program.before, *program.after)))


@pytest.mark.parametrize("recompute", ["cheap", "functions", "all"])
def test_no_sequence_is_as_wide_as_a_constant(recompute: Any) -> None:
    wide = cells.attention.bind(3, 4, {"slots": 50, "width": 20})
    for dtype in (torch.float32, torch.bfloat16):
        made = plan(wide, dtype, recompute=recompute, masked=True)
        for program in (made.inference, made.forward, made.backward):
            widths = {
                v.type.size for v in list_values(verify(program)) if v.type.rate == "sequence"
            }
            assert max(widths) < 50 * 20
            assert ("constant_memory", 1000) in {(n, v.type.size) for n, v in program.constants}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_programs_in_half_precision_are_well_formed(schedule: str) -> None:
    for cell in CELLS.values():
        made = plan(cell, torch.bfloat16, schedule, masked=True, resets=True)
        for program in (made.inference, made.forward, made.backward):
            verify(program)


def test_products_of_constants_run_once_a_call() -> None:
    made = plan(CELLS["additive"], torch.float32)
    products = [op for op in flat(made.forward.before) if op.kind in PRODUCTS]
    assert [op.result.type.rate for op in products] == ["constant", "sequence"]
    back = [op for op in flat(made.backward.after) if op.kind in ("outer", "linear_t")]
    of_keys = [op for op in back if op.values[0].type.size == 20]
    assert {op.kind: op.values[0].type.rate for op in of_keys} == {
        "outer": "constant", "linear_t": "constant",
    }  # fmt: skip


@needs_compiler
def test_loops_are_exact() -> None:
    some = EVERYTHING, OPTIONS[2]
    cases = [CellCase(cell, **options) for cell in CELLS.values() for options in some]
    check_loops(cases, "auto", compile_loops)
    check_loops([CellCase(CELLS["additive"])], "naive", compile_loops)


@needs_compiler
@pytest.mark.parametrize("schedule", ["naive", "auto"])
def test_kernels_for_a_gpu_are_exact(schedule: str) -> None:
    cases = [CellCase(cell, **EVERYTHING) for cell in CELLS.values()]
    check_loops(cases, schedule, shim_loops)


@needs_compiler
def test_scans_are_exact() -> None:
    cases = [CellCase(CELLS["faded"], steps=66, **options) for options in ({}, EVERYTHING)]
    check_loops(cases, "auto", functools.partial(shim_scans, warps=2, blocks=2))


@needs_compiler
def test_matrix_states_stay_in_registers() -> None:
    cases = [
        CellCase(CELLS["recalled"], steps=66, **{"recompute": "functions", **options})
        for options in ({}, EVERYTHING)
    ]
    check_loops(cases, "auto", shim_matrices)


@rnn.cell(state=("h",), constants={"offset": "hidden_size", "gain": 1, "wide": (2, "hidden_size")})
def driven(x: Any, offset: Any, gain: Any, wide: Any, h: Any) -> Any:
    """A step reads rows of constants, a number, a part, and a product of them and the state."""
    first = rnn.reshape(wide, 2 * h.shape[-1])[:, : h.shape[-1]]
    mixed = rnn.linear("mixed", rnn.cat(h, offset), bias=False)
    h = rnn.tanh(rnn.linear("h", x, h) * gain + offset * mixed + first)
    return h, dict(h=h)


@needs_compiler
@pytest.mark.parametrize("blocks", [1, 4])
def test_clusters_are_exact(blocks: int) -> None:
    cases = [
        CellCase(driven.bind(3, 20, {}), **options)
        for options in ({}, EVERYTHING, {"masked": True, "recompute": "all"})
    ]
    check_loops(
        cases, "persistent", functools.partial(shim_clusters, shape=ClusterShape(blocks, 3, 2))
    )


@needs_nvrtc
def test_clusters_compile() -> None:
    made = plan(driven.bind(3, 64, {}), torch.bfloat16)
    for program in (made.forward, made.backward):
        layout = Clusters(program, always=True).choose(4, H200)
        assert isinstance(layout, ClusterLayout)
        assert compile_cuda("recurrent", emit_cluster(layout).text, "sm_90a").stat().st_size


@needs_nvrtc
def test_kernels_compile() -> None:
    for name in ("additive", "faded", "recalled"):
        made = plan(CELLS[name], torch.bfloat16, recompute="functions", masked=True)
        for program in (made.forward, made.backward):
            matrix, scan = emit_matrix(program), emit_scan(program)
            texts = [emit_cuda(program, whole=name == "faded").text]
            texts += [matrix.text] if isinstance(matrix, MatrixSource) else []
            texts += [scan.text] if scan else []
            for text in texts:
                assert compile_cuda("recurrent", text, "sm_90").stat().st_size


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("T", [1, 4])
def test_layers_are_exact(T: int, shared: bool, dtype: torch.dtype) -> None:
    x, memory, offset = sequence(T, 2, 3), sequence(1 if shared else 2, 5, 3), sequence(2, 4)
    found = []
    for impl in ("reference", "cpp"):
        torch.manual_seed(1)
        layer = rnn.RNN(additive, 3, 4, num_layers=2, bidirectional=True, impl=impl, dtype=dtype)
        for parameter in layer.parameters():
            nn.init.normal_(parameter, std=0.5)
        given = [t.to(dtype).requires_grad_() for t in (memory, offset)]
        lengths = [T, 1]
        first = gradients(layer, x.to(dtype), memory=given[0], offset=given[1], lengths=lengths)
        output, _ = layer(x.to(dtype), memory=given[0], offset=given[1], lengths=lengths)
        found.append([*first, *torch.autograd.grad(output.sin().sum(), given)])
    tolerance = 1e-9 if dtype == torch.float64 else 6e-2
    for exact, mine in zip(*found, strict=True):
        torch.testing.assert_close(mine, exact, rtol=tolerance, atol=tolerance)


@needs_compiler
def test_exported_programs_are_exact() -> None:
    class Attentive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = rnn.RNN(additive, 3, 4, impl="cpp", dtype=torch.float64)

        def forward(self, x: Any, memory: Any, offset: Any) -> Any:
            return self.layer(x, memory=memory, offset=offset)

    given, made = (sequence(5, 2, 3), sequence(1, 5, 3), sequence(2, 4)), Attentive()
    exported = torch.export.export(made, given).module()
    torch.testing.assert_close(exported(*given), made(*given))
