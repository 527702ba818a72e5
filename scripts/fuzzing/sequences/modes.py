"""All ways to call a layer, and what PyTorch itself cannot do in them."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from fuzzing.sequences import calls, surroundings, transforms
from fuzzing.sequences.calls import Call, Results, backward
from fuzzing.sequences.surroundings import compiled, compiled_autograd
from fuzzing.sequences.transforms import func_vmap, func_vmap_grad

Mode = Callable[[nn.Module, Call], Results]
# Mode -> its weight in draws.
MODES: dict[Mode, float] = {
    calls.forward: 4, calls.no_grad: 3, calls.inference: 2, backward: 8, calls.accumulate: 2,
    calls.grad: 3, calls.retain: 2, calls.double: 2, calls.batched: 1,
    calls.changed_between: 0.7, calls.input_changed_between: 0.7, calls.settings_between: 0.7,
    calls.output_changed: 0.7, calls.detached_twice: 1, calls.chained: 1.5, calls.steps: 0.6,
    calls.queries: 0.4,
    transforms.functional: 2, transforms.func_grad: 1, transforms.func_jvp: 0.7, func_vmap: 0.7,
    func_vmap_grad: 0.5,
    surroundings.checkpoint_reentrant: 0.7, surroundings.checkpoint_plain: 0.7,
    surroundings.saved_hooks: 0.7, surroundings.saved_hooks_changing: 0.5,
    surroundings.dispatch_mode: 0.5, surroundings.dispatch_mode_seen: 0.4, surroundings.meta: 0.5,
    surroundings.threads: 0.7, surroundings.autocast: 1.5, compiled: 0.05,
    compiled_autograd: 0.08,
}  # fmt: skip
# Mode -> another with the same results without what the first is about; it computes the truth.
PLAIN: dict[Mode, Mode] = {
    calls.batched: calls.one_by_one, func_vmap: transforms.func_loop,
    func_vmap_grad: transforms.func_loop_grad, surroundings.threads: surroundings.no_threads,
} | dict.fromkeys((
    surroundings.checkpoint_reentrant, surroundings.checkpoint_plain, surroundings.saved_hooks,
    surroundings.dispatch_mode, compiled, compiled_autograd, calls.settings_between,
), backward)  # fmt: skip
# Modes whose results do not define those of another implementation.
ALONE = {surroundings.meta, surroundings.saved_hooks_changing, surroundings.dispatch_mode_seen,
         calls.queries, calls.output_changed, calls.changed_between,
         calls.input_changed_between}  # fmt: skip
# Modes that PyTorch refuses, or has not in every version, for a PackedSequence.
NOT_PACKED = {surroundings.checkpoint_reentrant, surroundings.checkpoint_plain, surroundings.meta,
              transforms.func_grad, transforms.func_jvp, func_vmap, func_vmap_grad, compiled,
              compiled_autograd}  # fmt: skip
# Mode -> a part of the text of an error that is PyTorch's: full backward hooks under torch.func,
# and the gradient of circular padding of an empty batch.
REFUSED: dict[Mode, str] = {
    func_vmap: "hooks.py:", func_vmap_grad: "hooks.py:", calls.batched: "Tensor.as_strided",
}  # fmt: skip
