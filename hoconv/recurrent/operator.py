"""Declares the operator: a recurrent layer in one direction.

B batch, H hidden size, I input size, T time steps, n features of a state.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hoconv.dispatch.declaration import Benchmark, Cost, Implementation, Operator, Sample, declare
from hoconv.dispatch.implementations import resolve
from hoconv.dispatch.registration import autocast, check_dense, check_dtypes
from hoconv.recurrent import cells, ops
from hoconv.recurrent.frontend.cell import BoundCell, Cell
from hoconv.recurrent.frontend.serialize import to_text
from hoconv.recurrent.frontend.trace import trace
from hoconv.recurrent.plans import prepare, request
from hoconv.recurrent.runtime.libraries import PRODUCTS, READY

_TOLERANCES = {
    torch.float64: 1e-12,
    torch.float32: 1e-4,  # small LSTMs are cuDNN's on a GPU, and that is 1e-5 off
    torch.float16: 1e-2,
    torch.bfloat16: 6e-2,
}
_CELLS: dict[str, tuple[Cell, dict[str, int]]] = {
    "lstm": (cells.lstm, {}),
    "gru": (cells.gru, {}),
    "elman": (cells.elman, {}),
    "peephole_lstm": (cells.peephole_lstm, {}),
    "layernorm_lstm": (cells.layernorm_lstm, {}),
    "coupled_lstm": (cells.coupled_lstm, {}),
    "minimal_gated": (cells.minimal_gated, {}),
    "projected_lstm": (cells.projected_lstm, {"proj_size": 3}),
}


def recurrent(
    x: Tensor,
    *tensors: Tensor,
    cell: str,
    hidden_size: int,
    schedule: str = "auto",
    reverse: bool = False,
    impl: str = "auto",
) -> tuple[Tensor, ...]:
    """Runs a ready cell over a sequence; :class:`hoconv.recurrent.RNN` runs it for each layer.

    Args:
        x: (T, B, I); float32, float64, float16 or bfloat16.
        tensors: the initial states (B, n), then the cell's parameters, in its order; dtype and
            device of x.
        cell: the name of a ready cell.
        hidden_size: H.
        schedule: one of :data:`hoconv.recurrent.SCHEDULES`.
        reverse: whether the first step is the last of x.
        impl: ``"auto"``, ``"reference"``, ``"cpp"`` or ``"cuda"``.

    Returns:
        The outputs (T, B, n), then each state (B, n) after the last step. Under autocast all
        tensors are cast to its dtype.

    Raises:
        ValueError: a shape or device does not fit.
        TypeError: a dtype is not supported, or differs from x's.
        hoconv.dispatch.implementations.ImplementationError: `impl` names one that cannot run here.
    """
    x, *others = _check(x, tensors, cell, hidden_size)
    call = _call(x, others, cell, hidden_size, schedule, reverse)
    name = resolve("recurrent", impl, x.device.type, call.plan, call.program)
    run = OPERATOR.implementations[name].function
    return run(x, others, cell, hidden_size, schedule, reverse)


def _check(x: Tensor, tensors: Sequence[Tensor], cell: str, hidden_size: int) -> tuple[Tensor, ...]:
    """Returns x and the other tensors, cast under autocast and checked."""
    check_dense(x)
    if x.dim() != 3 or 0 in (x.shape[0], x.shape[2]):
        raise ValueError(f"x: expected (T, B, I), T and I at least 1, got shape {tuple(x.shape)}")
    states = _bind(cell, x.shape[2], hidden_size).state_sizes
    names, shapes, _ = _trace(cell, x.shape[2], hidden_size)
    expected: dict[str, tuple[int, ...]] = dict(zip(names, shapes, strict=True))
    expected = {state: (x.shape[1], n) for state, n in states.items()} | expected
    if len(tensors) != len(expected):
        raise ValueError(
            f"tensors: expected {len(expected)} ({', '.join(expected)}), got {len(tensors)}"
        )
    for tensor, (name, shape) in zip(tensors, expected.items(), strict=True):
        check_dense(tensor, name)
        if [*tensor.shape] != [*shape]:
            raise ValueError(f"{name}: expected shape {shape}, got {tuple(tensor.shape)}")
    x, *tensors = autocast(x.device.type, x, *tensors)
    check_dtypes(x, _TOLERANCES, **dict(zip(expected, tensors, strict=True)))
    return x, *tensors


def _implementation(
    run: Callable[[ops.Call], list[Tensor]],
) -> Callable[..., tuple[Tensor, ...]]:
    def function(
        x: Tensor, tensors: Sequence[Tensor], cell: str, hidden_size: int,
        schedule: str = "auto", reverse: bool = False,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        return tuple(run(_call(x, tensors, cell, hidden_size, schedule, reverse)))

    return function


def _call(
    x: Tensor, tensors: Sequence[Tensor], cell: str, hidden_size: int, schedule: str, reverse: bool
) -> ops.Call:
    bound = _bind(cell, x.shape[2], hidden_size)
    names, _, text = _trace(cell, x.shape[2], hidden_size)
    plan = request(text, x.dtype, schedule, False, False, reverse)
    n = len(bound.state_sizes)
    states, parameters = list(tensors[:n]), list(tensors[n:])
    return ops.Call(bound, names, plan, x, states, parameters, reverse=reverse)


def _runtime() -> Any:
    """Returns the module that runs loops in CUDA; it brings the compiler."""
    from hoconv.recurrent.runtime import cuda

    return cuda


def _bind(cell: str, input_size: int, hidden_size: int) -> BoundCell:
    made, options = _CELLS[cell]
    return made.bind(input_size, hidden_size, options)


_Traced = tuple[tuple[str, ...], tuple[tuple[int, ...], ...], str]


def _trace(cell: str, input_size: int, hidden_size: int) -> _Traced:
    """The names and shapes of a ready cell's parameters, and its text. A constant to
    torch.compile."""
    return _trace_once(cell, input_size, hidden_size)


@functools.cache
def _trace_once(cell: str, input_size: int, hidden_size: int) -> _Traced:
    traced = trace(_bind(cell, input_size, hidden_size))
    declared = traced.declarations
    return tuple(d.name for d in declared), tuple(d.read_shape for d in declared), to_text(traced)


_trace._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def _sample(
    cell: str, T: int, B: int, n: int, H: int, device: torch.device, dtype: torch.dtype,
    name: str = "", **options: object,
) -> Sample:  # fmt: skip
    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, dtype=torch.float64) * scale).to(device, dtype)

    bound = _bind(cell, n, H)
    states = [draw(B, size) for size in bound.state_sizes.values()]
    parameters = [draw(*d.read_shape, scale=H**-0.5) for d in trace(bound).declarations]
    kwargs = {"cell": cell, "hidden_size": H, **options}
    return Sample((draw(T, B, n), *states, *parameters), kwargs, name or cell)


def _samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Few: each is compiled, in each dtype. tests/hoconv/recurrent has every cell.

    Wide enough that hardly any draw is ill-conditioned: a gradient that is a single number may
    be the difference of two that nearly agree, and three features may have no variance.
    """
    yield _sample("lstm", 2, 2, 3, 5, device, dtype)
    yield _sample("layernorm_lstm", 2, 2, 3, 8, device, dtype)
    yield _sample("projected_lstm", 2, 3, 3, 5, device, dtype, "backwards", reverse=True)
    yield _sample("gru", 1, 1, 4, 5, device, dtype, "one step and row")
    x, *tensors = (sample := _sample("lstm", 2, 3, 3, 5, device, dtype)).args
    strided = x.transpose(0, 1).contiguous().transpose(0, 1)
    yield Sample((strided, *tensors), sample.kwargs, "(B, T)")


