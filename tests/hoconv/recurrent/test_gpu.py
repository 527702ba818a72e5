"""The loop on a GPU: every cell, rung and dtype, and graphs that serve more than one call."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from hoconv import recurrent as rnn
from hoconv.dispatch.implementations import resolve
from hoconv.recurrent import cells
from hoconv.recurrent.compiled_plan import CompiledPlan
from hoconv.recurrent.frontend.cell import BoundCell
from hoconv.recurrent.ladder import SCHEDULES
from hoconv.recurrent.plans import find_plan
from hoconv.recurrent.runtime.cuda import CudaLoop, obstacle
from hoconv.recurrent.runtime.workspace import Workspace
from hoconv.recurrent.schedule import plan
from tests.hoconv.recurrent.definitions import DEFINITIONS
from tests.hoconv.recurrent.support import (
    READY,
    cell_case,
    check_many_gradients,
    gradients,
    layer,
    sequence,
)
from tests.hoconv.recurrent.test_cells import OPTIONS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and obstacle() is not None, reason=str(obstacle())
    ),
]


@pytest.fixture(autouse=True)
def _products_of_float32_are_float32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def check(which: str | int | BoundCell, schedule: str = "auto", **options: Any) -> None:
    case = cell_case(which, "cuda", **options)
    made = plan(case.cell, torch.float64, schedule, **case.options)
    case.check_plan(made, lambda program: CudaLoop(program, schedule in ("graph", "auto")))


@pytest.mark.parametrize("which", READY)
def test_ready_cells_are_exact(which: str) -> None:
    check(which, masked=True)
    check(which, reverse=True)
    check(which, masked=True, resets=True, reverse=True)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", DEFINITIONS)
def test_cells_of_the_library_are_exact(name: str, schedule: str) -> None:
    bound = getattr(cells, name).bind(5, 4, OPTIONS.get(name, {}))
    check(bound, schedule, masked=True)
    check(bound, schedule, resets=True, reverse=True, recompute="all")
    check(bound, schedule, recompute="functions")


@pytest.mark.parametrize("which", range(12))
def test_random_cells_are_exact(which: int) -> None:
    check(which, reverse=which % 2 == 1)


@pytest.mark.slow
@pytest.mark.parametrize("which", range(12, 50))
def test_more_random_cells_are_exact(which: int) -> None:
    check(which, reverse=which % 2 == 1)


@pytest.mark.parametrize("schedule", rnn.SCHEDULES)
@pytest.mark.parametrize("which", ["lstm", "minimal_gated", "layernorm_lstm"])
def test_every_schedule_is_exact(which: str, schedule: str) -> None:
    check(which, schedule)


def pair(name: str, impl: str = "cuda", **arguments: Any) -> tuple[rnn.RNN, rnn.RNN]:
    """The same layer on a GPU, compiled and as the definition."""
    ours = layer(name, impl=impl, **arguments).cuda()
    reference = layer(name, impl="reference", **arguments).cuda()
    reference.load_state_dict(ours.state_dict())
    return ours, reference


def same(ours: Any, x: Tensor, reference: Any, *arguments: Any) -> None:
    found, exact = (gradients(made, x, *arguments) for made in (ours, reference))
    torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-9)


def test_auto_is_cuda() -> None:
    assert resolve("recurrent", "auto", "cuda") == "cuda"


@pytest.mark.parametrize("impl", ["cpp", "cuda"])
@pytest.mark.parametrize("name", ["lstm", "projected_lstm", "layernorm_lstm"])
def test_layers_equal_the_definition_with_all_that_a_layer_has(name: str, impl: str) -> None:
    ours, reference = pair(name, impl, num_layers=2, bidirectional=True)
    states = tuple(sequence(4, 3, n).cuda() for n in ours.runs[0][0].state_sizes.values())
    same(ours, sequence(5, 3, 3).cuda(), reference, states, [5, 2, 3])


@pytest.fixture
def without_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU whose blocks form no clusters."""
    monkeypatch.setattr(CompiledPlan, "keeps_weights", lambda *_: False)


