"""Changes a layer between calls. A function returns what it did, or None for nothing.

Every change is one that a user can make. Those that a later operation takes back register how.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable

import torch

from fuzzing.draw import Draw
from fuzzing.sequences import cells
from fuzzing.sequences.modules import (
    attribute,
    generator_attribute,
    generator_forward,
    global_hook,
    hook,
    method,
    patch,
    patch_pytorch,
    subclass,
    submodule,
    take_back,
)
from fuzzing.sequences.parameters import (
    edit,
    extra_parameter,
    freeze,
    freeze_all,
    hook_tensor,
    load,
    misshape,
    parametrized,
    plain_tensor,
    pruned,
    remove,
    reorder,
    replace,
    swap_data,
    tie,
    unparametrized,
    unpruned,
)
from fuzzing.sequences.world import World


def train(world: World, draw: Draw) -> str | None:
    if world.still:
        return None
    world.layer.train(not world.layer.training)
    return "layer.train()" if world.layer.training else "layer.eval()"


def flag(world: World, draw: Draw) -> str | None:
    """The attribute `training` of the layer alone."""
    if world.still:
        return None
    world.layer.training = not world.layer.training
    return f"layer.training = {world.layer.training}"


def convert(world: World, draw: Draw) -> str:
    if world.made.exact:
        world.layer.float()
        return "layer.float()"
    # A recurrent layer compiles a loop for every dtype: rarely.
    often = (torch.float64,) * (12 if hasattr(world.layer, "runs") else 2)
    dtype = draw.choice((*often, torch.float32, torch.bfloat16))
    world.layer.to(dtype)
    return f"layer.to({dtype})"


def deepcopy(world: World, draw: Draw) -> str:
    world.mend_all()
    world.tensor_hooks.clear()
    world.layer = world.copy()
    _forget_instance(world)
    return "layer = copy.deepcopy(layer)"


def pickled(world: World, draw: Draw) -> str | None:
    world.mend_all()
    try:
        world.layer = pickle.loads(pickle.dumps(world.layer))
    except (pickle.PicklingError, AttributeError, RuntimeError, TypeError, NotImplementedError):
        return None
    world.tensor_hooks.clear()
    _forget_instance(world)
    return "layer = pickle.loads(pickle.dumps(layer))"


def _forget_instance(world: World) -> None:
    """Lets what was to be undone on the old object be: it is on the copy for good."""
    kept = {t: u for t, u in world.undo.items() if "nn.modules.module" in t or "replaced by" in t
            or t.startswith("torch.")}  # fmt: skip
    world.undo.clear()
    world.undo.update(kept)


def share(world: World, draw: Draw) -> str:
    world.layer.share_memory()
    return "layer.share_memory()"


def zero(world: World, draw: Draw) -> str:
    world.layer.zero_grad()
    return "layer.zero_grad()"


def same_device(world: World, draw: Draw) -> str:
    world.layer.to(next(world.layer.parameters(), torch.zeros(())).device)
    return "layer.to(its device)"


def reset(world: World, draw: Draw) -> str | None:
    if not hasattr(world.layer, "reset_parameters"):
        return None
    torch.manual_seed(draw.integer(0, 1000))
    world.layer.reset_parameters()
    return "layer.reset_parameters()"


def option(world: World, draw: Draw) -> str | None:
    """What the cell and its options were made of changes: the layer does not."""
    if not hasattr(world.layer, "options"):
        return None
    options = world.layer.options
    before = cells.SCALES[0]
    cells.SCALES[0] = 0.25
    world.undo[f"torch.cells #{next(world.numbers)}"] = lambda: cells.SCALES.__setitem__(0, before)
    if isinstance(options.get("factors"), list):
        options["factors"].append(3.0)
    if "p" in options:
        options["p"] = 0.9
    if "slots" in options:
        options["slots"] = 5
    return "the options and the globals of the cell change"


# Settings of PyTorch


def setting(world: World, draw: Draw) -> str:
    kind = draw.choice(("default dtype", "deterministic", "threads", "grad", "mkldnn", "device",
                        "flush"))  # fmt: skip
    if kind == "default dtype":
        before = torch.get_default_dtype()
        torch.set_default_dtype(draw.choice((torch.float64, torch.float32, torch.float16)))
        return world.later("torch.set_default_dtype", lambda: torch.set_default_dtype(before))
    if kind == "deterministic":
        on = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(not on)
        return world.later("torch.use_deterministic_algorithms",
                           lambda: torch.use_deterministic_algorithms(on))  # fmt: skip
    if kind == "threads":
        count = torch.get_num_threads()
        torch.set_num_threads(draw.choice((1, 2)))
        return world.later("torch.set_num_threads", lambda: torch.set_num_threads(count))
    if kind == "grad":
        enabled = torch.is_grad_enabled()
        torch.set_grad_enabled(not enabled)
        return world.later(f"torch.set_grad_enabled({not enabled})",
                           lambda: torch.set_grad_enabled(enabled))  # fmt: skip
    if kind == "mkldnn":
        on = torch.backends.mkldnn.enabled
        torch.backends.mkldnn.set_flags(not on)
        return world.later("torch.backends.mkldnn.set_flags",
                           lambda: torch.backends.mkldnn.set_flags(on) and None)  # fmt: skip
    if kind == "device":
        torch.set_default_device("cpu")
        return world.later("torch.set_default_device", lambda: torch.set_default_device(None))
    torch.set_flush_denormal(True)
    return world.later("torch.set_flush_denormal", lambda: torch.set_flush_denormal(False) and None)


Change = Callable[[World, Draw], str | None]
# Change -> its weight in draws.
CHANGES: dict[Change, float] = {
    edit: 2, swap_data: 2, replace: 1.5, misshape: 1, reorder: 1, tie: 1, plain_tensor: 1,
    remove: 1, extra_parameter: 0.5, freeze: 2, freeze_all: 1.5, load: 1, hook_tensor: 0.7,
    parametrized: 1, unparametrized: 1, pruned: 1, unpruned: 1, hook: 3, global_hook: 1,
    attribute: 10, generator_attribute: 1, method: 1.5, generator_forward: 1, subclass: 1.5,
    patch: 2, patch_pytorch: 1.5, take_back: 12, submodule: 1.5, train: 2, flag: 0.7, convert: 1,
    deepcopy: 1, pickled: 0.7, share: 0.3, zero: 0.3, same_device: 0.3, reset: 0.5, option: 0.7,
    setting: 2,
}  # fmt: skip
