"""Every declared operator, in every implementation, on every device, in every dtype.

The tests know an operator only through its declaration.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only, tree_structure

from hoconv.dispatch.declaration import Operator, Sample, operators
from hoconv.dispatch.implementations import choose, implementations
from hoconv.dispatch.registration import Op
from hoconv.tools.testing.call_forms import forms, unlike
from hoconv.tools.testing.cases import make_cases
from hoconv.tools.testing.comparison import (
    differentiable,
    on_cpu,
    output_and_gradients,
    relative_error,
    same_bits,
)
from hoconv.tools.testing.finite_differences import disagreement
from hoconv.tools.testing.usages import with_penalty
from hoconv.tools.testing.variants import Variant, variants

THREADS = (1, 2, 3, 5)
_PENALTY = 100  # tolerances: a penalty squares gradients, and is differentiated again


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    wanted = metafunc.fixturenames
    if "operator" in wanted:
        metafunc.parametrize("operator", operators(), ids=lambda operator: operator.name)
    if "dtype" in wanted:
        pairs = [
            pytest.param(
                *variant.values, dtype, marks=variant.marks, id=f"{variant.id}-{short(dtype)}"
            )
            for variant in variants(operators())
            for dtype in variant.values[0].operator.tolerances
        ]
        metafunc.parametrize(("variant", "dtype"), pairs, indirect=["variant"])
    elif "variant" in wanted:
        metafunc.parametrize("variant", variants(operators()), indirect=True)


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def elements(sample: Sample) -> int:
    return sum(a.numel() for a in sample.args if isinstance(a, Tensor))


def small_samples(variant: Variant, dtype: torch.dtype, largest: int) -> list[Sample]:
    """Samples of at most so many elements, and the smallest that has any."""
    samples = sorted(variant.samples(dtype), key=elements)
    smallest = next(s for s in samples if elements(s))
    return [s for s in samples if elements(s) <= largest] or [smallest]


def a_few_samples(variant: Variant, dtype: torch.dtype) -> list[Sample]:
    """For what takes long a sample: some of all kinds, with an empty and the last one."""
    samples = list(variant.samples(dtype))
    empty = [s for s in samples if not elements(s)][:1]
    return [*samples[1::15], *empty, samples[-1]]


def tensor_positions(sample: Sample) -> list[int]:
    return [i for i, a in enumerate(sample.args) if isinstance(a, Tensor)]


class Call(nn.Module):
    """A call of an operator as a module, which is what torch.export takes."""

    def __init__(self, variant: Variant, kwargs: Any) -> None:
        super().__init__()
        self.variant, self.kwargs = variant, kwargs

    def forward(self, *args: Any) -> Any:
        return self.variant.call(*args, **self.kwargs)


def all_same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(same_bits(a[name], b[name]) for name in a)


def errors(output: Any, exact: Any) -> list[float]:
    """The relative error of every tensor of an output."""
    assert tree_structure(output) == tree_structure(exact)
    pairs = zip(tree_leaves(output), tree_leaves(exact), strict=True)
    return [relative_error(t, other) for t, other in pairs]


def properties(output: Any) -> Any:
    """Returns what is known of an output whose tensors have no data; the device aside."""
    return tree_map(lambda t: (t.dtype, t.shape), output)


def moved(values: Any, device: str) -> Any:
    return tree_map_only(Tensor, lambda t: t.to(device), values)


def test_declaration_is_complete(operator: Operator) -> None:
    names = [*operator.implementations]
    assert names[0] == "reference", "implementations: the first one has to be the reference"
    devices = operator.implementations["reference"].devices
    assert not devices, "implementations: the reference has to run on all devices"
    assert "auto" not in names, "implementations: auto is the choice among them"
    sizes = list(operator.benchmark.sizes)
    assert sizes == sorted(set(sizes)), "benchmark.sizes have to ascend"
    for dtype in operator.tolerances:
        samples = list(operator.samples(torch.device("cpu"), dtype))
        names = [sample.name for sample in samples]
        assert all(names), "samples: each needs a name"
        assert len(set(names)) == len(names), "samples: each needs a name of its own"
        assert any(elements(sample) for sample in samples), "samples: all are empty"
        for sample in samples:
            assert "impl" not in sample.kwargs, f"{sample.name}: impl is given by who calls"
            floats = [a for a in sample.args if isinstance(a, Tensor) and a.is_floating_point()]
            assert {a.dtype for a in floats} == {dtype}, f"{sample.name}: has another dtype"
            assert {a.device.type for a in floats} == {"cpu"}, f"{sample.name}: is not on the CPU"


def test_cost_counts_each_input_and_the_output(operator: Operator) -> None:
    for sample in operator.samples(torch.device("cpu"), torch.float32):
        cost = operator.cost(sample)
        out = operator.function(*sample.args, impl="reference", **sample.kwargs)
        inputs = sum(a.nbytes for a in sample.args if isinstance(a, Tensor))
        outputs = sum(t.nbytes for t in tree_leaves(out))
        most = inputs + outputs
        assert cost.forward_bytes <= most, f"{sample.name}: cost: more bytes than there are"
        assert cost.forward_bytes >= outputs, f"{sample.name}: cost: fewer bytes than the output's"
        assert cost.backward_bytes <= 2 * inputs + outputs, sample.name
        assert cost.backward_bytes >= outputs, sample.name
        assert min(cost.forward_flops, cost.backward_flops) >= 0, sample.name


def test_baselines_compute_what_the_operator_does(operator: Operator) -> None:
    benchmark, dtype = operator.benchmark, torch.float32
    sample = benchmark.sample(benchmark.sizes[0], torch.device("cpu"), dtype)
    exact = operator.function(*sample.args, impl="reference", **sample.kwargs)
    for name, baseline in benchmark.baselines.items():
        out = baseline(*sample.args, **sample.kwargs)
        assert all(e <= 2 * operator.tolerances[dtype] for e in errors(out, exact)), name


def test_agrees_with_the_reference(variant: Variant, dtype: torch.dtype) -> None:
    reference = Variant(variant.operator, "reference", "cpu")
    failed = []
    for sample in variant.samples(dtype):
        results = output_and_gradients(variant.call, sample.args, sample.kwargs)
        args, kwargs = on_cpu((sample.args, dict(sample.kwargs)), not variant.operator.bitwise)
        exact = output_and_gradients(reference.call, args, kwargs, rounded_to=dtype)
        assert results.keys() == exact.keys(), sample.name
        for name, result in results.items():
            error = relative_error(result, exact[name])
            if not error <= variant.operator.tolerances[dtype]:  # also where it is NaN
                failed.append(f"{sample.name}: {name}: relative error {error:.1e}")
    assert not failed, "\n".join(failed)


def test_other_forms_of_a_call_agree_with_the_reference(
    variant: Variant, dtype: torch.dtype
) -> None:
    failed = []
    for case in make_cases(variant.operator, variant.device, dtype):
        for form, expected in case.forms:
            results = output_and_gradients(
                variant.call,
                form.args,
                case.sample.kwargs,
                form.cotangent,
                positions=form.positions,
            )
            assert results.keys() == expected.keys(), (case.sample.name, form.name)
            for name, result in results.items():
                error = relative_error(result, expected[name], case.expected[name])
                if not error <= variant.operator.tolerances[dtype]:
                    failed.append(f"{case.sample.name}, {form.name}: {name}: error {error:.1e}")
    assert not failed, "\n".join(failed)


def test_results_have_the_dtype_device_and_shapes_of_the_reference(
    variant: Variant, dtype: torch.dtype
) -> None:
    for sample in variant.samples(dtype):
        args = differentiable(sample.args)
        out = variant.call(*args, **sample.kwargs)
        exact = variant.operator.function(*sample.args, impl="reference", **sample.kwargs)
        assert properties(out) == properties(exact), sample.name
        for t, other in zip(tree_leaves(out), tree_leaves(exact), strict=True):
            assert t.device == other.device, sample.name
            assert t.requires_grad, sample.name
        torch.autograd.backward([t.sum() for t in tree_leaves(out)])
        for a in args:
            if isinstance(a, Tensor) and a.requires_grad:
                assert a.grad is not None, sample.name
                assert (a.grad.dtype, a.grad.device) == (dtype, a.device), sample.name


def test_inputs_are_left_alone(variant: Variant, dtype: torch.dtype) -> None:
    for sample in variant.samples(dtype):
        before = copy.deepcopy(sample.args)
        output_and_gradients(variant.call, sample.args, sample.kwargs)
        for a, b in zip(sample.args, before, strict=True):
            assert not isinstance(a, Tensor) or torch.equal(a, b), sample.name


def test_two_runs_give_the_same_bits(variant: Variant, dtype: torch.dtype) -> None:
    for sample in variant.samples(dtype):
        first, second = (
            output_and_gradients(variant.call, sample.args, sample.kwargs) for _ in range(2)
        )
        assert all_same_bits(first, second), sample.name


def test_any_number_of_threads_gives_the_same_bits(variant: Variant, dtype: torch.dtype) -> None:
    if variant.device != "cpu":
        pytest.skip("threads are the CPU's")
    if variant.impl == "reference":
        pytest.skip("it may use PyTorch's convolution, which sums as the number of threads wants")
    if not variant.operator.implementations[variant.impl].thread_invariant:
        pytest.skip("it uses PyTorch's matrix products, which sum as the number of threads wants")
    before = torch.get_num_threads()
    try:
        for sample in variant.samples(dtype):
            results = []
            for threads in THREADS:
                torch.set_num_threads(threads)
                results.append(output_and_gradients(variant.call, sample.args, sample.kwargs))
            assert all(all_same_bits(results[0], other) for other in results[1:]), sample.name
    finally:
        torch.set_num_threads(before)


def test_gradients_and_their_gradients_agree_with_finite_differences(variant: Variant) -> None:
    if torch.float64 not in variant.operator.tolerances:
        pytest.skip("finite differences need float64")
    if variant.operator.surrogate_gradient:
        pytest.skip("the gradient is declared to be another than the derivative")
    # All elements one by one where there are few, else in random directions.
    for largest, fast in ((100, False), (3000, True)):
        for sample in small_samples(variant, torch.float64, largest):
            second = not _stops_at_first_order(variant)
            if found := disagreement(variant, sample, fast=fast, second=second):
                pytest.fail(found, pytrace=False)


def _stops_at_first_order(variant: Variant) -> bool:
    return variant.operator.first_order and variant.impl != "reference"


def test_a_penalty_of_gradients_is_right_or_an_error(variant: Variant) -> None:
    """PyTorch drops what an op without a gradient of its own leaves out of a sum."""
    operator, stops = variant.operator, _stops_at_first_order(variant)
    if variant.impl == "reference" or not (stops or operator.surrogate_gradient):
        pytest.skip("finite differences are compared with its second derivatives")
    known = operator.tolerances
    dtype = torch.float64 if torch.float64 in known else next(iter(known))
    sample = small_samples(variant, dtype, 300)[-1]
    reference = with_penalty(Variant(operator, "reference", "cpu").call)
    args, kwargs = on_cpu((sample.args, sample.kwargs), in_float64=not operator.bitwise)
    try:
        exact = output_and_gradients(reference, args, kwargs, rounded_to=dtype)
    except RuntimeError:
        pytest.skip("the definition has no second derivatives")
    try:
        found = output_and_gradients(with_penalty(variant.call), sample.args, sample.kwargs)
    except RuntimeError as error:
        if not stops:
            pytest.fail(f"second derivatives: {error}; declare first_order=True", pytrace=False)
        return
    for what in exact:
        error = relative_error(found[what], exact[what])
        if not error <= _PENALTY * known[dtype]:
            cure = "differentiate its gradient, or refuse it by once_differentiable"
            pytest.fail(f"{what}, with a penalty of gradients: error {error:.1e}; {cure} and "
                        "first_order=True", pytrace=False)  # fmt: skip


# opcheck looks at the gradients of views among its inputs.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_torch_library_finds_no_fault(variant: Variant, dtype: torch.dtype) -> None:
    function = variant.operator.implementations[variant.impl].function
    op = function.overload if isinstance(function, Op) else function
    if not isinstance(op, torch._ops.OpOverload):
        pytest.skip(f"{variant.impl} is a Python function")
    choose(variant.operator, variant.impl, variant.device)  # loads it
    signature = inspect.signature(variant.operator.function)

    def arguments(sample: Sample) -> tuple[Any, ...]:
        bound = signature.bind(*differentiable(sample.args), **sample.kwargs)
        bound.apply_defaults()
        return tuple(bound.arguments[a.name] for a in op._schema.arguments)

    for sample in variant.samples(dtype):
        torch.library.opcheck(op, arguments(sample), test_utils=("test_schema", "test_faketensor"))
    if dtype == torch.float32:
        for sample in a_few_samples(variant, dtype):
            torch.library.opcheck(op, arguments(sample))


def test_compiled_equals_eager(variant: Variant) -> None:
    samples = a_few_samples(variant, torch.float32)
    # A reference is PyTorch's own ops, which take long to trace: what is tested is the call of it.
    for sample in samples[-2:] if variant.impl == "reference" else samples:
        torch.compiler.reset()
        eager = output_and_gradients(variant.call, sample.args, sample.kwargs)
        compiled = torch.compile(variant.call, fullgraph=True, backend="aot_eager")
        for name, result in output_and_gradients(compiled, sample.args, sample.kwargs).items():
            tolerance = variant.operator.tolerances[torch.float32]
            assert relative_error(result, eager[name]) <= tolerance, sample.name


# Inductor imports modules that use deprecated parts of torch.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_compiled_by_inductor_equals_eager(variant: Variant) -> None:
    if variant.impl == "reference":
        pytest.skip("Inductor compiles PyTorch's own operators")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if variant.device == "cpu" and not (
        header.exists() and implementations()["cpp"] == "available"
    ):
        pytest.skip(f"inductor needs a C++ compiler and {header}")
    torch.compiler.reset()
    sample = small_samples(variant, torch.float32, 3000)[-1]
    eager = output_and_gradients(variant.call, sample.args, sample.kwargs)
    compiled = torch.compile(variant.call, fullgraph=True)
    for name, result in output_and_gradients(compiled, sample.args, sample.kwargs).items():
        tolerance = variant.operator.tolerances[torch.float32]
        assert relative_error(result, eager[name]) <= tolerance, sample.name


def test_exported_equals_eager(variant: Variant) -> None:
    for sample in a_few_samples(variant, torch.float32):
        exported = torch.export.export(Call(variant, sample.kwargs), tuple(sample.args))
        result = exported.module()(*sample.args)
        exact = variant.call(*sample.args, **sample.kwargs)
        tolerance = variant.operator.tolerances[
            torch.float32
        ]  # what is exported may be no library's
        assert all(e <= tolerance for e in errors(result, exact)), sample.name


def test_vmap_gives_what_the_calls_give_one_by_one(variant: Variant) -> None:
    """Batches all arguments that are tensors, then each alone."""
    for sample in a_few_samples(variant, torch.float32):
        call = functools.partial(variant.call, **sample.kwargs)
        positions = tensor_positions(sample)
        for batched in dict.fromkeys([(*positions,), *((i,) for i in positions)]):
            calls = [
                [a.roll(moved) if i in batched else a for i, a in enumerate(sample.args)]
                for moved in (0, 1)
            ]
            exact = tree_map(lambda *each: torch.stack(each), *(call(*args) for args in calls))
            together = [
                torch.stack(pair) if i in batched else pair[0]
                for i, pair in enumerate(zip(*calls, strict=True))
            ]
            in_dims = tuple(0 if i in batched else None for i in range(len(together)))
            result = refused_or(functools.partial(torch.func.vmap(call, in_dims), *together))
            if isinstance(result, str):
                continue
            for e in errors(result, exact):
                assert e <= 2 * variant.operator.tolerances[torch.float32], sample.name


def test_fake_tensors_get_the_real_shape_dtype_and_strides(variant: Variant) -> None:
    for sample in itertools.islice(variant.samples(torch.float32), 0, None, 3):
        real = variant.call(*sample.args, **sample.kwargs)
        with FakeTensorMode() as mode:
            given = (sample.args, dict(sample.kwargs))
            args, kwargs = tree_map_only(Tensor, mode.from_tensor, given)
            fake = variant.call(*args, **kwargs)
        assert properties(fake) == properties(real), sample.name
        for t, other in zip(tree_leaves(fake), tree_leaves(real), strict=True):
            assert (t.device, t.stride()) == (other.device, other.stride()), sample.name


class FakesAreChecked(TorchDispatchMode):
    """Compares what each op returns with what its fake kernel does; PyTorch's own aside."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        real = func(*args, **(kwargs or {}))
        if func.namespace not in ("aten", "prim", "prims"):
            with FakeTensorMode():
                fake = func(*tree_map_only(Tensor, alike, args), **(kwargs or {}))
            assert properties(fake) == properties(real), func
            assert layouts(fake) == layouts(real), func
        return real


