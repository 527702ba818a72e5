"""Why a layer is not fused, in words. The limits of CUDA kernels are C++, which needs no GPU."""

from __future__ import annotations

import ctypes
import itertools
import subprocess
from collections.abc import Iterator

import pytest
import torch

from hoconv import HighOrderConv2d, jit
from hoconv.high_order.layer import rule
from tests.support import Variant, variants

SOURCE = jit.CSRC / "high_order" / "layer" / "cuda" / "limits.cu"
SHARED_MEMORY = 232448  # bytes a block of an H100
FUSED = 484  # layers of the grid below, as measured to be faster


@pytest.fixture(scope="module")
def limits(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The limits alone, by the C++ compiler: they call nothing of CUDA."""
    if reason := jit.obstacle("cpu"):
        pytest.skip(reason)
    path = tmp_path_factory.mktemp("limits") / "limits.so"
    flags = ["-std=c++17", "-shared", "-fPIC", "-I", str(jit.CSRC), "-x", "c++"]
    subprocess.run([jit.compiler("cpu"), *flags, SOURCE, "-o", path], check=True)
    return ctypes.CDLL(str(path))


@pytest.fixture
def on_a_gpu(limits: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    class Properties:
        shared_memory_per_block_optin = SHARED_MEMORY

    monkeypatch.setattr(jit, "functions", lambda library: limits)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    rule._why_cuda_unfused_once.cache_clear()
    yield
    rule._why_cuda_unfused_once.cache_clear()


def why(
    k: int = 5, s: int = 5, C: int = 3, dilation: int = 1,
    dtype: torch.dtype = torch.float32, allow_tf32: bool = False,
) -> str | None:  # fmt: skip
    weight = torch.empty(k * k, C, s, s, dtype=dtype, device="meta")
    return rule.why_unfused("cuda", weight, k, dilation, allow_tf32)


@pytest.mark.usefixtures("on_a_gpu")
def test_each_limit_is_named() -> None:
    assert why() is None
    assert why(k=4) == "kernel size 4 (3, 5 and 7 are fused)"
    assert why(s=9) == "generator kernel size 9 (1, 3, 5 and 7 are fused)"
    assert why(C=24, s=1) == "24 channels (up to 16 are fused)"
    assert why(dilation=5) == "a reach of 10 pixels (up to 8 is fused)"
    assert "reach of" in str(why(dilation=2**62))  # no overflow
    assert why(dtype=torch.float64) == "float64 is not fused"
    assert why(k=7, C=2) == "2 passes for the gradient of 2 channels (up to 1 are faster fused)"
    assert why(k=7, C=2, dtype=torch.bfloat16) is None
    assert why(k=7, C=2, allow_tf32=True) is None
    memory = "557056 bytes of shared memory for 16 channels with a reach of 8 pixels"
    found = why(k=3, s=1, C=16, dilation=8)
    assert found == f"{memory} (this GPU has {SHARED_MEMORY} a block)"


@pytest.mark.usefixtures("on_a_gpu")
def test_all_limits_that_are_passed_are_named_at_once() -> None:
    reasons = why(k=4, C=24, dtype=torch.float64)
    assert reasons is not None
    assert reasons.split("; ") == [
        "float64 is not fused",
        "kernel size 4 (3, 5 and 7 are fused)",
        "24 channels (up to 16 are fused)",
    ]


@pytest.mark.usefixtures("on_a_gpu")
def test_what_was_fused_is_fused() -> None:
    """The number of layers of the grid that are fused, counted when the rule was measured."""
    grid = itertools.product(
        range(1, 12), (1, 2, 3, 5, 7, 9), (1, 3, 4, 8, 16, 17), (1, 2, 4),
        (torch.float64, torch.float32, torch.bfloat16), (False, True),
    )  # fmt: skip
    assert sum(why(*layer) is None for layer in grid) == FUSED


@pytest.mark.usefixtures("on_a_gpu")
def test_the_reason_is_a_constant_to_a_compiled_program() -> None:
    def program(weight: torch.Tensor, k: int) -> torch.Tensor:
        return weight[0] if rule.why_unfused("cuda", weight, k, 1, False) is None else weight

    torch.compiler.reset()
    compiled = torch.compile(program, fullgraph=True, backend="eager")
    for k, C in ((5, 3), (4, 3), (3, 1), (3, 24)):  # sizes that change are variables to it
        weight = torch.empty(k * k, C, 5, 5, device="meta")
        assert compiled(weight, k).shape == program(weight, k).shape


def test_reference_and_cpp_on_other_devices() -> None:
    layer = HighOrderConv2d(3, 3, impl="reference")
    assert layer.why_unfused() == "the reference is never fused"
    meta = torch.empty(9, 3, 3, 3, device="meta")
    assert rule.why_unfused("cpp", meta, 3, 1, False) == "cpp is fused on a CPU only"


@pytest.mark.parametrize("variant", variants([HighOrderConv2d.operator]), indirect=True)
def test_layer_says_why_as_it_is_called(variant: Variant) -> None:
    layer = HighOrderConv2d(3, 3, generator_kernel_size=3, impl=variant.impl).to(variant.device)
    wide = HighOrderConv2d(24, 4, impl=variant.impl).to(variant.device)
    found, of_wide = layer.why_unfused(), wide.why_unfused()
    if (variant.impl, variant.device) in (("cpp", "cpu"), ("cuda", "cuda")):
        assert found is None
    else:
        assert found == of_wide
        assert isinstance(found, str)
    if variant.impl == "cuda":
        assert of_wide == "kernel size 4 (3, 5 and 7 are fused); 24 channels (up to 16 are fused)"
        seven = HighOrderConv2d(2, 7, impl="cuda").cuda()
        assert "2 passes" in str(seven.why_unfused())
        with torch.autocast("cuda", torch.bfloat16):
            assert seven.why_unfused() is None
