"""Batches of sets on the device that trains are those of a loader."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from datamodules import placement
from datamodules.coco import COCO, on_device
from datamodules.memory import EvaluationBatches, TrainingBatches
from datamodules.placement import DataDeviceError
from datamodules.sampling import Shuffle, TrainingLoader
from tests.datamodules.coco.files import Split

Load = Callable[..., COCO]
both_tasks = pytest.mark.parametrize("task", ["segmentation", "detection", "captions", "denoise"])


def trainer(device: str = "cpu", rank: int = 0, world_size: int = 1) -> Any:
    strategy = SimpleNamespace(root_device=torch.device(device))
    return SimpleNamespace(strategy=strategy, global_rank=rank, world_size=world_size)


@pytest.fixture(params=["kept", "decoded"])
def pair(
    both: dict[str, Split],
    load: Load,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Callable[..., tuple[COCO, COCO]]:
    """Makes two data modules of the same arguments: one with loaders, and one whose sets are on
    the device that trains, here the CPU, where they are kept, or decoded by a thread."""

    def pair(*arguments: Any, rank: int = 0, world_size: int = 1, **options: Any) -> Any:
        kept = request.param == "kept"
        made = [
            load(*arguments, cache_images=kept, device=device, **options)
            for device in ("cpu", "auto")
        ]
        for data in made:
            data.trainer = trainer(rank=rank, world_size=world_size)
        for place in ("is_resident", "is_decoded"):
            monkeypatch.setattr(on_device, place, lambda device, *_: device == "auto")
        return made

    return pair


def tensors(batch: Any) -> list[Tensor]:
    return [value for value in batch if isinstance(value, Tensor)]


def same(found: Iterable[Any], expected: Iterable[Any]) -> None:
    for batch, other in zip(found, expected, strict=True):
        assert type(batch) is type(other)
        for value, value_e in zip(tensors(batch), tensors(other), strict=True):
            assert value.dtype == value_e.dtype
            assert value.shape == value_e.shape
            assert value.is_contiguous()
            exact = not (hasattr(batch, "tokens") and value is batch.images)  # colours
            assert (value.int() - value_e.int()).abs().max() <= (0 if exact else 1)
        if hasattr(batch, "references"):
            assert list(batch.references) == list(other.references)


def sampler_of(loader: Any) -> Shuffle:
    return (loader.batch_sampler if isinstance(loader, TrainingLoader) else loader).sampler


def epoch(loader: Any, number: int) -> list[Any]:
    """As Lightning takes it: by number, and without asking for one batch more than there are."""
    sampler_of(loader).set_epoch(number)
    return list(itertools.islice(loader, len(loader)))


@both_tasks
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_epochs_are_those_of_the_loader(pair: Any, task: str, world_size: int) -> None:
    for rank in range(world_size):
        loaded, resident = (
            data.train_dataloader()
            for data in pair(task, batch_size=2, seed=3, rank=rank, world_size=world_size)
        )
        assert isinstance(loaded, TrainingLoader)
        assert isinstance(resident, TrainingBatches)
        assert len(loaded) == len(resident)
        for number in (0, 1, 5):
            same(epoch(resident, number), epoch(loaded, number))


@both_tasks
def test_unchanged_images_are_the_same_bits(pair: Any, task: str) -> None:
    loaded, resident = (
        data.train_dataloader() for data in pair(task, batch_size=4, augment=False, min_count=1)
    )
    for batch, other in zip(resident, loaded, strict=True):
        for value, value_e in zip(tensors(batch), tensors(other), strict=True):
            assert torch.equal(value, value_e)


@both_tasks
def test_a_damaged_image_is_left_out(
    both: dict[str, Split], pair: Any, task: str, recwarn: pytest.WarningsRecorder
) -> None:
    (both["train"].folder / both["train"].images[2]["file_name"]).unlink()
    loaded, resident = (data.train_dataloader() for data in pair(task, batch_size=4))
    assert sum(len(batch.images) for batch in resident) == (10 if task == "captions" else 5)
    same(epoch(resident, 1), epoch(loaded, 1))


@both_tasks
@pytest.mark.parametrize("test_split", ["val", "train"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_evaluation_is_that_of_the_loader(
    pair: Any, task: str, test_split: str, world_size: int
) -> None:
    for rank, stage in itertools.product(range(world_size), ("val", "test")):
        loaded, resident = (
            getattr(data, f"{stage}_dataloader")()
            for data in pair(
                task, batch_size=2, test_split=test_split, rank=rank, world_size=world_size
            )
        )
        assert isinstance(resident, EvaluationBatches)
        assert len(resident) == len(loaded)
        for _ in range(2):
            same(resident, loaded)


@both_tasks
def test_an_epoch_continues_with_the_state_of_either(pair: Any, task: str) -> None:
    loaded, resident = pair(task, batch_size=2)
    expected = epoch(loaded.train_dataloader(), 4)
    for used in range(len(expected)):
        for stopped, continued in ((loaded, resident), (resident, loaded), (resident, resident)):
            first, second = stopped.train_dataloader(), continued.train_dataloader()
            epoch(first, 3)
            sampler_of(first).set_epoch(4)
            iterator = iter(first)
            for _ in range(used + 1):
                next(iterator)  # the last one is being worked on
            assert first.state_dict() == {"epoch": 4, "batches": used}
            second.load_state_dict(first.state_dict())
            found = list(itertools.islice(second, len(expected) - used))
            same(found, expected[used:])
            same(epoch(second, 5), epoch(loaded.train_dataloader(), 5))


@both_tasks
def test_stages_of_one_split_share_its_pixels(pair: Any, task: str) -> None:
    _, data = pair(task, test_split="train")
    sources = [
        getattr(data, f"{stage}_dataloader")().data.images for stage in ("train", "test", "val")
    ]
    assert sources[0] is sources[1] is not sources[2]
    assert data.train_dataloader().data is data.train_dataloader().data, "made once"


@pytest.mark.parametrize("cache_images", [True, False])
def test_a_gpu_is_not_demanded_in_vain(
    both: dict[str, Split], load: Load, cache_images: bool
) -> None:
    data = load(device="gpu", cache_images=cache_images)
    for stage in ("train", "val", "test"):
        with pytest.raises(DataDeviceError, match=r"data\.device: .* a run on cpu.*trainer=gpu"):
            getattr(data, f"{stage}_dataloader")()
    with pytest.raises(ValueError, match="device: expected one of auto, gpu, cpu; got 'tpu'"):
        load(device="tpu")


def test_a_loader_decodes_where_the_gpu_cannot(
    both: dict[str, Split], load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "decodes_on", lambda device: False)
    data = load(device="auto")
    data.trainer = trainer("cuda:0")
    assert isinstance(data.train_dataloader(), TrainingLoader)
    data = load(device="gpu")
    data.trainer = trainer("cuda:0")
    with pytest.raises(DataDeviceError, match=r"data\.device: .*pip install torchcodec"):
        data.train_dataloader()


def test_a_gpu_decodes_where_too_few_processes_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "decodes_on", lambda device: True)
    gpu = torch.device("cuda", 0)
    assert placement.is_decoded("auto", gpu, num_workers=2)
    assert not placement.is_decoded("auto", gpu, num_workers=16)
    assert placement.is_decoded("gpu", gpu, num_workers=16)
    assert not placement.is_decoded("cpu", gpu, num_workers=2)
    assert not placement.is_decoded("auto", torch.device("cpu"), num_workers=2)


def test_a_set_takes_at_most_a_tenth_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 5000))
    gpu = torch.device("cuda", 0)
    assert placement.is_resident("auto", 100, gpu)
    assert not placement.is_resident("auto", 101, gpu)
    assert placement.is_resident("gpu", 101, gpu)
    assert not placement.is_resident("cpu", 1, gpu)
    assert not placement.is_resident("auto", 1, torch.device("cpu"))


@pytest.mark.gpu
@both_tasks
@pytest.mark.parametrize("stage", ["train", "val", "test"])
@pytest.mark.parametrize("device", ["auto", "gpu"])
def test_batches_are_the_same_on_a_gpu(
    both: dict[str, Split], load: Load, task: str, stage: str, device: str
) -> None:
    def batches(device: str) -> Any:
        data = load(task, cache_images=True, device=device, seed=5)
        data.trainer = trainer("cuda:0")
        return getattr(data, f"{stage}_dataloader")()

    found, loaded = batches(device), batches("cpu")
    assert isinstance(found, TrainingBatches | EvaluationBatches)
    assert all(value.is_cuda for batch in found for value in tensors(batch))
    same((type(b)(*(v.cpu() if isinstance(v, Tensor) else v for v in b)) for b in found), loaded)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@both_tasks
def test_a_batch_waits_for_no_gpu(both: dict[str, Split], load: Load, task: str) -> None:
    data = load(task, cache_images=True, batch_size=2)
    data.trainer = trainer("cuda:0")
    loader = data.train_dataloader()
    for batch in loader:  # the first copy constants to the GPU
        data.on_after_batch_transfer(batch, 0)
    try:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(2):
            for batch in loader:
                data.on_after_batch_transfer(batch, 0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
