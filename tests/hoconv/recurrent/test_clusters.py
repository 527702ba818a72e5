"""Kernels that keep a layer's weights on the chip: clusters of blocks, in float64 on a CPU."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hoconv import jit
from hoconv import recurrent as rnn
from hoconv.jit import BuildError, nvrtc
from hoconv.jit.generated import compile_cuda
from hoconv.recurrent.codegen.cluster.kernel import emit_cluster
from hoconv.recurrent.codegen.cluster.layout import SHARED_BYTES, ClusterLayout, ClusterShape
from hoconv.recurrent.compiled_plan import CompiledPlan
from hoconv.recurrent.frontend.cell import BoundCell, Cell
from hoconv.recurrent.frontend.serialize import to_text
from hoconv.recurrent.frontend.trace import trace
from hoconv.recurrent.ir.program import Program, Value, flat
from hoconv.recurrent.ir.verify import verify
from hoconv.recurrent.passes.cluster.distribute import distribute, refuse
from hoconv.recurrent.passes.cluster.reciprocals import take_reciprocals
from hoconv.recurrent.plans import find_plan, request
from hoconv.recurrent.runtime import clusters
from hoconv.recurrent.runtime.clusters import CAPABILITY, H200, Clusters
from hoconv.recurrent.runtime.cuda import CudaLoop
from hoconv.recurrent.runtime.interpret import interpret
from hoconv.recurrent.runtime.packing import pack
from hoconv.recurrent.schedule import Plan, plan
from hoconv.tools.testing.cells import run_program
from tests.hoconv.recurrent.cluster_shim import shim_clusters
from tests.hoconv.recurrent.support import READY, bound, cell_case, gradients

needs_compiler = pytest.mark.skipif(
    jit.obstacle("cpu") is not None, reason=str(jit.obstacle("cpu"))
)
needs_nvrtc = pytest.mark.skipif(nvrtc.obstacle() is not None, reason=str(nvrtc.obstacle()))
needs_clusters = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < CAPABILITY,
    reason="no GPU whose blocks form clusters",
)

# Blocks, rows and warps; what the steps have; whether the last thread runs first.
WAYS: list[tuple[ClusterShape, dict[str, Any], bool]] = [
    (ClusterShape(1, 2, 2), {}, False),
    (ClusterShape(2, 3, 2), {"masked": True}, False),
    (ClusterShape(4, 1, 2), {"resets": True, "reverse": True}, True),
    (ClusterShape(2, 2, 2), {"masked": True, "recompute": "all"}, False),
]
# The same of teams of two clusters, whose last blocks have no features of 20.
TEAMS: list[tuple[ClusterShape, dict[str, Any], bool]] = [
    (ClusterShape(2, 3, 2, 2), {"masked": True}, False),
    (ClusterShape(4, 1, 2, 2), {"resets": True, "reverse": True}, True),
    (ClusterShape(2, 2, 2, 2), {"masked": True, "recompute": "all"}, True),
]


@rnn.cell(state=("h",))
def heads(x: Any, h: Any) -> Any:
    """Two heads, which are products of parts of the state; their results are concatenated."""
    first, second = rnn.chunk(h, 2)
    n = first.shape[-1]
    new = rnn.cat(rnn.linear("first", first, size=n), rnn.linear("second", second, size=n))
    h = rnn.tanh(rnn.linear("x", x) + new * rnn.mean(new))
    return h, dict(h=h)


@rnn.cell(state={"h": "hidden_size", "s": 1})
def scalars(x: Any, h: Any, s: Any) -> Any:
    """Products of one feature, and of a concatenation with one."""
    s = rnn.tanh(rnn.linear("s", h, size=1) + s)
    h = rnn.tanh(rnn.linear("h", x, rnn.cat(h, s)) * s)
    return rnn.cat(s, h), dict(h=h, s=s)


@rnn.cell(state=("h", "c"))
def shifted(x: Any, h: Any, c: Any) -> Any:
    """States change places; a product has a bias, is read whole and in overlapping parts."""
    y = rnn.linear("y", h, size=2 * h.shape[-1])
    n = h.shape[-1]
    new = rnn.tanh(y[:, :n] * y[:, 1 : n + 1] + rnn.linear("x", x) + rnn.sum(y))
    return new + c, dict(h=c, c=new)


@rnn.cell(state=("h",))
def deep(x: Any, h: Any) -> Any:
    """Three products, one after another; the second has another size."""
    new = rnn.tanh(rnn.linear("x", x) + rnn.linear("a", h))
    new = rnn.tanh(rnn.linear("b", new, size=7))
    h = rnn.zoneout(rnn.layer_norm("norm", rnn.linear("c", new)), h, 0.3)
    return h, dict(h=h)


@rnn.cell(state={"h": "hidden_size", "old": 1, "new": 1})
def delayed(x: Any, h: Any, old: Any, new: Any) -> Any:
    """States of one feature, which vectors read two steps later; they divide by one, too."""
    h, gate = rnn.tanh(rnn.linear("h", x, h) * old), rnn.sigmoid(rnn.linear("gate", x, h, size=1))
    return h / (1 + gate * gate), dict(h=h, old=new, new=gate)


OWN: list[Cell] = [heads, scalars, shifted, deep, delayed]


def of(cell: Cell, hidden_size: int = 4) -> BoundCell:
    return cell.bind(3, hidden_size, {})


# With 20 features, each of several blocks has some. In the last one, products read parts of the
# gathered state in place.
EVERYTHING = [
    *(of(cell, 20) for cell in OWN), *(bound(name, 3, 20) for name in READY), *range(8),
    of(heads, 64),
]  # fmt: skip


def programs(made: Plan) -> dict[str, Program]:
    return {name: getattr(made, name) for name in ("inference", "forward", "backward")}


def check(
    which: list[Any],
    way: tuple[ClusterShape, dict[str, Any], bool],
    most_shared_bytes: int = SHARED_BYTES,
) -> None:
    """Every cell on a stand-in for a GPU; all kernels are compiled at once."""
    shape, options, backwards = way
    cases = [cell_case(each, **options) for each in which]
    plans = [plan(case.cell, torch.float64, "persistent", **case.options) for case in cases]
    named = {
        f"{name}_{i}": program
        for i, made in enumerate(plans)
        for name, program in programs(made).items()
        if not refuse(program)
    }
    found = shim_clusters(named, shape, backwards, most_shared_bytes)
    loops = {named[n]: loop for n, loop in found.items()}
    for case, made in zip(cases, plans, strict=True):
        case.check_plan(made, loops.get)


@needs_compiler
@pytest.mark.parametrize("way", range(len(WAYS)))
def test_clusters_are_exact(way: int) -> None:
    check(EVERYTHING[way :: len(WAYS)], WAYS[way])


@needs_compiler
@pytest.mark.parametrize(
    "way", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, len(TEAMS)))]
)
def test_teams_are_exact(way: int) -> None:
    check(EVERYTHING[way :: len(TEAMS)], TEAMS[way])


@needs_compiler
@pytest.mark.parametrize(
    "way", [WAYS[1], *(pytest.param(each, marks=pytest.mark.slow) for each in TEAMS[:2])]
)
def test_what_comes_from_the_l2_cache_is_exact(
    way: tuple[ClusterShape, dict[str, Any], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hoconv.recurrent.codegen.cluster.layout._SPREAD_BYTES", 0)
    check([*(of(cell, 20) for cell in (rnn.lstm, rnn.layernorm_lstm, heads, deep)), 0, 1], way)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("way", [*WAYS, *TEAMS])
def test_more_random_cells_are_exact(way: tuple[ClusterShape, dict[str, Any], bool]) -> None:
    first = 8 + 10 * [*WAYS, *TEAMS].index(way)
    check([*range(first, first + 10)], way)


@needs_compiler
def test_weights_that_a_block_has_no_room_for_are_read_at_every_step() -> None:
    check([of(rnn.lstm, 64)], (ClusterShape(1, 3, 2), {}, False), most_shared_bytes=0)
    # Some in registers, some in shared memory, some in global memory.
    check([of(rnn.gru, 64)], (ClusterShape(1, 3, 2), {}, False), most_shared_bytes=1 << 16)


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("cell", "shape", "most_shared_bytes"),
    [
        (of(rnn.lstm, 20), ClusterShape(2, 3, 2), SHARED_BYTES),
        (of(rnn.gru, 40), ClusterShape(1, 11, 2), SHARED_BYTES),
        (of(rnn.layernorm_lstm, 72), ClusterShape(2, 2, 4), SHARED_BYTES),
        (of(heads, 64), ClusterShape(2, 9, 2), SHARED_BYTES),
        (of(rnn.lstm, 160), ClusterShape(1, 3, 2), 1 << 16),
        (of(rnn.coupled_lstm, 200), ClusterShape(1, 9, 2), 0),
        # Four warps multiply together; also some rows of weights that there are not.
        (of(rnn.lstm, 20), ClusterShape(2, 19, 4), SHARED_BYTES),
        (of(rnn.gru, 120), ClusterShape(1, 17, 8), 1 << 17),
        (of(rnn.lstm, 160), ClusterShape(1, 22, 4), 1 << 16),
    ],
    ids=lambda each: each.name if isinstance(each, BoundCell) else "",
)
def test_tensor_cores_multiply_what_they_should(
    cell: BoundCell, shape: ClusterShape, most_shared_bytes: int, dtype: torch.dtype
) -> None:
    check_tensor_cores(cell, shape, dtype, False, most_shared_bytes)


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize(
    ("cell", "shape", "most_shared_bytes"),
    [
        (of(rnn.lstm, 50), ClusterShape(4, 3, 2, 2), SHARED_BYTES),
        (of(rnn.gru, 40), ClusterShape(2, 11, 2, 2), SHARED_BYTES),
        (of(rnn.layernorm_lstm, 64), ClusterShape(2, 2, 4, 2), SHARED_BYTES),
        (of(rnn.peephole_lstm, 20), ClusterShape(2, 3, 2, 2), SHARED_BYTES),
        (of(rnn.lstm, 60), ClusterShape(2, 3, 8, 2), SHARED_BYTES),  # warps split K, too
        (of(heads, 64), ClusterShape(2, 9, 2, 2), SHARED_BYTES),
        (of(rnn.coupled_lstm, 300), ClusterShape(2, 3, 2, 2), 1 << 16),
        (of(rnn.lstm, 60), ClusterShape(2, 22, 8, 2), SHARED_BYTES),  # four warps together
        (of(rnn.lstm, 300), ClusterShape(2, 18, 8, 2), 1 << 17),
    ],
    ids=lambda each: each.name if isinstance(each, BoundCell) else "",
)
def test_tensor_cores_of_teams_multiply_halves_as_they_come(
    cell: BoundCell, shape: ClusterShape, most_shared_bytes: int, backwards: bool
) -> None:
    check_tensor_cores(cell, shape, torch.bfloat16, backwards, most_shared_bytes)


def check_tensor_cores(
    cell: BoundCell, shape: ClusterShape, dtype: torch.dtype, backwards: bool,
    most_shared_bytes: int,
) -> None:  # fmt: skip
    torch.manual_seed(0)
    made, T, B = plan(cell, dtype, "persistent"), 4, 4
    loops = shim_clusters(programs(made), shape, backwards, most_shared_bytes)
    parameters = {
        d.name: (torch.randn(d.shape) * d.shape[-1] ** -0.5).to(dtype) for d in made.declarations
    }
    drawn = {"x": torch.randn(T, B, 3).to(dtype)}
    for which, program in programs(made).items():
        params = pack(program, parameters)
        drawn["d_output"] = torch.randn(T, B, made.forward.results[0][1].type.size).to(dtype)
        given = {name: drawn[name] for name, _ in program.sequences}
        states = {
            s.name: torch.randn(B, s.value.type.size) for s in program.states if s.total is None
        }
        exact, last = interpret(program, params, given, states)
        found = run_program(program, given, states, parameters, None, loops[which])
        torch.testing.assert_close(found, exact | last, rtol=3e-2, atol=3e-2)
        drawn |= exact


@needs_compiler
@pytest.mark.parametrize("reverse", [False, True])
def test_nothing_is_written_beside_a_buffer(reverse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    case = cell_case("layernorm_lstm", reverse=reverse)
    made = plan(case.cell, torch.float64, "persistent", **case.options)
    loops = shim_clusters(programs(made), ClusterShape(2, 2, 2))
    beside, width = [], 256

    def make(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        whole = torch.ones(math.prod(shape) + 2 * width, dtype=dtype)
        beside.extend((whole[:width], whole[-width:]))
        return whole[width:-width].view(shape)

    monkeypatch.setattr("hoconv.recurrent.runtime.pages.allocate", make)
    by_program = {program: loops[name] for name, program in programs(made).items()}
    case.check_plan(made, by_program.get)
    assert len(beside) > 20
    assert all(bool((t == 1).all()) for t in beside)


@needs_compiler
def test_what_an_earlier_launch_has_left_in_a_mailbox_is_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = cell_case("lstm")
    made = plan(case.cell, torch.float64, "persistent", **case.options)
    loops = shim_clusters(programs(made), ClusterShape(2, 2, 2, 2))
    empty = Tensor.new_empty

    def make(self: Tensor, *shape: Any, **options: Any) -> Tensor:
        found = empty(self, *shape, **options)
        if found.dtype == torch.uint8:
            found.view(torch.int32).fill_(1)  # the number of the first exchange
        return found

    monkeypatch.setattr(Tensor, "new_empty", make)
    by_program = {program: loops[name] for name, program in programs(made).items()}
    case.check_plan(made, by_program.get)


@pytest.fixture(params=[1, 2], ids=["clusters", "teams"])
def _both_on_a_stand_in(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Layers with two directions run both in one kernel, on a stand-in for a GPU."""

    def make(made: CompiledPlan, which: str) -> Any:
        shape = ClusterShape(2, 2, 2, request.param)
        return shim_clusters({which: made.program(which)}, shape, which == "backward", runs=2)[
            which
        ]

    find_plan.cache_clear()
    monkeypatch.setattr(CompiledPlan, "_cuda", make)
    monkeypatch.setattr(CompiledPlan, "keeps_weights", lambda _, which, x, directions: True)
    monkeypatch.setattr("hoconv.recurrent.layers.resolve", lambda name, impl, *_: impl)
    yield
    find_plan.cache_clear()


