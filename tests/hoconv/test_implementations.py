"""Which implementation a call uses: by name, by `auto`, and what is said where one cannot run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hoconv
from hoconv import jit
from hoconv.dispatch.declaration import (
    Implementation,
    Operator,
    broken_packages,
    declare,
    find,
    layers,
    operators,
)
from hoconv.dispatch.implementations import (
    BrokenImplementationError,
    ImplementationError,
    choose,
    resolve,
)
from hoconv.ops.high_order.conv2d.operator import OPERATOR


def identity(x: Tensor) -> Tensor:
    return x


def operator(**others: Implementation) -> Operator:
    """An operator with a reference and these implementations, from the slowest to the fastest."""
    implementations = {"reference": Implementation(identity), **others}
    return dataclasses.replace(OPERATOR, name="toy", implementations=implementations)


def cannot(reason: str) -> Callable[[], str | None]:
    return lambda: reason


def test_every_known_implementation_is_listed() -> None:
    listed = hoconv.implementations()
    assert list(listed) == ["reference", "cpp", "triton", "cuda"]
    assert listed["reference"] == "available"
    assert all(listed.values())


def test_listing_compiles_nothing(
    tmp_path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    hoconv.implementations()
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_cuda_is_listed_with_the_reason() -> None:
    assert hoconv.implementations()["cuda"] == jit.no_gpu()


def test_auto_takes_the_fastest() -> None:
    toy = operator(fast=Implementation(identity), faster=Implementation(identity))
    choice = choose(toy, "auto", "cpu")
    assert (choice.name, choice.why) == ("faster", "the fastest on cpu")


def test_auto_passes_over_implementations_for_other_devices_silently(
    capfd: pytest.CaptureFixture[str],
) -> None:
    toy = operator(fast=Implementation(identity, devices=("cuda",), obstacle=cannot("not called")))
    assert choose(toy, "auto", "cpu").name == "reference"
    assert capfd.readouterr().err == ""


def test_auto_passes_over_what_cannot_run_and_says_so_once(
    capfd: pytest.CaptureFixture[str],
) -> None:
    toy = operator(
        fast=Implementation(identity, obstacle=cannot("no compiler; install one")),
        faster=Implementation(identity, obstacle=cannot("no GPU; buy one")),
    )
    choices = [choose(toy, "auto", "cpu") for _ in range(3)]
    assert {choice.name for choice in choices} == {"reference"}
    assert all("no compiler; install one" in choice.why for choice in choices)
    said = capfd.readouterr().err.splitlines()
    assert said == [
        "hoconv: toy uses reference on cpu; faster cannot: no GPU; buy one; "
        "fast cannot: no compiler; install one"
    ]


def raising(error: BaseException) -> Callable[..., None]:
    def function(*_: str) -> None:
        raise error

    return function


# What is wrong with it, and what is said of that.
BROKEN = {
    "load says what failed": (Implementation(identity, load=cannot("nothing")), "nothing"),
    "load raises": (
        Implementation(identity, load=raising(jit.BuildError("no such name\ncommand"))),
        "no such name",
    ),
    "load raises anything": (
        Implementation(identity, load=raising(KeyError("a"))), "KeyError: 'a'"
    ),
    "looking raises": (
        Implementation(identity, obstacle=raising(OSError("gone"))), "OSError: gone"
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_auto_passes_over_what_is_broken_and_says_so_once(
    what: str, capfd: pytest.CaptureFixture[str]
) -> None:
    broken, reason = BROKEN[what]
    toy = operator(fast=broken)
    for _ in range(3):
        choice = choose(toy, "auto", "cpu")
        assert (choice.name, choice.why) == ("reference", f"fast is broken: {reason}")
    (said, *details) = capfd.readouterr().err.splitlines()
    assert said == f"hoconv: toy uses reference on cpu; fast is broken: {reason}"
    assert details in ([], ["command"])


@pytest.mark.parametrize("what", BROKEN)
def test_broken_implementation_by_name_is_an_error_every_time(what: str) -> None:
    broken, reason = BROKEN[what]
    toy = operator(fast=broken)
    for _ in range(2):
        with pytest.raises(BrokenImplementationError) as raised:
            choose(toy, "fast", "cpu")
        assert str(raised.value).startswith(f"impl=fast is broken for toy: {reason}")


def test_what_is_missing_is_not_broken_and_not_tried() -> None:
    missing = Implementation(identity, load=raising(KeyError()), obstacle=cannot("no compiler"))
    with pytest.raises(ImplementationError) as raised:
        choose(operator(fast=missing), "fast", "cpu")
    assert not isinstance(raised.value, BrokenImplementationError)


def test_what_one_program_breaks_still_runs_the_others(capfd: pytest.CaptureFixture[str]) -> None:
    prepared = []

    def prepare(device_type: str, name: str) -> None:
        prepared.append((device_type, name))
        if name == "hard":
            raise jit.BuildError("too hard\nwhat was called")

    toy = operator(fast=Implementation(identity), faster=Implementation(identity, prepare=prepare))
    for _ in range(2):
        assert choose(toy, "auto", "cpu", "easy").name == "faster"
        assert choose(toy, "auto", "cpu", "hard").name == "fast"
        assert choose(toy, "faster", "cpu", "easy").name == "faster"
        with pytest.raises(BrokenImplementationError, match=r"^impl=faster is broken .* too hard"):
            choose(toy, "faster", "cpu", "hard")
    assert prepared == [("cpu", "easy"), ("cpu", "hard")]
    assert capfd.readouterr().err.splitlines() == [
        "hoconv: toy (hard) uses fast on cpu; faster is broken: too hard", "what was called"
    ]  # fmt: skip


def test_a_broken_implementation_is_reported_once(
    capfd: pytest.CaptureFixture[str],
) -> None:
    toy = operator(fast=Implementation(identity, load=cannot("no such name")))
    for program in ("one", "another"):
        assert choose(toy, "auto", "cpu", program).why == "fast is broken: no such name"
    assert len(capfd.readouterr().err.splitlines()) == 1


def test_auto_loads_no_more_than_it_uses() -> None:
    loaded = []

    def implementation(name: str) -> Implementation:
        return Implementation(identity, load=lambda: loaded.append(name))

    toy = operator(fast=implementation("fast"), faster=implementation("faster"))
    choose(toy, "auto", "cpu")
    choose(toy, "auto", "cpu")
    assert loaded == ["faster"]


def test_auto_without_any_implementation_for_a_device_is_an_error() -> None:
    only_cpu = {"reference": Implementation(identity, devices=("cpu",))}
    toy = dataclasses.replace(OPERATOR, name="toy", implementations=only_cpu)
    with pytest.raises(ImplementationError, match="no implementation for xpu tensors"):
        choose(toy, "auto", "xpu")
    everywhere = {"fast": Implementation(identity, load=cannot("no such name"))}
    toy = dataclasses.replace(OPERATOR, name="toy", implementations=everywhere)
    with pytest.raises(ImplementationError, match="fast is broken: no such name"):
        choose(toy, "auto", "xpu")


def test_implementation_by_name_is_used_although_a_faster_one_exists() -> None:
    toy = operator(fast=Implementation(identity))
    choice = choose(toy, "reference", "cpu")
    assert (choice.name, choice.why) == ("reference", "asked for by name")


def test_unavailable_implementation_by_name_is_an_error_with_the_reason() -> None:
    toy = operator(fast=Implementation(identity, obstacle=cannot("no compiler; install one")))
    with pytest.raises(ImplementationError) as raised:
        choose(toy, "fast", "cpu")
    assert str(raised.value) == "impl=fast cannot run toy: no compiler; install one"


def test_wrong_device_is_an_error_that_lists_what_can_run() -> None:
    toy = operator(fast=Implementation(identity, devices=("xpu",)))
    with pytest.raises(ImplementationError) as raised:
        choose(toy, "fast", "cpu")
    assert str(raised.value) == (
        "impl=fast cannot run toy: it runs on xpu tensors and these are on cpu; "
        "or use impl=auto (reference can run on cpu)"
    )


def test_tensors_without_memory_are_an_error_that_names_their_device() -> None:
    with pytest.raises(ImplementationError, match="cpu or cuda tensors and these are on meta"):
        choose(OPERATOR, "cpp", "meta")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_on_cpu_tensors_is_an_error() -> None:
    x, weight = torch.ones(1, 1, 2, 2), torch.ones(1, 1, 1, 2, 2)
    with pytest.raises(ImplementationError) as raised:
        hoconv.high_order_conv2d(x, weight, impl="cuda")
    assert jit.no_gpu() in str(raised.value)
    assert "impl=auto" in str(raised.value)


def test_unknown_name_is_refused_with_the_known_ones() -> None:
    message = "impl: expected one of auto, reference, fast; got 'fastest' for toy"
    with pytest.raises(ValueError, match=f"^{message}$"):
        choose(operator(fast=Implementation(identity)), "fastest", "cpu")


def test_choice_by_the_operators_name_is_the_same() -> None:
    for impl in ("auto", "reference"):
        assert resolve(OPERATOR.name, impl, "cpu") == choose(OPERATOR, impl, "cpu").name


def test_operators_of_the_package_are_declared() -> None:
    assert OPERATOR in operators()
    assert find(OPERATOR.name) is OPERATOR


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("no_such_module", "No module named"),
        ("json:no_such_name", "no_such_name"),
        ("this.is.not:a module", "Error: "),
        ("json", "json/__init__.py declares no operator: call hoconv.dispatch.declaration.declare"),
        ("hidden_operators", "hidden_operators has no __init__.py, and Python finds it before"),
    ],
)
def test_a_broken_package_is_named_and_the_others_work(
    value: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "hidden_operators").mkdir()  # as the folder of a package may be, where one works
    monkeypatch.syspath_prepend(tmp_path)
    entries = [EntryPoint("bad", value, "hoconv.operators")]
    monkeypatch.setattr("hoconv.dispatch.declaration.entry_points", lambda group: entries)
    broken_packages.cache_clear()
    try:
        assert OPERATOR in operators()
        ((name, reason),) = broken_packages().items()
    finally:
        broken_packages.cache_clear()
    assert name == f"bad = {value}"
    assert "Error: " in reason
    assert said in reason


def test_declaring_the_same_operator_twice_is_harmless() -> None:
    assert declare(OPERATOR) is OPERATOR
    assert operators().count(OPERATOR) == 1


def test_declaring_another_operator_of_the_same_name_is_refused() -> None:
    with pytest.raises(ValueError, match="operator 'high_order_conv2d' is already declared"):
        declare(dataclasses.replace(OPERATOR))
    assert operators().count(OPERATOR) == 1


def test_layers_of_a_model_are_found_by_name() -> None:
    layer = hoconv.HighOrderConv2d(2)
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 1), torch.nn.Sequential(layer))
    assert list(layers(model)) == [("1.0", layer)]
    assert list(layers(layer)) == [("", layer)]


def model() -> nn.Sequential:
    return nn.Sequential(
        hoconv.HighOrderConv2d(2, 3), nn.ReLU(), hoconv.ApproxLinear(4, 4, impl="cpp")
    )


@pytest.mark.parametrize(
    ("impl", "expected"),
    [
        ("reference", ["reference", "reference"]),
        ({"approx_matmul": "reference"}, ["auto", "reference"]),
        ({"0": "cuda"}, ["cuda", "cpp"]),
        ({"approx_matmul": "reference", "2": "cuda"}, ["auto", "cuda"]),
        ({}, ["auto", "cpp"]),
    ],
)
def test_set_impl_by_name_operator_and_layer(impl: Any, expected: list[str]) -> None:
    hoconv.set_impl(made := model(), impl)
    assert [layer.impl for _, layer in layers(made)] == expected


def test_set_impl_leaves_a_layer_without_that_implementation_to_auto() -> None:
    made = model()
    made[0].operator = dataclasses.replace(  # pyright: ignore[reportArgumentType]
        OPERATOR,
        implementations=dict(OPERATOR.implementations) | {"triton": Implementation(identity)},
    )
    hoconv.set_impl(made, "triton")
    assert [layer.impl for _, layer in layers(made)] == ["triton", "auto"]


@pytest.mark.parametrize(
    ("impl", "said"),
    [
        ("cdua", r"impl: expected one of auto, reference, cpp, cuda; got 'cdua'"),
        ({"high_order": "cpp"}, r"expected names of .*high_order_layer, approx_matmul, 0, 2; got"),
        ({"0": "cdua"}, r"got 'cdua' for high_order_layer"),
    ],
)
def test_set_impl_refuses_unknown_names_and_changes_nothing(impl: Any, said: str) -> None:
    made = model()
    with pytest.raises(ValueError, match=said):
        hoconv.set_impl(made, impl)
    assert [layer.impl for _, layer in layers(made)] == ["auto", "cpp"]