@pytest.mark.usefixtures("without_clusters")
@pytest.mark.parametrize("name", ["lstm", "gru", "elman"])
def test_gradients_have_gradients_where_cudnn_runs_the_layer(name: str) -> None:
    ours, reference = pair(name)
    ours.float()
    x = sequence(4, 2, 3).cuda()
    found = []
    for made, leaf in ((ours, x.float().requires_grad_()), (reference, x.clone().requires_grad_())):
        output, state = made(leaf)
        output = made(output[..., :3], state)[0]  # fed to itself
        first = torch.autograd.grad(output.sin().sum(), [leaf, *made.parameters()],
                                    create_graph=True)  # fmt: skip
        loss = torch.stack([g.square().sum() for g in first]).sum()
        found.append((output, *first, *torch.autograd.grad(loss, [leaf, *made.parameters()])))
        assert ("CudnnFunction" in str(output.grad_fn)) == (made is ours)
    for mine, exact in zip(*found, strict=True):
        assert (mine - exact).norm() <= 1e-4 * exact.norm()


@pytest.mark.usefixtures("without_clusters")
def test_many_gradients_at_once_where_cudnn_runs_the_layer() -> None:
    check_many_gradients(rnn.LSTM(3, 4, impl="cuda", device="cuda"))


@pytest.mark.parametrize("bidirectional", [False, True])
def test_many_gradients_at_once(bidirectional: bool) -> None:
    check_many_gradients(
        rnn.LSTM(3, 4, bidirectional=bidirectional, dtype=torch.float64, impl="cuda", device="cuda")
    )


@pytest.mark.parametrize("size", [4, 300])
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_equal_pytorch_with_two_layers_and_directions_packed(kind: str, size: int) -> None:
    theirs = getattr(nn, kind)(3, size, 2, bidirectional=True, device="cuda")
    ours = getattr(rnn, kind)(3, size, 2, bidirectional=True, device="cuda")
    ours.load_state_dict(theirs.state_dict())
    packed = pack_padded_sequence(torch.randn(6, 4, 3), [4, 1, 6, 4], enforce_sorted=False)
    torch.testing.assert_close(ours(packed.cuda()), theirs(packed.cuda()))
    x = torch.randn(6, 4, 3, device="cuda")
    torch.testing.assert_close(ours(x), theirs(x))  # small ones are the library's


@pytest.mark.usefixtures("without_clusters")
@pytest.mark.parametrize("name", ["lstm", "gru", "elman"])
def test_what_the_library_runs_equals_the_definition(name: str) -> None:
    ours, reference = pair(name, bidirectional=True)
    ours.float()
    assert plan(ours.runs[0][0], torch.float32).cudnn
    x = sequence(7, 5, 3).cuda()
    found, exact = gradients(ours, x.float()), gradients(reference, x)
    torch.testing.assert_close([t.double() for t in found], exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("impl", ["cpp", "cuda"])
def test_noise_is_that_of_the_definition(impl: str) -> None:
    @rnn.cell(state=("h",))
    def noisy(x: Any, h: Any) -> Any:
        new = rnn.tanh(rnn.linear("i", rnn.dropout(x, 0.3), rnn.dropout(h, 0.5)))
        h = rnn.zoneout(new, h, 0.2)
        return h, dict(h=h)

    ours = rnn.RNN(noisy, 3, 16, dtype=torch.float64, impl=impl, device="cuda")
    reference = rnn.RNN(noisy, 3, 16, dtype=torch.float64, impl="reference", device="cuda")
    reference.load_state_dict(ours.state_dict())
    found = []
    for made in (ours, reference):
        torch.manual_seed(7)
        found.append(gradients(made, sequence(6, 5, 3).cuda() * 0 + 1))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-4), (torch.bfloat16, 5e-2), (torch.float16, 1e-2)],
)
@pytest.mark.parametrize("name", ["lstm", "gru", "layernorm_lstm"])
def test_dtypes_are_near_the_definition_in_float64(
    name: str, dtype: torch.dtype, tolerance: float
) -> None:
    cell, options = READY[name]
    ours = rnn.RNN(cell, 48, 320, schedule="graph", impl="cuda", device="cuda", **options)
    ours.to(dtype)
    reference = rnn.RNN(cell, 48, 320, impl="reference", device="cuda", **options).double()
    reference.load_state_dict(ours.state_dict())
    x = torch.randn(37, 9, 48, device="cuda").to(dtype)
    for mine, exact in zip(gradients(ours, x), gradients(reference, x.double())):
        assert mine.dtype == dtype
        assert (mine.double() - exact).norm() <= tolerance * exact.norm()


