"""Lowers the steps of a program to kernels, products and addresses, for any target.

Sizes in addresses are marked (:mod:`hoconv.recurrent.codegen.sizes`).

B batch, T time steps, i the number of steps already done, t the time step that is computed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from hoconv.recurrent.codegen.expressions import TYPES
from hoconv.recurrent.codegen.kernels import memories, pointer
from hoconv.recurrent.codegen.loops import Kernel, lower
from hoconv.recurrent.codegen.sizes import size
from hoconv.recurrent.codegen.storage import Buffer, Storage, assign_storage
from hoconv.recurrent.ir.program import Group, Op, Program, Value


@dataclass(frozen=True, eq=False)
class LoweredSteps:
    """The body of a time loop.

    Attributes:
        items: products, and groups whose kernel is not empty, in order.
        kernels: the name and the loops of each group's kernel.
        scratch_bytes: the bytes of scratch memory that a row needs.
    """

    storage: Storage
    items: tuple[Op | Group, ...]
    kernels: Mapping[Group, tuple[str, Kernel]]
    scratch_bytes: int


def lower_steps(
    program: Program,
    fixed: Collection[Value] = (),
    keeps_states: bool = False,
    indexed: bool = False,
) -> LoweredSteps:
    """Assigns storage (`fixed`, `keeps_states`: see :func:`assign_storage`) and lowers every group
    to loops (`indexed`: see :func:`lower`)."""
    storage = assign_storage(program, fixed, keeps_states)
    made = {op.result for item in storage.items if isinstance(item, Group) for op in item.ops}
    products = {item.result for item in storage.items if isinstance(item, Op)}
    # Values to store that no kernel of the step computes: they come from elsewhere, or a product
    # computes them and writes only one of several locations.
    copies = [
        v for v, places in storage.stores.items()
        if v not in made and len(places) > (v in products)
    ]  # fmt: skip
    kernels: dict[Group, tuple[str, Kernel]] = {}
    items: list[Op | Group] = []
    for item in storage.items:
        if isinstance(item, Group):
            own = copies if item is storage.items[-1] else ()
            kernel = lower(item, storage, own, indexed)
            if not (kernel.first or kernel.sections):
                continue
            kernels[item] = f"kernel{len(kernels)}", kernel
        items.append(item)
    most = max((kernel.scratch_bytes for _, kernel in kernels.values()), default=0)
    return LoweredSteps(storage, tuple(items), kernels, most)


def pointers(storage: Storage) -> list[tuple[Buffer, bool, str]]:
    """The pointers of a step: (buffer, whether to the rows after the step, name).

    A buffer of a state has two: to the rows before the step and to those after it.
    """
    found = []
    for buffer in (*storage.buffers, *storage.inner):
        found.append((buffer, False, buffer.name))
        if buffer.kind in ("state", "history"):
            found.append((buffer, True, f"{buffer.name}_after"))
    return found


def offset(buffer: Buffer, after: bool, reverse: bool) -> str:
    """The offset from a buffer's start to the rows of this step, as " + ..." to append."""
    rows = f"B * {size(buffer.type.size)}"
    match buffer.kind:
        case "sequence":
            return f" + t * {rows}"
        case "state":
            return f" + (i + {int(after)}) % 2 * {rows}"
        case "history":
            following = "(t + T) % (T + 1)" if reverse else "(t + 1)"
            return f" + {following if after else 't'} * {rows}"
    return ""


def row_pointers(kernel: Kernel, scratch_bytes: int) -> list[str]:
    """Declares a pointer to the present row of each memory that a kernel reads or writes.

    Args:
        scratch_bytes: from the scratch of a row to that of the next, the same in all kernels:
            while one runs for a row, another may run for another row.
    """
    lines = []
    for memory in memories(kernel):
        own, name = TYPES[memory.type.dtype], pointer(memory)
        if memory.location is None:
            start = f"s.scratch + row * {size(scratch_bytes)} + {size(memory.start)}"
            at = f"reinterpret_cast<{own}*>({start})"
        elif memory.location.buffer.kind == "once":
            at = f"s.{name}"
        else:
            at = f"s.{name} + row * {size(memory.type.size)}"
        lines.append(f"{own}* __restrict__ {name} = {at};")
    return lines
