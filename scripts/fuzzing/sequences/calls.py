"""The ways to call a layer: modes of autograd, transforms, hooks on tensors, threads, compilers.

A function of ``MODES`` takes a layer and a ``Call``, and returns results by name. ``PLAIN`` names
the mode that gives the same results without what its own mode is about; it computes the truth.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fuzzing.draw import Draw
from fuzzing.sequences.layers import Arguments

Results = dict[str, Tensor | str | None]


@dataclass(frozen=True)
class Call:
    """One call, which can be repeated: the arguments are drawn anew, and are the same each time."""

    arguments: Callable[[], Arguments]
    seed: int

    def draw(self, *key: Any) -> Draw:
        return Draw(self.seed, *key)

    def run(self, layer: nn.Module, given: Arguments) -> list[Tensor]:
        torch.manual_seed(self.seed)
        return flatten(layer(*given.args, **given.kwargs))

    def cotangents(self, outputs: list[Tensor], *key: Any) -> list[Tensor]:
        generator = self.draw("cotangents", *key).generator()
        return [
            torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o.device, o.dtype)
            for o in outputs
        ]


def flatten(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, PackedSequence):
        return [result.data]
    return [t for part in result for t in flatten(part)]


def _named(outputs: list[Tensor]) -> Results:
    found: Results = {}
    for i, output in enumerate(outputs):
        found[f"output {i}"] = output.detach()
        found[f"output {i}'s gradient"] = str(output.requires_grad)
    return found


def _leaves(layer: nn.Module, given: Arguments) -> dict[str, Tensor]:
    leaves = {f"d_{name}": t for name, t in given.leaves.items() if t.requires_grad}
    parameters = {f"d_{name}": p for name, p in layer.named_parameters() if p.requires_grad}
    return leaves | parameters


def _grad(
    outputs: list[Tensor], leaves: dict[str, Tensor], cotangents: list[Tensor], **options: Any
) -> dict[str, Tensor | None]:
    used = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if o.requires_grad]
    if not used or not leaves:
        return {}
    some, their = zip(*used, strict=True)
    found = torch.autograd.grad(some, [*leaves.values()], their, allow_unused=True, **options)
    return dict(zip(leaves, found, strict=True))


def forward(layer: nn.Module, call: Call) -> Results:
    return _named(call.run(layer, call.arguments()))


def no_grad(layer: nn.Module, call: Call) -> Results:
    with torch.no_grad():
        return forward(layer, call)


def inference(layer: nn.Module, call: Call) -> Results:
    given = call.arguments()
    with torch.inference_mode():
        outputs = call.run(layer, given)
        return {f"output {i}": o.clone() for i, o in enumerate(outputs)}


def inference_inputs(layer: nn.Module, call: Call) -> Results:
    """Inputs that were made in inference mode, outside of it."""
    given = call.arguments()
    with torch.inference_mode():
        made = call.arguments()
    outputs = call.run(layer, made)
    return {f"output {i}": o.detach().clone() for i, o in enumerate(outputs)} | {
        "given": str(len(given.leaves))
    }


def backward(layer: nn.Module, call: Call) -> Results:
    given = call.arguments()
    return _backward(layer, call, given, call.run(layer, given))


def _backward(
    layer: nn.Module, call: Call, given: Arguments, outputs: list[Tensor],
    around: contextlib.AbstractContextManager[Any] | None = None,
) -> Results:  # fmt: skip
    layer.zero_grad()
    found = _named(outputs)
    cotangents = call.cotangents(outputs)
    used = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if o.requires_grad]
    if used:
        with around or contextlib.nullcontext():
            torch.autograd.backward(*zip(*used, strict=True))
    for name, tensor in _leaves(layer, given).items():
        found[name] = None if tensor.grad is None else tensor.grad.detach().clone()
    layer.zero_grad()
    return found


def accumulate(layer: nn.Module, call: Call) -> Results:
    """Two calls, whose gradients are added; the second has other arguments of the same shape."""
    found = backward(layer, call)
    return found | {f"again {k}": v for k, v in backward(layer, call).items()}


def grad(layer: nn.Module, call: Call) -> Results:
    given = call.arguments()
    outputs = call.run(layer, given)
    leaves = _leaves(layer, given)
    return _named(outputs) | _grad(outputs, leaves, call.cotangents(outputs))


def retain(layer: nn.Module, call: Call) -> Results:
    given = call.arguments()
    outputs = call.run(layer, given)
    leaves = _leaves(layer, given)
    found = _named(outputs) | _grad(outputs, leaves, call.cotangents(outputs), retain_graph=True)
    more = _grad(outputs, leaves, call.cotangents(outputs, 2))
    return found | {f"second {k}": v for k, v in more.items()}


def double(layer: nn.Module, call: Call) -> Results:
    given = call.arguments()
    outputs = call.run(layer, given)
    leaves = _leaves(layer, given)
    cotangents = [c.requires_grad_() for c in call.cotangents(outputs)]
    first = _grad(outputs, leaves, cotangents, create_graph=True)
    # Zeros for those that an implementation leaves out, so that all get the same cotangents.
    grads = [torch.zeros_like(leaves[k]) if g is None else g for k, g in first.items()]
    more = leaves | {f"d_cotangent {i}": c for i, c in enumerate(cotangents)}
    second = _grad(grads, more, call.cotangents(grads, 2)) if grads else {}
    return (
        _named(outputs)
        | {k: v if v is None else v.detach() for k, v in first.items()}
        | {f"second {k}": v for k, v in second.items()}
    )


def batched(layer: nn.Module, call: Call) -> Results:
    given = call.arguments()
    outputs = call.run(layer, given)
    one, two = call.cotangents(outputs), call.cotangents(outputs, 2)
    both = [torch.stack(pair) for pair in zip(one, two, strict=True)]
    return _grad(outputs, _leaves(layer, given), both, is_grads_batched=True)


def one_by_one(layer: nn.Module, call: Call) -> Results:
    given = call.arguments()
    outputs = call.run(layer, given)
    leaves = _leaves(layer, given)
    one = _grad(outputs, leaves, call.cotangents(outputs), retain_graph=True)
    two = _grad(outputs, leaves, call.cotangents(outputs, 2))
    return {k: None if v is None else torch.stack((v, two[k])) for k, v in one.items()}


def functional(layer: nn.Module, call: Call) -> Results:
    """Other parameters by functional_call, and their gradients."""
    given = call.arguments()
    others = {n: (p.detach() * 1.1).requires_grad_(p.requires_grad)
              for n, p in layer.named_parameters()}  # fmt: skip
    torch.manual_seed(call.seed)
    outputs = flatten(functional_call(layer, others, given.args, given.kwargs))
    leaves = {f"d_{n}": t for n, t in (given.leaves | others).items() if t.requires_grad}
    return _named(outputs) | _grad(outputs, leaves, call.cotangents(outputs))


def _scalar(layer: nn.Module, call: Call, given: Arguments) -> Callable[..., Tensor]:
    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        torch.manual_seed(call.seed)
        outputs = flatten(functional_call(layer, parameters, (x, *given.args[1:]), given.kwargs))
        cotangents = call.cotangents(outputs)
        return sum(((o * c).sum() for o, c in zip(outputs, cotangents, strict=True)),
                   outputs[0].new_zeros(()))  # fmt: skip

    return loss


def _own_parameters(layer: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach() for n, p in layer.named_parameters()}


def func_grad(layer: nn.Module, call: Call) -> Results:
    given = call.arguments()
    parameters = _own_parameters(layer)
    of_parameters, of_x = torch.func.grad(_scalar(layer, call, given), (0, 1))(
        parameters, given.args[0].detach()
    )
    return {"d_x": of_x, **{f"d_{n}": g for n, g in of_parameters.items()}}


def func_jvp(layer: nn.Module, call: Call) -> Results:
    given = call.arguments()
    parameters = _own_parameters(layer)
    tangents = dict(zip(parameters, call.cotangents([*parameters.values()], "t"), strict=True))
    x = given.args[0].detach()
    value, tangent = torch.func.jvp(
        _scalar(layer, call, given), (parameters, x), (tangents, call.cotangents([x], "x")[0])
    )
    return {"value": value, "tangent": tangent}


def func_vmap(layer: nn.Module, call: Call) -> Results:
    if _is_noisy(layer):  # vmap draws other numbers
        return func_loop(layer, call)
    given = call.arguments()
    x = given.args[0].detach()
    xs = torch.stack((x, x * 0.5))

    def one(x: Tensor) -> tuple[Tensor, ...]:
        torch.manual_seed(call.seed)
        return tuple(flatten(layer(x, *given.args[1:], **given.kwargs)))

    outputs = torch.vmap(one, randomness="same")(xs)
    return _named([*outputs])


def func_loop(layer: nn.Module, call: Call) -> Results:
    given = call.arguments()
    x = given.args[0].detach()
    parts = []
    for scaled in (x, x * 0.5):
        torch.manual_seed(call.seed)
        parts.append(flatten(layer(scaled, *given.args[1:], **given.kwargs)))
    return _named([torch.stack(pair) for pair in zip(*parts, strict=True)])


def func_vmap_grad(layer: nn.Module, call: Call) -> Results:
    if _is_noisy(layer):
        return func_loop_grad(layer, call)
    given = call.arguments()
    x = given.args[0].detach()
    xs = torch.stack((x, x * 0.5))
    gradient = torch.func.grad(_scalar(layer, call, given), 0)
    found = torch.vmap(gradient, (None, 0), randomness="same")(_own_parameters(layer), xs)
    return {f"d_{n}": g for n, g in found.items()}


def func_loop_grad(layer: nn.Module, call: Call) -> Results:
    given = call.arguments()
    x = given.args[0].detach()
    gradient = torch.func.grad(_scalar(layer, call, given), 0)
    one, two = (gradient(_own_parameters(layer), x) for x in (x, x * 0.5))
    return {f"d_{n}": torch.stack((g, two[n])) for n, g in one.items()}


def _checkpointed(layer: nn.Module, call: Call, reentrant: bool) -> Results:
    given = call.arguments()
    if reentrant and not (isinstance(given.args[0], Tensor) and given.args[0].requires_grad):
        return backward(layer, call)  # this checkpoint then has no gradient by design
    torch.manual_seed(call.seed)

    def run(*args: Any) -> tuple[Tensor, ...]:
        return tuple(flatten(layer(*args, **given.kwargs)))

    outputs = [*checkpoint(run, *given.args, use_reentrant=reentrant)]
    return _backward(layer, call, given, outputs)


def checkpoint_reentrant(layer: nn.Module, call: Call) -> Results:
    return _checkpointed(layer, call, True)


def checkpoint_plain(layer: nn.Module, call: Call) -> Results:
    return _checkpointed(layer, call, False)


def saved_hooks(layer: nn.Module, call: Call) -> Results:
    given = call.arguments()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        outputs = call.run(layer, given)
    return _backward(layer, call, given, outputs)


def saved_hooks_changing(layer: nn.Module, call: Call) -> Results:
    """Hooks that change what they saved: a call which ignores them gives other gradients."""
    given = call.arguments()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: t.clone(), lambda t: t * 0 if t.is_floating_point() else t
    ):
        outputs = call.run(layer, given)
    return _backward(layer, call, given, outputs)


def saved_on_cpu(layer: nn.Module, call: Call) -> Results:
    given = call.arguments()
    with torch.autograd.graph.save_on_cpu():
        outputs = call.run(layer, given)
    return _backward(layer, call, given, outputs)


class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Counting(TorchDispatchMode):
    """Counts the ops that it sees."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class _Function(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def dispatch_mode(layer: nn.Module, call: Call) -> Results:
    given = call.arguments()
    with _Dispatch():
        outputs = call.run(layer, given)
        return _backward(layer, call, given, outputs)


