"""Assigns memory to what steps with matrix states read and write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hoconv.recurrent.codegen.storage import Buffer, Storage, assign_storage
from hoconv.recurrent.ir.program import Program, Yield


def assign(program: Program, parts: Mapping[Yield, int]) -> Storage:
    """Assigns storage, in which sparse sequences are not as long as others, and those in parts are
    wider."""
    dense = replace(program, yields=tuple(y for y in program.yields if not y.sparse))
    storage = assign_storage(dense, keeps_states=True)
    replayed = {r.value for r in program.replays}
    sequences = (*(v for _, v in program.sequences), *program.made_before)
    read = zip(sequences, storage.sequences, strict=True)
    written = iter(storage.yields)

    def give(i: int, each: Yield) -> Buffer:
        if each.sparse:
            return Buffer(f"sparse{i}", "sparse", each.sequence.type)
        own, type = next(written), each.sequence.type
        return replace(own, type=replace(type, shape=(parts[each] * type.size,)))

    return replace(
        storage,
        sequences=tuple(replace(b, kind="sparse") if v in replayed else b for v, b in read),
        yields=tuple(give(i, each) for i, each in enumerate(program.yields)),
    )