@needs_compiler
@pytest.mark.usefixtures("_both_on_a_stand_in")
@pytest.mark.parametrize(
    ("name", "layers", "recompute"),
    [("lstm", 2, False), ("projected_lstm", 1, False), ("minimal_gated", 1, True)],
)
def test_both_directions_in_one_kernel_equal_the_definition(
    name: str, layers: int, recompute: bool
) -> None:
    cell, options = READY[name]
    found = []
    torch.manual_seed(0)
    T, B = 4, 3
    x, reset = torch.randn(T, B, 3, dtype=torch.float64), torch.rand(T, B) < 0.3
    for impl in ("reference", "cuda"):
        made = rnn.RNN(cell, 3, 20, layers, True, impl=impl, recompute=recompute, **options)
        made = made.double()
        sizes = made.runs[0][0].state_sizes.values()
        torch.manual_seed(1)
        made.reset_parameters()
        states = [torch.randn(2 * layers, B, n, dtype=torch.float64) for n in sizes]
        given = tuple(states) if len(states) > 1 else states[0]
        found.append(gradients(made, x, given, [3, 1, 4], reset=reset))
        with torch.no_grad():
            found[-1].append(made(x)[0])
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


@needs_compiler
@pytest.mark.usefixtures("_both_on_a_stand_in")
def test_both_directions_in_one_kernel_have_noise_of_their_own_and_gradients_of_gradients() -> None:
    @rnn.cell(state=("h",))
    def noisy(x: Any, h: Any) -> Any:
        h = rnn.tanh(rnn.linear("i", rnn.dropout(x, 0.3), rnn.dropout(h, 0.5)))
        return h, dict(h=h)

    x = torch.ones(4, 2, 3, dtype=torch.float64, requires_grad=True)
    found = []
    for impl in ("reference", "cuda"):
        torch.manual_seed(2)
        made = rnn.RNN(noisy, 3, 6, bidirectional=True, impl=impl, dtype=torch.float64)
        output, state = made(x)
        leaves = [x, *made.parameters()]
        loss = output.sin().sum() + state.sum()
        first = torch.autograd.grad(loss, leaves, retain_graph=True, create_graph=True)
        once = torch.autograd.grad(output[0].sum(), leaves, retain_graph=True)  # a part of it
        second = torch.autograd.grad(torch.stack([g.square().sum() for g in first]).sum(), leaves)
        found.append([output, *first, *once, *second])
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


