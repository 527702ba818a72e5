"""Gradients where layers, states and gradients depend on each other, and of parameters alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hoconv import jit
from hoconv import recurrent as rnn
from hoconv.recurrent.plans import find_plan
from tests.hoconv.recurrent.support import (
    agree,
    check_many_gradients,
    gradients,
    layer,
    sequence,
)

needs_compiler = pytest.mark.skipif(
    jit.obstacle("cpu") is not None, reason=str(jit.obstacle("cpu"))
)


@pytest.mark.parametrize(
    "expression",
    [
        lambda p: rnn.softmax(p),
        lambda p: p / rnn.sqrt(rnn.sum(p * p)),
        lambda p: rnn.sum(p),
        lambda p: p - rnn.mean(p),
        lambda p: rnn.max(p),
        lambda p: rnn.cat(p[:, :2], p[:, 1:3]),
        lambda p: rnn.cat(*reversed(rnn.chunk(rnn.softmax(p), 2))),
        lambda p: rnn.layer_norm("n", rnn.exp(p)),
        lambda p: rnn.where(p > 0, p * p, rnn.sum(p) * p),
        lambda p: rnn.minimum(p, rnn.mean(p)) + rnn.parameter("q", 1),
    ],
)
def test_of_expressions_of_parameters_alone(expression: Callable[[Any], Any]) -> None:
    @rnn.cell(state=("h",))
    def made(x: Any, h: Any) -> Any:
        h = rnn.tanh(rnn.linear("h", x, h)) * expression(rnn.parameter("p"))
        return h, dict(h=h)

    for schedule in ("naive", "auto"):
        agree(rnn.RNN(made, 3, 4, dtype=torch.float64, schedule=schedule))


# Each gets a layer and x, and returns a number whose gradients are asked for.
def gradient_penalty(made: rnn.RNN, x: Tensor) -> Tensor:
    (g,) = torch.autograd.grad(made(x)[0].sin().sum(), x, create_graph=True)
    return g.square().sum()


def penalty_of_parameters(made: rnn.RNN, x: Tensor) -> Tensor:
    found = torch.autograd.grad(made(x)[0].sin().sum(), [*made.parameters()], create_graph=True)
    return torch.stack([g.square().sum() for g in found]).sum()


def fed_its_output(made: rnn.RNN, x: Tensor) -> Tensor:
    output, state = made(x)
    return made(output[..., :3] + x, state)[0].sin().sum()


def fed_its_state(made: rnn.RNN, x: Tensor) -> Tensor:
    state: Any = None
    outputs = []
    for part in x.split(2):
        output, state = made(part, state)
        outputs.append(output)
    return torch.cat(outputs).sin().sum()


def penalty_when_fed_its_state(made: rnn.RNN, x: Tensor) -> Tensor:
    (g,) = torch.autograd.grad(fed_its_state(made, x), x, create_graph=True)
    return g.square().sum()


def state_of_the_input(made: rnn.RNN, x: Tensor) -> Tensor:
    drawn = [x.mean((0, 2))[None, :, None].expand(1, -1, n).cos() for n in sizes(made)]
    output, _ = made(x * x, tuple(drawn) if len(drawn) > 1 else drawn[0])
    (g,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
    return g.square().sum()


def third_order(made: rnn.RNN, x: Tensor) -> Tensor:
    (g,) = torch.autograd.grad(fed_its_output(made, x), x, create_graph=True)
    (g,) = torch.autograd.grad(g.square().sum(), x, create_graph=True)
    return g.sin().sum()


def sizes(made: rnn.RNN) -> list[int]:
    return list(made.runs[0][0].state_sizes.values())


CHAINS = (
    gradient_penalty, penalty_of_parameters, fed_its_output, fed_its_state,
    penalty_when_fed_its_state, state_of_the_input, third_order,
)  # fmt: skip


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("name", ["lstm", "gru", "layernorm_lstm", "minimal_gated"])
@pytest.mark.parametrize("impl", ["cpp", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_of_chained_layers_are_those_of_the_definition(
    impl: str, name: str, chain: Callable[[rnn.RNN, Tensor], Tensor]
) -> None:
    made = layer(name)
    device = "cuda" if impl == "cuda" else "cpu"
    made.to(device)
    x = sequence(4, 2, 3).to(device).requires_grad_()
    found = []
    for which in (impl, "reference"):
        made.impl = which
        loss = chain(made, x)
        leaves = [x, *made.parameters()]
        graph = torch.autograd.grad(loss, leaves, create_graph=True, materialize_grads=True)
        plain = torch.autograd.grad(chain(made, x), leaves, materialize_grads=True)
        found.append((loss, *graph, *plain))
    for mine, exact in zip(*found, strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-9, atol=1e-9)


def test_of_stacked_layers_of_both_directions_and_lengths() -> None:
    made = layer("gru", num_layers=2, bidirectional=True)
    x = sequence(4, 3, 3).requires_grad_()
    found = []
    for impl in ("cpp", "reference"):
        made.impl = impl
        output, state = made(x, lengths=[4, 2, 3])
        (g,) = torch.autograd.grad(output.sin().sum() + state.sum(), x, create_graph=True)
        found.append(torch.autograd.grad(g.square().sum(), [x, *made.parameters()]))
    for mine, exact in zip(*found, strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("impl", ["cpp", "reference"])
def test_hessians_are_those_of_finite_differences(impl: str) -> None:
    made = layer("elman", impl=impl)

    def loss(x: Tensor) -> Tensor:
        output, state = made(x)
        return made(output[..., :3], state)[0].sin().sum()

    x = sequence(2, 1, 3)
    hessian = torch.autograd.functional.hessian(loss, x)
    assert isinstance(hessian, Tensor)
    by_hand = torch.empty(6, 6, dtype=torch.float64)
    for i in range(6):
        step = torch.zeros(6, dtype=torch.float64)
        step[i] = 1e-5
        ends = (
            torch.autograd.functional.jacobian(loss, x + s.view(2, 1, 3)) for s in (step, -step)
        )
        above, below = (end for end in ends if isinstance(end, Tensor))
        by_hand[i] = (above - below).flatten() / 2e-5
    torch.testing.assert_close(hessian.reshape(6, 6), by_hand, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("frozen", ["x", "parameters", "some"])
def test_of_what_is_asked_for_alone(frozen: str) -> None:
    made = layer("lstm")
    x = sequence().requires_grad_(frozen != "x")
    for i, parameter in enumerate(made.parameters()):
        parameter.requires_grad_(frozen == "x" or (frozen == "some" and i % 2 == 0))
    leaves = [t for t in (x, *made.parameters()) if t.requires_grad]
    found = []
    for impl in ("cpp", "reference"):
        made.impl = impl
        output, _ = made(x)
        first = torch.autograd.grad(output.sin().sum(), leaves, create_graph=True)
        loss = torch.stack([g.square().sum() for g in first]).sum()
        found.append((*first, *torch.autograd.grad(loss, leaves)))
    for mine, exact in zip(*found, strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["lstm", "gru", "elman"])
def test_of_a_library_s_function_are_those_of_the_definition(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU it is PyTorch's own function, whose second derivative PyTorch has."""
    from hoconv.recurrent import match, ops

    monkeypatch.setattr(match, "fastest", lambda program: True)
    monkeypatch.setattr("hoconv.recurrent.schedule.fastest", lambda program: True)
    monkeypatch.setitem(ops.RUNS, "cpp", ops.run_cuda)
    find_plan.cache_clear()
    made = layer(name)
    x = sequence(4, 2, 3).requires_grad_()
    found = []
    for impl in ("cpp", "reference"):
        made.impl = impl
        output = made(x)[0]
        if impl == "cpp":
            assert "CudnnFunction" in str(output.grad_fn.next_functions) + str(output.grad_fn)
        loss = penalty_when_fed_its_state(made, x) + fed_its_output(made, x)
        found.append((loss, *torch.autograd.grad(loss, [x, *made.parameters()])))
        twice = made(x)[0].sum()
        found[-1] += torch.autograd.grad(twice, [x], retain_graph=True)
        found[-1] += torch.autograd.grad(twice, [x])
    find_plan.cache_clear()
    for mine, exact in zip(*found, strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-9, atol=1e-9)