def test_graphs_serve_every_length_and_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, reference = pair("gru", bidirectional=True, schedule="graph")
    same(ours, sequence(5, 2, 3).cuda(), reference)
    monkeypatch.setattr("hoconv.recurrent.runtime.cuda.compile_cuda", None)
    for B in (2, 70):
        for T in (1, 2, 3, 31, 33, 70, 5):
            same(ours, sequence(T, B, 3).cuda(), reference)


def test_a_known_length_and_batch_record_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, reference = pair("gru", schedule="graph")
    same(ours, sequence(62, 2, 3).cuda(), reference)  # 32 + 16 + 8 + 4 + 2
    monkeypatch.setattr(torch.cuda, "CUDAGraph", None)
    for T in (7, 1, 64, 99):
        same(ours, sequence(T, 2, 3).cuda(), reference)


def test_what_could_not_be_recorded_is_recorded_the_next_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find_plan.cache_clear()  # what other tests have recorded
    ours, reference = pair("gru", schedule="graph")
    chunk = Workspace._chunk

    def interrupted(workspace: Workspace, size: int) -> None:
        chunk(workspace, size)
        if torch.cuda.is_current_stream_capturing():
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Workspace, "_chunk", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ours(sequence(5, 2, 3).cuda())
    same(ours, sequence(5, 2, 3).cuda(), reference)


def test_workspaces_that_were_dropped_are_made_again() -> None:
    ours, reference = pair("lstm", schedule="graph")
    for B in (*range(1, 12), 1, 2):
        same(ours, sequence(3, B, 3).cuda(), reference)


def test_streams_have_their_own_workspaces() -> None:
    ours, reference = pair("lstm", schedule="graph")
    inputs = [sequence(40, 16, 3).cuda() for _ in range(3)]
    exact = [gradients(reference, x) for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    found = []
    for x, stream in zip(inputs, streams):
        with torch.cuda.stream(stream):
            found.append(gradients(ours, x))
    torch.cuda.synchronize()
    torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("schedule", ["auto", "graph"])
def test_results_of_one_call_outlive_the_next(schedule: str) -> None:
    ours, reference = pair("lstm", schedule=schedule)
    x, y = sequence(6, 3, 3).cuda().requires_grad_(), sequence(6, 3, 3).cuda()
    first = ours(x)[0]
    ours(y)
    exact = reference(x)[0]
    torch.testing.assert_close(first, exact)
    torch.testing.assert_close(
        torch.autograd.grad(first.sum(), x), torch.autograd.grad(exact.sum(), x)
    )


@pytest.mark.parametrize("schedule", ["auto", "graph"])
def test_the_same_call_gives_the_same_bits(schedule: str) -> None:
    ours, _ = pair("layernorm_lstm", schedule=schedule)
    x = sequence(20, 7, 3).cuda()
    torch.testing.assert_close(gradients(ours, x), gradients(ours, x), rtol=0, atol=0)


def test_the_precision_of_products_is_pytorchs() -> None:
    ours = rnn.LSTM(256, 256, schedule="graph", impl="cuda", device="cuda")
    x = torch.randn(9, 32, 256, device="cuda")
    exact = ours(x)[0]
    torch.set_float32_matmul_precision("high")
    rounded = ours(x)[0]
    assert not torch.equal(rounded, exact)
    torch.testing.assert_close(rounded, exact, rtol=1e-2, atol=1e-2)
    torch.set_float32_matmul_precision("highest")
    assert torch.equal(ours(x)[0], exact)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_step_waits_for_nothing() -> None:
    @rnn.cell(state=("h",))
    def noisy(x: Any, h: Any) -> Any:
        h = rnn.dropout(rnn.maximum(rnn.tanh(rnn.linear("i", x, h)), -0.5), 0.5)
        return h, dict(h=h)

    made = [
        rnn.RNN(noisy, 3, 4, impl="cuda", device="cuda"),
        rnn.LSTM(3, 4, schedule="graph", impl="cuda", device="cuda"),
        rnn.LSTM(3, 4, schedule="persistent", impl="cuda", device="cuda"),
    ]
    x = torch.randn(9, 4, 3, device="cuda", requires_grad=True)
    lengths = torch.tensor([9, 3, 1, 5], device="cuda")

    def step() -> None:
        for each in made:
            each(x, None, lengths)[0].sum().backward()

    step()
    try:
        torch.cuda.set_sync_debug_mode("error")
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("schedule", ["auto", "graph"])
def test_a_user_captures_a_training_step(schedule: str) -> None:
    ours, reference = pair("peephole_lstm", num_layers=2, schedule=schedule)
    x = sequence(11, 3, 3).cuda()
    other = sequence(11, 3, 3).cuda()
    gradients(ours, x)  # compiles
    leaf, parameters = x.clone().requires_grad_(), tuple(ours.parameters())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # Nothing that autograd has made of the capture's stream may stay.
        output = ours(leaf)[0]
        found = torch.autograd.grad(output.square().sum(), (leaf, *parameters))
        output = output.detach()
    gradients(ours, sequence(30, 3, 3).cuda())  # in between, and of the same batch size
    with torch.no_grad():
        leaf.copy_(other)
    graph.replay()
    exact, _ = reference(other.requires_grad_())
    wanted = torch.autograd.grad(exact.square().sum(), (other, *reference.parameters()))
    torch.testing.assert_close(output, exact)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("schedule", ["auto", "graph"])
def test_torch_compile_sees_one_op_a_layer_and_direction(schedule: str) -> None:
    ours, _ = pair("gru", num_layers=2, bidirectional=True, schedule=schedule)
    torch.compiler.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    same(compiled, sequence().cuda(), ours)


@pytest.mark.slow
def test_graphs_of_torch_compile_contain_the_loop() -> None:
    ours, _ = pair("lstm", schedule="graph")
    torch.compiler.reset()
    compiled = torch.compile(ours, mode="reduce-overhead")
    for _ in range(4):
        same(compiled, sequence().cuda(), ours)


def test_gradients_of_gradients_are_those_of_the_definition() -> None:
    ours, _ = pair("peephole_lstm")
    x = sequence(2, 2, 3).cuda().requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: ours(x)[0], (x,), fast_mode=True)