def dispatch_mode_seen(layer: nn.Module, call: Call) -> Results:
    """A call must not become invisible to a mode."""
    given = call.arguments()
    with _Counting() as mode:
        outputs = call.run(layer, given)
    return _named(outputs) | {"sees ops": str(mode.count > 0)}


def function_mode(layer: nn.Module, call: Call) -> Results:
    given = call.arguments()
    with _Function():
        outputs = call.run(layer, given)
        return _backward(layer, call, given, outputs)


def meta(layer: nn.Module, call: Call) -> Results:
    given = call.arguments()
    parameters = {n: p.detach().to("meta") for n, p in layer.named_parameters()}
    kwargs = {k: v.to("meta") if isinstance(v, Tensor) else v for k, v in given.kwargs.items()}
    if isinstance(kwargs.get("state"), tuple):
        kwargs["state"] = tuple(s.to("meta") for s in kwargs["state"])
    outputs = flatten(functional_call(layer, parameters, (given.args[0].to("meta"),), kwargs))
    return {f"output {i}": f"{tuple(o.shape)} {o.dtype} {o.device}" for i, o in enumerate(outputs)}


def _is_noisy(layer: Any) -> bool:
    """Whether a call draws random numbers, of which two threads would each get some."""
    draws = hasattr(layer, "runs") and layer.runs[0][0].name.startswith(("random", "leaky"))
    return layer.training and (draws or any(
        getattr(layer, n, 0) for n in ("dropout", "weight_dropout")))  # fmt: skip


