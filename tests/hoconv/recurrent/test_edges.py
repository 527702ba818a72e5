"""Values at the edges: every function of the language, and what a cell makes of two of them, gives
in generated code what PyTorch's functions give for zeros, infinities, NaN, and numbers for which an
exponential overflows or vanishes; so do the gradients."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hoconv import jit
from hoconv import recurrent as rnn
from hoconv.recurrent.ir.functions import FUNCTIONS, Reduction

DTYPES = (torch.float32, torch.float64)
# Past 20 softplus is x. The exponential overflows past 88.7 of float32, 709.8 of float64; it is no
# normal number below -87.3 and -708.4, and 0 below -104 and -745.2.
_SIZES = (
    1e-8, 0.3, 1.0, 2.5, 19.9, 20.1,
    87.0, 88.5, 89.0, 103.0, 105.0,
    708.5, 710.0, 744.0, 746.0, 1e30,
)  # fmt: skip
# Of which a sine is that of the reference: of a large number one rounding is many waves.
_BOUNDED = ("sigmoid", "tanh", "sin", "cos", "sign", "relu", "neg", "abs")
CONSTANTS = (0.0, -0.0, 1.0, math.inf, math.nan, 1e-310, 1e300)
BASES = (1.0, 2.0, 0.5, 10.0, 1e30, 1e-30, 1 + 1e-9, 1 - 1e-9, 1.1, 1e300, math.inf)

Case = tuple[str, int, Callable[..., Any]]  # its name, how many operands, and what a cell does


def edges(dtype: torch.dtype) -> Tensor:
    info = torch.finfo(dtype)
    sizes = [0.0, *_SIZES, info.tiny / 8, info.tiny, info.eps, info.max, math.inf]
    return torch.tensor([*sizes, *(-s for s in sizes), math.nan], dtype=dtype)


def _one_operand() -> dict[str, Callable[[Any], Any]]:
    table = {
        f.name: getattr(rnn, f.name)
        for f in FUNCTIONS.values()
        if f.doc and len(f.operands) == 1 and not isinstance(f, Reduction)
    }
    return {
        **table,
        "neg": lambda x: -x,
        "gelu": rnn.gelu,
        "silu": rnn.silu,
        "clamp": lambda x: rnn.clamp(x, -1.0, 20.0),
        "square": lambda x: x * x,
        "minus": lambda x: 1 - x,
        "over": lambda x: 1 / x,
    }


def _two_operands() -> dict[str, Callable[[Any, Any], Any]]:
    def choice(condition: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        return lambda a, b: rnn.where(condition(a, b), a + 0.0, b + 1.0)

    return {
        "add": lambda a, b: a + b,
        "sub": lambda a, b: a - b,
        "mul": lambda a, b: a * b,
        "div": lambda a, b: a / b,
        "minimum": rnn.minimum,
        "maximum": rnn.maximum,
        "lt": choice(lambda a, b: a < b),
        "le": choice(lambda a, b: a <= b),
        "gt": choice(lambda a, b: a > b),
        "ge": choice(lambda a, b: a >= b),
        "eq": choice(lambda a, b: a == b),
        "ne": choice(lambda a, b: ~(a != b)),
        "sum": lambda a, b: rnn.sum(rnn.cat(a, b)),
        "max": lambda a, b: rnn.max(rnn.cat(a, b)),
    }


def functions() -> list[Case]:
    one, two = _one_operand(), _two_operands()
    cases: list[Case] = [(name, 1, f) for name, f in one.items()]
    cases += [(f"x ** {n}", 1, lambda x, n=n: x**n) for n in (1, 2, 3, 4)]
    cases += [(f"{base} ** x", 1, lambda x, base=base: base**x) for base in BASES]
    cases += [(name, 2, f) for name, f in two.items() if name not in ("sum", "max")]
    return cases


def compositions() -> list[Case]:
    one = _one_operand()
    return [
        (f"{f}({g}(x))", 1, lambda x, f=f, g=g: one[f](one[g](x)))
        for f, g in itertools.product(one, one)
        if f not in ("sin", "cos") or g in _BOUNDED
    ]


def with_constants() -> list[Case]:
    cases: list[Case] = []
    for (name, f), c in itertools.product(_two_operands().items(), CONSTANTS):
        if name not in ("sum", "max"):
            cases.append((f"{name}(x, {c})", 1, lambda x, f=f, c=c: f(x, c)))
            cases.append((f"{name}({c}, x)", 1, lambda x, f=f, c=c: f(c, x)))
    return cases


def run(cases: list[Case], impl: str, dtype: torch.dtype) -> dict[str, tuple[Tensor, Tensor]]:
    """The values of each case for its edges, and the gradients of its operands."""
    values = edges(dtype)
    pairs = torch.cartesian_prod(values, values)
    given = [values.unsqueeze(1) if operands == 1 else pairs for _, operands, _ in cases]
    sizes = [len(each) for each in given]

    def step(x, h):
        parts, start = [], 0
        for (_, operands, function), size in zip(cases, sizes, strict=True):
            rows = [x[:, start + i * size : start + (i + 1) * size] for i in range(operands)]
            parts.append(function(*rows))
            start += operands * size
        return rnn.cat(*parts), dict(h=h)

    count = sum(g.numel() for g in given)
    layer = rnn.RNN(rnn.cell(state=("h",))(step), count, 1, impl=impl, dtype=dtype)
    x = torch.cat([g.T.flatten() for g in given]).requires_grad_()
    output, _ = layer(x[None])
    output.sum().backward()
    assert x.grad is not None
    found = output[0].detach().split(sizes), x.grad.split([g.numel() for g in given])
    return dict(zip((name for name, _, _ in cases), zip(*found, strict=True), strict=True))


@pytest.mark.skipif(jit.obstacle("cpu") is not None, reason=str(jit.obstacle("cpu")))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "cases",
    [
        functions,
        pytest.param(with_constants, marks=pytest.mark.slow),
        pytest.param(compositions, marks=pytest.mark.slow),
    ],
)
def test_edges_are_those_of_the_reference(cases: Any, dtype: torch.dtype) -> None:
    listed = cases()
    exact, found = run(listed, "reference", dtype), run(listed, "cpp", dtype)
    info, values, failed = torch.finfo(dtype), edges(dtype), []
    for name, operands, _ in listed:
        for which, a, b in zip(("value", "gradient"), found[name], exact[name], strict=True):
            floor = info.tiny if which == "value" else info.eps  # a gradient is a difference
            # The largest number and infinity may be a rounding apart.
            nearest = (t.clamp(-info.max, info.max) for t in (a, b))
            wrong = ~torch.isclose(*nearest, rtol=256 * info.eps, atol=4 * floor, equal_nan=True)
            for i in wrong.nonzero().flatten()[:6].tolist():
                x = values[i].item() if operands == 1 else divmod(i, len(values))
                failed.append(f"{name}: {which} at {x}: {a[i].item()}, expected {b[i].item()}")
    assert not failed, "\n".join(failed)
