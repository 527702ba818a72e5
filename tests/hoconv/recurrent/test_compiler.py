"""Every pass alone and every schedule: the same outputs and gradients as the cell on tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from hoconv import recurrent as rnn
from hoconv.recurrent import reference
from hoconv.recurrent.frontend.trace import trace
from hoconv.recurrent.ir import kinds
from hoconv.recurrent.ir.program import Group, Program
from hoconv.recurrent.ir.verify import VerificationError, verify
from hoconv.recurrent.ladder import SCHEDULES
from hoconv.recurrent.passes.combine import combine
from hoconv.recurrent.passes.dtypes import infer_dtypes
from hoconv.recurrent.passes.fuse import fuse
from hoconv.recurrent.passes.hoisting.hoist import hoist
from hoconv.recurrent.passes.hoisting.sink import sink
from hoconv.recurrent.passes.parts import take_parts
from hoconv.recurrent.passes.simplify import simplify
from hoconv.recurrent.runtime.interpret import Loop, interpret
from hoconv.recurrent.runtime.packing import pack
from hoconv.recurrent.schedule import plan
from hoconv.tools.testing.cells import CellCase
from hoconv.tools.testing.random_cells import random_cell
from tests.hoconv.recurrent.support import READY, bound, cell_case

CELLS = [*READY, *range(50)]
PROGRAMS = "inference", "forward", "backward"


def check_loops(
    cases: Sequence[CellCase],
    schedule: str,
    compile: Callable[[Mapping[str, Program]], Mapping[str, Loop]],
    change: Callable[[Program], Program] = lambda program: program,
) -> None:
    """Every case by compiled loops, all compiled at once: their headers take longest.

    Args:
        change: a pass that runs on each program before.
    """
    plans = [plan(case.cell, torch.float64, schedule, **case.options) for case in cases]
    for made in plans:  # which keeps its programs
        vars(made).update({name: change(getattr(made, name)) for name in PROGRAMS})
    programs = {
        f"{name}_{i}": getattr(made, name) for i, made in enumerate(plans) for name in PROGRAMS
    }
    loops = {programs[name]: loop for name, loop in compile(programs).items()}
    for case, made in zip(cases, plans):
        case.check_plan(made, loops.get)


@pytest.mark.parametrize("which", CELLS)
def test_every_pass_keeps_outputs_and_gradients(which: str | int) -> None:
    case = cell_case(which)
    program = trace(case.cell, training=True).program
    program = case.check(infer_dtypes(program, torch.float64))
    program = case.check(simplify(program))
    case.check(combine(program))
    case.check(fuse(program))
    program = case.check(hoist(program))
    program = case.check(combine(program))
    program = case.check(sink(program))
    program = case.check(fuse(program))
    case.check(take_parts(program))


@pytest.mark.parametrize("which", CELLS)
def test_the_gradient_is_that_of_the_cell(which: str | int) -> None:
    case = cell_case(which)
    for schedule in ("naive", "auto"):
        case.check_plan(plan(case.cell, torch.float64, schedule, **case.options))


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_wild_random_cells_are_exact_or_refused(first: int) -> None:
    refused = 0
    for seed in range(first, first + 20):
        try:
            cell = random_cell(seed, wild=True)
            case = cell_case(cell, masked=seed % 3 == 0, resets=seed % 2 == 0)
        except rnn.CellError:
            refused += 1
            continue
        for schedule in ("naive", "auto"):
            case.check_plan(plan(case.cell, torch.float64, schedule, **case.options))
    assert refused < 10


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("which", READY)
def test_every_schedule_gives_the_same(which: str, schedule: str) -> None:
    everything = {"masked": True, "resets": True, "reverse": True}
    for options in ({"masked": True}, {"reverse": True}, {"resets": True}, everything):
        case = cell_case(which, **options)
        case.check_plan(plan(case.cell, torch.float64, schedule, **case.options))


@pytest.mark.parametrize("which", ["layernorm_lstm", 4, 7])
def test_tensors_are_made_on_the_device_of_the_others(which: str | int) -> None:
    case = cell_case(which)
    made = plan(case.cell, torch.float64, "auto", **case.options)
    with torch.device("meta"):  # where tensors are that nobody gave a device
        case.check_plan(made)


def products(program: Program, region: str) -> list[tuple[str, tuple[int, ...]]]:
    """The products of a region, with their weights' shapes."""
    ops = [op for op in getattr(program, region) if not isinstance(op, Group)]
    return [(op.kind, op.values[1].type.shape) for op in ops if op.kind in kinds.PRODUCTS]


def kernels(program: Program, region: str) -> int:
    return sum(isinstance(item, Group) for item in getattr(program, region))


