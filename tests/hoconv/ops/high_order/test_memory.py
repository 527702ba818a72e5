"""What a call of the high-order convolution and layer takes beside its tensors."""

from __future__ import annotations

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
name, impl, H, W, dilation = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])

def peak(H, W, dilation):
    x = torch.ones(1, 1, H, W, requires_grad=True)
    if name == "high_order_conv2d":
        weight = torch.ones(9, 1, 1, H, W, requires_grad=True)
        out = hoconv.high_order_conv2d(x, weight, dilation=dilation, impl=impl)
    else:
        weight = torch.ones(9, 1, 3, 3, requires_grad=True)
        out = hoconv.high_order_layer(x, weight, kernel_size=3, dilation=dilation, impl=impl)
    out.sum().backward()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10

torch.set_num_threads(1)
peak(8, 8, 1)
print(-peak(8, 8, 1) + peak(H, W, dilation))
"""


@pytest.mark.slow
@pytest.mark.parametrize("variant", on_cpus, indirect=True)
def test_a_thin_image_takes_no_more_rows_than_it_sees(variant: Variant) -> None:
    """Of 1 x 2000 pixels; rows of zeros far outside the image were hundreds of MiB."""
    command = [
        sys.executable,
        "-c",
        MEASURE,
        variant.operator.name,
        variant.impl,
        "1",
        "2000",
        "4000",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 32  # MiB
