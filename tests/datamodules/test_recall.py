"""Associative recall: what is generated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from datamodules.recall import Recall

SIZES = {"pairs": 3, "keys": 5, "values": 4, "size": 300, "batch_size": 64}


def load(**options: Any) -> Recall:
    data = Recall(**{**SIZES, **options})
    data.setup("fit")
    return data


def test_the_label_is_the_value_that_followed_the_key() -> None:
    data = load()
    assert (data.image_shape, data.num_classes) == ((1, 7, 9), 4)
    assert {name: len(split) for name, split in data.splits.items()} == {
        "train": 300, "val": 2000, "test": 2000,
    }  # fmt: skip
    for split in data.splits.values():
        assert split.images.sum(3).eq(1).all()  # one-hot
        for rows, label in zip(split.images[:, 0].argmax(2).tolist(), split.labels, strict=True):
            keys, values, asked = rows[0:-1:2], rows[1::2], rows[-1]
            assert len(set(keys)) == 3
            assert all(key < 5 for key in keys)
            assert all(5 <= value < 9 for value in values)
            assert values[keys.index(asked)] - 5 == label


def test_every_pair_is_asked_for_and_every_value_is_an_answer_as_often() -> None:
    split = load(size=4000).splits["train"]
    rows = split.images[:, 0].argmax(2)
    positions = rows[:, 0:-1:2].eq(rows[:, -1:]).int().argmax(1)
    for counts in (positions.bincount(minlength=3) * 3, split.labels.bincount(minlength=4) * 4):
        assert (counts / 4000 - 1).abs().max() < 0.15


def test_sequences_do_not_depend_on_the_seed_of_the_run_and_differ_between_sets() -> None:
    one, other = load(seed=1).splits, load(seed=2).splits
    assert all(torch.equal(one[name].images, other[name].images) for name in one)
    assert not torch.equal(one["val"].images, one["test"].images)


def test_batches_are_one_hot_as_they_are() -> None:
    data = load()
    images, labels = data.on_after_batch_transfer(next(iter(data.train_dataloader())), 0)
    assert images.dtype == torch.float32
    assert set(images.unique().tolist()) == {0.0, 1.0}
    assert (images.shape, labels.shape) == ((64, 1, 7, 9), (64,))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pairs": 6}, "^pairs: expected 1 to 5, as many as there are different keys; got 6$"),
        ({"pairs": 0}, "^pairs: expected 1 to 5"),
        ({"values": 1}, "^values: expected at least 2, got 1$"),
        ({"size": 0}, "^size: expected at least 1, got 0$"),
    ],
)
def test_wrong_sizes_are_refused_by_name(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(**options)


def test_a_delta_rule_learns_to_recall_and_predicts_from_no_picture(run, tmp_path: Path) -> None:
    done = run(
        "experiment=recall", "trainer=cpu", "impl=cpp", "logger=csv", "seed=1", "data.pairs=2",
        "data.keys=4", "data.values=4", "data.size=3000", "model.network.hidden_size=16",
        "model.learning_rate=0.02", "trainer.max_epochs=4",
    )  # fmt: skip
    assert done.exit_code == 0, done.err
    assert done.results["metrics"]["test/accuracy"] > 0.9  # guessing: 0.25
    Image.new("L", (8, 5)).save(tmp_path / "grey.png")
    (ckpt,) = (done.folder / "checkpoints").iterdir()
    done = run("mode=predict", f"ckpt={ckpt}", f"input={tmp_path}", "trainer=cpu", "impl=cpp")
    assert "input: a Recall says nothing of how its model reads the images of a folder" in done.err
