"""Data sets of files are read in threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from datamodules.prediction import FolderSet, join
from datamodules.reading.threads import FileSet

WAIT_S = 60  # for the other reader, which comes at once or never


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class Pairs(FileSet[int]):
    """An item is there once another is asked for too."""

    def __init__(self) -> None:
        self.both = threading.Barrier(2, timeout=WAIT_S)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, item: int) -> int:
        self.both.wait()
        return 10 * item


def test_the_process_that_trains_reads_two_items_at_once(two_threads: None) -> None:
    loader = DataLoader(Pairs(), batch_size=4)
    assert [batch.tolist() for batch in loader] == [[0, 10, 20, 30]]


class Unreadable(FileSet[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, item: int) -> int:
        if item % 2:
            raise OSError(f"item {item}")
        return item


def test_the_first_item_that_cannot_be_read_is_named(two_threads: None) -> None:
    with pytest.raises(OSError, match="item 1"):
        list(DataLoader(Unreadable(), batch_size=4))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_do_not_depend_on_who_reads(
    tmp_path: Path, two_threads: None, num_workers: int
) -> None:
    for number in range(7):
        size = 20 + number, 30 - number
        pixels = torch.randint(256, (*size, 3), dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(tmp_path / f"{number}.jpg")
    (tmp_path / "3.jpg").write_bytes(b"")
    data = FolderSet(tmp_path, (3, 16, 16))
    loader = DataLoader(data, batch_size=4, collate_fn=join, num_workers=num_workers)
    found = list(loader)
    assert [batch.names for batch in found] == [["0.jpg", "1.jpg", "2.jpg"],
                                                ["4.jpg", "5.jpg", "6.jpg"]]  # fmt: skip
    assert found[0].skipped == [("the file is empty", "3.jpg")]
    expected = join([data[item] for item in range(7)]).images
    assert torch.equal(torch.cat([batch.images for batch in found]), expected)
