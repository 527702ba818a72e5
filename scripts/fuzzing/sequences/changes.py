"""Changes a layer between calls. A function returns what it did, or None for nothing.

Every change is one that a user can make. Those that a later operation takes back register how.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import pickle
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from fuzzing.draw import Draw
from fuzzing.sequences import cells
from fuzzing.sequences.layers import Made

_MEND = 0.7  # the share of breaking changes that are taken back after a call


@dataclass
class World:
    """A layer in the middle of a sequence, and what is to be undone around it.

    Attributes:
        made: the layer as it was made.
        layer: the layer now.
        undo: what can be taken back, with its description; all of it is at the end.
        mend: what is taken back after the next call.
        tensor_hooks: of parameters, which copies of the layer do not have.
        foreign: the number of changes in force that the definition in plain PyTorch does not know.
        still: whether the layer must stay in evaluation mode.
    """

    made: Made
    layer: Any
    undo: dict[str, Callable[[], None]] = field(default_factory=dict)
    mend: list[Callable[[], None]] = field(default_factory=list)
    tensor_hooks: list[tuple[Tensor, Any]] = field(default_factory=list)
    foreign: int = 0
    still: bool = False
    numbers: Any = field(default_factory=itertools.count)

    def later(self, text: str, undo: Callable[[], None]) -> str:
        self.undo[f"{text} #{next(self.numbers)}"] = undo
        return text

    def parameter(self, draw: Draw) -> tuple[nn.Module, str, nn.Parameter] | None:
        """Draws a parameter, with its owner and name there."""
        found = [(m, n, p) for m in self.layer.modules() for n, p in m._parameters.items()
                 if p is not None]  # fmt: skip
        return draw.choice(found) if found else None

    def module(self, draw: Draw) -> tuple[str, nn.Module]:
        found = [("layer", self.layer)]
        if isinstance(getattr(self.layer, "generator", None), nn.Module):
            found.append(("layer.generator", self.layer.generator))
        return draw.choice(found)

    def copy(self) -> Any:
        """Returns a copy of the layer that was never called."""
        memo: dict[int, Any] = {}
        for module in self.layer.modules():
            for value in vars(module).values():
                if isinstance(value, Tensor) and not value.is_leaf:
                    memo[id(value)] = value.detach().clone()
        layer = copy.deepcopy(self.layer, memo)
        for tensor, hook in self.tensor_hooks:
            if id(tensor) in memo and tensor.requires_grad:
                memo[id(tensor)].register_hook(hook)
        return layer

    def mend_all(self) -> None:
        while self.mend:
            self.mend.pop()()

    def end(self) -> None:
        self.mend_all()
        for undo in reversed(self.undo.values()):
            undo()


def scale(value: Any) -> Any:
    """Changes a result: scales its tensors; an int becomes zero."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return value * 1.5
    if type(value) in (tuple, list):
        return type(value)(scale(v) for v in value)
    return 0 if type(value) is int else value


def _altered(original: Callable[..., Any]) -> Callable[..., Any]:
    """A method that calls the original and changes its result."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return scale(original(self, *args, **kwargs))

    return method


def _methods(kind: type) -> list[str]:
    """Lists the names of the methods that the library's classes define for a layer."""
    names = [
        name
        for base in kind.__mro__
        if base.__module__.startswith("hoconv.")
        for name, value in vars(base).items()
        if inspect.isfunction(value) and not name.startswith("__")
    ]
    skipped = ("extra_repr", "explain", "why_unfused", "_load_from_state_dict", "_convert",
               "_is_whole", "reset_parameters", "initial_state", "step")  # fmt: skip
    return sorted(set(names) - set(skipped))


