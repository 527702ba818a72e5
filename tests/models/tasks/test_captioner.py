import math

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader

from datamodules.coco.captions import END, START, CaptionBatch, References, Vocabulary, split_words
from models.metrics.captions import bleu4, cider_d
from models.networks.attention_decoder import AttentionDecoder
from models.tasks.captioner import Captioner
from tests.support import set_to_reference

WORDS = Vocabulary.of(["a red cat on a mat", "two dogs"], min_count=1)


class Data(pl.LightningDataModule):
    """Seven images, in batches of three."""

    def __init__(self, vocabulary: Vocabulary = WORDS) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.images = torch.randn(7, 3, 16, 16)
        self.references = [[f"A red cat, {i}!", "two dogs on a mat"] for i in range(7)]

    def batches(self) -> list[CaptionBatch]:
        tokens = torch.tensor([self.vocabulary.encode("a red cat"), [START, 5, END, 0, 0]])
        return [
            CaptionBatch(
                self.images[i : i + 3],
                tokens[[0, 1, 0]][: len(self.images[i : i + 3])],
                torch.tensor([5, 3, 5]),
                References(self.references[i : i + 3]),
            )
            for i in range(0, 7, 3)
        ]

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.batches(), batch_size=None)  # pyright: ignore

    val_dataloader = test_dataloader = train_dataloader


def captioner() -> Captioner:
    def network(weights: None) -> AttentionDecoder:
        return set_to_reference(AttentionDecoder(width=4, hidden_size=8, weights=weights))

    return Captioner(network, 0.01, 0.0, beam_width=2, max_length=6)


def trainer(**options) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, **options,
    )  # fmt: skip


@pytest.fixture
def fitted() -> Captioner:
    model = captioner()
    trainer(max_epochs=1).fit(model, datamodule=Data())
    return model


def test_loss_is_the_mean_over_words_and_ends(fitted):
    fitted.eval()
    batch = Data().batches()[0]
    log_probabilities = fitted.network(batch.images, batch.tokens[:, :-1]).log_softmax(2)
    expected = [
        -log_probabilities[b, t, batch.tokens[b, t + 1]]
        for b in range(3)
        for t in range(int(batch.lengths[b]) - 1)
    ]
    assert len(expected) == 4 + 2 + 4
    torch.testing.assert_close(fitted._loss(batch).value(), torch.stack(expected).mean())


def test_scores_are_those_of_the_whole_set(fitted):
    data = Data()
    fitted.eval()
    said = [caption.split() for caption in fitted.describe(data.images)]
    references = [[split_words(text) for text in described] for described in data.references]
    (metrics,) = trainer().test(fitted, datamodule=data, verbose=False)
    assert metrics["test/bleu4"] == pytest.approx(bleu4(said, references), abs=1e-6)
    assert metrics["test/cider_d"] == pytest.approx(cider_d(said, references), abs=1e-6)
    assert fitted._found == [], "the next evaluation begins anew"


def test_a_fit_takes_the_words_of_the_data(fitted):
    assert fitted.vocabulary.words == WORDS.words
    assert fitted.network.classifier.out_features == len(WORDS)
    found = {
        word for caption in fitted.describe(torch.randn(9, 3, 16, 16)) for word in caption.split()
    }
    assert found <= set(WORDS.words[4:])


def test_a_checkpoint_holds_the_words(fitted, tmp_path):
    torch.save(fitted.state_dict(), tmp_path / "model.pt")
    other = captioner().eval()
    other.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    images = torch.randn(2, 3, 16, 16)
    assert other.describe(images) == fitted.eval().describe(images)
    assert other.vocabulary.words == WORDS.words


def test_the_same_words_again_keep_the_weights(fitted):
    """A checkpoint is loaded into a model that was fitted, to test it."""
    before = fitted.network.embedding.weight
    fitted.set_extra_state(list(WORDS.words))
    assert fitted.network.embedding.weight is before


def test_the_loss_of_an_untrained_network_is_that_of_a_guess():
    model = captioner()
    model.set_extra_state([*WORDS.words, *map(str, range(90))])
    loss = model.eval()._loss(Data().batches()[0]).value()
    assert loss.item() == pytest.approx(math.log(100), rel=0.2)
