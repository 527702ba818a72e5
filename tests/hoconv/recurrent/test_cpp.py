"""Generated C++: its kernels and loops against the definition, and the op around them."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from hoconv import jit
from hoconv import recurrent as rnn
from hoconv.jit import compilers
from hoconv.recurrent.frontend.serialize import to_text
from hoconv.recurrent.frontend.trace import trace
from hoconv.recurrent.ir import evaluate
from hoconv.recurrent.ir.kinds import PRODUCTS
from hoconv.recurrent.ir.program import flat
from hoconv.recurrent.operator import OPERATOR
from hoconv.recurrent.ops import compiled_op
from hoconv.recurrent.passes.stream import stream
from hoconv.recurrent.plans import request
from hoconv.recurrent.runtime import pages, products
from hoconv.recurrent.runtime.cpp import compile_loops
from hoconv.recurrent.schedule import Plan, plan
from tests.hoconv.recurrent.support import READY, bound, cell_case, gradients, layer, sequence
from tests.hoconv.recurrent.test_compiler import check_loops

pytestmark = pytest.mark.skipif(jit.obstacle("cpu") is not None, reason=str(jit.obstacle("cpu")))


def test_compiled_loops_are_exact() -> None:
    cases = [cell_case(which, masked=True) for which in READY]
    cases += [cell_case("lstm", resets=True), cell_case("gru", resets=True, masked=True)]
    cases += [cell_case(0), cell_case(9)]
    cases += [cell_case(which, recompute="all", resets=True) for which in (*READY, 0, 9)]
    check_loops(cases, "auto", compile_loops)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 50, 10))
def test_compiled_loops_of_all_random_cells_are_exact(first: int) -> None:
    cases = [
        cell_case(which, reverse=which % 2 == 1, recompute=("all", "functions", "cheap")[which % 3])
        for which in range(first, first + 10)
    ]
    check_loops(cases, "auto", compile_loops)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", rnn.SCHEDULES)
def test_compiled_loops_of_every_schedule_are_exact(schedule: str) -> None:
    names = "lstm", "minimal_gated", "layernorm_lstm"
    cases = [cell_case(which, reverse=True) for which in names]
    cases += [cell_case(which, recompute="all") for which in names]
    check_loops(cases, schedule, compile_loops)


def test_loops_of_many_rows_are_exact() -> None:
    cases = [cell_case(which, masked=True) for which in READY]
    cases += [cell_case(which, reverse=True) for which in (0, 9)]
    cases += [cell_case(which, recompute="all", resets=True) for which in (*READY, 0, 9)]
    check_loops(cases, "auto", compile_loops, stream)


def pair(name: str, **arguments: Any) -> tuple[rnn.RNN, rnn.RNN]:
    """The same layer, compiled and as the definition."""
    ours = layer(name, impl="cpp", **arguments)
    reference = layer(name, impl="reference", **arguments)
    reference.load_state_dict(ours.state_dict())
    return ours, reference


@pytest.mark.parametrize("name", ["lstm", "projected_lstm", "layernorm_lstm"])
def test_layers_equal_the_definition_with_all_that_a_layer_has(name: str) -> None:
    ours, reference = pair(name, num_layers=2, bidirectional=True)
    x = sequence(5, 3, 3)
    states = tuple(sequence(4, 3, n) for n in ours.runs[0][0].state_sizes.values())
    arguments = (states, [5, 2, 3])
    for mine, exact in zip(gradients(ours, x, *arguments), gradients(reference, x, *arguments)):
        torch.testing.assert_close(mine, exact, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_equal_pytorch_with_two_layers_and_directions_packed(kind: str) -> None:
    theirs = getattr(nn, kind)(3, 4, 2, bidirectional=True)
    ours = getattr(rnn, kind)(3, 4, 2, bidirectional=True, impl="cpp")
    ours.load_state_dict(theirs.state_dict())
    packed = pack_padded_sequence(torch.randn(6, 4, 3), [4, 1, 6, 4], enforce_sorted=False)
    torch.testing.assert_close(ours(packed), theirs(packed))


def test_noise_is_that_of_the_definition() -> None:
    @rnn.cell(state=("h",))
    def noisy(x: Any, h: Any) -> Any:
        new = rnn.tanh(rnn.linear("i", rnn.dropout(x, 0.3), rnn.dropout(h, 0.5)))
        h = rnn.zoneout(new, h, 0.2)
        return h, dict(h=h)

    ours = rnn.RNN(noisy, 3, 16, dtype=torch.float64, impl="cpp")
    reference = rnn.RNN(noisy, 3, 16, dtype=torch.float64, impl="reference")
    reference.load_state_dict(ours.state_dict())
    x = sequence(6, 5, 3)
    found = []
    for made in (ours, reference):
        torch.manual_seed(7)
        found.append(gradients(made, x))
    for mine, exact in zip(*found):
        torch.testing.assert_close(mine, exact, rtol=1e-10, atol=1e-10)


def test_functions_are_exact_over_their_range_and_at_its_ends() -> None:
    @rnn.cell(state=("h",))
    def functions(x: Any, h: Any) -> Any:
        values = (rnn.exp(x), rnn.sigmoid(x), rnn.tanh(x), rnn.softplus(x), rnn.relu(x),
                  rnn.gelu(x), rnn.silu(x), rnn.abs(x), rnn.log(x), rnn.sqrt(x))  # fmt: skip
        return rnn.cat(*values), dict(h=h)

    special = [0.0, -0.0, 1e-30, -1e-30, 1e-3, 88.7, 89.5, -88, -104, 709.7, -745, 1000, -1000]
    special += [float("inf"), float("-inf"), float("nan")]
    for dtype, tolerance in ((torch.float32, 3e-7), (torch.float64, 6e-16)):
        x = torch.cat((torch.linspace(-30, 30, 4096 - len(special), dtype=torch.float64),
                       torch.tensor(special, dtype=torch.float64))).to(dtype)  # fmt: skip
        found = []
        for impl in ("cpp", "reference"):
            made = rnn.RNN(functions, 4096, 1, impl=impl, dtype=dtype)
            found.append(made(x.view(1, 1, -1))[0].view(10, 4096))
        for i, (mine, exact) in enumerate(zip(*found)):
            # What underflows is exact, to the last number before 0. But gelu is the difference of
            # near numbers, in PyTorch too.
            last = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
            atol = 2 * last if i < 5 else 4e-14 if i > 5 else 40 * tolerance
            torch.testing.assert_close(mine, exact, rtol=10 * tolerance, atol=atol,
                                       equal_nan=True, msg=lambda m, i=i: f"{i}: {m}")  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-4), (torch.bfloat16, 5e-2), (torch.float16, 1e-2)],
)
@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_dtypes_are_near_the_definition_in_float64(
    name: str, dtype: torch.dtype, tolerance: float
) -> None:
    ours, reference = pair(name)
    x = sequence(6, 3, 3).to(dtype)
    ours.to(dtype)
    reference.load_state_dict(ours.state_dict())
    for mine, exact in zip(gradients(ours, x), gradients(reference, x.double())):
        assert mine.dtype == dtype
        assert (mine.double() - exact).norm() <= tolerance * exact.norm()


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


# Rows of a product are computed by tiles of 8, 4, 2 and 1 rows; columns by panels of whole vectors,
# the last one padded.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "H", "tolerance"),
    [
        (torch.float64, 17, 1e-12),
        (torch.float32, 5, 1e-5),
        (torch.float32, 17, 1e-5),
        (torch.bfloat16, 17, 5e-2),
        (torch.float16, 17, 1e-2),
    ],
)
def test_products_of_any_size_are_near_the_definition(
    dtype: torch.dtype, H: int, tolerance: float, threads: int
) -> None:
    ours = rnn.RNN(rnn.lstm, 3, H, impl="cpp", bidirectional=True, dtype=dtype)
    reference = rnn.RNN(rnn.lstm, 3, H, impl="reference", bidirectional=True, dtype=torch.float64)
    reference.load_state_dict(ours.state_dict())
    for B in (1, 3, 31):
        x, reset = sequence(4, B, 3).to(dtype), torch.rand(4, B) < 0.2
        lengths = [4, *(1 + i % 4 for i in range(1, B))]
        found = gradients(ours, x, None, lengths, reset=reset)
        expected = gradients(reference, x.double(), None, lengths, reset=reset)
        for mine, exact in zip(found, expected, strict=True):
            assert mine.dtype == dtype
            assert (mine.double() - exact).norm() <= tolerance * exact.norm()


@pytest.mark.slow
@pytest.mark.parametrize("batch", [0, 1, 16])
@pytest.mark.parametrize("schedule", ["naive", "auto"])
@pytest.mark.parametrize("which", ["lstm", "elman"])
def test_large_products_are_near_the_definition(which: str, schedule: str, batch: int) -> None:
    cell, sizes = getattr(rnn, which), (700, 512)  # gradients of weights with either side longer
    ours = rnn.RNN(cell, *sizes, impl="cpp", schedule=schedule, bidirectional=True)
    reference = rnn.RNN(cell, *sizes, impl="reference", bidirectional=True, dtype=torch.float64)
    reference.load_state_dict(ours.state_dict())
    x = sequence(16, batch, 700).float()
    for mine, exact in zip(gradients(ours, x), gradients(reference, x.double())):
        assert mine.dtype == torch.float32
        assert (mine.double() - exact).norm() <= 1e-5 * exact.norm()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-13)])
# Rows in one block of the operands and in several, columns in panels of two and three vectors,
# with and without a rest.
@pytest.mark.parametrize(("T", "B", "n", "m"), [(1, 64, 1, 13), (9, 67, 49, 70), (3, 90, 64, 96)])
def test_products_of_whole_sequences_are_exact(
    dtype: torch.dtype, tolerance: float, T: int, B: int, n: int, m: int
) -> None:
    x, g = sequence(B, T, n).transpose(0, 1).to(dtype), sequence(T, B, m).to(dtype)
    weight, bias = sequence(m, 2 * n)[:, n:].to(dtype), sequence(2 * m)[::2].to(dtype)
    for by, added in ((weight, bias), (weight, None), (sequence(n, m).to(dtype).mT, None)):
        exact = evaluate.linear(x.double(), by.double(), None if added is None else added.double())
        found = products.linear(x, by, added)
        assert found.dtype == dtype
        assert (found.double() - exact).norm() <= tolerance * exact.norm()
    exact = evaluate.outer(g.double(), x.double())
    assert (products.outer(g, x).double() - exact).norm() <= tolerance * exact.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_number_of_threads_changes_no_bit(dtype: torch.dtype) -> None:
    made = rnn.RNN(rnn.lstm, 9, 17, impl="cpp", bidirectional=True, dtype=dtype)
    x, found = sequence(5, 40, 9).to(dtype), []
    before = torch.get_num_threads()
    try:
        for number in (1, 2):  # of which one has rows for products of a step
            torch.set_num_threads(number)
            found.append([*gradients(made, x), made(x)[0]])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


def test_products_of_many_rows_are_those_of_the_step() -> None:
    made = plan(bound("lstm"), torch.float32)
    forward, backward = stream(made.forward), stream(made.backward)
    assert not [op for op in flat(forward.before) if op.kind in PRODUCTS]
    assert not [op for op in flat(backward.after) if op.kind in PRODUCTS]
    assert stream(forward) is forward
    half = plan(bound("lstm"), torch.bfloat16).forward
    assert stream(half) is half


def test_large_tensors_have_huge_pages() -> None:
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not enabled.exists() or "[never]" in enabled.read_text():
        pytest.skip("the system has no huge pages")
    resource = pytest.importorskip("resource")
    size = 1 << 26  # more than the allocator keeps
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    pages.allocate((size,), (1,), torch.uint8).fill_(1)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert faults < size // 4096 // 2


def test_weights_that_no_step_reads_are_not_copied() -> None:
    made = rnn.LSTM(3, 4, impl="cpp")  # a product before the loop reads the weights of x
    x = torch.randn(2, 1, 3)
    with torch.no_grad():
        made(x)
        cpu = torch.profiler.ProfilerActivity.CPU
        with torch.profiler.profile(activities=[cpu], acc_events=True) as profile:
            made(x)
    assert "aten::clone" not in {event.key for event in profile.key_averages()}


def test_the_number_of_calls_of_pytorch_does_not_depend_on_the_steps() -> None:
    made = rnn.RNN(rnn.lstm, 512, 512, impl="cpp", schedule="auto")
    numbers = []
    for T in (16, 32):
        x = sequence(T, 16, 512).float()
        gradients(made, x)
        cpu = torch.profiler.ProfilerActivity.CPU
        with torch.profiler.profile(activities=[cpu], acc_events=True) as profile:
            gradients(made, x)
        numbers.append(sum(event.count for event in profile.key_averages()))
    assert numbers[0] == numbers[1]


def test_gradients_of_gradients_are_those_of_the_definition() -> None:
    ours, _ = pair("peephole_lstm")
    x = sequence(2, 2, 3).requires_grad_()

    def function(x: Tensor, *parameters: Tensor) -> Tensor:
        named = dict(zip(dict(ours.named_parameters()), parameters))
        return torch.func.functional_call(ours, named, (x,))[0]

    inputs = (x, *ours.parameters())
    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


def test_torch_compile_sees_one_op_a_layer_and_direction() -> None:
    ours, _ = pair("gru", num_layers=2, bidirectional=True)
    x = sequence()
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    compiled = torch.compile(ours, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(x), ours(x))
    calls = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert sum("recurrent.compiled" in call for call in calls) == 4
    torch.compiler.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(gradients(compiled, x), gradients(ours, x))


# opcheck looks at the gradients of views among its inputs.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("which", ["inference", "forward"])
def test_torch_library_finds_no_fault(which: str) -> None:
    plan = request(to_text(trace(bound("lstm"))), torch.float64, "auto", True, False, True)
    parameters = [t.detach().requires_grad_() for t in layer("lstm").parameters()]
    valid = torch.tensor([[1, 1], [1, 0], [1, 0]], dtype=torch.bool)[..., None]
    sequences = [sequence(3, 2, 3).requires_grad_(which == "forward"), valid]
    states = [sequence(2, 4), sequence(2, 4)]
    arguments = (sequences, states, parameters, None, plan, which, "cpp")
    tests = ("test_schema", "test_faketensor")
    if which == "forward":
        tests += ("test_autograd_registration", "test_aot_dispatch_dynamic")
    torch.library.opcheck(compiled_op.overload, arguments, test_utils=tests)


def test_a_new_length_or_batch_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _ = pair("gru")
    gradients(ours, sequence(5, 2, 3))
    monkeypatch.setattr("hoconv.recurrent.compiled_plan.compile_loops", None)
    gradients(ours, sequence(9, 4, 3))


def test_odd_sizes_and_strides() -> None:
    for T, B in ((1, 1), (1, 70), (3, 1), (2, 33)):
        ours, reference = pair("lstm")
        x = sequence(B, T, 3).transpose(0, 1)
        for mine, exact in zip(gradients(ours, x), gradients(reference, x)):
            torch.testing.assert_close(mine, exact, rtol=1e-10, atol=1e-10)


def test_states_can_be_each_other_and_the_input() -> None:
    @rnn.cell(state={"now": "input_size", "before": "input_size"})
    def shifted(x: Any, now: Any, before: Any) -> Any:
        return before, dict(now=x, before=now)

    x = sequence(6, 2, 3)
    for reverse in (False, True):
        made = rnn.RNN(shifted, 3, 3, bidirectional=reverse, dtype=torch.float64, impl="cpp")
        output, (now, before) = made(x)
        torch.testing.assert_close(output[2:, :, :3], x[:-2])
        torch.testing.assert_close((now[0], before[0]), (x[-1], x[-2]))
        if reverse:
            torch.testing.assert_close(output[:-2, :, 3:], x[2:])
        leaf = x.clone().requires_grad_()
        weights = torch.randn_like(output)
        (gradient,) = torch.autograd.grad((made(leaf)[0] * weights).sum(), leaf)
        torch.testing.assert_close(gradient[0], weights[2, :, :3])


def test_without_a_compiler_the_reason_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(compilers, "compiler", jit.compiler.__wrapped__)  # has found none yet
    monkeypatch.setenv("CXX", "/nowhere/c++")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    reason = OPERATOR.implementations["cpp"].obstacle()
    assert reason is not None
    assert "CXX=/nowhere/c++ was not found" in reason


def test_copies_and_pickles_work() -> None:
    ours, _ = pair("peephole_lstm")
    x = sequence()
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        torch.testing.assert_close(other(x), ours(x))


def test_it_learns_to_remember() -> None:
    torch.manual_seed(0)
    made = rnn.LSTM(1, 16, impl="cpp")
    head = nn.Linear(16, 1)
    optimizer = torch.optim.Adam([*made.parameters(), *head.parameters()], 0.02)
    losses = []
    for _ in range(60):
        x = torch.rand(8, 32, 1).round()
        loss = (head(made(x)[0][-1]) - x[0]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_threads_that_ask_for_a_program_at_once_run_the_same_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A loop is found by the identity of its program, and since Python 3.12 threads that read a
    cached property at once get different values: here every reading does."""
    for name in ("forward", "backward"):
        made_anew = getattr(Plan, name).func
        monkeypatch.setattr(Plan, name, property(made_anew))
    ours, x = rnn.GRU(3, 4, impl="cpp"), torch.randn(2, 3, 3)
    with torch.no_grad():
        expected = ours(x)[0]
    found = []

    def run() -> None:
        output = ours(x)[0]
        output.sum().backward()
        found.append(output.detach())

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == len(threads)
    for output in found:
        torch.testing.assert_close(output, expected)
