"""Starting from the weights of a checkpoint, where shapes alone do not say what weights are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from omegaconf import OmegaConf
from PIL import Image
from torch import Tensor, nn

from training.configuration.errors import MisconfigurationException
from training.results.saved import Saved
from training.start.weights import InitialWeights

INTEGERS = str(Path(__file__).parents[2] / "docs/use/mul7u_truncated.c")


class Named(pl.LightningModule):
    """Its rows stand for words, which are part of its state."""

    def __init__(self, words: list[str]) -> None:
        super().__init__()
        self.words = words
        self.rows = nn.Parameter(torch.randn(len(words)))

    def get_extra_state(self) -> list[str]:
        return self.words

    def set_extra_state(self, state: list[str]) -> None:
        self.words = state

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.rows.sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def start(model: Named, of: Named) -> None:
    saved = Saved(Path("other.ckpt"), None, {}, None, of.state_dict())
    described = {"_target_": f"{__name__}.Named", "words": ["a", "b"]}
    weights = InitialWeights(saved, described, OmegaConf.create({"multiplier": None}))
    pl.Trainer(
        callbacks=[weights], max_steps=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, accelerator="cpu",
    ).fit(model, [torch.zeros(1)])  # fmt: skip


@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
def test_weights_of_the_same_words_are_loaded_and_of_others_are_refused() -> None:
    model, same, other = Named(["a", "b"]), Named(["a", "b"]), Named(["b", "a"])
    start(model, same)
    assert torch.equal(model.rows, same.rows)
    with pytest.raises(MisconfigurationException, match="_extra_state, in weights of the same"):
        start(model, other)


def folder_of_classes(folder: Path, *names: str) -> Path:
    for split in ("train", "val"):
        for label, name in enumerate(names):
            (folder / split / name).mkdir(parents=True)
            for number in range(2):
                grey = Image.new("L", (8, 8), 100 * label + 10 * number)
                grey.save(folder / split / name / f"{number}.png")
    return folder


@pytest.mark.parametrize("multiplier", ["null", INTEGERS])
def test_the_head_starts_anew_for_other_classes_of_the_same_number(
    run, tmp_path, multiplier
) -> None:
    still = (
        "trainer=cpu", "impl=reference", "logger=none", "data=folder", "model.network.width=2",
        "data.image_size=16", "debug=fast", f"data.cache_dir={tmp_path / 'cache'}",
        f"approx.multiplier={multiplier}",
    )  # fmt: skip
    first = folder_of_classes(tmp_path / "first", "cat", "dog")
    other = folder_of_classes(tmp_path / "other", "bolt", "nut")
    done = run(*still, f"data.folder={first}")
    (checkpoint,) = (done.folder / "checkpoints").iterdir()
    on_other = (*still, f"data.folder={other}", "model.learning_rate=0", f"ckpt={checkpoint}")
    done = run(*on_other)
    assert done.exit_code == 0, done.err
    (line,) = [line for line in done.err.splitlines() if "ckpt" in line]
    assert line == (
        "Warning: ckpt: class 0 of the checkpoint is 'cat', of the data 'bolt': "
        "network.classifier.weight, network.classifier.bias start anew"
    )
    before, after = (
        torch.load(path, weights_only=True)["state_dict"]
        for path in (checkpoint, *(done.folder / "checkpoints").iterdir())
    )
    same = {name: torch.equal(before[name], value) for name, value in after.items()}
    features = [name for name in same if "features" in name and name.endswith("weight")]
    assert features
    assert all(same[name] for name in features)
    assert not same["network.classifier.weight"]


@pytest.mark.slow
def test_words_that_are_others_start_anew_and_the_rest_is_kept(run, tmp_path) -> None:
    short = (
        "experiment=coco_captions", "data=coco_tiny", "data.image_size=16", "debug=fast",
        "trainer=cpu", "impl=reference", "data.batch_size=4", "model.network.width=4",
        f"data.cache_dir={tmp_path / 'cache'}",
    )  # fmt: skip
    done = run(*short)
    (checkpoint,) = (done.folder / "checkpoints").iterdir()
    contents = torch.load(checkpoint, weights_only=True)
    words = contents["state_dict"]["_extra_state"]
    words[-1], words[-2] = words[-2], words[-1]
    torch.save(contents, tmp_path / "other.ckpt")
    done = run(*short, f"ckpt={tmp_path / 'other.ckpt'}")
    assert done.exit_code == 0, done.err
    lines = [line for line in done.err.splitlines() if "start anew" in line]
    assert len(lines) == 1
    assert "has another _extra_state: network.embedding.weight, network.classifier" in lines[0]
