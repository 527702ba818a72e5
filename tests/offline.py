"""Reading the record of an offline W&B run: W&B's messages in a log of LevelDB's format."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FILE_HEADER, RECORD_HEADER, BLOCK = 7, 7, 2**15  # bytes
WHOLE, LAST = 1, 4  # kinds of records


@dataclass
class Offline:
    """What an offline run says of itself.

    Attributes:
        history: the values of each row that was logged, and its number as ``_step``.
        exit_code: None where the run did not end.
    """

    name: str = ""
    group: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    exit_code: int | None = None


def read(folder: Path) -> Offline:
    """Reads the folder of an offline run."""
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.glob("run-*.wandb")
    found = Offline()
    for data in _records(path.read_bytes()):
        record: Any = wandb_internal_pb2.Record()  # pyright: ignore
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            found.name, found.group = record.run.display_name, record.run.run_group
            found.config |= _items(record.run.config.update)
        elif kind == "config":
            found.config |= _items(record.config.update)
        elif kind == "history":
            found.history.append({"_step": record.history.step.num} | _items(record.history.item))
        elif kind == "summary":
            found.summary |= _items(record.summary.update)
        elif kind == "exit":
            found.exit_code = record.exit.exit_code
    return found


def _records(log: bytes) -> Iterator[bytes]:
    """The records of a log, which may be divided among its blocks."""
    position, parts = FILE_HEADER, b""
    while position + RECORD_HEADER <= len(log):
        if BLOCK - position % BLOCK < RECORD_HEADER:
            position += BLOCK - position % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", log, position)
        if kind == 0:
            return
        position += RECORD_HEADER
        parts += log[position : position + length]
        position += length
        if kind in (WHOLE, LAST):
            yield parts
            parts = b""


def _items(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
