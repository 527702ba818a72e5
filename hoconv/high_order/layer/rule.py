"""Where the fused kernels run, and where generator and application stay two operators."""

from __future__ import annotations

import torch
from torch import Tensor

# CUDA: how many channels of sums fit the registers of one pass of the backward kernel over the
# image (`chunk_of` in backward_strips.cuh), by kernel size and the generator's; s = 1 takes all.
_CHANNELS_A_PASS = {
    (3, 3): 8, (3, 5): 3, (3, 7): 1,
    (5, 3): 8, (5, 5): 3, (5, 7): 1,
    (7, 3): 3, (7, 5): 1, (7, 7): 1,
}  # fmt: skip
# Up to how many passes a training step was faster fused, measured on an H200 at 112 x 112 pixels:
# kernel size -> (16 bits or TF32, float32 as three products of TF32).
_PASSES = {3: (6, 6), 5: (6, 3), 7: (4, 1)}
# Most shared memory of the backward kernel for a row of a channel in the window of its last warp.
_BYTES_OF_A_ROW = 2048


def _shared_memory(x: Tensor) -> int:
    """Bytes that a block may have, where x is or, if that is no GPU, on the current one."""
    device = x.device if x.is_cuda else None
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def fuses(
    impl: str, x: Tensor, weight: Tensor, kernel_size: int, dilation: int, allow_tf32: bool
) -> bool:
    """Whether an implementation computes such a layer in one fused kernel.

    Nothing is fused where x has no channel or no pixel. On a CPU `cpp` fuses all else. On a GPU
    `cuda` does where its tiles fit the shared memory of a multiprocessor (no float64, kernel sizes
    3, 5 and 7, generators of odd size up to 7, up to 16 channels, taps that reach up to 8 pixels,
    and not many of both) and it is the faster way.
    """
    C, s = weight.shape[1:3]
    if 0 in x.shape[1:]:
        return False
    if x.device.type == "cpu":
        return impl == "cpp"
    reach = max(dilation * (kernel_size - 1) // 2, s // 2)
    fits = (
        impl == "cuda"
        and x.dtype != torch.float64
        and kernel_size in (3, 5, 7)
        and s in (1, 3, 5, 7)
        and C <= 16
        and reach <= 8
        and C * (2 * reach + 1) * _BYTES_OF_A_ROW <= _shared_memory(x)
    )
    if not fits:
        return False
    passes = -(-C // _CHANNELS_A_PASS.get((kernel_size, int(s)), 16))
    in_one_product, in_three = _PASSES[kernel_size]
    return passes <= (in_three if x.dtype == torch.float32 and not allow_tf32 else in_one_product)
