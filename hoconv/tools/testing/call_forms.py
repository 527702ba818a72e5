"""One call in other forms: the same values with other strides, other gradients of the output, and
fewer arguments that are differentiated.

Kernels tend to be right in the form in which their author calls them. Users pass views, gradients
that are expanded, such as that of a sum, and arguments that need no gradient, such as the input of
the first layer, or frozen weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from hoconv.dispatch.declaration import Sample
from hoconv.tools.testing.comparison import gradient_name, is_floating

_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64)
GAP = 2  # elements of memory for each element of a strided tensor, and between rows


class Form(NamedTuple):
    """A way of calling a sample.

    Attributes:
        name: what is different.
        args: the sample's arguments, with the same values.
        cotangent: the gradient of the output.
        positions: of the arguments that are differentiated.
        same_values: whether the gradient of the output has the values that it was given; where it
            has not, results may be much smaller than theirs, and so errors relative to both count.
    """

    name: str
    args: tuple[Any, ...]
    cotangent: Any
    positions: tuple[int, ...]
    same_values: bool = True

    def of(self, results: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the part of the results of a call with all gradients that this one has."""
        left_out = {gradient_name(i) for i in range(len(self.args)) if i not in self.positions}
        return {name: t for name, t in results.items() if name not in left_out}


def forms(sample: Sample, cotangent: Any) -> Iterator[Form]:
    """Yields other forms of a call.

    Args:
        cotangent: a gradient of the output, in its structure, on the device of the arguments.
    """
    args = sample.args
    tensors = [i for i, a in enumerate(args) if isinstance(a, Tensor)]
    wanted = tuple(i for i in tensors if is_floating(args[i]))
    for changed in _once([*((i,) for i in tensors), tuple(tensors)]):
        name = f"with strides of its own: {_arguments(changed)}"
        given = tuple(strided(a) if i in changed else a for i, a in enumerate(args))
        yield Form(name, given, cotangent, wanted)
    given = tuple(_apart(a) if i in tensors else a for i, a in enumerate(args))
    yield Form("with rows apart", given, tree_map(_apart, cotangent), wanted)
    gradient = "gradient of the output"
    yield Form(f"{gradient} with strides of its own", args, tree_map(strided, cotangent), wanted)
    yield Form(f"{gradient} of a sum", args, tree_map(_expand, cotangent), wanted, False)
    fewer = [*((i,) for i in wanted), *(tuple(j for j in wanted if j != i) for i in wanted), ()]
    for some in _once(fewer):
        if some != wanted:
            yield Form(f"differentiated: {_arguments(some)}", args, cotangent, some)


def unlike(args: Sequence[Any], i: int) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yields calls in which tensor i is unlike the other arguments, and so no other forms. A kernel
    that takes it for like them reads wrong numbers, or memory that is not its own."""
    t = args[i]
    others = {"no tensor": t.tolist(), "on meta": t.to("meta"), "sparse": t.to_sparse()}
    others |= {str(to): t.to(to) for to in _DTYPES if to != t.dtype}
    for dim, size in enumerate(t.shape):
        if size:
            one = t.narrow(dim, size - 1, 1)
            others[f"1 in dimension {dim}"] = one
            others[f"expanded in dimension {dim}"] = one.expand(t.shape)
            others[f"shorter in dimension {dim}"] = t.narrow(dim, 0, size - 1)
    for name, other in others.items():
        yield f"argument {i} {name}", (*args[:i], other, *args[i + 1 :])


def strided(t: Tensor) -> Tensor:
    """Copies a tensor to memory where no dimension is contiguous, the first is the densest, and the
    values do not begin at the beginning. What lies between them is NaN, or the largest integer."""
    view = _memory(t, (*reversed(t.shape), GAP))[..., GAP - 1].permute(
        tuple(reversed(range(t.dim())))
    )
    return view.copy_(t.detach())


def _apart(t: Tensor) -> Tensor:
    """The same with rows that are contiguous, but lie apart."""
    if not t.dim():
        return t
    memory = _memory(t, (*t.shape[:-1], t.shape[-1] + GAP))
    return memory[..., : t.shape[-1]].copy_(t.detach())


def _memory(t: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Fills memory for the values of a tensor with what is to be wrong wherever it is read."""
    if t.is_floating_point():
        return t.new_full(shape, torch.nan)
    return t.new_full(shape, True if t.dtype == torch.bool else torch.iinfo(t.dtype).max)


def _expand(t: Tensor) -> Tensor:
    """Returns ones, which share one place in memory, as the gradient of a sum does."""
    return t.new_ones(()).expand(t.shape)


def _once(positions: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    return list(dict.fromkeys(positions))


def _arguments(positions: tuple[int, ...]) -> str:
    return ", ".join(f"argument {i}" for i in positions) or "no argument"