def exchanges(cell: BoundCell) -> tuple[int, int]:
    made = plan(cell, torch.float32)
    return distribute(made.forward).exchanges, distribute(made.backward).exchanges


def test_a_step_has_as_many_exchanges_as_products_and_sums_follow_each_other() -> None:
    assert exchanges(bound("lstm")) == exchanges(bound("gru")) == (1, 1)
    assert exchanges(bound("minimal_gated")) == exchanges(bound("projected_lstm")) == (2, 2)
    assert exchanges(bound("layernorm_lstm")) == (3, 3)  # h, sums of gates, sums of c
    assert exchanges(of(deep))[0] == 4


@pytest.mark.parametrize("which", ["layernorm_lstm", *range(12)])
def test_vectors_are_multiplied_by_reciprocals(which: str | int) -> None:
    case = cell_case(which)
    made = plan(case.cell, torch.float64, "combined", training=True)
    forward, backward = map(take_reciprocals, (made.forward, made.backward))
    divisions = [op for p in (forward, backward) for op in flat(p.step) if op.kind == "div"]
    assert not any(
        op.result.type.size > 1 and isinstance(by, Value) and by.type.size == 1
        for op in divisions
        for by in op.inputs[1:]
    )
    assert divisions or which != "layernorm_lstm"
    for changed in (forward, backward):
        verify(changed)
    case.check(take_reciprocals(made.inference))


