"""The sub-command `recurrent` of scripts/benchmark.py: what it writes, and what it makes of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hoconv import jit
from hoconv import recurrent as rnn

Script = Callable[[str], ModuleType]
DEVICES = [
    pytest.param(
        "cpu", marks=pytest.mark.skipif(jit.obstacle("cpu") is not None, reason="no compiler")
    ),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


@pytest.fixture
def recurrent(script: Script, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, with small sizes."""
    measurement, module = (
        script("hoconv.tools.benchmarking.measurement"),
        script("benchmarks.library.recurrent"),
    )
    monkeypatch.setattr(measurement, "FLUSH_BYTES", 2**20)
    for device in ("cpu", "cuda"):
        monkeypatch.setitem(module.REPEATS, device, 3)
        monkeypatch.setitem(module.SHAPES, device, ((3, 2, 4), (2, 5, 4)))
        monkeypatch.setitem(module.LONGEST, device, 5)
        for shapes in (module.LINEAR_SHAPES, module.GRU_SHAPES):
            monkeypatch.setitem(shapes, device, ((3, 2, 4),))
        monkeypatch.setitem(module.MATRIX_SHAPES, device, ((5, 2, 3, 4),))
    monkeypatch.setattr(module, "TYPICAL", (3, 2, 4))
    monkeypatch.setattr(module, "SMALLER", (3, 2, 4))
    return module


def run(
    script: Script, out: Path, section: str, *options: str, device: str = "cpu"
) -> dict[str, Any]:
    arguments = ["recurrent", "--device", device, "--out", str(out), "--sections", section]
    assert script("benchmark").main([*arguments, *options]) == 0
    return json.loads((out / f"recurrent_{section}_{device}.json").read_text())


def check_rows(rows: list[dict[str, Any]]) -> None:
    """Every one was timed, and compared with the first of its case."""
    assert rows
    baselines: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        assert row["error"] is None
        case = tuple(row[name] for name in ("cell", "T", "B", "H", "layers", "precision"))
        baseline = baselines.setdefault(case, row)
        for phase in ("forward", "forward_backward"):
            timing = row[phase]
            assert 0 < timing["p20_ms"] <= timing["median_ms"] <= timing["p80_ms"]
            assert timing["repeats"] == 3
            ratio = baseline[phase]["median_ms"] / timing["median_ms"]
            assert row["speed_up"][phase] == ratio
        assert row["extra_memory_bytes"] > 0


@pytest.mark.parametrize("device", DEVICES)
def test_cells_are_timed_against_their_definition(
    script: Script, recurrent: ModuleType, tmp_path: Path, device: str
) -> None:
    record = run(script, tmp_path, "cells", device=device)

    assert record["command"].startswith("python scripts/benchmark.py recurrent --device")
    assert (record["device"], record["section"]) == (device, "cells")
    check_rows(record["rows"])
    found = {(row["cell"], row["contender"]) for row in record["rows"]}
    assert found == {(cell, name) for cell in recurrent.CELLS for name in ("reference", "ours")}


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_published_cells_are_timed_against_their_definition(
    script: Script, recurrent: ModuleType, tmp_path: Path, device: str
) -> None:
    record = run(script, tmp_path, "published", device=device)

    check_rows(record["rows"])
    names = {"reference", "ours"} | ({"ours, graph"} if device == "cuda" else set())
    found = {(row["cell"], row["contender"]) for row in record["rows"]}
    assert found == {(cell.name, name) for cell in recurrent.PUBLISHED for name in names}