class Times(nn.Module):
    """A parametrization; the inverse is as exact as the product."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor

    def right_inverse(self, x: Tensor) -> Tensor:
        return x / self.factor


class Adapter(nn.Module):
    """A module around another, as LoRA puts it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.gain = nn.Parameter(torch.tensor(1.25, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) * self.gain.to(x.dtype)


class LoudConv(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


class LoudConvInside(nn.Conv2d):
    def _conv_forward(self, *args: Any) -> Tensor:
        return super()._conv_forward(*args) * 2


class LoudLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


class QuietConv(nn.Conv2d):
    """A subclass that changes nothing."""


class QuietLinear(nn.Linear):
    """A subclass that changes nothing."""


def _louder(module: nn.Module, *args: Any) -> Tensor:
    return type(module).forward(module, *args) * 2


# Parameters


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


# Hooks


def _double_output(module: nn.Module, args: Any, output: Any) -> Any:
    return scale(output)


def _observe(*args: Any) -> None:
    return None


def _double_input(module: nn.Module, args: Any) -> Any:
    first, *rest = args
    return (first * 1.5 if isinstance(first, Tensor) else first, *rest)


def _double_gradient(module: nn.Module, into: Any, out: Any) -> Any:
    return scale(into)


def _double_out_gradient(module: nn.Module, out: Any) -> Any:
    return scale(out)


_HOOKS = {
    "forward_hook": (_double_output, _observe),
    "forward_pre_hook": (_double_input, _observe),
    "full_backward_hook": (_double_gradient, _observe),
    "full_backward_pre_hook": (_double_out_gradient, _observe),
}


def hook(world: World, draw: Draw) -> str:
    where, module = world.module(draw)
    kind = draw.choice([*_HOOKS])
    function = draw.choice(_HOOKS[kind])
    handle = getattr(module, f"register_{kind}")(function)
    return world.later(f"{where}.register_{kind}({function.__name__})", handle.remove)


def global_hook(world: World, draw: Draw) -> str:
    kind = draw.choice([*_HOOKS])
    function = draw.choice(_HOOKS[kind])
    name = f"register_module_{kind}"
    handle = getattr(nn.modules.module, name)(function)
    return world.later(f"nn.modules.module.{name}({function.__name__})", handle.remove)


# Attributes, methods, classes


def attribute(world: World, draw: Draw) -> str:
    name = draw.choice([*world.made.settings])
    value, before = draw.choice(world.made.settings[name]), getattr(world.layer, name)
    setattr(world.layer, name, value)
    if name in world.made.sizes or name in ("options", "kernel_size", "heads", "groups"):
        world.foreign += 1
        layer = world.layer

        def mend() -> None:
            setattr(layer, name, before)
            world.foreign -= 1

        if draw.chance(_MEND):
            world.mend.append(mend)
            return f"layer.{name} = {value!r} for a call, {before!r} before"
    return f"layer.{name} = {value!r}"


def generator_attribute(world: World, draw: Draw) -> str | None:
    generator = getattr(world.layer, "generator", None)
    if not isinstance(generator, nn.Conv2d):
        return None
    k = generator.kernel_size[0]
    name, value = draw.choice((
        ("padding", (k // 2, k // 2)), ("padding", (0, 0)), ("padding_mode", "circular"),
        ("stride", (2, 2)), ("stride", (1, 1)), ("dilation", (2, 2)), ("groups", 2),
        ("padding", "valid"), ("padding", "same"), ("in_channels", 7), ("kernel_size", (9, 9)),
        ("out_channels", 3), ("stride", 1), ("dilation", 1),
    ))  # fmt: skip
    before = getattr(generator, name)
    setattr(generator, name, value)
    world.mend.append(lambda: setattr(generator, name, before))
    return f"layer.generator.{name} = {value!r} for a call"


def method(world: World, draw: Draw) -> str:
    """A method set on the instance."""
    layer = world.layer
    name = draw.choice(_methods(type(layer)))
    if name in vars(layer):
        delattr(layer, name)
        return f"del layer.{name}"
    original = getattr(type(layer), name)
    setattr(layer, name, types.MethodType(_altered(original), layer))
    world.foreign += 1

    def undo() -> None:
        if name in vars(layer):
            delattr(layer, name)
        world.foreign -= 1

    return world.later(f"layer.{name} = a method that scales its result", undo)


def generator_forward(world: World, draw: Draw) -> str | None:
    generator = getattr(world.layer, "generator", None)
    if not isinstance(generator, nn.Module) or "forward" in vars(generator):
        return None
    name = (
        "forward" if draw.chance(0.6) or not isinstance(generator, nn.Conv2d) else "_conv_forward"
    )
    if name == "forward":
        new = functools.partial(_louder, generator)
    else:
        new = types.MethodType(_altered(type(generator)._conv_forward), generator)
    setattr(generator, name, new)

    def undo() -> None:
        if name in vars(generator):
            delattr(generator, name)

    return world.later(f"layer.generator.{name} = twice it", undo)


def subclass(world: World, draw: Draw) -> str:
    """The layer becomes one of a subclass that overrides a method."""
    layer, before = world.layer, type(world.layer)
    name = draw.choice(_methods(before))
    new = type("Sub" + before.__name__, (before,), {name: _overriding(before, name)})
    layer.__class__ = new
    world.foreign += 1

    def undo() -> None:
        if type(layer) is new:
            layer.__class__ = before
            world.foreign -= 1

    return world.later(f"layer.__class__ = a subclass that overrides {name}", undo)


def _overriding(base: type, name: str) -> Callable[..., Any]:
    def override(self: Any, *args: Any, **kwargs: Any) -> Any:
        return scale(getattr(base, name)(self, *args, **kwargs))

    return override


def patch(world: World, draw: Draw) -> str:
    """A method of the layer's class replaced."""
    name = draw.choice(_methods(type(world.layer)))
    owner = next(b for b in type(world.layer).__mro__ if name in vars(b))
    world.foreign += 1

    def undo() -> None:
        world.foreign -= 1

    return _patched(world, owner, name, _altered(vars(owner)[name]), undo)


def patch_pytorch(world: World, draw: Draw) -> str:
    """A method of a class of PyTorch replaced."""
    kind, name = draw.choice((
        (nn.Conv2d, "forward"), (nn.Linear, "forward"), (nn.Conv2d, "_conv_forward"),
        (nn.Module, "__call__"), (nn.Module, "_call_impl"),
    ))  # fmt: skip
    return _patched(world, kind, name, _altered(vars(kind)[name]), lambda: None)


def _patched(
    world: World, kind: type, name: str, new: Callable[..., Any], undone: Callable[[], None]
) -> str:
    before = vars(kind)[name]
    setattr(kind, name, new)

    def undo() -> None:
        setattr(kind, name, before)
        undone()

    return world.later(f"{kind.__name__}.{name} replaced by one that scales its result", undo)


def take_back(world: World, draw: Draw) -> str | None:
    if not world.undo:
        return None
    # The last first: one patch of a method may hold another.
    text = [*world.undo][-1]
    world.undo.pop(text)()
    return f"undone: {text.rpartition(' #')[0]}"


def submodule(world: World, draw: Draw) -> str | None:
    layer, generator = world.layer, getattr(world.layer, "generator", None)
    if not isinstance(generator, nn.Module):
        return None
    convolves = isinstance(generator, nn.Conv2d)
    kind = draw.choice(("adapter", "sequential", "identity", "loud", "inside", "quiet", "another"))
    made: Any
    if kind == "adapter":
        made = Adapter(generator)
    elif kind == "sequential":
        made = nn.Sequential(generator)
    elif kind == "identity":
        made = nn.Identity()
    elif type(generator) not in (nn.Conv2d, nn.Linear):
        return None
    else:
        made = copy.copy(generator)  # shares the parameters
        made.__class__ = {
            "loud": (LoudLinear, LoudConv), "inside": (LoudLinear, LoudConvInside),
            "quiet": (QuietLinear, QuietConv), "another": (nn.Linear, nn.Conv2d),
        }[kind][convolves]  # fmt: skip
    made.train(layer.training)
    layer.generator = made

    def undo() -> None:
        layer.generator = generator

    if kind == "identity":
        world.mend.append(undo)
        return "layer.generator = nn.Identity() for a call"
    return world.later(f"layer.generator = {kind} ({type(made).__name__})", undo)


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