def _cost(sample: Sample) -> Cost:
    x, *tensors = sample.args
    products = [t for t in tensors if t.dim() == 2 and t.shape[0] != x.shape[1]]
    bound = _bind(sample.kwargs["cell"], x.shape[2], sample.kwargs["hidden_size"])
    n = trace(bound).output_size
    states = sum(t.nbytes for t in tensors[: len(bound.state_sizes)])
    read = x.nbytes + sum(t.nbytes for t in tensors)
    written = x.shape[0] * x.shape[1] * n * x.element_size() + states
    flops = 2 * x.shape[0] * x.shape[1] * sum(math.prod(t.shape) for t in products)
    return Cost(
        forward_bytes=read + written,
        backward_bytes=2 * read + written,
        forward_flops=flops,
        backward_flops=2 * flops,
    )


def _benchmark_sample(hidden_size: int, device: torch.device, dtype: torch.dtype) -> Sample:
    name = f"T=100, B=64, I=H={hidden_size}"
    return _sample("lstm", 100, 64, hidden_size, hidden_size, device, dtype, name)


def _nn_lstm(
    x: Tensor, h: Tensor, c: Tensor, *parameters: Tensor, **_: object
) -> tuple[Tensor, ...]:
    """PyTorch's own LSTM with these parameters."""
    weights, biases = parameters[::2], parameters[1::2]
    ih, hh = torch.cat(weights).split([x.shape[2], h.shape[1]], 1)
    bias = torch.cat(biases)
    flat = [ih.contiguous(), hh.contiguous(), bias, torch.zeros_like(bias)]
    output, *final = torch._VF.lstm(x, (h[None], c[None]), flat, True, 1, 0.0, True, False, False)
    return output, *(state[0] for state in final)


OPERATOR = declare(
    Operator(
        name="recurrent",
        function=recurrent,
        implementations={
            "reference": Implementation(_implementation(ops.RUNS["reference"])),
            "cpp": Implementation(
                _implementation(ops.RUNS["cpp"]),
                devices=("cpu", "cuda"),
                thread_invariant=False,
                load=PRODUCTS.load,
                obstacle=PRODUCTS.obstacle,
                prepare=functools.partial(prepare, "cpp"),
                libraries=(PRODUCTS, READY) if READY else (PRODUCTS,),
            ),
            "cuda": Implementation(
                _implementation(ops.RUNS["cuda"]),
                devices=("cuda",),
                load=lambda: _runtime().load(),
                obstacle=lambda: _runtime().obstacle(),
                prepare=functools.partial(prepare, "cuda"),
            ),
        },
        samples=_samples,
        tolerances=_TOLERANCES,
        cost=_cost,
        benchmark=Benchmark(
            axis="hidden size (LSTM, T = 100, B = 64)",
            sizes=(128, 256, 512),
            sample=_benchmark_sample,
            baselines={"nn.LSTM": _nn_lstm},
        ),
    )
)
