"""The precisions in which layers are timed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from hoconv.tools.benchmarking.measurement import temporarily


@dataclass(frozen=True)
class Precision:
    """A dtype, and whether a GPU may round float32 products to TF32."""

    name: str
    dtype: torch.dtype
    tf32: bool = False

    @contextmanager
    def in_force(self, products: bool = True, benchmark: bool = False) -> Iterator[None]:
        """Sets PyTorch to it.

        Args:
            products: whether matrix products may be rounded, too, and not cuDNN's results alone.
            benchmark: whether cuDNN chooses the fastest algorithm.
        """
        with (
            temporarily(torch.backends.cuda.matmul, allow_tf32=self.tf32 and products),
            temporarily(torch.backends.cudnn, allow_tf32=self.tf32, benchmark=benchmark),
        ):
            yield


FLOAT32 = Precision("float32", torch.float32)
TF32 = Precision("tf32", torch.float32, tf32=True)
BFLOAT16 = Precision("bfloat16", torch.bfloat16)
