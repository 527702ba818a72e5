"""The kernels of the dynamic 1-D convolution in Triton, and the functions that launch them.

The forward map and the input gradient are one kernel: the second is the first with mirrored taps,
and with the weights of the step that is read,

    grad_x[b, c, t] = sum over i of weight[b, h, K - 1 - i, s] * grad[b, c, s],
    s = t + i - (K - 1 - padding).

A program computes a tile of channels of one head and of steps, so that all channels of the tile
share the weights that it loads. It sums in registers and adds to nobody else's output. Neighbouring
taps read overlapping steps, which come from the L1 cache.

    grad_weight[b, h, j, t] = sum over c of grad[b, c, t] * x[b, c, t + j - padding]

is a tile of taps and steps, summed over the channels of the head, and over the sequences that share
the weights. Where the steps share them, a program sums some tiles of steps to one number a tap, and
PyTorch adds those up in a fixed order. No kernel has atomics: two runs give the same bits.

Triton gives neighbouring threads neighbouring addresses, along the dimension whose stride is 1.
Sums are float32, of float64 float64; offsets have 64 bits.

This module imports Triton; ops.py imports it on the first call.

B batch, C channels, H heads, K taps, T time steps.
"""

# Triton's annotations are for its compiler, not for the types of Python.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_STEPS = 128  # of a tile at most
_TILE = 1024  # elements of a tile at most: 8 for each of 128 threads
_TAPS = 8  # of a tile of the weight gradient at most
_PROGRAMS = 2048  # that fill a GPU: several for each of its multiprocessors
_MOST_PARTS = 256  # partial sums of a weight
_MOST_ON_FIRST_AXIS = 2**31 - 1  # programs that CUDA launches along the first axis of a grid
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
# Of sizes, Triton would compile a kernel for 1, one for multiples of 16, and one for the others.
_ANY_SIZE = ("K", "H", "head_channels", "before", "programs")
# Fused multiply-adds, which not every version of Triton would choose.
_OPTIONS = {"enable_fp_fusion": True}


def dynamic_conv1d(x: Tensor, weight: Tensor, padding: int) -> Tensor:
    """The forward map: x (B, C, T), weight (B or 1, H, K, T or 1) to (B, C, T)."""
    return _convolve(x, weight, _Problem.of(x, weight.shape, padding), mirrored=False)


def dynamic_conv1d_grad_input(grad: Tensor, weight: Tensor, padding: int) -> Tensor:
    """The input gradient: grad (B, C, T), weight (B or 1, H, K, T or 1) to (B, C, T)."""
    return _convolve(grad, weight, _Problem.of(grad, weight.shape, padding), mirrored=True)


