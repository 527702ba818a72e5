"""States that are reset within sequences: each part is as if it came by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hoconv import jit
from hoconv import recurrent as rnn
from hoconv.recurrent.codegen.cuda import emit_cuda
from hoconv.recurrent.ladder import SCHEDULES
from hoconv.recurrent.schedule import plan
from tests.hoconv.recurrent.support import bound, gradients, layer, sequence

IMPLS = [
    "reference",
    pytest.param(
        "cpp",
        marks=pytest.mark.skipif(jit.obstacle("cpu") is not None, reason=str(jit.obstacle("cpu"))),
    ),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


def part_by_part(
    made: rnn.RNN, x: Tensor, states: tuple[Tensor, ...], lengths: list[int], reset: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Runs each part of each sequence by itself; final states as those of the layer."""
    directions = 1 + made.bidirectional
    outputs = torch.zeros(*x.shape[:2], 0, dtype=x.dtype, device=x.device)
    final = [torch.empty_like(state) for state in states]
    for b, length in enumerate(lengths):
        starts = sorted({0, *(t for t in range(length) if reset[t, b])})
        for start, stop in zip(starts, [*starts[1:], length], strict=True):
            initial = [torch.zeros_like(state[:, b]) for state in states]
            for before, mine in zip(states, initial, strict=True):
                if start == 0 and not reset[0, b]:
                    mine[::directions] = before[::directions, b]
                if made.bidirectional and stop == length:
                    mine[1::2] = before[1::2, b]
            output, last = made(x[start:stop, b], initial[0] if len(initial) == 1 else (*initial,))
            if not outputs.shape[2]:
                outputs = outputs.new_zeros(*x.shape[:2], output.shape[1])
            outputs[start:stop, b] = output
            for mine, found in zip(final, last if isinstance(last, tuple) else (last,)):
                if stop == length:
                    mine[::directions, b] = found[::directions]
                if made.bidirectional and start == 0:
                    mine[1::2, b] = found[1::2]
    return outputs, final


def draw_states(made: rnn.RNN, B: int) -> tuple[Tensor, ...]:
    device = next(made.parameters()).device
    sizes = made.runs[0][0].state_sizes.values()
    return tuple(sequence(len(made.runs), B, n).to(device) for n in sizes)


@given(
    name=st.sampled_from(["lstm", "gru", "layernorm_lstm", "projected_lstm"]),
    bidirectional=st.booleans(),
    num_layers=st.integers(1, 2),
    begins=st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=6),
    ends=st.none() | st.lists(st.integers(1, 6), min_size=3, max_size=3),
)
def test_each_part_is_as_by_itself(
    name: str,
    bidirectional: bool,
    num_layers: int,
    begins: list[list[bool]],
    ends: list[int] | None,
) -> None:
    made = layer(name, num_layers=num_layers, bidirectional=bidirectional)
    T, reset = len(begins), torch.tensor(begins)
    lengths = None if ends is None else [min(end, T) for end in ends]
    x, states = sequence(T, 3, 3), draw_states(made, 3)
    state = states[0] if len(states) == 1 else states
    output, last = made(x, state, lengths, reset)
    expected = part_by_part(made, x, states, lengths or [T] * 3, reset)
    finals = list(last) if isinstance(last, tuple) else [last]
    torch.testing.assert_close((output, finals), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("impl", IMPLS)
def test_implementations_and_schedules_give_the_definition(impl: str, schedule: str) -> None:
    device = "cuda" if impl == "cuda" else "cpu"
    options: dict[str, Any] = {"num_layers": 2, "bidirectional": True}
    exact = layer("peephole_lstm", impl="reference", **options)
    made = layer("peephole_lstm", impl=impl, schedule=schedule, **options)
    made.load_state_dict(exact.state_dict())
    reset = torch.tensor([[1, 0, 0], [0, 0, 1], [1, 0, 1], [0, 0, 0], [0, 0, 1]]).bool()
    x, states = sequence(5, 3, 3), draw_states(exact, 3)
    expected = gradients(exact, x, states, lengths=[5, 2, 4], reset=reset)
    moved = x.to(device), tuple(s.to(device) for s in states)
    found = gradients(made.to(device), *moved, lengths=[5, 2, 4], reset=reset.to(device))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9, check_device=False)


