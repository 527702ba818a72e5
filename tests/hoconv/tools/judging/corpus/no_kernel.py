"""Right, and not by a kernel: its merit is that of the library that it calls."""

import torch
from honest import right
from torch import Tensor


def library(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: a library's speed is taken for a kernel's.
    Caught: no kernel of its own was seen"""
    return torch.nn.functional.rms_norm(x, x.shape[1:], gain, 1e-6)


def copied_definition(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: the definition passes for a kernel under another name.
    Caught: no kernel of its own was seen"""
    return gain * x / (x.square().mean(1, keepdim=True) + 1e-6).sqrt()


def under_a_compiled_name(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: an operation of its own hides that ATen computes it.
    Caught: calls ATen"""
    return torch.ops.corpus.normalize(x, gain)


_library = torch.library.Library("corpus", "FRAGMENT")
_library.define("normalize(Tensor x, Tensor gain) -> Tensor")
_library.impl("normalize", lambda x, gain: right(x, gain), "CompositeImplicitAutograd")
