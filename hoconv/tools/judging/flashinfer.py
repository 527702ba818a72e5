"""Reads FlashInfer-Bench's definitions as they are: JSON with axes, inputs, outputs and the source
of a reference, whose function is ``run``. A candidate defines ``run``.

Source: github.com/flashinfer-ai/flashinfer-bench, docs/flashinfer-trace/definition.mdx. Values of
the axes that vary, and of scalars, come from a workload there; here they are drawn. Definitions
whose inputs are indices into others need a workload, and are refused.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from hoconv.dispatch.declaration import Benchmark, Cost, Implementation, Operator, Sample

_TOLERANCE = 1e-2
_SIZES = (1, 7, 32, 65)  # of the axes that vary
_LARGEST = 65


def read(path: Path, seed: int) -> Operator:
    """Makes an operator of a definition.

    Args:
        path: the JSON file.
        seed: of the values of scalars.

    Raises:
        ValueError: an input is neither a tensor of floating-point numbers nor a scalar.
    """
    described = json.loads(path.read_text())
    space: dict[str, Any] = {}
    exec(compile(described["reference"], str(path), "exec"), space)
    draws = random.Random(seed)
    scalars = {
        name: draws.uniform(0.1, 1) for name, spec in described["inputs"].items()
        if spec["shape"] is None
    }  # fmt: skip
    for name, spec in described["inputs"].items():
        if not getattr(torch, spec["dtype"]).is_floating_point:
            raise ValueError(f"{path}: input {name} of {spec['dtype']} needs a workload")

    def function(*inputs: Any, impl: str = "reference") -> Any:
        return space["run"](*inputs)

    def sample(size: int, device: torch.device) -> Sample:
        axes = {name: axis.get("value", size) for name, axis in described["axes"].items()}
        inputs = tuple(
            scalars[name]
            if spec["shape"] is None
            else torch.randn([axes[axis] for axis in spec["shape"]], device=device).to(
                getattr(torch, spec["dtype"])
            )
            for name, spec in described["inputs"].items()
        )
        return Sample(inputs, name=f"axes of {size}")

    def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
        yield from (sample(size, device) for size in _SIZES)

    dtypes = {getattr(torch, spec["dtype"]): None for spec in described["outputs"].values()}
    return Operator(
        name="run",
        function=function,
        implementations={"reference": Implementation(function)},
        samples=samples,
        tolerances=dict.fromkeys(list(dtypes)[:1], _TOLERANCE),
        cost=lambda _: Cost(0, 0, 0, 0),
        benchmark=Benchmark("axes", (_LARGEST,), lambda size, device, _: sample(size, device)),
    )
