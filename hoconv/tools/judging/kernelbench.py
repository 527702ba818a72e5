"""Reads KernelBench's files as they are: a definition with ``Model``, ``get_inputs`` and
``get_init_inputs``. Its candidates define ``ModelNew``.

Source: github.com/ScalingIntelligence/KernelBench, src/kernelbench/eval.py. As there, models are
constructed under the same seed, in training mode, and called without gradients; the tolerance is
that of its float32.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from hoconv.dispatch.declaration import Benchmark, Cost, Implementation, Operator, Sample

_TOLERANCE = 1e-4


def read(
    module: ModuleType, name: str, device: str, seed: int
) -> tuple[Operator, Any, dict[str, Tensor]]:
    """Makes an operator of a definition.

    Args:
        module: of the definition's file.
        name: the operator's name.
        device: of the model.
        seed: of the model's weights.

    Returns:
        The operator, the arguments of the model's constructor, and the model's weights.
    """
    arguments = getattr(module, "get_init_inputs", list)()
    torch.manual_seed(seed)
    model: nn.Module = module.Model(*arguments).to(device)
    state = {key: value.detach().clone() for key, value in model.state_dict().items()}

    def function(*inputs: Any, impl: str = "reference") -> Any:
        return copy.deepcopy(model)(*inputs)  # statistics of batches stay what they were

    def sample(device: torch.device) -> Sample:
        with device:  # inputs may have gigabytes, which a CPU draws in tens of seconds
            drawn = module.get_inputs()
        inputs = (v.to(device) if isinstance(v, Tensor) else v for v in drawn)
        return Sample(tuple(inputs), name="get_inputs()")

    def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
        yield sample(device)

    operator = Operator(
        name=name,
        function=function,
        implementations={"reference": Implementation(function)},
        samples=samples,
        tolerances={torch.float32: _TOLERANCE},
        cost=lambda _: Cost(0, 0, 0, 0),
        benchmark=Benchmark("inputs", (1,), lambda _, device, dtype: sample(device)),
    )
    return operator, arguments, state
