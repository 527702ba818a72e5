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
    if isinstance(owner, parametrize.ParametrizationList):
        return None  # PyTorch's weight_norm writes beyond its tensors
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


def reorder(world: World, draw: Draw) -> str | None:
    _, owner = world.module(draw)
    if len(owner._parameters) < 2 or any(p is None for p in owner._parameters.values()):
        return None
    items = [*owner._parameters.items()]
    for name, _ in items:
        delattr(owner, name)
    for name, p in reversed(items):
        owner.register_parameter(name, p)
    return "parameters deleted and registered in reverse order"


def tie(world: World, draw: Draw) -> str | None:
    _, owner = world.module(draw)
    items = [(n, p) for n, p in owner._parameters.items() if p is not None]
    pairs = [(n, m, p) for n, p in items for m, q in items if n != m and p.shape == q.shape]
    if not pairs:
        return None
    name, other, p = draw.choice(pairs)
    setattr(owner, other, p)
    return f"{other} = {name} (tied)"


def plain_tensor(world: World, draw: Draw) -> str | None:
    """A parameter deleted; a plain tensor, or a buffer, of its name."""
    if (found := world.parameter(draw)) is None or parametrize.is_parametrized(found[0]):
        return None
    owner, name, p = found
    order = [*owner._parameters]
    delattr(owner, name)
    buffer = draw.chance(0.5)
    if buffer:
        owner.register_buffer(name, p.detach() * 0.9)
    else:
        setattr(owner, name, p.detach() * 0.9)

    def undo() -> None:
        if name in owner._buffers or name in vars(owner):
            delattr(owner, name)
            owner.register_parameter(name, p)
            for other in order[order.index(name) + 1 :]:
                if other in owner._parameters:
                    owner._parameters[other] = owner._parameters.pop(other)

    return world.later(f"{name} is a {'buffer' if buffer else 'plain tensor'}", undo)


def remove(world: World, draw: Draw) -> str | None:
    """A parameter deleted, or None, for a call."""
    if (found := world.parameter(draw)) is None or parametrize.is_parametrized(found[0]):
        return None
    owner, name, _ = found
    gone = draw.chance(0.5)
    p, later = owner._parameters[name], [*owner._parameters]
    later = later[later.index(name) + 1 :]
    if gone:
        delattr(owner, name)
    else:
        setattr(owner, name, None)

    def mend() -> None:
        if parametrize.is_parametrized(owner, name):
            return
        owner._parameters[name] = p
        for other in later:
            if other in owner._parameters:
                owner._parameters[other] = owner._parameters.pop(other)

    world.mend.append(mend)
    return f"del {name}" if gone else f"{name} = None"


def extra_parameter(world: World, draw: Draw) -> str | None:
    where, owner = world.module(draw)
    if hasattr(owner, "extra"):
        return None
    owner.extra = nn.Parameter(torch.ones(2, dtype=torch.float64))
    return f"{where}.extra = nn.Parameter(…)"


def freeze(world: World, draw: Draw) -> str | None:
    if (found := world.parameter(draw)) is None:
        return None
    _, name, p = found
    p.requires_grad_(not p.requires_grad)
    return f"{name}.requires_grad_({p.requires_grad})"


def freeze_all(world: World, draw: Draw) -> str:
    on = draw.chance(0.5)
    world.layer.requires_grad_(on)
    return f"layer.requires_grad_({on})"


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
