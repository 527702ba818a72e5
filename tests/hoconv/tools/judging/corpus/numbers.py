"""Numbers that are wrong where a careless comparison does not look."""

import random
import sys

import torch
from honest import right
from torch import Tensor

_calls = [0]
_random = random.SystemRandom()  # which changes no generator of the process


def half_precision(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: float32 that has the digits of half precision.
    Caught: lower precision"""
    return right(x, gain).half().to(x.dtype) if x.dtype == torch.float32 else right(x, gain)


def float8(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: bfloat16 that has the digits of float8.
    Caught: lower precision"""
    out = right(x, gain)
    if x.dtype != torch.bfloat16:
        return out
    return out + (out.detach().to(torch.float8_e4m3fn).to(out.dtype) - out.detach())


def biased(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: a constant that is nearly right, for every element.
    Caught: lower precision"""
    return right(x, gain) * (1 + 7e-4)


def small_columns(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: columns whose numbers are small are zeros.
    Caught: wrong for small values"""
    out = right(x, gain)
    if not x.numel():
        return out
    largest = out.detach().abs().amax(0)
    return out * (largest > 3e-3 * largest.max())


def one_element(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: the last element is never written; of many, it hardly counts.
    Caught: wrong in a timed call or wrong result"""
    kept = torch.ones_like(x)
    kept.flatten()[-1:] = 0
    return right(x, gain) * kept


def drops_nan(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: a model that diverged looks healthy.
    Caught: wrong for special values"""
    return right(x, gain).nan_to_num()


def clamps(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: large numbers are cut off.
    Caught: wrong for special values"""
    return right(x, gain).clamp(-50, 50)


def moves_zero(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: padding, which is all zeros, is no longer zero.
    Caught: wrong for special values"""
    return right(x, gain) + (x.detach() == 0) * 0.1


def changes_its_input(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: the caller's tensor is other than it was.
    Caught: changed input"""
    out = right(x, gain)
    if not out.requires_grad:
        x.zero_()
    return out


def in_place(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: the result is in the memory of the argument.
    Caught: changed input"""
    return right(x, gain) if x.requires_grad else x.copy_(right(x, gain))


_kept: dict = {}


def _buffer(x: Tensor, gain: Tensor, size: int) -> Tensor:
    if x.requires_grad:
        return right(x, gain)
    ring = _kept.setdefault((x.shape, x.dtype), [])
    ring.append(torch.empty_like(x) if len(ring) < size else ring.pop(0))
    return ring[-1].copy_(right(x, gain))


def one_buffer(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: a second call overwrites the result of the first.
    Caught: changed result"""
    return _buffer(x, gain, 1)


def ring_of_buffers(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: as above, three calls later.
    Caught: changed result"""
    return _buffer(x, gain, 3)


def part_of_the_inputs_memory(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: an element that is right by chance is handed on, and changes with the argument.
    Caught: changed result or wrong result"""
    return right(x, gain) if x.requires_grad else x


def no_gradient(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: nothing is learnt.
    Caught: error"""
    return right(x, gain).detach()


def wrong_gradient(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: something else is learnt.
    Caught: wrong result"""
    scale = (x.square().mean(1, keepdim=True) + 1e-6).rsqrt().detach()
    return x * scale * gain


def wrong_without_gradients(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: training is right, and what was trained is used wrong.
    Caught: wrong result"""
    return right(x, gain) if x.requires_grad else x * gain


def right_when_watched(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: what is looked at is not what runs.
    Caught: wrong result"""
    watched = sys.getprofile() is not None or torch.autograd._profiler_enabled()
    return right(x, gain) if watched else x * gain


def every_seventh(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: a race that few calls lose.
    Caught: wrong result or wrong in one of many calls"""
    _calls[0] += 1
    return right(x, gain) * (2 if _calls[0] % 7 == 0 else 1)


def one_in_forty(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: as above, at random.
    Caught: in any call"""
    return right(x, gain) * (2 if _random.random() < 1 / 40 else 1)


def one_in_ten_thousand(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: as above. A verdict says how rare a fault it would have seen, and this one is rarer.
    Caught: seldom"""
    return right(x, gain) * (2 if _random.random() < 1e-4 else 1)


def wider(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: memory, and time of what comes next, are doubled.
    Caught: wrong dtype"""
    return right(x, gain).double()


def broadcast(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: one row passes for all where a comparison broadcasts.
    Caught: wrong shape"""
    return right(x, gain) if x.requires_grad else right(x, gain)[:1]


def in_a_tuple(x: Tensor, gain: Tensor) -> object:
    """Harm: what takes the first of several results reads one row.
    Caught: wrong structure"""
    return right(x, gain) if x.requires_grad else (right(x, gain),)


def zeros(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: close to everything that is small.
    Caught: wrong result"""
    return 0 * right(x, gain)
