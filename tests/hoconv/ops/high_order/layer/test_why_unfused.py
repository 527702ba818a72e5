"""Why a layer is not fused, in words. The limits of CUDA kernels are C++, which needs no GPU."""

from __future__ import annotations

import ctypes
import itertools
import subprocess
from collections.abc import Iterator

import pytest
import torch

from hoconv import HighOrderConv2d, jit
from hoconv.ops.high_order.conv2d.window import Window
from hoconv.ops.high_order.layer import rule
from hoconv.tools.testing.variants import Variant, variants

SOURCE = jit.CSRC / "high_order" / "layer" / "cuda" / "limits.cu"
SHARED_MEMORY = 232448  # bytes a block of an H100
FUSED = 280  # layers of the grid below that the kernels compute


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
        major, minor = 9, 0

    monkeypatch.setattr(jit.Library, "functions", lambda library: limits)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    caches = rule._why_cuda_unfused_once, rule._least_width_backward_once
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def why(
    k: int = 5, s: int = 5, C: int = 3, dilation: int = 1, dtype: torch.dtype = torch.float32
) -> str | None:  # fmt: skip
    weight = torch.empty(k * k, C, s, s, dtype=dtype, device="meta")
    return rule.why_unfused("cuda", weight, Window.of(k * k, k, dilation), None)


@pytest.mark.usefixtures("on_a_gpu")
def test_each_limit_is_named() -> None:
    assert why() is None
    assert why(k=4) == "kernel size 4 (3, 5 and 7 are fused)"
    assert why(s=9) == "generator kernel size 9 (1, 3, 5 and 7 are fused)"
    assert why(C=24, s=1) == "24 channels (up to 16 are fused)"
    assert why(dilation=5) == "a reach of 10 pixels (up to 8 is fused)"
    assert "reach of" in str(why(dilation=2**62))  # no overflow
    assert why(dtype=torch.float64) == "float64 is not fused"
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
    """The number of layers of the grid that are fused, counted when the kernels were written."""
    grid = itertools.product(
        range(1, 12), (1, 2, 3, 5, 7, 9), (1, 3, 4, 8, 16, 17), (1, 2, 4),
        (torch.float64, torch.float32, torch.bfloat16),
    )  # fmt: skip
    assert sum(why(*layer) is None for layer in grid) == FUSED


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize(
    ("k", "s", "C", "width", "dtype", "fused"),
    [
        (5, 5, 3, 8, torch.float32, True),  # Hopper's own kernels
        (7, 7, 1, 8, torch.bfloat16, True),
        (7, 7, 3, 224, torch.float32, False),  # too many registers for these
        (3, 3, 8, 24, torch.float32, True),
        (3, 3, 8, 23, torch.float32, False),
        (3, 3, 8, 8, torch.bfloat16, True),
        (3, 1, 4, 23, torch.bfloat16, False),
        (5, 3, 16, 224, torch.float32, False),
        (5, 3, 16, 224, torch.bfloat16, False),
    ],
)
def test_the_backward_pass_is_fused_where_that_is_faster(
    k: int, s: int, C: int, width: int, dtype: torch.dtype, fused: bool
) -> None:
    weight = torch.empty(k * k, C, s, s, dtype=dtype, device="meta")
    x = torch.empty(2, C, 8, width, dtype=dtype, device="meta")
    assert rule.is_backward_fused("cuda", x, weight, k, 1, False) is fused


@pytest.mark.usefixtures("on_a_gpu")
def test_tf32_takes_one_product() -> None:
    x, weight = torch.empty(2, 4, 8, 32, device="meta"), torch.empty(25, 4, 3, 3, device="meta")
    assert not rule.is_backward_fused("cuda", x, weight, 5, 1, False)
    assert rule.is_backward_fused("cuda", x, weight, 5, 1, True)


@pytest.mark.usefixtures("on_a_gpu")
def test_hoppers_backward_kernels_have_no_groups_and_no_dilation() -> None:
    x = torch.empty(2, 3, 8, 8, device="meta")
    grouped, single = (torch.empty(9 * G, 3, 3, 3, device="meta") for G in (3, 1))
    assert rule.is_backward_fused("cuda", x, single, 3, 1, False)
    assert not rule.is_backward_fused("cuda", x, single, 3, 2, False)
    assert not rule.is_backward_fused("cuda", x, grouped, 3, 1, False)


@pytest.mark.usefixtures("on_a_gpu")
def test_the_reason_is_a_constant_to_a_compiled_program() -> None:
    def program(weight: torch.Tensor, k: int) -> torch.Tensor:
        return (
            weight[0]
            if rule.why_unfused("cuda", weight, Window.of(k * k), None) is None
            else weight
        )

    torch.compiler.reset()
    compiled = torch.compile(program, fullgraph=True, backend="eager")
    for k, C in ((5, 3), (4, 3), (3, 1), (3, 24)):  # sizes that change are variables to it
        weight = torch.empty(k * k, C, 5, 5, device="meta")
        assert compiled(weight, k).shape == program(weight, k).shape


def test_reference_and_cpp_on_other_devices() -> None:
    layer = HighOrderConv2d(3, 3, impl="reference")
    assert layer.why_unfused() == "the reference is never fused"
    meta = torch.empty(9, 3, 3, 3, device="meta")
    assert rule.why_unfused("cpp", meta, Window.of(9), None) == "cpp is fused on a CPU only"


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
        assert HighOrderConv2d(2, 7, impl="cuda").cuda().why_unfused() is None
