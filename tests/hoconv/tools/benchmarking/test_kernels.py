"""The names of the kernels that a call launches."""

from __future__ import annotations

import pytest
import torch

from hoconv import high_order_conv2d
from hoconv.dispatch.declaration import Sample
from hoconv.tools.benchmarking.kernels import launched, short_name
from hoconv.tools.benchmarking.measurement import Contender


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (
            "void hoconv::high_order::conv2d::(anonymous namespace)::"
            "apply_tuned<__nv_bfloat16, 5, 8, 3>"
            "(hoconv::high_order::Image<__nv_bfloat16 const>, hoconv::high_order::conv2d::Tiling)",
            "apply_tuned<__nv_bfloat16, 5, 8, 3>",
        ),
        (
            "void hoconv::high_order::conv2d::apply<float, (int)4, (bool)1>(int, long)",
            "apply<float, 4, 1>",
        ),
        ("triton_poi_fused_add_0", "triton_poi_fused_add_0"),
        ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD "),
    ],
)
def test_a_name_is_the_function_and_its_constants(name: str, short: str) -> None:
    assert short_name(name) == short.strip()


@pytest.mark.gpu
def test_the_kernels_of_a_call_are_named() -> None:
    sample = Sample(
        (torch.randn(2, 3, 16, 16, device="cuda"), torch.randn(25, 2, 1, 16, 16, device="cuda"))
    )
    contender = Contender("cuda", high_order_conv2d, sample)
    contender.grads = [torch.randn(2, 3, 16, 16, device="cuda")]
    found = launched(contender)
    assert found is not None
    assert len(found["forward"]) == 1
    assert found["forward"][0].startswith("apply_tuned<float, 5")
    assert len(found["backward"]) == 2


def test_a_cpu_launches_none() -> None:
    sample = Sample((torch.randn(1, 3, 8, 8), torch.randn(9, 1, 1, 8, 8)))
    assert launched(Contender("cpp", high_order_conv2d, sample)) is None