def alike(t: Tensor) -> Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)


def layouts(output: Any) -> list[list[int]]:
    """The strides of tensors, where they say where an element is."""
    tensors = (t for t in tree_leaves(output) if isinstance(t, Tensor) and t.numel())
    return [[s for n, s in zip(t.shape, t.stride()) if n > 1] for t in tensors]


def test_fake_tensors_of_other_forms_get_the_real_strides(variant: Variant) -> None:
    """Also those of gradients, where the gradient of the output and the inputs lie in memory in
    different ways: torch.compile lays them out as it likes."""
    for sample in itertools.islice(variant.samples(torch.float32), 0, None, 4):
        with torch.no_grad():
            like = variant.call(*sample.args, **sample.kwargs)
            cotangent = tree_map(lambda t: torch.randn(t.shape).to(t), like)
        for form in forms(sample, cotangent):
            with FakesAreChecked():
                output_and_gradients(
                    variant.call, form.args, sample.kwargs, form.cotangent,
                    positions=form.positions,
                )  # fmt: skip


def test_meta_tensors_get_the_shape_and_dtype(variant: Variant, dtype: torch.dtype) -> None:
    function = variant.operator.implementations[variant.impl].function
    signature = inspect.signature(variant.operator.function)
    for sample in itertools.islice(variant.samples(dtype), 0, None, 5):
        real = variant.call(*sample.args, **sample.kwargs)
        args, kwargs = moved((sample.args, dict(sample.kwargs)), "meta")
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        bound.arguments.pop("impl")
        meta = function(*bound.arguments.values())
        assert {t.device.type for t in tree_leaves(meta)} == {"meta"}
        assert properties(meta) == properties(real), sample.name