@pytest.mark.parametrize("device", DEVICES)
def test_library_cells_are_timed_against_pytorchs_at_every_shape(
    script: Script, recurrent: ModuleType, tmp_path: Path, device: str
) -> None:
    record = run(script, tmp_path, "library", device=device)

    check_rows(record["rows"])
    found = {(row["cell"], row["T"], row["B"], row["contender"]) for row in record["rows"]}
    names = {"lstm": {"nn.LSTM", "ours"}, "gru": {"nn.GRU", "ours"}}
    if device == "cuda":
        names = {cell: {*each, "ours, graph"} for cell, each in names.items()}
    assert found == {(c, *tb, name) for c in names for tb in ((3, 2), (2, 5)) for name in names[c]}
    for mean in record["geometric_means"]:
        product = 1.0
        for row in record["rows"]:
            if all(row[name] == mean[name] for name in recurrent.KEY):
                product *= row["speed_up"]["forward"]
        assert mean["forward"] == pytest.approx(product**0.5)
    assert (tmp_path / f"recurrent_library_{device}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("device", DEVICES)
def test_both_directions_are_timed_against_one(
    script: Script, recurrent: ModuleType, tmp_path: Path, device: str
) -> None:
    record = run(script, tmp_path, "directions", device=device)

    check_rows(record["rows"])
    names = ("ours, one direction", "ours, both", "nn.LSTM, both")
    found = [(row["T"], row["B"], row["contender"]) for row in record["rows"]]
    precisions = 2 if device == "cuda" else 1
    assert sorted(found) == sorted(
        (*tb, name) for tb in ((3, 2), (2, 5)) for name in names for _ in range(precisions)
    )


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_every_schedule_is_timed_with_one_layer_and_four(
    script: Script, recurrent: ModuleType, tmp_path: Path, device: str
) -> None:
    record = run(script, tmp_path, "ladder", device=device)

    check_rows(record["rows"])
    found = [(row["layers"], row["contender"]) for row in record["rows"]]
    rungs = [*(name for name in rnn.SCHEDULES if name != "auto"), "nn.LSTM"]
    assert found == [(layers, rung) for layers in (1, 4) for rung in rungs]
    assert (tmp_path / f"recurrent_ladder_{device}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("device", DEVICES)
def test_sequences_of_many_lengths_are_timed(
    script: Script, recurrent: ModuleType, tmp_path: Path, device: str
) -> None:
    record = run(script, tmp_path, "lengths", device=device)

    check_rows(record["rows"])
    names = {row["contender"] for row in record["rows"]}
    assert names == {"nn.LSTM, packed", "nn.LSTM, all steps", "ours"}


@pytest.mark.parametrize("device", DEVICES)
def test_linear_recurrences_are_timed_against_a_copy_of_as_many_bytes(
    script: Script, recurrent: ModuleType, tmp_path: Path, device: str
) -> None:
    record = run(script, tmp_path, "linear", device=device)

    check_rows(record["rows"])
    found = {(row["cell"], row["contender"]) for row in record["rows"]}
    expected = {("gated_sum", "copy"), ("gated_sum", "ours"), ("min_gru", "nn.GRU"),
                ("min_gru", "ours")}  # fmt: skip
    assert found >= expected
    for row in record["rows"]:
        assert all(row["cold"][phase]["median_ms"] > 0 for phase in ("forward", "backward"))


def test_a_copy_has_the_bytes_of_the_smallest_linear_recurrence(recurrent: ModuleType) -> None:
    T, B, n = 3, 2, 4
    case = recurrent.Case("gated_sum", T, B, 2 * n)
    x = torch.randn(T, B, 2 * n, requires_grad=True)
    for make in (recurrent.make_copies, recurrent.make_gated_sum("reference")):
        _, function = make(case, torch.device("cpu"), torch.float32)
        output = function(x)
        assert output.shape == (T, B, n)
        assert torch.autograd.grad(output.sum(), x)[0].shape == x.shape
    with torch.profiler.profile(record_shapes=True) as profile:
        output = recurrent.make_copies(case, torch.device("cpu"), torch.float32)[1](x)
        torch.autograd.grad(output, x, torch.ones_like(output))
    copied = [e.input_shapes[0][0] for e in profile.events() or () if e.name == "aten::copy_"]
    # Read and written: a, b and h; then the gradient of h, a, h, and the gradients of a and b.
    assert [2 * numbers for numbers in copied] == [3 * T * B * n, 5 * T * B * n]


@pytest.mark.parametrize("device", DEVICES)
def test_matrix_states_are_timed(
    script: Script, recurrent: ModuleType, tmp_path: Path, device: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr(recurrent, "has_fla", lambda: False)  # it compiles for minutes
    record = run(script, tmp_path, "matrices", device=device)

    check_rows(record["rows"])
    names = {"reference", "ours"} if device == "cpu" else {"ours"}
    found = {(row["cell"], row["contender"]) for row in record["rows"]}
    assert found == {(cell, name) for cell in recurrent.KINDS for name in names}
    for row in record["rows"]:
        assert (row["heads"], row["keys"]) == (3, 4)
        assert all(row["cold"][phase]["median_ms"] > 0 for phase in ("forward", "backward"))


def define_fla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, beta: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, None]:  # fmt: skip
    """Computes what fla's functions do, on (B, T, heads, ...): g is the logarithm of the decays, by
    default of retention's."""
    if g is None:
        g = torch.zeros(q.shape[:3])
        if beta is None:
            g = g + torch.log(1 - 2.0 ** (-5.0 - torch.arange(q.shape[2])))
    if g.ndim == 3:
        g = g[..., None]
    if use_qk_l2norm_in_kernel:
        q, k = (nn.functional.normalize(rows, dim=-1) for rows in (q, k))
    S, outputs = torch.zeros(*q.shape[::2], q.shape[3], v.shape[3]), []
    for t in range(q.shape[1]):
        S, added = g[:, t, :, :, None].exp() * S, v[:, t]
        if beta is not None:
            added = beta[:, t, :, None] * (added - torch.einsum("bhkv,bhk->bhv", S, k[:, t]))
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], added)
        outputs.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t] * q.shape[3] ** -0.5))
    return torch.stack(outputs, 1), None


