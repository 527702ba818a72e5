"""Against an enumeration of all sentences of a small random model, whose state is all words so
far: a state that does not follow its sentence is seen."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from datamodules.coco.captions import END, PAD, SPECIAL_TOKENS, START
from models.networks.beam_search import States, beam_search

V = len(SPECIAL_TOKENS) + 3
LENGTH = 4
BATCH = 3


class Model:
    """The logits of the next word depend on the image and on every word so far, in order."""

    def __init__(self) -> None:
        self.table = torch.randn(997, V)

    def step(self, words: Tensor, states: States) -> tuple[Tensor, States]:
        (state,) = states
        code = (state.view(words.shape) * 31 + words + 1) % len(self.table)
        return self.table[code].clone(), (code.view(1, -1, 1),)

    def first(self) -> States:
        return (torch.arange(BATCH).view(1, BATCH, 1) * 101,)

    def sentences(self, image: int) -> Iterator[tuple[float, list[int]]]:
        """Every sentence of the image, finished or cut off, with its mean log-probability."""

        def continued(words: list[int], state: Tensor, total: float):
            last = words[-1] if words else START
            logits, (following,) = self.step(torch.tensor([[last]]), (state,))
            logits[..., [PAD, START, SPECIAL_TOKENS.index("<unk>")]] = -torch.inf
            for word, gain in enumerate(logits[0, 0].log_softmax(0).tolist()):
                if gain == -torch.inf:
                    continue
                sentence = [*words, word]
                if word == END or len(sentence) == LENGTH:
                    yield (total + gain) / len(sentence), sentence
                else:
                    yield from continued(sentence, following, total + gain)

        yield from continued([], self.first()[0][:, image : image + 1], 0.0)


def found(model: Model, width: int) -> list[list[int]]:
    """The sentences with their end, without padding."""
    rows = beam_search(model.step, model.first(), width, LENGTH).tolist()
    assert all(set(row[row.index(END) + 1 :]) <= {PAD} for row in rows if END in row)
    return [[word for word in row if word != PAD] for row in rows]


@pytest.mark.parametrize("seed", range(20))
def test_a_beam_that_holds_all_sentences_finds_the_best(seed):
    torch.manual_seed(seed)
    model = Model()
    expected = [max(model.sentences(image))[1] for image in range(BATCH)]
    assert found(model, width=V**LENGTH) == expected


@pytest.mark.parametrize("seed", range(5))
def test_a_beam_of_one_takes_the_best_word_each_time(seed):
    torch.manual_seed(seed)
    model = Model()
    for image, sentence in enumerate(found(model, width=1)):
        expected, state = [], (model.first()[0][:, image : image + 1],)
        while END not in expected and len(expected) < LENGTH:
            last = expected[-1] if expected else START
            logits, state = model.step(torch.tensor([[last]]), state)
            expected.append(
                max((END, *range(len(SPECIAL_TOKENS), V)), key=logits[0, 0].tolist().__getitem__)
            )
        assert sentence == expected


def test_wider_beams_find_better_sentences_on_the_whole():
    means = []
    for width in (1, 3, 20):
        torch.manual_seed(0)
        total = 0.0
        for _ in range(20):
            model = Model()
            for image, sentence in enumerate(found(model, width)):
                total += next(m for m, words in model.sentences(image) if words == sentence)
        means.append(total)
    assert means == sorted(means)
    assert means[0] < means[2]


def test_sentences_that_do_not_end_are_cut_off():
    def endless(words: Tensor, states: States) -> tuple[Tensor, States]:
        logits = torch.zeros(*words.shape, V)
        logits[..., END] = -1e9
        return logits, states

    assert beam_search(endless, (torch.zeros(1, 2, 1),), 2, 5).shape == (2, 5)
