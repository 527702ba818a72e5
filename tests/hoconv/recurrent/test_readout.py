"""Products that no state waits for, as those of an output: one for all steps."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from hoconv import jit
from hoconv import recurrent as rnn
from hoconv.recurrent import cells
from hoconv.recurrent.codegen.scan import emit_scan
from hoconv.recurrent.ir.kinds import PRODUCTS
from hoconv.recurrent.ir.program import Program, flat
from hoconv.recurrent.runtime.cpp import compile_loops
from hoconv.recurrent.schedule import Plan, plan
from hoconv.tools.testing.cells import CellCase
from tests.hoconv.recurrent.matrix_shim import shim_matrices
from tests.hoconv.recurrent.scan_shim import shim_scans
from tests.hoconv.recurrent.shim import shim_loops
from tests.hoconv.recurrent.test_compiler import check_loops

needs_compiler = pytest.mark.skipif(
    jit.obstacle("cpu") is not None, reason=str(jit.obstacle("cpu"))
)


@rnn.cell(state=("h",))
def projected(x: Any, h: Any) -> Any:
    """A diagonal cell with an output of its own, gated by the input."""
    h = rnn.sigmoid(rnn.linear("f", x)) * h + rnn.linear("i", x)
    return rnn.linear("o", rnn.tanh(h)) * rnn.sigmoid(rnn.linear("g", x)), dict(h=h)


@rnn.cell(state=("a", "b"))
def two_products(x: Any, a: Any, b: Any) -> Any:
    """One product after the other, of both states, and what the first one is besides."""
    a = 0.5 * a + rnn.linear("x", x)
    b = 0.25 * b - a
    first = rnn.relu(rnn.linear("first", rnn.cat(a, b)) + a)
    return first + rnn.linear("second", first * b), dict(a=a, b=b)


@rnn.cell(state=("h",))
def both(x: Any, h: Any) -> Any:
    """A product that the state waits for, and one that it does not."""
    h = rnn.tanh(rnn.linear("x", x) + rnn.linear("h", h))
    return rnn.linear("o", h), dict(h=h)


@rnn.cell(state=("h", "o"))
def fed_back(x: Any, h: Any, o: Any) -> Any:
    """The next step reads the output."""
    h = 0.5 * h + rnn.linear("x", x) + o
    o = rnn.linear("o", h)
    return o, dict(h=h, o=o)


@rnn.cell(state=("h",))
def noisy(x: Any, h: Any) -> Any:
    """Random numbers before the product and after it."""
    h = 0.5 * h + rnn.linear("x", x)
    return rnn.dropout(rnn.linear("o", rnn.dropout(h, 0.4)), 0.3), dict(h=h)


@rnn.cell(state={"S": (2, 5, 4)})
def attended(x: Any, S: Any) -> Any:
    """A matrix, which products of several sums read."""
    k, q, p = (rnn.linear(name, x, size=(2, 5)) for name in "kqp")
    v = rnn.linear("v", x, size=(2, 4))
    S = rnn.sigmoid(rnn.linear("d", x, size=(2, 1, 1))) * S + rnn.einsum("hk,hv->hkv", k, v)
    one, other = (rnn.einsum("hkv,hk->hv", S, row) for row in (q, p))
    mixed = rnn.linear("m", rnn.reshape(rnn.tanh(one), 8), size=(2, 4)) + v
    o = rnn.linear("o", rnn.reshape(mixed, 8))
    return o + rnn.linear("u", rnn.reshape(rnn.normalize(other), 8)), dict(S=S)


BOUND = {cell.name: cell.bind(3, 4, {}) for cell in (projected, two_products, both, fed_back)}
EVERYTHING: dict[str, Any] = {"masked": True, "resets": True, "reverse": True}


def count_products(program: Program) -> int:
    return sum(op.kind in PRODUCTS for op in flat(program.step))


def programs(made: Plan) -> tuple[Program, Program, Program]:
    return made.inference, made.forward, made.backward


@pytest.mark.parametrize(("name", "left"), [("projected", 0), ("two_products", 0), ("both", 1),
                                            ("fed_back", 1)])  # fmt: skip
@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["plain", "everything"])
def test_only_products_that_a_state_waits_for_are_in_the_loop(
    name: str, left: int, options: dict[str, Any]
) -> None:
    made = plan(BOUND[name], torch.float32, **options)
    assert [count_products(program) for program in programs(made)] == [left] * 3
    naive = plan(BOUND[name], torch.float32, "fused", **options)
    assert min(map(count_products, programs(naive))) > left


def test_without_them_a_loop_is_scanned() -> None:
    for cell in (BOUND["projected"], BOUND["two_products"], cells.lru.bind(3, 4, {"states": 5})):
        made = plan(cell, torch.float32, recompute="functions")
        assert all(emit_scan(program) for program in programs(made)), cell.name


@needs_compiler
@pytest.mark.parametrize("compile", [compile_loops, shim_loops], ids=["cpp", "cuda"])
def test_loops_are_exact(compile: Any) -> None:
    cases = [CellCase(cell, **each) for cell in BOUND.values() for each in ({}, EVERYTHING)]
    check_loops(cases, "auto", compile)


@needs_compiler
def test_scans_are_exact() -> None:
    scanned = (BOUND["projected"], BOUND["two_products"], cells.lru.bind(3, 4, {"states": 5}))
    cases = [
        CellCase(cell, steps=9, recompute="functions", **each)
        for cell in scanned
        for each in ({}, {"resets": True, "reverse": True})
    ]
    check_loops(cases, "auto", functools.partial(shim_scans, warps=2, blocks=2))


@needs_compiler
@pytest.mark.parametrize("cell", [projected, two_products, both, fed_back, noisy, attended],
                         ids=lambda cell: cell.name)  # fmt: skip
def test_layers_equal_the_definition(cell: Any) -> None:
    found = {}
    for impl in ("reference", "cpp"):
        torch.manual_seed(3)
        layer = rnn.RNN(cell, 3, 4, num_layers=2, bidirectional=True, impl=impl,
                        dtype=torch.float64)  # fmt: skip
        x = torch.randn(6, 2, 3, dtype=torch.float64, requires_grad=True)
        torch.manual_seed(4)
        output, state = layer(x, lengths=torch.tensor([6, 4]))
        total = torch.stack([t.sin().sum() for t in (output, *state)]).sum()
        first = torch.autograd.grad(total, [x, *layer.parameters()], create_graph=True)
        second = torch.autograd.grad(torch.stack([g.square().sum() for g in first]).sum(), x)
        found[impl] = [output, *state, *first, *second]
    for ours, theirs in zip(found["cpp"], found["reference"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


@needs_compiler
def test_matrices_stay_in_registers() -> None:
    cell = attended.bind(3, 4, {})
    cases = [CellCase(cell, steps=9, recompute="functions", **each) for each in ({}, EVERYTHING)]
    check_loops(cases, "auto", shim_matrices)


def test_the_explanation_says_what_comes_after_the_loop() -> None:
    said = rnn.RNN(projected, 3, 4).explain()
    assert "after the loop, once for all steps: a product (4 to 4 features)" in said
    assert "before the loop backwards, once for all steps: " in said
    assert "after the loop, once" not in rnn.RNN(cells.gru, 3, 4).explain()
