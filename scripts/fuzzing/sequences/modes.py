"""All ways to call a layer. ``PLAIN`` names, for a mode, another with the same results without what
the first is about; it computes the truth.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

from torch import nn

from fuzzing.sequences.calls import (
    Call,
    Results,
    accumulate,
    anomaly,
    backward,
    batched,
    chained,
    changed_between,
    detached_twice,
    double,
    forward,
    grad,
    inference,
    inference_inputs,
    input_changed_between,
    no_grad,
    one_by_one,
    output_changed,
    queries,
    retain,
    settings_between,
    steps,
)
from fuzzing.sequences.surroundings import (
    autocast,
    autocast_forward,
    checkpoint_plain,
    checkpoint_reentrant,
    compiled,
    compiled_autograd,
    dispatch_mode,
    dispatch_mode_seen,
    function_mode,
    meta,
    no_threads,
    saved_hooks,
    saved_hooks_changing,
    saved_on_cpu,
    threads,
)
from fuzzing.sequences.transforms import (
    func_grad,
    func_jvp,
    func_loop,
    func_loop_grad,
    func_vmap,
    func_vmap_grad,
    functional,
)

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
