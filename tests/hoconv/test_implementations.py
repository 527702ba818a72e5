"""Which implementation a call uses: by name, by `auto`, and what is said where one cannot run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import hoconv
from hoconv import build
from hoconv.high_order.operator import OPERATOR
from hoconv.implementations import ImplementationError, choose, resolve
from hoconv.operators import Implementation, Operator, declare, find, layers, operators


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
    assert list(listed) == ["reference", "cpp", "cuda"]
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
    assert hoconv.implementations()["cuda"] == build.no_gpu()


def test_auto_takes_the_fastest() -> None:
    toy = operator(fast=Implementation(identity), faster=Implementation(identity))
    choice = choose(toy, "auto", "cpu")
    assert (choice.name, choice.why) == ("faster", "the fastest on cpu")


def test_auto_passes_over_implementations_for_other_devices_silently(
    capfd: pytest.CaptureFixture[str],
) -> None:
    toy = operator(fast=Implementation(identity, devices=("cuda",), load=cannot("not called")))
    assert choose(toy, "auto", "cpu").name == "reference"
    assert capfd.readouterr().err == ""


def test_auto_passes_over_what_cannot_run_and_says_so_once(
    capfd: pytest.CaptureFixture[str],
) -> None:
    toy = operator(
        fast=Implementation(identity, load=cannot("no compiler; install one")),
        faster=Implementation(identity, load=cannot("no GPU; buy one")),
    )
    choices = [choose(toy, "auto", "cpu") for _ in range(3)]
    assert {choice.name for choice in choices} == {"reference"}
    assert all("no compiler; install one" in choice.why for choice in choices)
    said = capfd.readouterr().err.splitlines()
    assert said == [
        "hoconv: toy uses reference on cpu; faster cannot: no GPU; buy one; "
        "fast cannot: no compiler; install one"
    ]


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


def test_asked_for_by_name_is_taken_though_a_faster_one_is_there() -> None:
    toy = operator(fast=Implementation(identity))
    choice = choose(toy, "reference", "cpu")
    assert (choice.name, choice.why) == ("reference", "asked for by name")


def test_asked_for_by_name_and_cannot_run_is_an_error_with_the_reason() -> None:
    toy = operator(fast=Implementation(identity, load=cannot("no compiler; install one")))
    with pytest.raises(ImplementationError) as raised:
        choose(toy, "fast", "cpu")
    assert str(raised.value) == "impl=fast cannot run toy: no compiler; install one"


def test_asked_for_by_name_on_another_device_is_an_error_with_what_can_run_there() -> None:
    toy = operator(fast=Implementation(identity, devices=("xpu",)))
    with pytest.raises(ImplementationError) as raised:
        choose(toy, "fast", "cpu")
    assert str(raised.value) == (
        "impl=fast cannot run toy: it runs on xpu tensors and these are on cpu; "
        "or use impl=auto (reference can run on cpu)"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_gpu_says_so_rather_than_to_move_the_tensors() -> None:
    x, weight = torch.ones(1, 1, 2, 2), torch.ones(1, 1, 1, 2, 2)
    with pytest.raises(ImplementationError) as raised:
        hoconv.high_order_conv2d(x, weight, impl="cuda")
    assert build.no_gpu() in str(raised.value)
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