def check_fla(recurrent: ModuleType, device: str, case: Any, tolerance: float) -> None:
    """Its function and ours are the same, and so are the gradients."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    parts = [torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
             for shape in recurrent.fla_shapes(case)]  # fmt: skip
    _, call = recurrent.make_fla(case, torch.device(device), dtype)
    theirs = call(*parts)
    way = recurrent.make_matrices("reference", case.heads, case.keys)
    _, call = way(case, torch.device("cpu"), torch.float32)
    copies = [part.detach().float().cpu().requires_grad_() for part in parts]
    ours = call(torch.cat([part.flatten(2).transpose(0, 1) for part in copies], -1))
    ours = ours.transpose(0, 1).unflatten(-1, (case.heads, case.keys))
    weights = torch.randn_like(ours)
    found = theirs, *torch.autograd.grad(theirs, parts, weights.to(theirs))
    for one, other in zip(found, (ours, *torch.autograd.grad(ours, copies, weights)), strict=True):
        assert (one.float().cpu() - other).norm() < tolerance * other.norm()


@pytest.mark.parametrize("name", ["gla", "retention", "delta", "gated_delta"])
def test_flas_functions_are_called_for_what_our_cells_compute(
    recurrent: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, (T, B, heads, keys) = recurrent.KINDS[name], (5, 2, 3, 4)
    package = ModuleType(f"fla.ops.{kind.fla}")
    setattr(package, f"chunk_{kind.fla}", define_fla)
    for stand_in in (ModuleType("fla"), ModuleType("fla.ops"), package):
        monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    sizes = kind.count_features(heads, keys)
    case = recurrent.MatrixCase(name, T, B, sizes, heads=heads, keys=keys)
    check_fla(recurrent, "cpu", case, 1e-5)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gla", "retention", "delta"])  # on Hopper, the other may refuse
def test_flas_functions_compute_what_our_cells_do(recurrent: ModuleType, name: str) -> None:
    pytest.importorskip("fla")
    sizes = recurrent.KINDS[name].count_features(2, 32)
    case = recurrent.MatrixCase(name, 100, 2, sizes, heads=2, keys=32)
    check_fla(recurrent, "cuda", case, 0.02)


def test_what_fla_raises_is_the_error_of_its_row(
    recurrent: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fla.py").write_text("raise ValueError('not on this card\\nmore')")
    monkeypatch.syspath_prepend(tmp_path)
    case = recurrent.MatrixCase("gla", 5, 2, 48, heads=3, keys=4)
    row = recurrent._apart(
        "fla", recurrent.compete_fla, case=case, device="cpu", precision=recurrent.FLOAT32
    )
    assert (row["contender"], row["error"]) == ("fla", "not on this card")
    assert row["forward"] is None


def test_contenders_with_lengths_give_the_same(recurrent: ModuleType) -> None:
    case, device = recurrent.Case("lstm", 7, 4, 5), torch.device("cpu")
    theirs, packed = recurrent.make_packed(case, device, torch.float64)
    ways = recurrent.with_lengths(recurrent.ours("reference"))
    ours, masked = ways(case, device, torch.float64)
    for parameter in (*theirs.parameters(), *ours.parameters()):
        nn.init.constant_(parameter, 0.1)
    for name, parameter in ours.named_parameters():
        if name.startswith("bias"):
            nn.init.constant_(parameter, 0.2)  # PyTorch's has two
    x = torch.randn(7, 4, 5, dtype=torch.float64)
    torch.testing.assert_close(packed(x), masked(x))


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_first_calls_are_timed_with_an_empty_cache_and_a_full_one(
    script: Script, recurrent: ModuleType, tmp_path: Path, device: str
) -> None:
    record = run(script, tmp_path, "latency", device=device)

    assert list(record["seconds"]) == ["empty cache", "full cache"]
    for times in record["seconds"].values():
        assert list(times) == ["first", "again", "new length", "new batch"]
        assert all(seconds > 0 for seconds in times.values())


@pytest.mark.slow
def test_compiled_cells_are_timed_within_a_limit(
    script: Script, recurrent: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recurrent, "CELLS", ("peephole_lstm",))
    rows = []
    for limit, steps in ((240.0, ("--compile-steps", "2")), (0.1, ())):
        monkeypatch.setattr(recurrent, "APART_LIMIT_S", limit)
        record = run(script, tmp_path, "cells", "--compile", "peephole_lstm", *steps)
        rows.append(record["rows"][-1])
    done, ended = rows
    assert (done["contender"], ended["contender"]) == ("torch.compile, 2 steps", "torch.compile")
    assert done["error"] is None
    assert done["compile_s"] > done["forward_backward"]["median_ms"] / 1e3
    assert done["speed_up"]["forward"] > 0
    assert ended["error"] == "not done after 0.1 s"
    assert ended["forward"] is ended["speed_up"] is None


def test_precisions_are_those_of_products_and_of_cudnn(recurrent: ModuleType) -> None:
    flags = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [each.allow_tf32 for each in flags]
    for precision in recurrent.PRECISIONS["cuda"]:
        with precision.in_force():
            assert [each.allow_tf32 for each in flags] == [precision.name == "tf32"] * 2
    assert [each.allow_tf32 for each in flags] == before
