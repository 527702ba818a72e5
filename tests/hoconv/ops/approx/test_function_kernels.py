"""Functions in C on a GPU: their kernels compiled as C++, by NVRTC, and run."""

from __future__ import annotations

import ctypes
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hoconv import approx
from hoconv.approx import multiplier, table_matmul
from hoconv.jit import compilers, driver, nvrtc
from hoconv.jit.generated import compile_cpp
from hoconv.ops.approx import function_kernels, function_products
from hoconv.ops.approx.accumulators import code_of
from tests.hoconv.ops.approx.test_c_functions import adder, function

GPU = Path(__file__).parents[1] / "emulation/gpu.h"
needs_compiler = pytest.mark.skipif(
    compilers.obstacle("cpu") is not None, reason=str(compilers.obstacle("cpu"))
)
needs_nvrtc = pytest.mark.skipif(nvrtc.obstacle() is not None, reason=str(nvrtc.obstacle()))

ACCUMULATORS = (None, "saturate:bits=20", "wrap:bits=18", "adder")
# A block has 32 x 32 sums and takes 32 k at a time.
SIZES = ((2, 5, 9, 7), (1, 33, 70, 65), (3, 70, 33, 1), (2, 3, 0, 2), (2, 0, 3, 4), (0, 2, 3, 4))
BLOCKS = 5  # of an emulated launch, at most

Given = tuple[Tensor | None, str | None, bool, Any]  # table, function, signed, accumulator


def given(folder: Path) -> list[Given]:
    """Every kind of multiplier with every kind of accumulator."""
    found: list[Given] = []
    entries = np.random.default_rng(0).integers(-900, 900, (256, 256), np.int32)
    for signed, accumulator in itertools.product((False, True), ACCUMULATORS):
        code = code_of(adder(folder, 17, signed) if accumulator == "adder" else accumulator, signed)
        found.append((None, function(folder, (12, 10), signed, 3)[1].code, signed, code))
        table = torch.from_numpy(entries if signed else abs(entries))
        found.append((table, None, signed, code))
    return found


def launcher(texts: list[str]) -> Any:
    """Returns what launches kernels of these sources as `function_kernels._launch` does, on an
    emulated GPU."""
    parts = [GPU.read_text(), '#define __CUDACC__\n#include "approx/cuda/functions.cuh"\n']
    for i, text in enumerate(texts):
        _, body = text.replace('extern "C" __global__', "static").split("\n", 1)
        parts.append(f"namespace source{i} {{\n{body}\n}}\n")
        for name, argument in (("sum", "Matrices"), ("multiply", "Pairs")):
            if f" {name}(const {argument}" in text:
                parts.append(f"""
extern "C" void {name}{i}(const hoconv::approx::{argument}* p, int64_t blocks, int threads) {{
  gpu::launch(dim3(blocks), threads, 0, [=] {{ source{i}::{name}(*p); }});
}}
""")
    library = ctypes.CDLL(str(compile_cpp("emulated", "".join(parts).replace("#pragma once", ""))))

    def launch(text: str, device: torch.device, name: str, blocks: int, numbers: list[int]) -> None:
        if blocks:
            kernel = getattr(library, f"{name}{texts.index(text)}")
            argument = driver.as_argument(numbers)
            kernel(argument, ctypes.c_int64(min(blocks, BLOCKS)), function_kernels._THREADS)

    return launch


def whole(*shape: int) -> Tensor:
    """Integers of 32 bits, of which the lowest count."""
    return torch.randint(-(2**31), 2**31, shape).int()


@needs_compiler
def test_kernels_compute_what_a_cpu_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every = given(tmp_path)
    texts = [function_kernels.source(code, register, signed) for _, code, signed, register in every]
    texts += [function_kernels.source(code) for _, code, *_ in every if code is not None]
    monkeypatch.setattr(function_kernels, "_launch", launcher(texts := [*dict.fromkeys(texts)]))
    torch.manual_seed(0)
    for case in every:
        for B, M, K, N in SIZES:
            for a, b in (
                (whole(B, M, K), whole(B, K, N)),
                (whole(B, K, M).mT, whole(K, N).expand(B, K, N)),
            ):
                expected = function_products.matmul(a, b, *case)
                assert torch.equal(function_kernels.matmul(a, b, *case), expected), case
        if (code := case[1]) is not None:
            for n in (0, 1, 256 * BLOCKS + 33):
                a, b = whole(n), whole(2 * n)[::2]
                expected = function_products.multiply(a, b, code)
                assert torch.equal(function_kernels.multiply(a, b, code), expected)