def threads(layer: nn.Module, call: Call) -> Results:
    if _is_noisy(layer):
        return no_threads(layer, call)
    found: dict[int, Results | BaseException] = {}

    enabled = torch.is_grad_enabled()

    def work(index: int) -> None:
        torch.set_grad_enabled(enabled)
        try:
            for _ in range(3):
                given = call.arguments()
                outputs = flatten(layer(*given.args, **given.kwargs))
                found[index] = _named(outputs) | _grad(
                    outputs, _leaves(layer, given), call.cotangents(outputs)
                )
        except BaseException as error:
            found[index] = error

    workers = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    results: Results = {}
    for i in range(2):
        of = found[i]
        if isinstance(of, BaseException):
            raise of
        results |= {f"thread {i}: {k}": v for k, v in of.items()}
    return results


def no_threads(layer: nn.Module, call: Call) -> Results:
    results: Results = {}
    for i in range(2):
        given = call.arguments()
        outputs = call.run(layer, given)
        of = _named(outputs) | _grad(outputs, _leaves(layer, given), call.cotangents(outputs))
        results |= {f"thread {i}: {k}": v for k, v in of.items()}
    return results


def _cast(layer: nn.Module, call: Call, dtype: torch.dtype, take: bool) -> Results:
    given = call.arguments()
    device = next(iter(given.leaves.values())).device.type
    with torch.autocast(device, dtype):
        outputs = call.run(layer, given)
    if not take:
        return _named(outputs)
    return _backward(layer, call, given, outputs)