def test_the_public_function_takes_meta_tensors(operator: Operator) -> None:
    dtype = next(iter(operator.tolerances))
    for sample in itertools.islice(operator.samples(torch.device("cpu"), dtype), 0, None, 5):
        args, kwargs = moved((sample.args, dict(sample.kwargs)), "meta")
        meta = operator.function(*args, **kwargs)
        real = operator.function(*sample.args, **sample.kwargs)
        assert {t.device.type for t in tree_leaves(meta)} == {"meta"}
        assert properties(meta) == properties(real), sample.name


def refused_or(function: Callable[[], Any]) -> Any:
    """Returns what a call returns; the word "refused" where it raises an error."""
    try:
        return function()
    except Exception:  # of PyTorch, or the operator's own
        return "refused"


def test_an_argument_unlike_the_others_is_refused_or_read_as_it_is(variant: Variant) -> None:
    reference = Variant(variant.operator, "reference", variant.device)
    sample = small_samples(variant, torch.float32, 300)[-1]
    variant.call(*sample.args, **sample.kwargs)  # arguments that are alike are not refused
    for i in tensor_positions(sample):
        for name, args in unlike(sample.args, i):
            result, exact = (
                refused_or(functools.partial(v.call, *args, **sample.kwargs))
                for v in (variant, reference)
            )
            # An argument that is alone is unlike none: of a number or a meta tensor, the result
            # is one, too.
            if any(not isinstance(t, Tensor) or t.is_meta for t in tree_leaves(result)):
                continue
            assert not isinstance(exact, str), f"{sample.name}, {name}"
            for t, other in zip(tree_leaves(result), tree_leaves(exact), strict=True):
                tolerance = 2 * max(variant.operator.tolerances.values())
                assert t.dtype == other.dtype, f"{sample.name}, {name}"
                assert relative_error(t, other) <= tolerance, f"{sample.name}, {name}"


