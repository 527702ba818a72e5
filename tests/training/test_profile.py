"""The names of kernels in a profile."""

from __future__ import annotations

import pytest

from training.callbacks.profile import NAME_WIDTH, shorten_name


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        (
            "void ours::(anonymous namespace)::multiply<ours::Tile<8, 4> >(float const*, float*)",
            "multiply<Tile<8, 4>>",
        ),
        (
            "void at::native::apply<4, at::native::Add<float> >(int, at::f(int)::{lambda(int)#1})",
            "apply<4, Add<float>>",
        ),
        ("aten::mm", "aten::mm"),
        ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD (Device -> Device)"),
        ("k" * 60, "k" * (NAME_WIDTH - 1) + "…"),
    ],
)
def test_names_are_short(name: str, shown: str) -> None:
    assert shorten_name(name) == shown
