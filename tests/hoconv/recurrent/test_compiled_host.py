"""The host's part of a run in one call of C++, on a CPU: a stand-in runs the kernel."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from torch import Tensor

from hoconv.recurrent.codegen.cluster.layout import ClusterShape
from hoconv.recurrent.ir.program import Program
from hoconv.recurrent.passes.cluster.distribute import refuse
from hoconv.recurrent.runtime.clusters import Kernel
from hoconv.recurrent.runtime.compiled_host import CompiledHost, suits
from hoconv.recurrent.runtime.cpp import obstacle
from hoconv.recurrent.runtime.driver import Configuration
from hoconv.recurrent.runtime.host import HostCode
from hoconv.recurrent.runtime.instructions import HostProgram, lower
from hoconv.recurrent.schedule import plan
from hoconv.testing.cells import CellCase
from tests.hoconv.recurrent.cluster_shim import ShimClusters, shim_clusters
from tests.hoconv.recurrent.support import READY, bound, cell_case

pytestmark = pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))

SHAPES = [ClusterShape(1, 2, 2), ClusterShape(2, 1, 2), ClusterShape(2, 2, 2, 2)]
STREAM, ADDRESS = 0x5EED, 0xADD5  # of no stream and no kernel
ZERO = ctypes.c_double()


class StandIn:
    """Launches the kernel of clusters as the driver would, and notes what it is asked for."""

    def __init__(self, loop: ShimClusters) -> None:
        self.loop = loop
        self.given: list[dict[str, Any]] = []
        kind = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.POINTER(Configuration), ctypes.c_void_p,
            ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p,
        )  # fmt: skip
        self.function = kind(self._launch)
        self.status = 0

    @property
    def kernel(self) -> Kernel:
        launch = ctypes.cast(self.function, ctypes.c_void_p).value
        assert launch
        return Kernel(self.loop.source, ADDRESS, launch, ctypes.addressof(ZERO))

    def _launch(self, given: Any, kernel: int, arguments: Any, _extra: None) -> int:
        c = given.contents
        self.given.append({
            "kernel": kernel, "stream": c.stream, "grid": (*c.grid,), "block": (*c.block,),
            "shared": c.shared_bytes,
            "attributes": [(a.id, a.value[0]) for a in c.attributes[: c.attribute_count]],
        })  # fmt: skip
        shape = self.loop.source.layout.shape
        call = ctypes.c_void_p(arguments[0])
        self.loop.launch(call, c.grid[0] // shape.blocks, ctypes.c_bool(self.loop.reversed))
        return self.status


def lowered(made: Any) -> dict[str, HostProgram]:
    names = [d.name for d in made.declarations]
    which = {name: getattr(made, name) for name in ("inference", "forward", "backward")}
    return {name: lower(p, names, name == "backward") for name, p in which.items()}


def stand_ins(hosts: dict[str, HostProgram], shape: ClusterShape) -> dict[str, StandIn]:
    programs: dict[str, Program] = {name: host.program for name, host in hosts.items()}
    return {name: StandIn(loop) for name, loop in shim_clusters(programs, shape).items()}


def run(host: CompiledHost, *given: Any) -> list[Tensor]:
    """Calls it as HostCode is called."""
    *lists, seed = given
    return host([t for each in lists for t in each], seed, STREAM)


def draw(
    host: HostProgram, case: CellCase, T: int = 4, B: int = 3
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Random tensors that a program takes."""

    def tensor(shape: tuple[int, ...], dtype: str) -> Tensor:
        found = torch.randn(shape, dtype=torch.float64)
        return found > 0 if dtype == "bool" else found

    def leading(rate: str) -> tuple[int, ...]:
        return () if rate == "once" else (T, B)

    p = host.program
    sequences = [tensor((*leading(v.type.rate), v.type.size), v.type.dtype) for _, v in p.sequences]
    states = [tensor((B, s.value.type.size), "f64") for s in p.states if s.total is None]
    return sequences, states, [t.detach() for t in case.parameters.values()]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_computes_what_the_function_of_python_computes(shape: ClusterShape) -> None:
    options = {"masked": shape.blocks > 1, "resets": shape.clusters > 1, "recompute": False}
    cases = [cell_case(each, **options) for each in (*(bound(n, 3, 6) for n in READY), *range(6))]
    hosts = {
        f"{name}_{i}": host
        for i, case in enumerate(cases)
        for name, host in lowered(plan(case.cell, torch.float64, "auto", **case.options)).items()
        if not refuse(host.program) and suits(host)
    }
    assert {name.partition("_")[0] for name in hosts} == {"inference", "forward", "backward"}
    for name, stand_in in stand_ins(hosts, shape).items():
        host, case = hosts[name], cases[int(name.partition("_")[2])]
        expected = HostCode(host, stand_in.loop)
        got = CompiledHost(host, stand_in.kernel)
        for T, B in (4, 3), (1, 1), (3, 5), (2, 0):
            given = draw(host, case, T, B)
            pairs = zip(run(got, *given, case.seed), expected(*given, case.seed), strict=True)
            for mine, other in pairs:
                assert (mine.stride(), mine.dtype) == (other.stride(), other.dtype), name
                # Products are written beside each other there, which may change how they add.
                tolerance = 1e-9 if name.startswith("backward") else 0
                torch.testing.assert_close(
                    mine, other, rtol=tolerance, atol=tolerance, equal_nan=True, msg=name
                )
        assert len(stand_in.given) == 3, name


