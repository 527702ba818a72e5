import gzip
import hashlib
import os
import struct
from pathlib import Path

import pytest
import torch
import torchvision

from datamodules import mnist
from datamodules.images import DataNotFoundError
from datamodules.mnist import MNIST

TRAIN, VAL, TEST = 40, 10, 20  # images in the small files written here


def idx(values: torch.Tensor) -> bytes:
    """The idx format: 0, 0, type (8 is uint8), dimensions, then each size as big-endian int32."""
    header = struct.pack(f">4B{values.dim()}I", 0, 0, 8, values.dim(), *values.shape)
    return header + values.to(torch.uint8).numpy().tobytes()


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Small stand-ins for the four files, by name without .gz; the checksums are theirs."""
    generator = torch.Generator().manual_seed(0)
    contents = {}
    for part, size in (("train", TRAIN), ("t10k", TEST)):
        images = torch.randint(256, (size, 28, 28), generator=generator)
        contents[f"{part}-images-idx3-ubyte"] = idx(images)
        contents[f"{part}-labels-idx1-ubyte"] = idx(torch.arange(size) % 10)
    md5 = {
        f"{name}.gz": hashlib.md5(gzip.compress(content, mtime=0)).hexdigest()
        for name, content in contents.items()
    }
    monkeypatch.setattr(mnist, "MD5", md5)
    monkeypatch.setattr(mnist, "VAL_SIZE", VAL)
    return contents


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nowhere = (tmp_path / "nowhere").as_uri() + "/"
    monkeypatch.setattr(torchvision.datasets.MNIST, "mirrors", [nowhere])


def write(folder: Path, files: dict[str, bytes], *, compressed: bool) -> None:
    folder.mkdir(parents=True)
    for name, content in files.items():
        if compressed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content, mtime=0))
        else:
            (folder / name).write_bytes(content)


def load(data_dir: Path) -> MNIST:
    data = MNIST(data_dir, batch_size=8)
    data.prepare_data()
    data.setup("fit")
    return data


@pytest.mark.parametrize("folder", ["mnist", "MNIST/raw"])
@pytest.mark.parametrize("compressed", [True, False], ids=["gz", "plain"])
@pytest.mark.usefixtures("no_network")
def test_reads_the_files_where_they_are(tmp_path, files, folder, compressed):
    write(tmp_path / folder, files, compressed=compressed)
    before = sorted(tmp_path.rglob("*"))

    splits = load(tmp_path).splits

    assert {name: len(split) for name, split in splits.items()} == {
        "train": TRAIN - VAL,
        "val": VAL,
        "test": TEST,
    }
    assert splits["test"].images.shape == (TEST, 1, 28, 28)
    assert splits["test"].images.numpy().tobytes() == files["t10k-images-idx3-ubyte"][16:]
    assert splits["test"].labels.tolist() == [i % 10 for i in range(TEST)]
    assert sorted(tmp_path.rglob("*")) == before, "nothing may be written beside the files"


@pytest.mark.usefixtures("no_network")
def test_images_keep_their_labels_in_train_and_val(tmp_path, files):
    write(tmp_path / "mnist", files, compressed=True)
    splits = load(tmp_path).splits
    pixels = files["train-images-idx3-ubyte"][16:]
    label = {pixels[i * 784 : (i + 1) * 784]: i % 10 for i in range(TRAIN)}
    found = 0
    for name in ("train", "val"):
        for image, target in zip(splits[name].images, splits[name].labels, strict=True):
            assert label.pop(image.numpy().tobytes()) == target
            found += 1
    assert found == TRAIN


@pytest.mark.usefixtures("files")
def test_no_files_and_no_network_is_one_error_that_says_what_to_do(tmp_path, no_network):
    with pytest.raises(DataNotFoundError) as caught:
        load(tmp_path / "data")
    message = str(caught.value)
    assert str(tmp_path / "data" / "mnist") in message
    assert "HOCONV_DATA_DIR" in message
    assert all(name in message for name in mnist.MD5)
    assert len(mnist.MD5) == 4


@pytest.mark.usefixtures("no_network")
def test_three_of_four_files_are_not_enough(tmp_path, files):
    files.pop("t10k-labels-idx1-ubyte")
    write(tmp_path / "mnist", files, compressed=True)
    with pytest.raises(DataNotFoundError, match="could not be downloaded"):
        load(tmp_path)


@pytest.mark.usefixtures("no_network")
def test_a_damaged_archive_is_named(tmp_path, files):
    write(tmp_path / "mnist", files, compressed=True)
    damaged = tmp_path / "mnist" / "train-labels-idx1-ubyte.gz"
    damaged.write_bytes(damaged.read_bytes()[:-9])
    with pytest.raises(DataNotFoundError, match=f"{damaged} is damaged"):
        load(tmp_path)


DAMAGE = {  # the name of a file, and what becomes of it
    "header cut": ("images-idx3", lambda contents: contents[:3]),
    "pixels cut": ("images-idx3", lambda contents: contents[:100]),
    "another type": ("images-idx3", lambda contents: contents[:2] + b"\x0a" + contents[3:]),
    "another shape": (
        "images-idx3",
        lambda contents: contents[:8] + struct.pack(">II", 14, 56) + contents[16:],
    ),
    "an eleventh class": ("labels-idx1", lambda contents: contents[:-1] + b"\x0a"),
}


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_plain_file_is_named(tmp_path, files, damage):
    write(tmp_path / "mnist", files, compressed=False)
    name, change = DAMAGE[damage]
    damaged = tmp_path / "mnist" / f"t10k-{name}-ubyte"
    damaged.write_bytes(change(damaged.read_bytes()))
    with pytest.raises(DataNotFoundError, match=f"{damaged} is damaged"):
        load(tmp_path)


@pytest.mark.usefixtures("no_network")
def test_labels_of_other_images_are_an_error(tmp_path, files):
    files["train-labels-idx1-ubyte"] = files["t10k-labels-idx1-ubyte"]
    write(tmp_path / "mnist", files, compressed=False)
    with pytest.raises(DataNotFoundError, match=r"mnist is damaged \(.* labels of train\)"):
        load(tmp_path)


@pytest.mark.data
@pytest.mark.skipif("HOCONV_DATA_DIR" not in os.environ, reason="HOCONV_DATA_DIR is not set")
def test_the_real_files_are_normalised():
    data = load(Path(os.environ["HOCONV_DATA_DIR"]))
    assert {name: len(split) for name, split in data.splits.items()} == {
        "train": 55_000,
        "val": 5_000,
        "test": 10_000,
    }
    train = data.splits["train"]
    images, _ = data.on_after_batch_transfer((train.images, train.labels), 0)
    assert abs(images.mean()) < 1e-3
    assert abs(images.std() - 1) < 1e-3