@pytest.mark.parametrize("impl", IMPLS[:2])
def test_what_came_before_a_reset_has_no_influence(impl: str) -> None:
    made = layer("lstm", impl=impl)
    reset = torch.tensor([[False], [False], [True], [False]])
    x = sequence(4, 1, 3).requires_grad_()
    output, (h, c) = made(x, reset=reset)
    (output[2:].sum() + h.sum() + c.sum()).backward()
    assert x.grad is not None
    assert not x.grad[:2].any()
    assert x.grad[2:].abs().min() > 0
    broken = x.detach().clone()
    broken[1] = torch.nan
    found, _ = made(broken, reset=reset)
    assert found[1].isnan().all()
    torch.testing.assert_close(found[2:], output[2:])


def test_batch_first_one_sequence_and_steps_one_by_one() -> None:
    made, turned = layer("lstm"), layer("lstm", batch_first=True)
    turned.load_state_dict(made.state_dict())
    x, reset = sequence(5, 2, 3), torch.tensor([[0, 1], [1, 0], [0, 0], [1, 1], [0, 0]]).bool()
    output, state = made(x, reset=reset)
    by_batch, again = turned(x.transpose(0, 1), reset=reset.t())
    torch.testing.assert_close((by_batch.transpose(0, 1), again), (output, state))
    one, _ = made(x[:, 1], reset=reset[:, 1])
    torch.testing.assert_close(one, output[:, 1])
    steps, state_now = [], None
    for t in range(5):
        step, state_now = made(x[t : t + 1], state_now, reset=reset[t : t + 1])
        steps.append(step)
    torch.testing.assert_close((torch.cat(steps), state_now), (output, state))


def test_compiled_exported_and_transformed() -> None:
    made = layer("lstm", impl="reference")
    x, reset = sequence(3, 2, 3), torch.tensor([[0, 0], [1, 0], [0, 1]]).bool()
    expected = made(x, None, None, reset)

    torch.compiler.reset()
    compiled = torch.compile(Named(made), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, reset), expected)
    exported = torch.export.export(Named(made), (x, reset)).module()
    torch.testing.assert_close(exported(x, reset), expected)
    masks = torch.stack((reset, ~reset))
    mapped = torch.func.vmap(lambda mask: made(x, reset=mask)[0])(masks)
    torch.testing.assert_close(mapped[1], made(x, reset=~reset)[0])


class Named(torch.nn.Module):
    def __init__(self, made: rnn.RNN) -> None:
        super().__init__()
        self.layer = made

    def forward(self, x: Tensor, reset: Tensor) -> Any:
        return self.layer(x, reset=reset)


@pytest.mark.parametrize("impl", IMPLS[1:2])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_exported_programs_take_any_number_of_steps(impl: str, bidirectional: bool) -> None:
    made = layer("lstm", impl=impl, bidirectional=bidirectional)
    x, reset = sequence(6, 2, 3), torch.tensor([[0, 0], [1, 0], [0, 1]] * 2).bool()
    steps = {0: torch.export.Dim("T", min=2, max=20)}
    exported = torch.export.export(Named(made), (x, reset), dynamic_shapes=(steps, steps)).module()
    torch.testing.assert_close(exported(x[:2], reset[:2]), made(x[:2], reset=reset[:2]))


@pytest.mark.parametrize(
    ("reset", "error", "said"),
    [
        (torch.zeros(5, 2), TypeError, "reset: expected a tensor of bool, got torch.float32"),
        ([[True]], TypeError, "reset: expected a tensor of bool, got list; compare it with 0"),
        (torch.zeros(2, 5).bool(), ValueError, r"reset: expected shape \(5, 2\).* got \(2, 5\)"),
        (torch.zeros(5, 2, device="meta").bool(), ValueError, "reset: expected the device of x"),
    ],
)
def test_a_mask_that_does_not_fit_is_refused(reset: Any, error: type, said: str) -> None:
    with pytest.raises(error, match=said):
        layer("lstm")(sequence(5, 2, 3), reset=reset)


def test_a_packed_sequence_is_refused() -> None:
    packed = torch.nn.utils.rnn.pack_sequence([sequence(3, 3)])
    with pytest.raises(ValueError, match="reset: not for a PackedSequence; pad it"):
        layer("lstm")(packed, reset=torch.zeros(3, 1).bool())


def test_a_reset_launches_nothing_more() -> None:
    """On a GPU, the kernel between two products of a step takes it in."""
    for which in ("lstm", "gru", "layernorm_lstm"):
        plain, with_resets = (
            emit_cuda(plan(bound(which), torch.float32, resets=resets).forward).launches
            for resets in (False, True)
        )
        assert len(with_resets) == len(plain)