@pytest.mark.parametrize(
    ("which", "before", "step", "groups", "back", "back_groups"),
    [
        # All gates in one product before the loop, and one a step.
        ("lstm", [("linear", (16, 3))], [("linear", (16, 4))], 1, [("linear_t", (16, 4))], 1),
        ("gru", [("linear", (12, 3))], [("linear", (12, 4))], 1, [("linear_t", (12, 4))], 2),
        ("elman", [("linear", (4, 3))], [("linear", (4, 4))], 1, [("linear_t", (4, 4))], 1),
        # The second product of h depends on the first.
        (
            "minimal_gated", [("linear", (8, 3))], [("linear", (4, 4))] * 2, 2,
            [("linear_t", (4, 4))] * 2, 3,
        ),
        (
            "projected_lstm", [("linear", (16, 3))], [("linear", (16, 3)), ("linear", (3, 4))], 1,
            [("linear_t", (3, 4)), ("linear_t", (16, 3))], 2,
        ),
    ],
)  # fmt: skip
def test_a_step_has_as_few_products_and_kernels_as_can_be(
    which: str, before: list, step: list, groups: int, back: list, back_groups: int
) -> None:
    made = plan(bound(which), torch.float64)
    assert products(made.forward, "before") == before
    assert products(made.forward, "step") == step
    assert kernels(made.forward, "step") == groups
    assert products(made.backward, "step") == back
    assert kernels(made.backward, "step") == back_groups
    assert not [op for op in made.backward.step if getattr(op, "kind", "") in kinds.SUMS]


def test_the_rungs_of_the_ladder_add_one_thing_each() -> None:
    plans = {name: plan(bound("lstm"), torch.float64, name) for name in SCHEDULES}
    count = {n: (len(p.forward.step), len(products(p.forward, "step"))) for n, p in plans.items()}
    assert count["naive"][1] == 8
    assert count["combined"][1] == 2
    assert count["fused"] == (3, 2)
    assert count["hoisted"] == (2, 1)
    assert not plans["fused"].forward.before
    assert str(plans["auto"].forward) == str(plans["hoisted"].forward)


def saved(which: str, **options: Any) -> list[str]:
    """Returns what made each value that the forward steps save."""
    program = plan(bound(which), torch.float64, **options).forward
    made_by = {op.result: op.kind for item in program.step if isinstance(item, Group)
               for op in item.ops}  # fmt: skip
    sources = [y.source for y in program.yields if y.name.startswith("saved")]
    return [made_by.get(v, v.hint) for v in sources]


def test_what_is_cheap_is_computed_again_and_the_rest_saved() -> None:
    assert saved("lstm") == ["h", "c", "sigmoid", "sigmoid", "tanh", "sigmoid", "tanh"]
    assert saved("elman") == ["h"]  # the tanh is the output
    # f * h, an operand of a product, is a product of two that are saved.
    assert saved("minimal_gated") == ["h", "sigmoid", "tanh"]


def test_gradients_of_vectors_are_summed_in_the_loop() -> None:
    made = plan(bound("layernorm_lstm"), torch.float64).backward
    assert [y.sequence.type.size for y in made.yields] == [16]  # of the gates: products read it
    assert sum(s.total is not None for s in made.states) == 10
    assert not [s for s in plan(bound("lstm"), torch.float64).backward.states if s.total]


def test_masks_are_drawn_again_and_never_saved() -> None:
    @rnn.cell(state=("h",))
    def noisy(x: Any, h: Any) -> Any:
        h = rnn.dropout(rnn.tanh(rnn.linear("h", x, h)), 0.5)
        return h, dict(h=h)

    made = plan(noisy.bind(3, 4, {}), torch.float64, training=True)
    assert "keep(0.5, 0, 4)" in str(made.backward)
    assert {y.source.type.dtype for y in made.forward.yields} == {"f64"}
    assert "keep" not in str(plan(noisy.bind(3, 4, {}), torch.float64).forward)