@needs_compiler
@needs_nvrtc
def test_nvrtc_compiles_the_kernels(tmp_path: Path) -> None:
    for table, code, signed, accumulator in given(tmp_path):
        if signed == (table is None):
            text = function_kernels.source(code, accumulator, signed)
            assert function_kernels.compile_source(text, "sm_90").stat().st_size


COMMON = "#include <stdint.h>\n#  include <stdlib.h>\n"


@needs_compiler
@needs_nvrtc
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("return __builtin_clz(a | 1) + __builtin_ctzll(b | 1) + __builtin_popcount(a);", None),
        ("static const int8_t t[] = {1, 2}; return t[a & 1] * abs(b) & INT16_MAX;", None),
        ("return div(a, 3).quot * b;",
         r'^mul12s\.c, line 4: does not compile for a GPU: identifier "div" is undefined; change '
         r"it, or move the tensors to the CPU$"),
    ],
)  # fmt: skip
def test_what_a_source_takes_from_c_is_there_or_refused_in_one_line(
    tmp_path: Path, line: str, message: str | None
) -> None:
    path = tmp_path / "mul12s.c"
    path.write_text(f"{COMMON}int mul12s(int a, int b) {{\n  {line}\n}}\n")
    text = function_kernels.source(multiplier(path).code)  # pyright: ignore[reportAttributeAccessIssue]
    if message is None:
        function_kernels.compile_source(text, "sm_90")
    else:
        with pytest.raises(ValueError, match=message):
            function_kernels.compile_source(text, "sm_90")


@needs_compiler
def test_a_multiplier_and_an_adder_have_names_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[Any] = []
    for name, operation, mask in (("mul12s", "*", 1), ("add20se", "+", 6)):
        path = tmp_path / f"{name}.c"
        path.write_text(
            f"{COMMON}#ifndef MASK\n#define MASK {mask}\n#endif\n#define p 0\n"
            "static int part(int n) { return n & ~MASK; }\n"
            f"int {name}(int a, int b) {{ return (part(a) {operation} b) + p; }}\n"
        )
        codes.append(code_of(path, True) if operation == "+" else multiplier(path).code)  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setattr(function_kernels, "_launch", launcher([function_kernels.source(*codes)]))
    case = None, codes[0], True, codes[1]
    a, b = whole(1, 4, 9), whole(1, 9, 5)
    expected = function_products.matmul(a, b, *case)
    assert torch.equal(function_kernels.matmul(a, b, *case), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("accumulator", ACCUMULATORS)
@pytest.mark.parametrize("kind", ["function", "table"])
def test_a_graph_records_what_a_gpu_computes_as_a_cpu_does(
    tmp_path: Path, kind: str, accumulator: Any
) -> None:
    if kind == "function":
        found = function(tmp_path, (12, 10), True, 3)[1]
    else:
        values = np.random.default_rng(0).integers(-900, 900, (256, 256))
        found = approx.LookupTable(values, signed=True)
    if accumulator == "adder":
        accumulator = adder(tmp_path, 17, True)

    def draw() -> list[Tensor]:
        return [whole(*shape).to(found.dtype) for shape in ((2, 37, 65), (2, 65, 41))]

    def call(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        sums = table_matmul(a, b, found, accumulator=accumulator)
        return sums, approx.multiply(a, a.flip(2), found)

    a, b = (t.cuda() for t in draw())
    call(a, b)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # which refuses a copy to the CPU
        out = call(a, b)
    for _ in range(2):
        new = draw()
        for t, values in zip((a, b), new, strict=True):
            t.copy_(values)
        graph.replay()
        for found_there, expected in zip(out, call(*new), strict=True):
            assert torch.equal(found_there.cpu(), expected)
