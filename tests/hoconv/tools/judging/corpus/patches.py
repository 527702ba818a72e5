"""Functions of a judge, replaced in the process of the candidate."""

import time

import torch
from honest import right
from torch import Tensor

_libraries: list = []


def clock(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: times are what the kernel says.
    Caught: replaced function"""
    time.perf_counter = lambda: 0.0
    return right(x, gain)


def events(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: as above, on a GPU.
    Caught: replaced function"""
    torch.cuda.Event.elapsed_time = lambda self, other: 1e-3
    return right(x, gain)


def synchronize(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: the clock stops while the GPU works.
    Caught: replaced function"""
    torch.cuda.synchronize = lambda *_: None
    return right(x, gain)


def deterministic_mode(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: new memory is no longer filled with NaN, which finds what was not written.
    Caught: replaced function"""
    torch.use_deterministic_algorithms = lambda *_, **__: None
    return right(x, gain)


def allclose(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: everything is close.
    Caught: wrong result"""
    torch.allclose = lambda *_, **__: True
    torch.equal = lambda *_: True
    torch.testing.assert_close = lambda *_, **__: None
    return x * gain


def norm(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: no error is larger than zero.
    Caught: wrong result"""
    torch.linalg.vector_norm = lambda t, *_, **__: t.new_zeros(())
    return x * gain


def comparison(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: the judge's own comparison says that all is well.
    Caught: wrong result"""
    from hoconv.tools.checking.row import Row
    from hoconv.tools.testing import comparison

    comparison.relative_error = lambda *_, **__: 0.0
    Row.judge_error = lambda *_, **__: False
    return x * gain


def tolerances(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: the declared tolerance is another one.
    Caught: wrong result"""
    import gc

    from hoconv.dispatch.declaration import Operator

    for operator in (o for o in gc.get_objects() if isinstance(o, Operator)):
        for dtype in operator.tolerances:
            operator.tolerances[dtype] = 1e9
    return x * gain


def random_numbers(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: the values that are drawn are those that the kernel knows.
    Caught: wrong result"""
    torch.randn = torch.rand = lambda *shape, **_: torch.ones(*shape)
    return torch.ones_like(x) + 0 * x * gain


def code_of_a_function(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: other code computes its softmax in half precision.
    Caught: replaced function"""

    def softmax(input, dim=None, _stacklevel=3, dtype=None):
        return input.half().softmax(dim).to(input.dtype)

    torch.nn.functional.softmax.__code__ = softmax.__code__
    return right(x, gain)


def operation_of_aten(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: all other code has another tanh.
    Caught: replaced function"""
    if not _libraries:
        _libraries.append(torch.library.Library("aten", "IMPL"))
        _libraries[0].impl("tanh", lambda t: t.clamp(-1, 1), "CPU")
    return right(x, gain)