def test_autocast_computes_products_in_half_precision() -> None:
    ours = rnn.LSTM(16, 32, impl="cuda", device="cuda")
    x = torch.randn(5, 4, 16, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        output, _ = ours(x)
    assert output.dtype == torch.bfloat16
    output.sum().backward()
    half = copy.deepcopy(ours).bfloat16()(x.bfloat16())[0]
    torch.testing.assert_close(output, half)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in ours.parameters())


def test_odd_sizes_and_strides() -> None:
    for T, B in ((1, 1), (1, 70), (3, 1), (2, 33)):
        ours, reference = pair("lstm")
        same(ours, sequence(B, T, 3).cuda().transpose(0, 1), reference)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_empty_batch_launches_no_kernel(schedule: str, bidirectional: bool) -> None:
    ours = rnn.LSTM(4, 4, 2, bidirectional=bidirectional, schedule=schedule, device="cuda")
    x = torch.randn(3, 0, 4, device="cuda", requires_grad=True)
    output, _ = ours(x)
    output.sum().backward()
    assert output.shape == (3, 0, 4 * (1 + bidirectional))
    for parameter in ours.parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any()


def test_a_bidirectional_layer_runs_again_in_a_checkpoint() -> None:
    ours = rnn.LSTM(4, 4, bidirectional=True, device="cuda")
    x = torch.randn(3, 2, 4, device="cuda", requires_grad=True)
    expected = torch.autograd.grad(ours(x)[0].sum(), [x, *ours.parameters()])
    again = checkpoint(lambda x: ours(x)[0], x, use_reentrant=False)
    found = torch.autograd.grad(again.sum(), [x, *ours.parameters()])
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_a_call_in_inference_mode_keeps_is_not_written_outside(schedule: str) -> None:
    ours = rnn.RNN(rnn.layernorm_lstm, 4, 4, schedule=schedule, device="cuda")
    x = torch.randn(3, 2, 4, device="cuda")
    modes = torch.inference_mode(), torch.no_grad(), torch.inference_mode(), torch.enable_grad()
    found = []
    for mode in modes:
        with mode:
            found.append(ours(x)[0].clone())
    for output in found[1:]:
        torch.testing.assert_close(output, found[0])
