"""Groups before and after the loop: compiled with it, and run for the rows of all steps at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hoconv import jit
from hoconv import recurrent as rnn
from hoconv.recurrent.frontend.cell import Cell
from hoconv.recurrent.passes.rows import make_row_programs
from hoconv.recurrent.plans import find_plan
from hoconv.recurrent.runtime import host
from hoconv.recurrent.runtime.cpp import compile_loops
from hoconv.recurrent.schedule import plan
from tests.hoconv.recurrent.support import cell_case, gradients
from tests.hoconv.recurrent.test_compiler import check_loops
from tests.hoconv.recurrent.test_whole import OWN, WAITING

pytestmark = pytest.mark.skipif(jit.obstacle("cpu") is not None, reason=str(jit.obstacle("cpu")))


@rnn.cell(state=("h",))
def prepared(x: Any, h: Any) -> Any:
    """Most of its work depends on the input alone: conditions, reductions, several sizes."""
    z = rnn.layer_norm("norm", rnn.gelu(rnn.linear("z", x)))
    scale = rnn.sum(rnn.abs(x)) * rnn.parameter("scale", 1)
    z = rnn.where(z > 0.2, z * scale, rnn.softmax(rnn.cat(z, x))[:, : z.shape[-1]])
    h = rnn.tanh(z + rnn.linear("h", h)) * rnn.sigmoid(rnn.parameter("gain") * z)
    return rnn.cat(h, rnn.mean(z)), dict(h=h)


CELLS: list[Cell] = [prepared, *OWN, *WAITING]


def of(cell: Cell) -> Any:
    return cell.bind(3, 4, {})


def test_groups_are_exact() -> None:
    options: tuple[dict[str, bool], ...] = ({}, {"masked": True, "resets": True, "reverse": True})
    cases = [cell_case(of(cell), **each) for cell in CELLS for each in options]
    check_loops(cases, "auto", compile_loops)


def test_groups_do_not_run_op_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    made = plan(of(prepared), torch.float64)
    assert make_row_programs(made.forward)
    assert make_row_programs(made.backward)
    assert not make_row_programs(plan(of(prepared), torch.float64, "hoisted").common[0][1])
    layer = rnn.RNN(prepared, 3, 4, dtype=torch.float64, impl="cpp")
    x = torch.randn(5, 2, 3, dtype=torch.float64)
    expected = gradients(layer, x)
    kinds = []
    evaluate = host.evaluate_op

    def recorded(op: Any, *rest: Any) -> Any:
        kinds.append(op.kind)
        return evaluate(op, *rest)

    monkeypatch.setattr(host, "evaluate_op", recorded)
    find_plan.cache_clear()  # the host's part of a program is written again
    torch.testing.assert_close(gradients(layer, x), expected)
    find_plan.cache_clear()
    assert not kinds


@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (4, 1), (3, 0)])
def test_any_number_of_rows(shape: tuple[int, int]) -> None:
    ours = rnn.RNN(prepared, 3, 4, dtype=torch.float64, impl="cpp")
    exact = rnn.RNN(prepared, 3, 4, dtype=torch.float64, impl="reference")
    exact.load_state_dict(ours.state_dict())
    x = torch.randn(*shape, 3, dtype=torch.float64)
    torch.testing.assert_close(gradients(ours, x), gradients(exact, x), rtol=1e-9, atol=1e-9)