def test_an_op_refuses_what_it_would_misread(variant: Variant) -> None:
    """Also called by itself, past the checks of the public function: by a saved program, say."""
    function = variant.operator.implementations[variant.impl].function
    op = function.overload if isinstance(function, Op) else function
    if not isinstance(op, torch._ops.OpOverload):
        pytest.skip(f"{variant.impl} is a Python function")
    choose(variant.operator, variant.impl, variant.device)  # loads it
    signature = inspect.signature(variant.operator.function)
    for sample in a_few_samples(variant, torch.float32):
        for i in tensor_positions(sample) if elements(sample) else ():
            for name, args in unlike(sample.args, i):
                bound = signature.bind(*args, impl="reference", **sample.kwargs)
                bound.apply_defaults()
                given = [bound.arguments[a.name] for a in op._schema.arguments]
                try:
                    result = op(*given)
                except (RuntimeError, TypeError, ValueError):
                    continue
                if any(a.is_meta for a in args if isinstance(a, Tensor)):
                    continue  # PyTorch called the fake, which reads nothing
                exact = refused_or(functools.partial(variant.operator.function, **bound.arguments))
                if isinstance(exact, str):  # by its checks, which the definition may not need
                    reference = variant.operator.implementations["reference"].function
                    exact = refused_or(functools.partial(reference, *given))
                assert not isinstance(exact, str), f"{sample.name}, {name}"
                for e in errors(result, exact):
                    assert e <= variant.operator.tolerances[torch.float32], (sample.name, name)