def test_it_launches_what_the_layout_says() -> None:
    case = cell_case(bound("lstm", 3, 6))
    host = lowered(plan(case.cell, torch.float64, "auto"))["inference"]
    for shape in SHAPES:
        stand_in = stand_ins({"inference": host}, shape)["inference"]
        run(CompiledHost(host, stand_in.kernel), *draw(host, case, 2, 5), None)
        teams = -(-5 // shape.rows)
        assert stand_in.given == [{
            "kernel": ADDRESS, "stream": STREAM, "grid": (teams * shape.members, 1, 1),
            "block": (shape.threads, 1, 1), "shared": stand_in.loop.source.layout.shared_bytes,
            "attributes": [(4, shape.blocks), *([(2, 1)] if shape.clusters > 1 else [])],
        }]  # fmt: skip


def test_it_takes_strided_tensors() -> None:
    case = cell_case(bound("lstm", 3, 6))
    for name, host in lowered(plan(case.cell, torch.float64, "auto")).items():
        stand_in = stand_ins({name: host}, SHAPES[0])[name]
        sequences, states, parameters = draw(host, case)
        expected = HostCode(host, stand_in.loop)(sequences, states, parameters, None)
        strided = [t.transpose(0, -1).contiguous().transpose(0, -1) for t in sequences]
        states = [t.t().contiguous().t() for t in states]
        parameters = [t.t().contiguous().t() if t.dim() == 2 else t for t in parameters]
        got = run(CompiledHost(host, stand_in.kernel), strided, states, parameters, None)
        for mine, other in zip(got, expected, strict=True):
            torch.testing.assert_close(mine, other)


def test_zeros_of_an_address_have_one_number() -> None:
    like = torch.empty(0)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        found = torch.ops.hoconv.recurrent.zeros(like, ctypes.addressof(ZERO), 3, 4, dtype)
        assert (found.dtype, found.stride(), found.device) == (dtype, (0, 0), like.device)
        assert torch.equal(found, torch.zeros(3, 4, dtype=dtype))


def test_it_refuses_what_the_kernel_does_not_read() -> None:
    case = cell_case(bound("peephole_lstm", 3, 6))
    host = lowered(plan(case.cell, torch.float64, "auto"))["inference"]
    stand_in = stand_ins({"inference": host}, SHAPES[0])["inference"]
    made = CompiledHost(host, stand_in.kernel)
    sequences, states, parameters = draw(host, case)

    def change(of: list[Tensor], at: int, by: Any) -> list[Tensor]:
        return [by(t) if i == at else t for i, t in enumerate(of)]

    for i in range(len(states)):
        for by in (lambda t: t[:2], lambda t: t[:, :5], lambda t: t[0]):
            assert run(made, sequences, change(states, i, by), parameters, None) == []
    weights = [i for i, t in enumerate(parameters) if t.dim() == 2]
    others = [i for i, t in enumerate(parameters) if t.dim() == 1 and len(t) == 6]
    for i in weights:
        assert run(made, sequences, states, change(parameters, i, lambda t: t[:5]), None) == []
    peepholes = [i for i in others if "peephole" in [*case.parameters][i]]
    assert len(peepholes) == 3
    for i in peepholes:
        for by in (Tensor.float, lambda t: t[:5]):
            assert run(made, sequences, states, change(parameters, i, by), None) == []
    assert stand_in.given == []


def test_an_error_of_the_driver_is_raised() -> None:
    case = cell_case(bound("lstm", 3, 6))
    host = lowered(plan(case.cell, torch.float64, "auto"))["inference"]
    stand_in = stand_ins({"inference": host}, SHAPES[0])["inference"]
    stand_in.status = 701
    with pytest.raises(RuntimeError, match="error 701 of the CUDA driver"):
        run(CompiledHost(host, stand_in.kernel), *draw(host, case), None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_ready_cells_suit(dtype: torch.dtype) -> None:
    for name in READY:
        for program, host in lowered(plan(bound(name, 3, 6), dtype, "auto")).items():
            assert suits(host), (name, program, {each.kind for each in host.instructions})
