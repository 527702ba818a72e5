"""Programs saved by torch.export, in a process that imports torch and hoconv alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hoconv.dispatch.declaration import operators
from hoconv.ops.dynamic_conv1d.ops import KERNELS
from hoconv.tools.testing.variants import Variant, variants

LOAD = """
import sys, torch, hoconv
from torch.utils._pytree import tree_leaves
torch.backends.cudnn.allow_tf32 = False
for path in sys.argv[1:]:
    program = torch.export.load(path)
    saved = torch.load(path + ".tensors")
    out = program.module()(*saved["args"])
    for ours, theirs in zip(tree_leaves(out), tree_leaves(saved["out"]), strict=True):
        error = (ours - theirs).norm() / theirs.norm().clamp(min=1e-30)
        assert error <= saved["tolerance"], path
"""


class Call(nn.Module):
    def __init__(self, variant: Variant, kwargs: Any) -> None:
        super().__init__()
        self.variant, self.kwargs = variant, kwargs

    def forward(self, *args: Any) -> Any:
        return self.variant.call(*args, **self.kwargs)


def load_elsewhere(*paths: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", LOAD, *map(str, paths)],
        capture_output=True, text=True, check=False, env=os.environ | environment,
    )  # fmt: skip


def save(variant: Variant, path: Path) -> Path:
    """A sample's call as a program, and beside it what it was called with and gave."""
    sample = next(s for s in variant.samples(torch.float32) if all(
        not isinstance(a, Tensor) or a.numel() for a in s.args))  # fmt: skip
    program = torch.export.export(Call(variant, sample.kwargs), tuple(sample.args))
    torch.export.save(program, path)
    out = variant.call(*sample.args, **sample.kwargs)
    tolerance = variant.operator.tolerances[torch.float32]
    torch.save({"args": sample.args, "out": out, "tolerance": tolerance}, f"{path}.tensors")
    return path


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_run_where_hoconv_was_imported_alone(device: str, tmp_path: Path) -> None:
    own = [o for o in operators() if o.function.__module__.startswith("hoconv.")]
    all_variants = [variant for param in variants(own) for variant in param.values]
    chosen = [v for v in all_variants if v.device == device and not v.obstacle()]
    assert {v.operator.name for v in chosen} == {o.name for o in own}
    paths = [save(v, tmp_path / f"{v.operator.name}_{v.impl}.pt2") for v in chosen]
    done = load_elsewhere(*paths)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_says_why_where_the_kernels_cannot_be_built(tmp_path: Path) -> None:
    operator = next(o for o in operators() if o.name == "high_order_layer")
    variant = Variant(operator, "cpp", "cpu")
    if reason := variant.obstacle():
        pytest.skip(reason)
    path = save(variant, tmp_path / "program.pt2")
    done = load_elsewhere(path, CXX="no-such-compiler", TORCH_EXTENSIONS_DIR=str(tmp_path))
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "hoconv::high_order_layer.cpp cannot run here: the C++ compiler" in done.stderr, last


def test_a_device_without_a_kernel_is_named() -> None:
    if reason := KERNELS["cpp"].load():
        pytest.skip(reason)
    q = torch.empty(1, 1, 1, device="meta")
    op = torch.ops.hoconv.dynamic_conv1d.cpp
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.XLA)
    with pytest.raises(RuntimeError, match=r"dynamic_conv1d\.cpp has no kernel for XLA tensors"):
        op.redispatch(key, q, q[None], 0)