def autocast(layer: nn.Module, call: Call) -> Results:
    return _cast(layer, call, torch.bfloat16, take=True)


def autocast_forward(layer: nn.Module, call: Call) -> Results:
    with torch.no_grad():
        return _cast(layer, call, torch.bfloat16, take=False)


def compiled(layer: nn.Module, call: Call) -> Results:
    given = call.arguments()
    torch._dynamo.reset()
    try:
        function = torch.compile(layer, backend="eager", dynamic=False)
        torch.manual_seed(call.seed)
        outputs = flatten(function(*given.args, **given.kwargs))
        return _backward(layer, call, given, outputs)
    finally:
        torch._dynamo.reset()


def compiled_autograd(layer: nn.Module, call: Call) -> Results:
    given = call.arguments()
    outputs = call.run(layer, given)
    torch._dynamo.reset()
    try:
        compiler = torch.compile(backend="eager", dynamic=False)
        around = torch._dynamo.compiled_autograd._enable(compiler)
        return _backward(layer, call, given, outputs, around)
    finally:
        torch._dynamo.reset()


def changed_between(layer: nn.Module, call: Call) -> Results:
    """A parameter is changed in place between forward and backward, then back."""
    given = call.arguments()
    outputs = call.run(layer, given)
    parameters = [*layer.parameters()]
    if not parameters:
        return {}
    chosen = call.draw("changed").choice(parameters)
    before = chosen.detach().clone()
    with torch.no_grad():
        chosen.mul_(1.5)
    try:
        return _backward(layer, call, given, outputs)
    finally:
        layer.zero_grad()
        with torch.no_grad():
            chosen.copy_(before)


def input_changed_between(layer: nn.Module, call: Call) -> Results:
    given = call.arguments()
    outputs = call.run(layer, given)
    with torch.no_grad():
        for tensor in given.leaves.values():
            tensor.mul_(1.5)
    try:
        return _backward(layer, call, given, outputs)
    finally:
        layer.zero_grad()


def settings_between(layer: nn.Module, call: Call) -> Results:
    """Attributes change between forward and backward: the backward pass is of the call before."""
    given = call.arguments()
    outputs = call.run(layer, given)
    names = ("impl", "residual", "recompute", "softmax", "gradient", "dilation", "bidirectional")
    before = {n: getattr(layer, n) for n in names if n in vars(layer)}
    others = {"impl": "auto", "gradient": "ste", "dilation": before.get("dilation", 1)}
    training = layer.training
    try:
        layer.train(not training)
        for name, value in before.items():
            setattr(layer, name, others.get(name, not value))
        return _backward(layer, call, given, outputs)
    finally:
        layer.train(training)
        for name, value in before.items():
            setattr(layer, name, value)


