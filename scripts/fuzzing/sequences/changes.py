"""Changes a layer between calls. A function returns what it did, or None for nothing.

Every change is one that a user can make. Those that a later operation takes back register how.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch

from fuzzing.draw import Draw
from fuzzing.sequences import modules, parameters
from fuzzing.sequences.world import World


def train(world: World, draw: Draw) -> str | None:
    if world.still:
        return None
    world.layer.train(not world.layer.training)
    return "layer.train()" if world.layer.training else "layer.eval()"


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


def reset(world: World, draw: Draw) -> str | None:
    if not hasattr(world.layer, "reset_parameters"):
        return None
    torch.manual_seed(draw.integer(0, 1000))
    world.layer.reset_parameters()
    return "layer.reset_parameters()"


def option(world: World, draw: Draw) -> str | None:
    """What the options of a cell were made of changes: the layer does not."""
    if not hasattr(world.layer, "options"):
        return None
    options = world.layer.options
    if isinstance(options.get("factors"), list):
        options["factors"].append(3.0)
    options.update({k: v for k, v in (("p", 0.9), ("slots", 5)) if k in options})
    return "the options of the cell change"


# A setting of PyTorch: what reads it, what sets it, and its values.
_SETTINGS: tuple[tuple[Any, Any, tuple[Any, ...]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype,
     (torch.float64, torch.float32, torch.float16)),
    (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms,
     (False, True)),
    (torch.get_num_threads, torch.set_num_threads, (1, 2)),
    (torch.is_grad_enabled, torch.set_grad_enabled, (False, True)),
)  # fmt: skip


def setting(world: World, draw: Draw) -> str:
    read, write, values = draw.choice(_SETTINGS)
    before, value = read(), draw.choice(values)
    write(value)
    return world.later(f"torch.{write.__name__}({value})", lambda: write(before))


Change = Callable[[World, Draw], str | None]
# Change -> its weight in draws.
CHANGES: dict[Change, float] = {
    parameters.edit: 2, parameters.swap_data: 2, parameters.replace: 1.5, parameters.misshape: 1,
    parameters.tie: 1, parameters.displace: 2, parameters.freeze: 3, parameters.load: 1,
    parameters.hook_tensor: 0.7, parameters.parametrized: 1, parameters.unparametrized: 1,
    parameters.pruned: 1, parameters.unpruned: 1, modules.hook: 3, modules.global_hook: 1,
    modules.attribute: 10, modules.generator_attribute: 1, modules.method: 2.5,
    modules.subclass: 1.5, modules.patch: 2, modules.patch_pytorch: 1.5, modules.take_back: 12,
    modules.submodule: 1.5, train: 2, convert: 1, deepcopy: 1, pickled: 0.7, reset: 0.5,
    option: 0.7, setting: 2,
}  # fmt: skip