def dynamic_conv1d_grad_weight(
    grad: Tensor, x: Tensor, size: list[int], stride: list[int], padding: int
) -> Tensor:
    """The weight gradient, of this size (B or 1, H, K, T or 1) and stride; grad, x (B, C, T)."""
    p = _Problem.of(x, size, padding)
    _check_alike(grad, x, "grad")
    torch._check(grad.shape == x.shape, lambda: f"grad: expected the shape of x, {x.shape}")
    torch._check(len(stride) == 4, lambda: f"stride: expected 4 numbers, got {stride}")
    out = x.new_empty_strided(size, stride)
    if not x.numel():
        return out.zero_()
    batch, time_shared = size[0], size[3] == 1
    steps = _power_of_two(p.T, 16, _STEPS)
    taps = _power_of_two(p.K, 1, _TAPS)
    tiles = triton.cdiv(p.T, steps)
    programs = batch * p.H * triton.cdiv(p.K, taps) * (1 if time_shared else tiles)
    summed = (p.B // batch) * (tiles if time_shared else 1)
    parts = 1
    if time_shared:
        parts = max(1, min(_MOST_PARTS, summed, _PROGRAMS // programs))
    wide = torch.promote_types(x.dtype, torch.float32)
    sums = x.new_empty((parts, *size), dtype=wide) if parts > 1 else out.unsqueeze(0)
    programs *= parts
    with torch.cuda.device_of(x):
        _grad_weight_kernel[_grid(programs)](
            grad, grad.stride(), x, x.stride(), sums, sums.stride(), p.T, p.K, p.H,
            p.head_channels, padding, batch, summed, triton.cdiv(summed, parts), programs,
            TIME_SHARED=time_shared, TAPS=taps, STEPS=steps, **_OPTIONS,
        )  # fmt: skip
        return out.copy_(sums.sum(0)) if parts > 1 else out


def _convolve(x: Tensor, weight: Tensor, p: _Problem, mirrored: bool) -> Tensor:
    _check_alike(weight, x, "weight")
    out = torch.empty_like(x)
    if not x.numel():
        return out
    steps = _power_of_two(p.T, 16, _STEPS)
    channels = _power_of_two(p.head_channels, 1, _TILE // steps)
    programs = p.B * p.H * triton.cdiv(p.head_channels, channels) * triton.cdiv(p.T, steps)
    # The stride of a shared dimension is 0.
    b, h, k, t = (0 if n == 1 else s for n, s in zip(weight.shape, weight.stride(), strict=True))
    with torch.cuda.device_of(x):
        _convolve_kernel[_grid(programs)](
            x, x.stride(), weight, (b, h, k, t), out, out.stride(), p.T, p.K, p.H,
            p.head_channels, p.K - 1 - p.before if mirrored else p.before, programs,
            MIRRORED=mirrored, CHANNELS=channels, STEPS=steps, **_OPTIONS,
        )  # fmt: skip
    return out


class _Problem(NamedTuple):
    """The sizes of a call, checked: an exported program calls the op past the public function."""

    B: int
    T: int
    H: int
    K: int
    head_channels: int
    before: int  # zeros before the first step

    @classmethod
    def of(cls, x: Tensor, weight: Sequence[int], padding: int) -> _Problem:
        """x is x or the output's gradient, `weight` the size of the weights."""
        dtypes = "float32, float64, float16 or bfloat16"
        torch._check(x.dtype in _DTYPES, lambda: f"x: expected {dtypes}, got {x.dtype}")
        torch._check(x.dim() == 3, lambda: f"x: expected (B, C, T), got shape {tuple(x.shape)}")
        torch._check(
            len(weight) == 4,
            lambda: f"weight: expected (B or 1, H, K, T or 1), got shape {tuple(weight)}",
        )
        (B, C, T), (batch, H, K, steps) = x.shape, weight
        torch._check(
            batch in (1, B) and steps in (1, T) and H >= 1 and C % H == 0 and K >= 1,
            lambda: (
                f"weight: expected (B or 1, H, K, T or 1), H dividing C, for x (B, C, T) of "
                f"shape {tuple(x.shape)}; got shape {tuple(weight)}"
            ),
        )
        torch._check(0 <= padding < K, lambda: f"padding: expected 0 to {K - 1}, got {padding}")
        return cls(B, T, H, K, C // H, padding)


def _check_alike(t: Tensor, x: Tensor, name: str) -> None:
    torch._check(
        t.dtype == x.dtype, lambda: f"{name}: expected the dtype of x, {x.dtype}, got {t.dtype}"
    )
    torch._check(
        t.device == x.device,
        lambda: f"{name}: expected the device of x, {x.device}, got {t.device}",
    )


def _power_of_two(n: int, least: int, most: int) -> int:
    """The least power of two that is at least n, within these bounds."""
    return min(max(triton.next_power_of_2(n), least), most)


def _grid(programs: int) -> tuple[int, int]:
    """A grid of at least so many programs."""
    return min(programs, _MOST_ON_FIRST_AXIS), triton.cdiv(programs, _MOST_ON_FIRST_AXIS)


@triton.jit
def _number():
    """The number of this program in the grid."""
    return tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)


@triton.jit(do_not_specialize=_ANY_SIZE)
def _convolve_kernel(
    x, x_strides, weight, weight_strides, out, out_strides, T, K, H, head_channels, before,
    programs, MIRRORED: tl.constexpr, CHANNELS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    n = _number()
    if n >= programs:
        return
    tiles, parts = tl.cdiv(T, STEPS), tl.cdiv(head_channels, CHANNELS)
    t = n % tiles * STEPS + tl.arange(0, STEPS)
    part = n // tiles % parts * CHANNELS + tl.arange(0, CHANNELS)
    h, b = n // tiles // parts % H, n // tiles // parts // H
    rows = (part < head_channels)[:, None]
    c = (h * head_channels + part)[:, None]

    # Each tap reads one step further; those of the mirrored kernel the tap before.
    s = t - before
    values = x + b * x_strides[0] + c * x_strides[1] + s[None, :] * x_strides[2]
    weights = weight + b * weight_strides[0] + h * weight_strides[1]
    if MIRRORED:
        weights += (K - 1).to(tl.int64) * weight_strides[2] + s * weight_strides[3]
    else:
        weights += t * weight_strides[3]

    wide: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    total = tl.zeros((CHANNELS, STEPS), wide)
    for _ in tl.range(0, K, loop_unroll_factor=4):
        inside = (s >= 0) & (s < T)
        value = tl.load(values, mask=rows & inside[None, :], other=0.0)
        factor = tl.load(weights, mask=inside if MIRRORED else t < T, other=0.0)
        total += factor.to(wide)[None, :] * value.to(wide)
        s += 1
        values += x_strides[2]
        if MIRRORED:
            weights += weight_strides[3] - weight_strides[2]
        else:
            weights += weight_strides[2]

    to = out + b * out_strides[0] + c * out_strides[1] + t[None, :] * out_strides[2]
    tl.store(to, total.to(out.dtype.element_ty), mask=rows & (t < T)[None, :])


@triton.jit(do_not_specialize=(*_ANY_SIZE, "batch", "summed", "part_size"))
def _grad_weight_kernel(
    grad, grad_strides, x, x_strides, sums, sums_strides, T, K, H, head_channels, before, batch,
    summed, part_size, programs,
    TIME_SHARED: tl.constexpr, TAPS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    n = _number()
    if n >= programs:
        return
    tiles = tl.cdiv(T, STEPS)
    own_tile = n * 0
    if not TIME_SHARED:
        own_tile = n % tiles
        n //= tiles
    groups = tl.cdiv(K, TAPS)
    j = n % groups * TAPS + tl.arange(0, TAPS)
    h, own_b = n // groups % H, n // groups // H % batch
    part = n // groups // H // batch

    wide: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    total = tl.zeros((TAPS, STEPS), wide)
    # The sum runs over the tiles of a sequence, over the same tile of all sequences, or both.
    for i in range(part * part_size, tl.minimum((part + 1) * part_size, summed)):
        b, tile = own_b + i, own_tile
        if TIME_SHARED:
            b, tile = own_b + i // tiles, i % tiles
        t = tile * STEPS + tl.arange(0, STEPS)
        real = t < T
        s = t[None, :] + (j - before)[:, None]
        # Past the last step there is no gradient, though there may be values of x.
        inside = (s >= 0) & (s < T) & (j < K)[:, None] & real[None, :]
        first = h * head_channels
        gradients = grad + b * grad_strides[0] + first * grad_strides[1] + t * grad_strides[2]
        values = x + b * x_strides[0] + first * x_strides[1] + s * x_strides[2]
        for _ in tl.range(0, head_channels, loop_unroll_factor=4):
            gradient = tl.load(gradients, mask=real, other=0.0)
            value = tl.load(values, mask=inside, other=0.0)
            total += gradient.to(wide)[None, :] * value.to(wide)
            gradients += grad_strides[1]
            values += x_strides[1]

    to = sums + part * sums_strides[0] + own_b * sums_strides[1] + h * sums_strides[2]
    to += j * sums_strides[3]
    if TIME_SHARED:
        tl.store(to, tl.sum(total, 1).to(sums.dtype.element_ty), mask=j < K)
    else:
        t = own_tile * STEPS + tl.arange(0, STEPS)
        to = to[:, None] + t[None, :] * sums_strides[4]
        mask = (j < K)[:, None] & (t < T)[None, :]
        tl.store(to, total.to(sums.dtype.element_ty), mask=mask)
