import pytest
import torch
from PIL import Image

from datamodules.images import DataNotFoundError
from datamodules.prediction import ImageFolder
from datamodules.reading.skipped import SkippedWarning
from tests.datamodules.coco.files import write_jpeg


@pytest.fixture
def folder(tmp_path):
    """Three images, one of them below, one damaged, and two files that are none."""
    (tmp_path / "below").mkdir()
    write_jpeg(torch.full((3, 20, 30), 200, dtype=torch.uint8), tmp_path / "b.JPG")
    write_jpeg(torch.full((1, 8, 8), 10, dtype=torch.uint8), tmp_path / "below" / "grey.jpeg")
    Image.new("RGBA", (12, 16), (255, 0, 0, 255)).save(tmp_path / "a.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "a.png").read_bytes()[:40])
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "empty.png.d").mkdir()
    return tmp_path


@pytest.mark.parametrize("num_workers", [0, 1])
def test_images_keep_their_names_and_sizes(folder, num_workers):
    data = ImageFolder(folder, image_shape=(3, 4, 4), batch_size=2, num_workers=num_workers)
    first, second = data.predict_dataloader()
    assert first.names == ["a.png", "b.JPG"]
    assert second.names == ["below/grey.jpeg"]
    assert first.sizes == [(16, 12), (20, 30)]
    assert second.sizes == [(8, 8)]
    assert first.images.shape == (2, 3, 4, 4)
    assert second.images.shape == (1, 3, 4, 4)
    assert first.images[0].amax((1, 2)).tolist() == [255, 0, 0]
    assert (first.images[1].float() - 200).abs().max() <= 2


def test_files_that_cannot_be_read_are_skipped_counted_and_named(folder):
    data = ImageFolder(folder, image_shape=(3, 4, 4), batch_size=2)
    batches = [data.on_after_batch_transfer(batch, 0) for batch in data.predict_dataloader()]
    assert sum(len(batch.images) for batch in batches) == 3
    ((reason, names),) = data.skipped.items()
    assert "cannot be decoded" in reason
    assert names == ["cut.png"]
    with pytest.warns(SkippedWarning, match=r"1 skipped, .*: cut\.png"):
        data.teardown("predict")


def test_a_photograph_is_turned_upright(tmp_path):
    image = Image.new("RGB", (6, 2))
    exif = Image.Exif()
    exif[0x0112] = 6  # turn right by 90 degrees
    image.save(tmp_path / "photo.jpg", exif=exif)
    (batch,) = ImageFolder(tmp_path, image_shape=(3, 4, 4), batch_size=1).predict_dataloader()
    assert batch.sizes == [(6, 2)]


@pytest.mark.parametrize(
    ("name", "message"), [(".", "no images .* in {path}"), ("missing", "there is no {path}$")]
)
def test_a_folder_without_images_is_an_error(tmp_path, name, message):
    path = (tmp_path / name).resolve()
    with pytest.raises(DataNotFoundError, match=message.format(path=path)):
        ImageFolder(tmp_path / name, image_shape=(3, 4, 4), batch_size=1)