def test_autocast_gives_what_the_reference_gives(variant: Variant) -> None:
    """Forward and backward, also where autocast has cast some arguments before the call."""
    reference = Variant(variant.operator, "reference", variant.device)
    # Gradients of half-precision arguments are rounded to it, whatever the operator computes in.
    rounding = torch.finfo(torch.bfloat16).eps
    tolerance = 2 * max(rounding, *variant.operator.tolerances.values())
    sample = small_samples(variant, torch.float32, 300)[-1]
    positions = tensor_positions(sample)
    for cast in ([], positions, *([i] for i in positions)):
        args = [a.bfloat16() if i in cast else a for i, a in enumerate(sample.args)]
        try:
            with torch.autocast(variant.device, torch.bfloat16):
                results, exact = (
                    output_and_gradients(v.call, args, sample.kwargs, rounded_to=torch.bfloat16)
                    for v in (variant, reference)
                )
        except TypeError as error:
            if torch.bfloat16 in variant.operator.tolerances:
                raise
            pytest.fail(
                f"{variant}: under autocast to bfloat16, which the operator does not declare: "
                f"{error}; where hoconv.dispatch.registration.autocasts(device_type) is true, "
                f"convert tensors to a dtype that it does",
                pytrace=False,
            )
        assert results.keys() == exact.keys()
        for name, result in results.items():
            assert result.dtype == exact[name].dtype, (cast, name)
            assert relative_error(result, exact[name]) <= tolerance, (cast, name)


def test_auto_is_the_implementation_that_it_says(operator: Operator) -> None:
    choice = choose(operator, "auto", "cpu")
    sample = next(s for s in operator.samples(torch.device("cpu"), torch.float32) if elements(s))
    out = operator.function(*sample.args, impl="auto", **sample.kwargs)
    named = operator.function(*sample.args, impl=choice.name, **sample.kwargs)
    assert tree_structure(out) == tree_structure(named)
    assert all(map(torch.equal, tree_leaves(out), tree_leaves(named)))
    torch.compiler.reset()
    compiled = torch.compile(operator.function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*sample.args, impl="auto", **sample.kwargs), out)


def test_unknown_implementation_is_refused_with_the_known_ones(operator: Operator) -> None:
    sample = next(iter(operator.samples(torch.device("cpu"), torch.float32)))
    with pytest.raises(ValueError, match=r"impl: expected one of auto, reference.*'fastest'"):
        operator.function(*sample.args, impl="fastest", **sample.kwargs)