def test_blocks_send_the_smaller_of_operand_and_result() -> None:
    made = plan(bound("lstm"), torch.bfloat16)
    (forward,), (backward,) = (distribute(p).products for p in (made.forward, made.backward))
    assert forward.gathered  # h, not four gates
    assert backward.gathered is None  # the gradient of h, not of four gates
    assert distribute(made.backward, alone=True).products[0].gathered  # alone: nothing is sent


def choose(made: Plan, B: int, always: bool = False) -> list[Any]:
    return [Clusters(p, always).choose(B, H200) for p in programs(made).values()]


def test_weights_lie_in_registers_where_they_fit() -> None:
    for layout in choose(plan(rnn.lstm.bind(512, 512, {}), torch.bfloat16), 64):
        assert layout.register_bytes > 1 << 16
        assert layout.kept_bytes == 0
        assert layout.shape.blocks == 16
        assert layout.shared_bytes <= H200.shared_bytes
    for layout in choose(plan(rnn.lstm.bind(32, 32, {}), torch.bfloat16), 64):
        assert layout.shape.blocks == 1


def test_a_team_has_the_weights_that_a_cluster_has_no_room_for() -> None:
    made = plan(rnn.lstm.bind(1024, 1024, {}), torch.bfloat16)
    weights = 2 * 4 * 1024 * 1024
    for layout in choose(made, 64):
        assert layout.shape.members == 32
        assert layout.far_bytes == 0
        assert 32 * (layout.register_bytes + layout.kept_bytes) == weights
        assert layout.shared_bytes <= H200.shared_bytes


