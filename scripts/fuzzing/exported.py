"""Running exported programs in a process that did not make them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fuzzing.programs import BACKWARD, Randoms
from fuzzing.verdicts import Verdict, compare, describe_error, is_refusal


def judge(name: str, folder: Path, say: Callable[[str], None]) -> Verdict:
    """Loads a program that a case saved, and compares its output and gradients.

    Gradients of approximate products may be refused: an exported program does not know their kind.

    Args:
        name: of its two files, without suffix.
        folder: the folder of the files.
        say: called with a description of the case before it runs.
    """
    saved: dict[str, Any] = torch.load(folder / f"{name}.pt", weights_only=False)
    say(saved["what"])
    with warnings.catch_warnings(action="ignore"):
        refused = None
        try:
            module: Any = torch.export.load(folder / f"{name}.pt2").module()
            held = [key for key, _ in module.named_parameters()]

            def function(*tensors: Tensor) -> Tensor:
                given = len(tensors) - len(held)
                parameters = dict(zip(held, tensors[given:], strict=True))
                return torch.func.functional_call(module, parameters, tensors[:given])

            try:
                randoms = Randoms(saved["draw"], saved["dtype"], special=saved["special"])
                results = BACKWARD.run(function, saved["tensors"], randoms, torch.func)
            except Exception as error:
                if not (saved["may_refuse"] and is_refusal(error)):
                    raise
                refused = Verdict("refused", describe_error(error))
                results = {"output": function(*saved["tensors"])}
        except Exception as error:
            return Verdict("wrong", f"loaded in another process: {describe_error(error)}")
    expected = saved["expected"]
    if refused:
        expected = {"output": expected["output"]}
    verdict = compare(
        results, expected, saved["dtypes"], saved["tolerances"],
        lambda: saved["disturbed"], saved["jitter"], lambda: saved["rounded"],
    )  # fmt: skip
    if verdict.kind == "equal":
        return refused or verdict
    return Verdict(verdict.kind, f"loaded in another process: {verdict.why}")