def saved_bytes(made: rnn.RNN, x: Tensor) -> int:
    """Returns what is kept between forward and backward, each memory once."""
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.setdefault(t.untyped_storage().data_ptr(), t), lambda t: t
    ):
        outputs, _ = made(x)
    del outputs
    return sum(t.untyped_storage().nbytes() for t in kept.values())


@needs_compiler
@pytest.mark.parametrize("name", ["lstm", *(pytest.param(n, marks=pytest.mark.slow)
                                            for n in ("gru", "layernorm_lstm"))])  # fmt: skip
def test_recomputing_keeps_less_and_changes_nothing(name: str) -> None:
    arguments = {"bidirectional": True}
    keeping = layer(name, impl="cpp", **arguments)
    made = layer(name, impl="cpp", recompute=True, **arguments)
    made.load_state_dict(keeping.state_dict())
    assert "recompute=True" in repr(made)
    x, reset = sequence(20, 2, 3).requires_grad_(), torch.rand(20, 2) < 0.2
    for mine, exact in zip(
        gradients(made, x, None, [20, 8], reset), gradients(keeping, x, None, [20, 8], reset)
    ):
        torch.testing.assert_close(mine, exact, rtol=1e-12, atol=1e-12)
    assert saved_bytes(made, x) < 0.95 * saved_bytes(keeping, x)
    second = [gradient_penalty(each, x) for each in (made, keeping)]
    torch.testing.assert_close(*second, rtol=1e-12, atol=1e-12)


