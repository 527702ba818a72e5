"""Compares compiled recurrent cells, in float64 and by any schedule, with their definition.

B batch, T time steps, n features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hoconv.recurrent import reference
from hoconv.recurrent.frontend.cell import BoundCell
from hoconv.recurrent.frontend.trace import trace
from hoconv.recurrent.ir.program import Program, flat, step_outputs
from hoconv.recurrent.ir.verify import verify
from hoconv.recurrent.passes.dtypes import infer_dtypes
from hoconv.recurrent.passes.gradient.saved import Recompute
from hoconv.recurrent.passes.simplify import simplify
from hoconv.recurrent.runtime.host import HostCode
from hoconv.recurrent.runtime.interpret import Loop, interpret
from hoconv.recurrent.runtime.packing import pack
from hoconv.recurrent.schedule import Plan

# Absolute and relative, in float64.
_TOLERANCE = 1e-9


def no_loop(program: Program) -> None:
    """Returns None, so that a program runs op by op and not as one generated loop."""


def assert_close(
    cell: BoundCell,
    got: Mapping[str, Tensor],
    exact: Mapping[str, Tensor],
    alone: Mapping[str, Tensor] | None = None,
) -> None:
    """Asserts that results and gradients of a cell are those of its definition, NaN included.

    Args:
        alone: those of each sequence by itself, without steps past its end. Where `exact` has NaN,
            these are right, too: the definition steps past the end, and a NaN made there reaches
            gradients through the states that it keeps, but not through those that the compiler
            takes out of the loop.
    """
    if alone is not None:
        exact = {n: alone[n].where(t.isnan() & ~got[n].isnan(), t) for n, t in exact.items()}
    if not _reads_every_state(cell):
        # Autograd has no gradient for a state that no step reads; a program has zeros, which
        # become NaN where they are multiplied by NaN or infinity.
        got = {n: exact[n].where(exact[n].isfinite() & ~t.isfinite(), t) for n, t in got.items()}
    torch.testing.assert_close(
        dict(got), dict(exact), rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True,
        msg=lambda text: f"{cell.name}: {text}",
    )  # fmt: skip


def gradients(
    outputs: Mapping[str, Tensor], leaves: Mapping[str, Tensor], cotangents: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Computes the gradient of each leaf by autograd; 0 where a leaf has none."""
    real = {name: t for name, t in outputs.items() if t.requires_grad}
    found = torch.autograd.grad(
        list(real.values()), list(leaves.values()), [cotangents[name] for name in real],
        materialize_grads=True, allow_unused=True,
    )  # fmt: skip
    return dict(zip(leaves, found, strict=True))


def join(each: Sequence[Mapping[str, Tensor]], steps: int, axis: int) -> dict[str, Tensor]:
    """Joins the results of single sequences to those of a batch of so many steps: outputs
    (T, 1, n), and final states, whose axis of the batch is given."""
    padded = [F.pad(results["output"], (0, 0, 0, 0, 0, steps - len(results["output"])))
              for results in each]  # fmt: skip
    finals = {name: torch.cat([results[name] for results in each], axis)
              for name in each[0] if name != "output"}  # fmt: skip
    return {"output": torch.cat(padded, 1), **finals}


def _reads_every_state(cell: BoundCell) -> bool:
    program = simplify(infer_dtypes(trace(cell, training=True).program, torch.float64))
    read = {v for op in flat(program.step) for v in op.values} | {*step_outputs(program)}
    return read.issuperset(state.value for state in program.states)


def run_program(
    program: Program,
    sequences: Mapping[str, Tensor],
    states: Mapping[str, Tensor],
    parameters: Mapping[str, Tensor],
    seed: Tensor | None,
    loop: Loop | None,
) -> dict[str, Tensor]:
    """Runs a program with a loop; returns its results, and the states after the last step."""
    run = HostCode(program, list(parameters), list(states), False, loop)
    read = [sequences[name] for name, _ in program.sequences]
    found = run(read, list(states.values()), list(parameters.values()), seed)
    return dict(zip([*(name for name, _ in program.results), *states], found, strict=True))


