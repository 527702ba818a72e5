"""Counting the multiplications of a model, and what they cost."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from hoconv import HighOrderConv2d, approx
from hoconv.ops.approx.layers.cost import energy_by_multiplier

FIGURES = {"PDK45_PWR": 0.4, "PDK45_DELAY": 1.5, "PDK45_AREA": 700.0}


def table(**figures: float) -> approx.LookupTable:
    numbers = torch.arange(16)
    return approx.LookupTable(numbers[:, None] * numbers, signed=False, figures=figures)


def test_multiplications_are_those_of_the_sums_that_make_the_outputs() -> None:
    network = nn.ModuleDict({
        "grouped": nn.Conv2d(2, 6, 3, stride=2, padding=1, groups=2),
        "linear": nn.Linear(5, 7),
        "transposed": nn.ConvTranspose1d(3, 4, 2, stride=2),
        "volume": nn.Conv3d(1, 2, 2),
        "unused": nn.Linear(5, 7),
    })  # fmt: skip

    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = network

        def forward(self, image: Tensor, rows: Tensor) -> None:
            self.layers["grouped"](image)
            self.layers["linear"](input=rows)
            self.layers["linear"](rows[0])
            self.layers["transposed"](torch.ones(1, 3, 5))
            self.layers["volume"](torch.ones(1, 1, 3, 3, 3))

    found = approx.cost(Calls(), torch.ones(1, 2, 8, 10), torch.ones(3, 5))
    assert {each.name: each.multiplications for each in found.layers} == {
        "layers.grouped": (6 * 4 * 5) * (1 * 3 * 3),
        "layers.linear": (3 + 1) * 7 * 5,
        "layers.transposed": (3 * 5) * (4 * 2),
        "layers.volume": (2 * 2 * 2 * 2) * 8,
        "layers.unused": 0,
    }
    assert found.multiplications == found.unknown == 1080 + 140 + 120 + 128
    assert found.energy is None


def test_energy_is_power_times_delay_and_unknown_where_one_is() -> None:
    model = nn.Sequential(*(nn.Linear(10, 10) for _ in range(4)))
    without = {name: FIGURES[name] for name in ("PDK45_PWR", "PDK45_AREA")}
    approx.convert(model, {"0": table(**FIGURES), "1": table(**without), "2": "mbm16"})
    found = approx.cost(model, torch.ones(1, 10))
    energies = [each.energy for each in found.layers]
    assert energies == [pytest.approx(0.4 * 1.5 * 100), None, None, None]
    assert [each.area for each in found.layers] == [700.0, 700.0, None, None]
    assert [each.multiplier for each in found.layers[2:]] == ["mbm16", "exact"]
    assert found.energy == energies[0]
    assert (found.multiplications, found.unknown) == (400, 300)
    *_, third, fourth, total = str(found).splitlines()
    assert third.split() == ["2", "100", "unknown", "mbm16"]
    assert fourth.split() == ["3", "100", "unknown", "exact"]
    assert total.split() == ["400", "60", "pJ", "without", "300", "of", "unknown", "energy"]


def test_energies_of_a_user_go_before_figures_and_are_found_by_name_and_by_file(
    tmp_path: Path,
) -> None:
    path = tmp_path / "mul4u.c"
    path.write_text(
        "// PDK45_PWR = 0.4 mW\n// PDK45_DELAY = 1.5 ns\n#include <stdint.h>\n"
        "uint8_t mul4u(uint8_t a, uint8_t b) { return a * b; }\n"
    )
    model = nn.Sequential(*(nn.Linear(10, 10) for _ in range(3)))
    approx.convert(model, {"0": path, "1": "drum:k=4"})
    x = torch.ones(1, 10)
    of_file = approx.cost(model, x).layers[0].energy
    assert of_file == pytest.approx(60)
    energies = {path: 0.5, "drum:k=4": 0.25, "exact": 2, "mbm10": 9}
    found = approx.cost(model, x, energies=energies)
    assert [each.energy for each in found.layers] == [50, 25, 200]
    assert found.energy == 275
    assert found.unknown == 0


@pytest.mark.parametrize("energy", [0, -1.0, math.inf, math.nan, True, "3"])
def test_an_energy_that_is_no_positive_number_is_refused(energy) -> None:
    with pytest.raises(ValueError, match="energies: expected pJ of a multiplication by 'exact'"):
        energy_by_multiplier({"exact": energy})


def test_what_is_no_model_and_no_mapping_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^model: expected a torch.nn.Module, got function"):
        approx.cost(lambda x: x, torch.ones(1))  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"^energies: expected pJ of a multiplication .*; got 3.7"):
        approx.cost(nn.Linear(2, 2), torch.ones(1, 2), energies=3.7)  # pyright: ignore[reportArgumentType]


def test_an_energy_of_no_multiplier_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected one of .* got 'mbm17'"):
        approx.cost(nn.Linear(2, 2), torch.ones(1, 2), energies={"mbm17": 1.0})


def test_a_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Dropout(), nn.Flatten(), nn.Linear(12, 10))
    model[1].eval()
    approx.convert(model, table())  # whose ranges are not known: it was not trained
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    random = torch.random.get_rng_state()
    found = approx.cost(model, torch.ones(1, 1, 4, 4))
    assert found.multiplications == 12 * 9 + 120
    assert torch.equal(torch.random.get_rng_state(), random)
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
    assert model.get_buffer("0.quantizer.input.least").isnan()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        approx.cost(model, torch.ones(1, 1, 5, 5))
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
    assert not any(module._forward_hooks for module in model.modules())


def test_a_forward_of_a_user_is_called_and_kept() -> None:
    layer = approx.ApproxLinear(4, 4)
    layer.forward = own = lambda input: input[:, :3]
    assert approx.cost(layer, torch.ones(1, 4)).multiplications == 12
    assert layer.forward is own


def test_layers_are_counted_that_a_fused_kernel_or_a_compiled_program_would_not_call() -> None:
    encoder = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True).eval()
    found = approx.cost(encoder, torch.ones(1, 3, 4))
    counts = {each.name: each.multiplications for each in found.layers}
    assert counts["linear1"] == counts["linear2"] == 3 * 4 * 6

    model = nn.Sequential(nn.Linear(4, 4))
    model.compile(backend=lambda *_: pytest.fail("it was compiled"))
    assert approx.cost(model, torch.ones(1, 4)).multiplications == 16


def test_a_fused_layer_counts_its_generator() -> None:
    layer = HighOrderConv2d(2, kernel_size=3, generator_kernel_size=3)
    found = approx.cost(layer, torch.ones(1, 2, 5, 5))
    assert [(each.name, each.multiplications) for each in found.layers] == [
        ("generator", 25 * 9 * 2 * 9)
    ]


def test_an_energy_is_of_a_multiplier_however_it_is_named(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mul4u.c").write_text(
        "#include <stdint.h>\nuint8_t mul4u(uint8_t a, uint8_t b) { return a * b; }\n"
    )
    names = ("mul4u.c", str(tmp_path / "mul4u.c"), approx.multiplier("mul4u.c"))
    for layer in (approx.ApproxLinear(4, 4, multiplier=name) for name in names):
        for name in names:
            assert approx.cost(layer, torch.ones(1, 4), energies={name: 5}).energy == 80
    exact, other = (approx.multiplier(lambda a, b, n=n: a * b + n, bits=4, signed=False)
                    for n in (0, 1))  # fmt: skip
    layer = approx.ApproxLinear(4, 4, multiplier=other)
    assert approx.cost(layer, torch.ones(1, 4), energies={exact: 5}).energy is None
    with pytest.raises(ValueError, match=r"^energies: .*mul4u.c' is there twice, with two"):
        approx.cost(layer, torch.ones(1, 4), energies={names[0]: 5, names[1]: 6})


def test_hooks_of_a_user_do_not_change_the_count() -> None:
    layer = nn.Linear(5, 7)
    layer.register_forward_hook(lambda module, args, out: out.sum())
    assert approx.cost(layer, torch.ones(3, 5)).multiplications == 3 * 5 * 7
