"""The memory that a high-order convolution or layer takes, and reads beside its tensors."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hoconv.ops.high_order.conv2d import operator as of_weights
from hoconv.ops.high_order.layer import operator as of_parameters
from hoconv.tools.testing.variants import Variant, variants

on_cpus = [
    variant
    for operator in (of_weights.OPERATOR, of_parameters.OPERATOR)
    for variant in variants([operator])
    if variant.values[0].device == "cpu"
]
MEASURE = """
import resource, sys, torch, hoconv
name, impl, H, W, k, dilation = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])

def peak(H, W, k, dilation):
    x = torch.ones(1, 1, H, W, requires_grad=True)
    if name == "high_order_conv2d":
        weight = torch.ones(k * k, 1, 1, H, W, requires_grad=True)
        out = hoconv.high_order_conv2d(x, weight, dilation=dilation, impl=impl)
    else:
        weight = torch.ones(k * k, 1, 3, 3, requires_grad=True)
        out = hoconv.high_order_layer(x, weight, kernel_size=k, dilation=dilation, impl=impl)
    out.sum().backward()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10

torch.set_num_threads(1)
peak(8, 8, 3, 1)
print(-peak(8, 8, 3, 1) + peak(H, W, k, dilation))
"""


def measure(variant: Variant, *sizes: int) -> float:
    """Returns MiB that a call and its gradient hold at most."""
    names = variant.operator.name, variant.impl
    command = [sys.executable, "-c", MEASURE, *names, *map(str, sizes)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("variant", on_cpus, indirect=True)
def test_a_thin_image_takes_no_more_rows_than_it_sees(variant: Variant) -> None:
    """Of 1 x 2000 pixels; rows of zeros far outside the image were hundreds of MiB."""
    assert measure(variant, 1, 2000, 3, 4000) < 32


@pytest.mark.slow
def test_taps_far_outside_take_no_rows() -> None:
    """Weights of 961 taps and their gradient are 70 MiB; padding took 160 MiB more."""
    variant = Variant(of_weights.OPERATOR, "cpp", "cpu")
    assert measure(variant, 96, 96, 31, 500) < 110


READ = """
import torch, hoconv

torch.set_num_threads(1)
for k in range(1, 32):
    for padding in ("zeros", "valid"):
        across = 33 if padding == "zeros" else 34 - k
        x, weight = torch.ones(1, 1, 2, 33), torch.ones(k, 1, 1, 2, across)
        x.requires_grad_(), weight.requires_grad_()
        out = hoconv.high_order_conv2d(
            x, weight, kernel_size=(1, k), padding=padding, impl="cpp"
        )
        grads = torch.autograd.grad(out.sum(), (x, weight))
        assert all(t.isfinite().all() for t in (out, *grads)), (k, padding)
"""


@pytest.mark.slow
def test_what_is_beside_an_image_is_not_read() -> None:
    """glibc fills memory that is freed with the byte 255: floats that are read from it are NaN."""
    environment = os.environ | {"MALLOC_PERTURB_": "255"}
    command = [sys.executable, "-c", READ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
