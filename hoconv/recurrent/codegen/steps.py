"""A program's steps as kernels and products, with where they find their rows: for any target.

B batch, T time steps, i steps done before this one, t the place of this one in time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from hoconv.recurrent.codegen.expressions import TYPES
from hoconv.recurrent.codegen.kernels import memories, pointer
from hoconv.recurrent.codegen.loops import Kernel, lower
from hoconv.recurrent.codegen.storage import Buffer, Storage, place
from hoconv.recurrent.ir.program import Group, Op, Program, Value


@dataclass(frozen=True, eq=False)
class Steps:
    """What a time loop is made of.

    Attributes:
        items: products, and groups that compute something, in order.
        kernels: of each group: its name and its loops.
        scratch_bytes: how many a row needs.
    """

    storage: Storage
    items: tuple[Op | Group, ...]
    kernels: Mapping[Group, tuple[str, Kernel]]
    scratch_bytes: int


def lower_steps(program: Program, fixed: Collection[Value] = ()) -> Steps:
    """Gives every value its place, `fixed` as in :func:`place`, and every kernel its loops."""
    storage = place(program, fixed)
    made = {op.result for item in storage.items if isinstance(item, Group) for op in item.ops}
    products = {item.result for item in storage.items if isinstance(item, Op)}
    # What no kernel makes and has to be written, or a product writes to one of several places.
    copies = [
        v for v, places in storage.stores.items()
        if v not in made and len(places) > (v in products)
    ]  # fmt: skip
    kernels: dict[Group, tuple[str, Kernel]] = {}
    items: list[Op | Group] = []
    for item in storage.items:
        if isinstance(item, Group):
            kernel = lower(item, storage, copies if item is storage.items[-1] else ())
            if not (kernel.first or kernel.sections):
                continue
            kernels[item] = f"kernel{len(kernels)}", kernel
        items.append(item)
    most = max((kernel.scratch_bytes for _, kernel in kernels.values()), default=0)
    return Steps(storage, tuple(items), kernels, most)


def pointers(storage: Storage) -> list[tuple[Buffer, bool, str]]:
    """Of each buffer: its rows at this step, and of a state's those after it, with their names."""
    found = []
    for buffer in storage.buffers:
        found.append((buffer, False, buffer.name))
        if buffer.kind in ("state", "history"):
            found.append((buffer, True, f"{buffer.name}_after"))
    return found


def offset(buffer: Buffer, after: bool, reverse: bool) -> str:
    """From a buffer's beginning to the rows of this step, as a sum to add to."""
    rows = f"B * {buffer.type.size}"
    match buffer.kind:
        case "sequence":
            return f" + t * {rows}"
        case "state":
            return f" + (i + {int(after)}) % 2 * {rows}"
        case "history":
            following = "(t + T) % (T + 1)" if reverse else "(t + 1)"
            return f" + {following if after else 't'} * {rows}"
    return ""


def row_pointers(kernel: Kernel) -> list[str]:
    """Declares a pointer to the row in each place that a kernel reads or writes."""
    lines = []
    for memory in memories(kernel):
        own, name = TYPES[memory.type.dtype], pointer(memory)
        if memory.place is None:
            start = f"s.scratch + row * {kernel.scratch_bytes} + {memory.scratch}"
            at = f"reinterpret_cast<{own}*>({start})"
        elif memory.place.buffer.kind == "once":
            at = f"s.{name}"
        else:
            at = f"s.{name} + row * {memory.type.size}"
        lines.append(f"{own}* __restrict__ {name} = {at};")
    return lines