def test_nothing_is_computed_twice_or_for_nothing() -> None:
    @rnn.cell(state=("h",))
    def wasteful(x: Any, h: Any) -> Any:
        rnn.exp(h)
        a, b = rnn.tanh(h + x), rnn.tanh(h + x)
        h = a * 1.0 + b
        return h, dict(h=h)

    program = simplify(infer_dtypes(trace(wasteful.bind(3, 3, {})).program, torch.float32))
    assert [getattr(op, "kind", "") for op in program.step] == ["add", "tanh", "add"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("which", READY)
def test_half_precision_is_computed_as_the_definition_says(which: str, dtype: torch.dtype) -> None:
    cell = bound(which)
    made = plan(cell, dtype, masked=True)
    for program in (made.inference, made.forward, made.backward):
        verify(program)
    parameters = {d.name: torch.randn(d.shape).to(dtype) for d in trace(cell).declarations}
    x, valid = torch.randn(4, 3, 3).to(dtype), torch.rand(4, 3, 1) < 0.7
    states = {name: torch.randn(3, n).to(dtype) for name, n in cell.state_sizes.items()}
    exact, finals = reference.recurrent(cell, x, list(states.values()), parameters, valid=valid)
    params = pack(made.inference, parameters)
    got, last = interpret(made.inference, params, {"x": x, "valid": valid}, states)
    torch.testing.assert_close(got["output"], exact, rtol=2e-2, atol=2e-2)
    for mine, definition in zip(last.values(), finals, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine.to(dtype), definition, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_programs_in_half_precision_read_nothing_that_is_not_there(schedule: str) -> None:
    seeded = (random_cell(seed) for seed in range(20))
    for cell in (*map(bound, READY), *seeded):
        made = plan(cell, torch.bfloat16, schedule, masked=True, resets=True)
        for program in (made.inference, made.forward, made.backward):
            verify(program)


def test_malformed_programs_are_found() -> None:
    program = plan(bound("lstm"), torch.float32, "hoisted").stages[2][1]
    backwards = replace(program, step=program.step[::-1])
    twice = replace(program, step=(*program.step, program.step[0]))
    for wrong, message in (
        (backwards, "reads what is not there"),
        (twice, "made twice"),
        (replace(program, step=()), "is not made in it"),
        (replace(program, results=(("output", program.step[0].result),)), "is not made"),  # pyright: ignore[reportAttributeAccessIssue]
    ):
        with pytest.raises(VerificationError, match=message):
            verify(wrong)


def test_explanations_say_what_a_plan_does() -> None:
    layer = rnn.RNN(rnn.lstm, 3, 4)
    said = layer.explain()
    assert said.splitlines() == [
        "layer 0: lstm, schedule auto: the fastest rung of the ladder: persistent where it can and "
        "is faster, else graph",
        "  before the loop, once for all steps: a product (3 to 16 features); 1 call",
        "  each step: a product (4 to 16 features), a kernel of 21 ops; 2 calls",
        "  each step backwards: a product (16 to 4 features), a kernel of 24 ops; 2 calls",
        "  after the loop backwards, once for all steps: the gradient of a weight (16 x 4), the "
        "gradient of a weight (16 x 3), a product (16 to 3 features), 1 sum for the gradients of "
        "vectors; 4 calls",
        "  next states: not affine: sigmoid of what depends on h",
        "  combined into one product: i, f, g, o of x",
        "  combined into one product: i, f, g, o of h",
        "  saved for backward: the state h, the state c, 3 results of sigmoid, 2 results of tanh; "
        "112 bytes a step and row",
        "  cpp: on a CPU, one call for all steps; on a GPU, op by op in PyTorch",
        "  cuda: forward: one kernel where blocks form clusters (compute capability 9.0 and later)",
        "  cuda: backward: one kernel where blocks form clusters (compute capability 9.0 and "
        "later)",
        "  cuda: else cuDNN's lstm, which keeps the weights on the chip in float32 with up to 192 "
        "hidden units; with lengths, resets or torch.compile as follows",
        "  cuda: graphs of up to 32 steps; each step 1 product and 1 kernel, backwards 1 product "
        "and 1 kernel",
    ]
    naive = rnn.RNN(rnn.lstm, 3, 4, schedule="naive").explain()
    assert "before the loop, once for all steps: nothing" in naive
    assert "13 kernels of one op each" in naive


@pytest.mark.parametrize(
    ("cell", "options", "why", "how"),
    [
        (rnn.lstm, {"dtype": torch.bfloat16}, "not cuDNN's lstm, which keeps", "graphs of up to"),
        (rnn.gru, {"schedule": "graph"}, "not cuDNN, which schedule auto", "graphs of up to"),
        (rnn.gru, {"schedule": "hoisted"}, "not cuDNN, which schedule auto", "launches one by one"),
        (rnn.minimal_gated, {}, "not cuDNN: the cell is not exactly", "each step 2 products and 2"),
    ],
)
def test_explanations_say_what_a_gpu_runs(
    cell: rnn.Cell, options: dict[str, Any], why: str, how: str
) -> None:
    *_, first, second = rnn.RNN(cell, 3, 4, **options).explain().splitlines()
    assert first.startswith(f"  cuda: {why}")
    assert how in second
