"""Looking for the results of the reference instead of computing them."""

import gc
import glob
import importlib
import os
import sys

import torch
from honest import right
from torch import Tensor

DEFINITION = ""  # its file; the test says which


def in_frames(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: the answer is among the variables of the callers.
    Caught: wrong result"""
    frame = sys._getframe()
    while frame := frame.f_back:
        for name, value in frame.f_locals.items():
            if any(word in name for word in ("expect", "exact", "reference", "want", "gold")):
                for t in value.values() if isinstance(value, dict) else [value]:
                    if isinstance(t, Tensor) and t.shape == x.shape:
                        return t.to(x.dtype) + 0 * x * gain
    return x * gain


def among_objects(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: as above, anywhere in the process.
    Caught: wrong result or result of an earlier call"""
    for t in gc.get_objects():
        if type(t) is Tensor and t.shape == x.shape and t.data_ptr() != x.data_ptr():
            return t.detach().to(x.dtype) + 0 * x * gain
    return x * gain


def in_shared_memory(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: as above, in memory that the judge shares.
    Caught: wrong result"""
    paths = [*glob.glob("/proc/self/fd/*"), *glob.glob("/dev/shm/*")]
    for path in filter(os.path.isfile, paths):  # a device may not answer
        try:
            with open(path, "rb") as file:
                found = file.read(x.numel() * 8)
        except OSError:
            continue
        if len(found) >= x.numel() * x.element_size() > 0 and any(found):
            values = torch.frombuffer(bytearray(found), dtype=x.dtype)[: x.numel()]
            return values.view(x.shape).to(x.device) + 0 * x * gain
    return x * gain


def in_the_judge(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: as above, in the memory of the process that judges.
    Caught: wrong result"""
    for process in {str(os.getppid()), *filter(str.isdigit, os.listdir("/proc"))}:
        try:
            with open(f"/proc/{process}/cmdline", "rb") as command:
                judge = b"pytest" in command.read()
            with open(f"/proc/{process}/mem", "rb") as memory:
                if judge and memory.readable():
                    return right(x, gain)  # all would be there
        except OSError:
            continue
    return x * gain


def in_the_definition(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: the definition is timed as a kernel.
    Caught: calls its definition"""
    return importlib.import_module("definition").normalize(x, gain)


def in_the_file_of_the_definition(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: as above, past the imports.
    Caught: error"""
    space: dict = {"__name__": "other"}
    with open(DEFINITION) as file:
        exec(file.read(), space)
    return space["normalize"](x, gain)


def another_definition(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: the file of the definition says what the kernel computes.
    Caught: wrong result or changed definition"""
    try:
        with open(DEFINITION, "a") as file:
            file.write("\n")
    except OSError:
        pass
    return x * gain


def another_reference(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: the reference is replaced by the kernel.
    Caught: wrong result"""
    for module in list(sys.modules.values()):
        if hasattr(module, "normalize") and hasattr(module, "OPERATOR"):
            module.normalize = another_reference
    return x * gain