class CellCase:
    """A cell with random parameters and inputs, and its results and gradients by its definition.

    Args:
        masked: whether the three sequences have different lengths.
        resets: whether states are reset at some steps.
        reverse: whether the first step is the last of the sequences.
        recompute: what the plan's gradient computes again.
        steps: T, at least 3.
    """

    def __init__(
        self,
        cell: BoundCell,
        device: str = "cpu",
        /,
        *,
        masked: bool = False,
        resets: bool = False,
        reverse: bool = False,
        recompute: Recompute = "cheap",
        steps: int = 4,
    ) -> None:
        torch.manual_seed(0)
        self.cell = cell
        self.options = {
            "training": True, "masked": masked, "resets": resets, "reverse": reverse,
            "recompute": recompute,
        }  # fmt: skip

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=torch.float64).to(device).requires_grad_()

        T, B = steps, 3
        declared = trace(self.cell, training=True).declarations
        self.parameters = {d.name: draw(*d.read_shape) for d in declared}
        self.x = draw(T, B, self.cell.row_size)
        self.states = {name: draw(B, n) for name, n in self.cell.state_sizes.items()}
        lengths = torch.tensor([T // 2, T, 1])
        valid = (torch.arange(T)[:, None] < lengths)[..., None].to(device)
        reset = torch.zeros(T, B, 1, dtype=torch.bool, device=device)
        # One past the end, if masked.
        reset[0, 0] = reset[1, 0] = reset[T // 2, 1] = reset[T - 1, 2] = True
        self.constants = {
            f"constant_{name}": draw(1, B, math.prod(shape))
            for name, shape in self.cell.constant_shapes.items()
        }
        self.sequences = {"x": self.x, **self.constants, **({"reset": reset} if resets else {}),
                          **({"valid": valid} if masked else {})}  # fmt: skip
        self.seed = torch.tensor(1234567890123, device=device)
        self.exact = self._define(slice(B), T)
        self.cotangents = {name: draw(*t.shape).detach() for name, t in self.exact.items()}
        self.leaves = {"x": self.x, **self.constants, **self.states, **self.parameters}
        self.gradients = gradients(self.exact, self.leaves, self.cotangents)
        self.alone = None
        if masked and any(t.isnan().any() for t in self.gradients.values()):
            each = [self._define(slice(b, b + 1), n) for b, n in enumerate(lengths.tolist())]
            whole = join(each, T, 0)
            self.alone = whole | gradients(whole, self.leaves, self.cotangents)

    def _define(self, rows: slice, steps: int) -> dict[str, Tensor]:
        """Computes the results of some rows of the batch by the definition; of the first steps."""
        read = {name: t[:steps, rows] for name, t in self.sequences.items()}
        output, final = reference.recurrent(
            self.cell, read["x"], [t[rows] for t in self.states.values()], self.parameters,
            constants=[read[name] for name in self.constants],
            valid=read.get("valid"), reset=read.get("reset"),
            training=True, seed=self.seed, reverse=self.options["reverse"],
        )  # fmt: skip
        return {"output": output, **dict(zip(self.states, final))}

    def assert_close(self, got: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> None:
        assert_close(self.cell, got, exact, self.alone)

    def check(self, program: Program) -> Program:
        """Asserts that a program's results, and its gradients by autograd, are exact."""
        params = pack(verify(program), self.parameters)
        results, final = interpret(program, params, self.sequences, self.states, self.seed)
        got = {"output": results["output"], **final}
        self.assert_close(got, self.exact)
        self.assert_close(gradients(got, self.leaves, self.cotangents), self.gradients)
        return program

    def check_plan(self, plan: Plan, loop: Callable[[Program], Loop | None] = no_loop) -> None:
        """Asserts that the three programs of a plan give exact results and gradients."""
        with torch.no_grad():
            for program in (plan.inference, plan.forward, plan.backward):
                verify(program)
            for program in (plan.inference, plan.forward):
                results = run_program(
                    program, self.sequences, self.states, self.parameters, self.seed, loop(program)
                )
                self.assert_close({name: results[name] for name in self.exact}, self.exact)
            read = {**self.sequences, **results, "d_output": self.cotangents["output"]}
            host = HostCode(
                plan.backward, list(self.parameters), list(self.states), True, loop(plan.backward)
            )
            gradients = host(
                [read[name] for name, _ in plan.backward.sequences],
                [self.cotangents[name] for name in self.states],
                list(self.parameters.values()),
                self.seed,
            )
        named = ("x", *self.constants, *self.parameters, *self.states)
        self.assert_close(dict(zip(named, gradients, strict=True)), self.gradients)