def test_the_page_says_how_many_bytes_are_kept() -> None:
    page = (Path(__file__).parents[3] / "docs" / "use" / "recurrent.md").read_text()
    for recompute, said in ((False, "13,312"), (True, "3,072 bytes a step and row")):
        made = rnn.LSTM(512, 512, dtype=torch.bfloat16, recompute=recompute)
        assert said in page
        assert f"{said.split()[0].replace(',', '')} bytes a step and row" in made.explain()


def test_two_layers_that_share_one_input_and_each_other() -> None:
    first, second = layer("lstm", impl="cpp"), layer("minimal_gated", impl="cpp")
    head = nn.Linear(4, 3, dtype=torch.float64)
    x = sequence(3, 2, 3).requires_grad_()
    leaves = [x, *first.parameters(), *second.parameters(), *head.parameters()]
    found = []
    for impl in ("cpp", "reference"):
        first.impl = second.impl = impl
        output, _ = second(head(first(x)[0]) + x)
        (g,) = torch.autograd.grad(output.sin().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(g.square().sum(), leaves, materialize_grads=True))
    for mine, exact in zip(*found, strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-9, atol=1e-9)


def functional(made: rnn.RNN) -> Callable[[Tensor, dict[str, Tensor]], Tensor]:
    """A layer as a function of its input and parameters."""
    return lambda x, parameters: torch.func.functional_call(made, parameters, (x,))[0].sin().sum()


TRANSFORMS: dict[str, Callable[[Any, Tensor, dict[str, Tensor]], Any]] = {
    "grad": lambda f, x, p: torch.func.grad(f, argnums=(0, 1))(x, p),
    "jacrev": lambda f, x, p: torch.func.jacrev(f)(x, p),
    "vjp": lambda f, x, p: torch.func.vjp(f, x, p)[1](torch.tensor(2.0, dtype=x.dtype)),
    "grad of grad": lambda f, x, p: torch.func.grad(
        lambda x: torch.func.grad(f)(x, p).square().sum()
    )(x),
    "vmap": lambda f, x, p: torch.func.vmap(f, in_dims=(0, None))(torch.stack((x, 2 * x)), p),
    "vmap of grad": lambda f, x, p: torch.func.vmap(torch.func.grad(f), in_dims=(0, None))(
        torch.stack((x, 2 * x)), p
    ),
    "jvp": lambda f, x, p: torch.func.jvp(lambda x: f(x, p), (x,), (x.cos(),)),
    "jvp by parameters": lambda f, x, p: torch.func.jvp(lambda p: f(x, p), (p,), (p,)),
    "jacfwd": lambda f, x, p: torch.func.jacfwd(f)(x, p),
    "hessian": lambda f, x, p: torch.func.hessian(f)(x, p),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_under_torch_func_are_right_or_refused(name: str) -> None:
    transform = TRANSFORMS[name]
    refused = name in ("jvp", "jvp by parameters", "jacfwd", "hessian")
    made = layer("gru")
    parameters = {name: p.detach() for name, p in made.named_parameters()}
    x = sequence(3, 2, 3)
    made.impl = "reference"
    exact = transform(functional(made), x, parameters)
    made.impl = "cpp"
    if refused:
        with pytest.raises(NotImplementedError, match="no forward-mode derivative; use reverse"):
            transform(functional(made), x, parameters)
    else:
        found = transform(functional(made), x, parameters)
        torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-9)


def test_in_forward_mode_are_refused() -> None:
    made, x = layer("lstm", impl="cpp"), sequence(3, 2, 3)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            made(dual)


@needs_compiler
@pytest.mark.parametrize("bidirectional", [False, True])
def test_many_gradients_at_once_are_those_of_each(bidirectional: bool) -> None:
    check_many_gradients(
        rnn.LSTM(3, 4, bidirectional=bidirectional, dtype=torch.float64, impl="cpp")
    )
