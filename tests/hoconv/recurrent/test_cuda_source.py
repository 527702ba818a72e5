"""The CUDA kernels of every ready cell compile, for two architectures, without a GPU."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from hoconv import build
from hoconv.recurrent.emit.cuda import emit_cuda
from hoconv.recurrent.schedule import plan
from tests.hoconv.recurrent.support import READY, bound


def obstacle() -> str | None:
    try:
        build.compiler("cuda")
    except build.BuildError as error:
        return str(error)
    return None


def compiled(source: Path, architecture: str) -> str:
    """What nvcc says of a source."""
    command = [
        build.compiler("cuda"), "-cubin", f"-arch={architecture}", "-std=c++17", "-I",
        str(build.CSRC), str(source), "-o", str(source.with_suffix(f".{architecture}")),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stderr if done.returncode else ""


def one_source(texts: dict[str, str]) -> str:
    """All kernels in one file, each program in a namespace of its own: one start of nvcc."""
    lines = ['#include "recurrent/block.cuh"']
    for name, text in texts.items():
        body = text.replace('extern "C" ', "").split("\n", 1)[1]
        lines.append(f"namespace {name} {{\n{body}\n}}")
    return "\n".join(lines)


@pytest.mark.slow
@pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_kernels_of_every_ready_cell_compile(
    tmp_path: Path, dtype: torch.dtype, architecture: str
) -> None:
    texts = {}
    for name in READY:
        made = plan(bound(name), dtype, masked=True)
        texts[f"{name}_forward"] = emit_cuda(made.forward).text
        texts[f"{name}_backward"] = emit_cuda(made.backward).text
    source = tmp_path / "kernels.cu"
    source.write_text(one_source(texts))
    assert compiled(source, architecture) == ""


def test_only_what_waits_for_other_threads_has_one_block_a_row() -> None:
    assert not emit_cuda(plan(bound("lstm"), torch.float32).forward).one_block
    assert emit_cuda(plan(bound("layernorm_lstm"), torch.float32).forward).one_block == {"kernel0"}