def output_changed(layer: nn.Module, call: Call) -> Results:
    """The output is changed in place before backward, as nn.ReLU(inplace=True) does."""
    given = call.arguments()
    outputs = call.run(layer, given)
    return _backward(layer, call, given, [o.mul_(2.0) for o in outputs])


def detached_twice(layer: nn.Module, call: Call) -> Results:
    """Two graphs alive at once, differentiated in the other order."""
    one, two = call.arguments(), call.arguments()
    first = call.run(layer, one)
    second = call.run(layer, two)
    found = _grad(second, _leaves(layer, two), call.cotangents(second, 2))
    return found | {f"first {k}": v for k, v in _grad(
        first, _leaves(layer, one), call.cotangents(first)).items()}  # fmt: skip


def chained(layer: nn.Module, call: Call) -> Results:
    """The final states of a call are the initial ones of the next; both in one graph."""
    given = call.arguments()
    if not hasattr(layer, "runs"):
        return grad(layer, call)
    torch.manual_seed(call.seed)
    _, state = layer(*given.args, **given.kwargs)
    outputs = flatten(layer(given.args[0], state))
    return _named(outputs) | _grad(outputs, _leaves(layer, given), call.cotangents(outputs))


def anomaly(layer: nn.Module, call: Call) -> Results:
    with torch.autograd.set_detect_anomaly(True):
        return backward(layer, call)


def steps(layer: nn.Module, call: Call) -> Results:
    """A causal convolution over time, step by step."""
    given = call.arguments()
    if not hasattr(layer, "step"):
        return forward(layer, call)
    x = given.args[0]
    some = max(1, x.shape[2] // 2)
    torch.manual_seed(call.seed)
    y, state = layer.step(x[:, :, :some], layer.initial_state(x.shape[0]))
    outputs = [y]
    for t in range(some, x.shape[2]):
        y, state = layer.step(x[:, :, t], state)
        outputs.append(y)
    return _named(outputs) | _grad(outputs, _leaves(layer, given), call.cotangents(outputs))


def queries(layer: nn.Module, call: Call) -> Results:
    """What a layer says of itself, then a call."""
    repr(layer)
    said = ""
    if hasattr(layer, "explain"):
        said = str(layer.explain())
    if hasattr(layer, "why_unfused"):
        said = str(layer.why_unfused())
    return {"said": str(len(said) > 0)} | forward(layer, call)


Mode = Callable[[nn.Module, Call], Results]
# Mode -> its weight in draws.
MODES: dict[Mode, float] = {
    forward: 4, no_grad: 3, inference: 2, inference_inputs: 0.3, backward: 8, accumulate: 2,
    grad: 3, retain: 2, double: 2, batched: 1, functional: 2, func_grad: 1, func_jvp: 0.7,
    func_vmap: 0.7, func_vmap_grad: 0.5, checkpoint_reentrant: 0.7, checkpoint_plain: 0.7,
    saved_hooks: 0.7, saved_hooks_changing: 0.5, saved_on_cpu: 0.4, dispatch_mode: 0.5,
    dispatch_mode_seen: 0.4, function_mode: 0.5, meta: 0.5, threads: 0.7, autocast: 1,
    autocast_forward: 0.7, compiled: 0.05, compiled_autograd: 0.08, changed_between: 0.7,
    input_changed_between: 0.7, settings_between: 0.7, output_changed: 0.7, detached_twice: 1,
    chained: 1.5, anomaly: 0.4, steps: 0.6, queries: 0.4,
}  # fmt: skip
PLAIN: dict[Mode, Mode] = {
    batched: one_by_one, func_vmap: func_loop, func_vmap_grad: func_loop_grad,
    checkpoint_reentrant: backward, checkpoint_plain: backward, saved_hooks: backward,
    saved_on_cpu: backward, dispatch_mode: backward, function_mode: backward,
    threads: no_threads, compiled: backward, compiled_autograd: backward, anomaly: backward,
    settings_between: backward,
}  # fmt: skip
# Modes whose results do not define those of another implementation.
ALONE = {meta, saved_hooks_changing, dispatch_mode_seen, queries, output_changed, changed_between,
         input_changed_between, inference_inputs}  # fmt: skip

warnings.filterwarnings("ignore", message="Anomaly Detection")
