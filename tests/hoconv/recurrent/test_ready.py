"""Loops of ready cells that are compiled once, for layers of all sizes, as a wheel has them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from hoconv import jit
from hoconv import recurrent as rnn
from hoconv.dispatch.implementations import ImplementationError
from hoconv.jit import prebuilt
from hoconv.jit.compilers import LOOP_FLAGS
from hoconv.recurrent import cells
from hoconv.recurrent.ready import write
from hoconv.recurrent.runtime import cpp

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(jit.obstacle("cpu") is not None, reason=str(jit.obstacle("cpu"))),
]
REASON = "a C++ compiler was not found; install one"


@pytest.fixture(scope="module")
def loops(tmp_path_factory: pytest.TempPathFactory) -> jit.Library:
    """The loops of some cells in float32, as a wheel for this machine brings them."""
    folder = tmp_path_factory.mktemp("csrc") / "ready"
    write(folder, {"layernorm_lstm": cells.layernorm_lstm, "gla": cells.gla})
    sources = sorted(folder.glob("*_float32.cpp"))
    library = jit.Library("recurrent_ready", sources, include=[jit.CSRC], flags=LOOP_FLAGS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prebuilt, "targets", lambda device: [prebuilt.target(device)])
        library.place(folder)
    return library


@pytest.fixture(autouse=True)
def _no_compiler(loops: jit.Library, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def find_none(name: str, text: str) -> Path:
        raise jit.MissingCompilerError(REASON)

    cpp.products.load()
    monkeypatch.setattr(cpp, "READY", loops)
    monkeypatch.setattr(cpp, "compile_cpp", find_none)
    cpp._load_ready.cache_clear()
    yield
    cpp._load_ready.cache_clear()


def results(layer: rnn.RNN, x: Any) -> list[Tensor]:
    """The output, and the gradients of the parameters."""
    output = layer(x)[0]
    output = output if isinstance(output, Tensor) else output.data
    output.square().sum().backward()
    found = [output.detach(), *(p.grad for p in layer.parameters() if p.grad is not None)]
    layer.zero_grad()
    return found


@pytest.mark.parametrize(
    ("name", "sizes", "options"),
    [
        ("layernorm_lstm", (7, 12), {}),
        ("layernorm_lstm", (12, 12), {"num_layers": 2, "bidirectional": True}),
        ("gla", (9, 24), {"heads": 3, "keys": 4, "values": 8}),
        ("gla", (9, 24), {"heads": 2, "keys": 12, "values": 12}),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_layers_of_all_sizes_have_the_same_loops(
    name: str, sizes: tuple[int, int], options: dict[str, Any], packed: bool
) -> None:
    torch.manual_seed(0)
    layer = rnn.RNN(getattr(cells, name), *sizes, impl="cpp", **options)
    x: Any = torch.randn(6, 5, sizes[0])
    if packed:
        x = pack_sequence([torch.randn(n, sizes[0]) for n in (6, 4, 1)])
    found = results(layer, x)
    layer.impl = "reference"
    for mine, exact in zip(found, results(layer, x), strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-4, atol=1e-5)


@rnn.cell(state=("h",))
def own(x: Any, h: Any) -> Any:
    h = rnn.tanh(rnn.linear("h", x, h)) * 0.71875
    return h, dict(h=h)


def test_a_cell_of_ones_own_says_in_one_line_what_it_lacks(
    capfd: pytest.CaptureFixture[str],
) -> None:
    reason = f"hoconv's wheel brings no compiled loops of this layer's cell and options; {REASON}"
    layer = rnn.RNN(own, 3, 4, impl="cpp")
    with pytest.raises(ImplementationError) as refused:
        layer(torch.ones(2, 1, 3))
    assert str(refused.value) == f"impl=cpp cannot run recurrent: {reason}"
    layer.impl = "auto"
    assert layer(torch.ones(2, 1, 3))[0].shape == (2, 1, 4)
    said = [line for line in capfd.readouterr().err.splitlines() if "uses reference" in line]
    assert len(said) == 1
    assert re.fullmatch(
        r"hoconv: recurrent \(.*\) uses reference on cpu; cpp cannot: " + re.escape(reason), said[0]
    )