def test_all_teams_run_at_the_same_time() -> None:
    clusters = Clusters(plan(rnn.lstm.bind(1024, 1024, {}), torch.bfloat16).forward, always=True)

    def has_teams(B: int, runs: int, resident: int) -> bool:
        chip = dataclasses.replace(H200, resident=((8, 15), (16, resident)))
        found = clusters.choose(B, chip, runs)
        return isinstance(found, ClusterLayout) and found.shape.clusters == 2

    assert has_teams(66, 1, 7)
    assert not has_teams(67, 1, 7)
    assert has_teams(22, 2, 7)
    assert not has_teams(23, 2, 7)
    assert has_teams(22, 1, 2)
    assert not has_teams(1, 1, 1)


def test_two_directions_share_the_chip() -> None:
    made, strict = (
        Clusters(plan(rnn.lstm.bind(512, 512, {}), dtype).forward, always=False)
        for dtype in (torch.bfloat16, torch.float32)
    )
    for B in (1, 16, 64):
        alone, both = (made.choose(B, H200, runs) for runs in (1, 2))
        assert not isinstance(alone, str)
        assert not isinstance(both, str)
        assert 2 * -(-B // both.shape.rows) <= dict(H200.resident)[both.shape.blocks]
        assert (both.shape == alone.shape) == (B == 1)
    # One direction has the chip at work.
    assert strict.choose(64, H200, 2) == "one after the other is faster"


def test_it_is_said_why_a_kernel_cannot_keep_the_weights_or_should_not() -> None:
    large = plan(rnn.lstm.bind(8, 20_000, {}), torch.bfloat16)
    reason = "what 16 multiprocessors exchange does not fit their shared memory"
    assert set(choose(large, 64)) == {reason}
    many = plan(rnn.lstm.bind(512, 512, {}), torch.bfloat16)
    assert set(choose(many, 4096)) == {"graphs are faster for so many rows"}
    assert not any(isinstance(layout, str) for layout in choose(many, 4096, always=True))

    @rnn.cell(state=("h",))
    def independent(x: Any, h: Any) -> Any:
        h = rnn.relu(rnn.linear("x", x) + rnn.parameter("u") * h)
        return h, dict(h=h)

    assert refuse(plan(of(independent), torch.float32).forward) == "its steps have no product"


@pytest.mark.slow
@needs_nvrtc
@pytest.mark.parametrize("architecture", ["sm_90a", "sm_100a", "sm_120a"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernels_compile(dtype: torch.dtype, architecture: str) -> None:
    made = plan(rnn.layernorm_lstm.bind(64, 64, {}), dtype)
    shapes = (
        ClusterShape(1, 2, 8), ClusterShape(2, 10, 8), ClusterShape(4, 10, 8, 2),
        ClusterShape(16, 22, 8, 2),
    )  # fmt: skip
    for program in (made.forward, made.backward):
        for shape in shapes:
            layout = ClusterLayout(distribute(program, shape.blocks == 1), shape)
            compile_cuda("recurrent", emit_cluster(layout).text, architecture)


def test_the_kernel_of_the_backward_pass_is_compiled_beside_that_of_the_forward_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled: list[str] = []

    def keep(_: str, text: str, architecture: str) -> None:
        compiled.append(text)
        raise BuildError("whoever runs the kernel is told")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: CAPABILITY)
    monkeypatch.setattr(clusters, "_describe", lambda _: H200)
    monkeypatch.setattr(clusters, "compile_cuda", keep)
    cell = to_text(trace(rnn.peephole_lstm.bind(48, 48, {})))
    made = find_plan.__wrapped__(request(cell, torch.float32, "auto", False, False, False))  # anew
    loop = made.cuda_loop("forward").clusters
    assert loop is not None
    assert isinstance(loop.find(4, torch.device("cuda", 0)), ClusterLayout)
    for thread in threading.enumerate():
        if thread.name == clusters.BESIDE:
            thread.join()
    (text,) = compiled
    backward = made.cuda_loop("backward").clusters
    assert backward is not None
    layout = backward.choose(4, H200)
    assert isinstance(layout, ClusterLayout)
    assert text == emit_cluster(layout, 1).text


def test_explain_says_which_loops_are_one_kernel_and_why_others_are_not() -> None:
    where = "where blocks form clusters (compute capability 9.0 and later)"
    said = rnn.RNN(rnn.peephole_lstm, 512, 512, dtype=torch.bfloat16).explain()
    assert f"forward: one kernel {where}\n" in said
    both = rnn.RNN(rnn.lstm, 512, 512, dtype=torch.bfloat16, bidirectional=True).explain()
    assert f"forward: one kernel for both directions at once {where}\n" in both
    said = rnn.RNN(rnn.lstm, 2048, 2048).explain()
    assert "backward: not one kernel, since graphs are faster for so many rows" in said


# On a GPU


@pytest.fixture
def _strict() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


class Forced(Clusters):
    """Kernels of one shape."""

    def __init__(self, program: Program, shape: ClusterShape) -> None:
        super().__init__(program, always=True)
        self.shape = shape

    def find(self, B: int, device: torch.device) -> Any:
        return refuse(self.program) or self._make_layout(self.shape, H200.shared_bytes)


@pytest.mark.gpu
@needs_clusters
@pytest.mark.parametrize("way", range(len(WAYS + TEAMS)))
@pytest.mark.parametrize("which", EVERYTHING, ids=lambda each: getattr(each, "name", str(each)))
def test_clusters_are_exact_on_a_gpu(which: Any, way: int) -> None:
    shape, options, _ = (WAYS + TEAMS)[way]
    case = cell_case(which, "cuda", **options)
    made = plan(case.cell, torch.float64, "persistent", **case.options)
    case.check_plan(made, lambda program: CudaLoop(program, True, Forced(program, shape)))


def both(made: rnn.RNN, x: Tensor, *arguments: Any) -> list[Tensor]:
    return gradients(made, x, *arguments)


def error(got: list[Tensor], exact: list[Tensor]) -> float:
    return max(
        ((a.double() - b).norm() / b.norm().clamp_min(1e-30)).item()
        for a, b in zip(got, exact, strict=True)
    )


SIZED = [
    ("lstm", torch.bfloat16, 20, 64, 512), ("lstm", torch.float16, 20, 9, 256),
    ("lstm", torch.float32, 20, 33, 128), ("lstm", torch.float32, 10, 12, 512),
    ("gru", torch.bfloat16, 20, 5, 100), ("gru", torch.float32, 20, 70, 40),
    ("layernorm_lstm", torch.bfloat16, 12, 20, 384), ("layernorm_lstm", torch.float32, 12, 20, 256),
    ("minimal_gated", torch.bfloat16, 12, 40, 256), ("lstm", torch.bfloat16, 12, 16, 768),
    ("lstm", torch.bfloat16, 3, 200, 512), ("peephole_lstm", torch.float32, 1, 1, 17),
    # Teams of two clusters.
    ("lstm", torch.bfloat16, 20, 64, 1024), ("gru", torch.bfloat16, 9, 33, 1000),
    ("lstm", torch.float16, 6, 20, 1024), ("layernorm_lstm", torch.bfloat16, 6, 16, 1024),
    ("peephole_lstm", torch.bfloat16, 6, 60, 900), ("coupled_lstm", torch.bfloat16, 6, 9, 1024),
    ("gru", torch.float32, 6, 9, 768), ("minimal_gated", torch.float32, 6, 5, 1024),
    # Weights that registers and shared memory do not hold.
    ("lstm", torch.bfloat16, 6, 70, 1024), ("lstm", torch.float32, 6, 9, 1024),
]  # fmt: skip


@pytest.mark.gpu
@needs_clusters
@pytest.mark.usefixtures("_strict")
@pytest.mark.parametrize(("name", "dtype", "T", "B", "H"), SIZED)
def test_errors_are_no_larger_than_those_of_graphs(
    name: str, dtype: torch.dtype, T: int, B: int, H: int
) -> None:
    cell, options = READY[name]

    def layer(schedule: str, own: torch.dtype) -> rnn.RNN:
        torch.manual_seed(0)
        made = rnn.RNN(
            cell, H, H, impl="cuda", schedule=schedule, device="cuda", dtype=dtype, **options
        )
        return made.to(own)

    ours = layer("persistent", dtype)
    x = torch.randn(T, B, H, device="cuda", dtype=dtype)
    exact = both(layer("graph", torch.float64), x.double())
    got = both(ours, x)
    assert error(got, exact) <= 1.5 * error(both(layer("graph", dtype), x), exact)
    assert all(map(torch.equal, got, both(ours, x)))  # the same bits


@pytest.mark.gpu
@needs_clusters
def test_cudnn_is_not_called_where_a_kernel_keeps_the_weights() -> None:
    made = rnn.LSTM(8, 8, impl="cuda", device="cuda")
    assert "Cudnn" not in str(made(torch.randn(3, 2, 8, device="cuda"))[0].grad_fn)


@pytest.mark.gpu
@needs_clusters
@pytest.mark.parametrize(("dtype", "n"), [(torch.float32, 64), (torch.bfloat16, 1024)])
def test_a_callers_graph_replays_the_kernel_for_new_inputs(dtype: torch.dtype, n: int) -> None:
    made = rnn.RNN(rnn.lstm, n, n, impl="cuda", device="cuda", dtype=dtype)
    x = torch.randn(9, 6, n, device="cuda", dtype=dtype)
    with torch.no_grad():
        made(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = made(x)[0]
        x.normal_()
        graph.replay()
        assert torch.equal(output, made(x)[0])


@pytest.mark.gpu
@needs_clusters
@pytest.mark.usefixtures("_strict")
@pytest.mark.parametrize("which", READY)
def test_both_directions_at_once_equal_the_definition_on_a_gpu(which: str) -> None:
    cell, options = READY[which]
    found = []
    x, reset = torch.randn(5, 9, 3).double().cuda(), torch.rand(5, 9).cuda() < 0.3
    for impl in ("reference", "cuda"):
        torch.manual_seed(1)
        made = rnn.RNN(cell, 3, 20, 2, True, impl=impl, schedule="persistent", **options)
        made = made.double().cuda()
        lengths = [5, 1, 4, 2, 3, 5, 5, 1, 2]
        found.append(both(made, x, None, lengths, reset) + both(made, x))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


@pytest.mark.gpu
@needs_clusters
@pytest.mark.parametrize(("name", "dtype", "T", "B", "H"), SIZED)
def test_both_directions_at_once_give_what_they_give_one_after_the_other(
    name: str, dtype: torch.dtype, T: int, B: int, H: int
) -> None:
    cell, options = READY[name]
    made = rnn.RNN(
        cell, H, H, bidirectional=True, schedule="persistent", impl="cuda", device="cuda",
        dtype=dtype, **options,
    )  # fmt: skip
    x = torch.randn(T, B, H, device="cuda", dtype=dtype)
    got = both(made, x)
    assert all(map(torch.equal, got, both(made, x)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hoconv.recurrent.directions._find_plan", lambda *_: None)
        alone = both(made, x)
    # Blocks and warps, and so the order of sums, may be others for two.
    limit = 1e-4 if dtype == torch.float32 else 2e-2
    assert error(got, [t.double() for t in alone]) < limit


@pytest.mark.gpu
@needs_clusters
def test_a_callers_graph_replays_both_directions_of_a_training_step() -> None:
    made = rnn.RNN(rnn.lstm, 64, 64, 2, True, impl="cuda", device="cuda")
    x, parameters = torch.randn(9, 6, 64, device="cuda"), tuple(made.parameters())
    leaf = x.clone().requires_grad_()
    both(made, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = made(leaf)[0]
        found = torch.autograd.grad(output.square().sum(), (leaf, *parameters))
        output = output.detach()
    with torch.no_grad():
        leaf.copy_(torch.randn_like(x))
    graph.replay()
    fresh = leaf.detach().clone().requires_grad_()
    expected = made(fresh)[0]
    wanted = torch.autograd.grad(expected.square().sum(), (fresh, *parameters))
    assert torch.equal(output, expected)
    assert all(map(torch.equal, found, wanted))


@pytest.mark.gpu
@needs_clusters
@pytest.mark.parametrize("launches", [100, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("n", "B", "bidirectional"),
    # Of 1024 units, 3 teams of two clusters, and one of each direction.
    [(512, 64, False), (512, 64, True), (1024, 64, False), (1024, 22, True)],
)
def test_kernels_of_several_streams_share_a_busy_gpu(
    n: int, B: int, bidirectional: bool, launches: int
) -> None:
    made = rnn.RNN(
        rnn.lstm, n, n, bidirectional=bidirectional, impl="cuda", device="cuda",
        dtype=torch.bfloat16,
    )  # fmt: skip
    x = torch.randn(20, B, n, device="cuda", dtype=torch.bfloat16)
    busy = torch.randn(4096, 4096, device="cuda")
    filling, *streams = (torch.cuda.Stream() for _ in range(3))
    with torch.no_grad():
        expected = made(x)[0]
        wrong = torch.zeros(len(streams), dtype=torch.int64, device="cuda")
        torch.cuda.synchronize()
        for _ in range(launches // len(streams)):
            with torch.cuda.stream(filling):
                torch.mm(busy, busy)
            for count, stream in zip(wrong, streams, strict=True):
                with torch.cuda.stream(stream):
                    count += (made(x)[0] != expected).any()
        torch.cuda.synchronize()
    assert wrong.tolist() == [0, 0]
