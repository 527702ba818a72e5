"""Changes of parameters: their values, names and owners, parametrizations, pruning.

A change returns what it did, or None for nothing.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from fuzzing.draw import Draw
from fuzzing.sequences.world import World


class Times(nn.Module):
    """A parametrization; the inverse is as exact as the product."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor

    def right_inverse(self, x: Tensor) -> Tensor:
        return x / self.factor


def edit(world: World, draw: Draw) -> str | None:
    if (found := world.parameter(draw)) is None:
        return None
    _, name, p = found
    with torch.no_grad():
        p.mul_(draw.choice((0.8, 1.2, -1.0))).add_(0.05)
    return f"{name}.mul_().add_()"


def swap_data(world: World, draw: Draw) -> str | None:
    if (found := world.parameter(draw)) is None:
        return None
    _, name, p = found
    new = p.detach() * draw.choice((0.9, -1.1))
    kind = draw.choice(("plain", "turned", "view"))
    if kind == "turned" and new.dim() > 1:
        new = new.transpose(0, 1).contiguous().transpose(0, 1)
    elif kind == "view":
        new = torch.stack((new, new), -1)[..., 1]
    p.data = new
    return f"{name}.data = … ({kind})"


def replace(world: World, draw: Draw) -> str | None:
    if (found := world.parameter(draw)) is None or parametrize.is_parametrized(found[0]):
        return None
    owner, name, p = found
    setattr(owner, name, nn.Parameter(p.detach() * 0.9, requires_grad=p.requires_grad))
    return f"{name} = nn.Parameter(…)"


def misshape(world: World, draw: Draw) -> str | None:
    """A parameter of another shape or dtype: to be refused."""
    if (found := world.parameter(draw)) is None:
        return None
    owner, name, p = found
    # PyTorch's weight_norm writes beyond its tensors; its pruning keeps the gradient's old shape.
    if isinstance(owner, parametrize.ParametrizationList) or name.endswith("_orig"):
        return None
    before = p.data
    kind = draw.choice(("longer", "longer", "float16", "flat"))
    if kind == "longer" and p.dim():
        p.data = torch.cat((before, before[:1]))
    elif kind == "float16":
        p.data = before.half()
    else:
        p.data = before.reshape(-1)
    p.grad = None

    def mend() -> None:
        p.grad = None
        p.data = before
        world.foreign -= 1

    world.mend.append(mend)
    world.foreign += 1
    return f"{name}.data = … ({kind}), for one call"


def tie(world: World, draw: Draw) -> str | None:
    _, owner = world.module(draw)
    items = [(n, p) for n, p in owner._parameters.items() if p is not None]
    pairs = [(n, m, p) for n, p in items for m, q in items if n != m and p.shape == q.shape]
    if not pairs:
        return None
    name, other, p = draw.choice(pairs)
    setattr(owner, other, p)
    return f"{other} = {name} (tied)"


def displace(world: World, draw: Draw) -> str | None:
    """A parameter deleted or None for a call; or a plain tensor, or a buffer, of its name."""
    if (found := world.parameter(draw)) is None or parametrize.is_parametrized(found[0]):
        return None
    owner, name, p = found
    kind = draw.choice(("deleted", "None", "a buffer", "a plain tensor"))
    delattr(owner, name)
    if kind == "None":
        owner.register_parameter(name, None)
    elif kind == "a buffer":
        owner.register_buffer(name, p.detach() * 0.9)
    elif kind == "a plain tensor":
        setattr(owner, name, p.detach() * 0.9)

    def undo() -> None:
        if parametrize.is_parametrized(owner, name) or owner._parameters.get(name) is not None:
            return
        if hasattr(owner, name):
            delattr(owner, name)
        owner.register_parameter(name, p)

    if kind in ("deleted", "None"):
        world.mend.append(undo)
        return f"{name} is {kind}, for a call"
    return world.later(f"{name} is {kind}", undo)


def freeze(world: World, draw: Draw) -> str | None:
    if (found := world.parameter(draw)) is None:
        return None
    _, name, p = found
    if draw.chance(0.4):
        world.layer.requires_grad_(not p.requires_grad)
        return f"layer.requires_grad_({p.requires_grad})"
    p.requires_grad_(not p.requires_grad)
    return f"{name}.requires_grad_({p.requires_grad})"


def load(world: World, draw: Draw) -> str:
    state = {k: v * 0.95 if v.is_floating_point() else v
             for k, v in world.layer.state_dict().items()}  # fmt: skip
    assign = draw.chance(0.4)
    world.layer.load_state_dict(state, assign=assign)
    return f"load_state_dict(assign={assign})"


def hook_tensor(world: World, draw: Draw) -> str | None:
    found = [(n, p) for n, p in world.layer.named_parameters() if p.requires_grad]
    if not found:
        return None
    name, p = draw.choice(found)
    hook = functools.partial(torch.mul, other=3.0)
    handle = p.register_hook(hook)
    world.tensor_hooks.append((p, hook))

    def undo() -> None:
        handle.remove()
        world.tensor_hooks[:] = [(t, h) for t, h in world.tensor_hooks if h is not hook]

    return world.later(f"{name}.register_hook(times 3)", undo)


# Parametrizations and pruning


def parametrized(world: World, draw: Draw) -> str | None:
    if (found := world.parameter(draw)) is None or isinstance(
        found[0], parametrize.ParametrizationList
    ):
        return None
    owner, name, p = found
    if not p.is_floating_point() or "." in name:
        return None
    kind = draw.choice(("times", "times", "weight_norm", "spectral_norm"))
    if kind != "times" and p.dim() < 2:
        kind = "times"
    if kind == "times":
        parametrize.register_parametrization(owner, name, Times(draw.choice((0.5, -1.5))))
    elif kind == "weight_norm":
        parametrizations.weight_norm(owner, name)
    else:
        parametrizations.spectral_norm(owner, name)
        world.layer.eval()
        world.still = True
    return f"{kind} of {name}"


def unparametrized(world: World, draw: Draw) -> str | None:
    found = [(m, n) for m in world.layer.modules() if parametrize.is_parametrized(m)
             for n in m.parametrizations]  # fmt: skip
    if not found:
        return None
    owner, name = draw.choice(found)
    parametrize.remove_parametrizations(owner, name)
    return f"parametrizations of {name} removed"


def pruned(world: World, draw: Draw) -> str | None:
    if (found := world.parameter(draw)) is None:
        return None
    owner, name, p = found
    if parametrize.is_parametrized(owner) or name.endswith("_orig") or p.numel() < 2:
        return None
    if isinstance(owner, parametrize.ParametrizationList):
        return None
    prune.l1_unstructured(owner, name, 1 if p.numel() < 4 else 0.4)
    return f"prune {name}"


def unpruned(world: World, draw: Draw) -> str | None:
    found = [(m, n[: -len("_orig")]) for m in world.layer.modules() for n in m._parameters
             if n.endswith("_orig")]  # fmt: skip
    if not found:
        return None
    owner, name = draw.choice(found)
    prune.remove(owner, name)
    return f"pruning of {name} removed"
