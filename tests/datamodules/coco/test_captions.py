import pytest
import torch
from torch.utils._pytree import tree_leaves

from datamodules.coco.captions import (
    END,
    LENGTH_STEP,
    PAD,
    START,
    UNKNOWN,
    Vocabulary,
    round_length,
    split_words,
)

TEXTS = ["A cat and a dog.", "a DOG, and a man's hat", "a cat: 2 dogs"]


def test_words_are_lower_case_without_punctuation():
    assert split_words('The man\'s "T-shirt", size 42 -- naïve_ .') == [
        "the", "man's", "t", "shirt", "size", "42", "naïve",
    ]  # fmt: skip


def test_vocabulary_is_ordered_by_frequency_then_alphabet():
    vocabulary = Vocabulary.of(TEXTS, min_count=2)
    assert vocabulary.words == ["<pad>", "<start>", "<end>", "<unk>", "a", "and", "cat", "dog"]
    assert len(vocabulary) == 8


def test_sentences_survive_but_for_rare_words():
    vocabulary = Vocabulary.of(TEXTS, min_count=2)
    tokens = vocabulary.encode("A dog and a ZEBRA")
    assert tokens == [START, 4, 7, 5, 4, UNKNOWN, END]
    assert vocabulary.decode([*tokens, PAD, 4]) == "a dog and a <unk>"
    assert vocabulary.decode([4, 6]) == "a cat"


def test_batches_are_padded_and_say_how_long_each_caption_is(both, load):
    data = load("captions", min_count=1, batch_size=5)
    batches = list(data.train_dataloader())
    assert [len(batch.images) for batch in batches] == [5, 5, 2], "a caption is an item"
    texts = []
    for batch in batches:
        assert batch.images.shape[1:] == (3, 8, 8)
        assert batch.tokens.dtype == batch.lengths.dtype == torch.int64
        assert batch.tokens.shape[1] == round_length(int(batch.lengths.max()))
        for tokens, length, references in zip(*batch[1:], strict=True):
            assert tokens[0] == START
            assert tokens[length - 1] == END
            assert (tokens[length:] == PAD).all()
            text = data.vocabulary.decode(tokens.tolist())
            assert text in [" ".join(split_words(reference)) for reference in references]
            assert len(references) == 2
            texts.append(text)
    expected = [f"a cat number {i}" for i in range(6)] + 6 * ["a cat and a small dog"]
    assert sorted(texts) == sorted(expected)


@pytest.mark.parametrize("words", range(1, 10))
def test_batches_have_few_lengths(both, load, words):
    for split in both.values():
        for caption in split.captions:
            caption["caption"] = " ".join(["word"] * words)
        split.write()
    (batch, *_) = load("captions", min_count=1).train_dataloader()
    assert set(batch.lengths.tolist()) == {words + 2}
    longest = batch.tokens.shape[1]
    assert longest % LENGTH_STEP == 0
    assert 0 <= longest - (words + 2) < LENGTH_STEP


def test_references_are_no_part_of_what_walks_a_batch(both, load):
    (batch, *_) = load("captions", min_count=1).train_dataloader()
    assert len(tree_leaves(batch)) == len(batch)


def test_evaluation_sees_each_image_once_with_all_its_captions(both, load):
    data = load("captions", min_count=1)
    (batch,) = data.val_dataloader()
    assert len(batch.images) == 3
    # Images are in the order of their ids, and these were given out from the highest.
    assert list(batch.references) == [
        [f"A cat, number {i}!", "a cat and a small dog"] for i in (2, 1, 0)
    ]


def test_words_of_validation_captions_are_not_learned(both, load):
    both["val"].caption(both["val"].images[0]["id"], "a zebra zebra zebra zebra zebra")
    both["val"].write()
    assert "zebra" not in load("captions", min_count=1).vocabulary.words


def test_captions_of_unreadable_images_are_left_out(both, load):
    (both["train"].folder / both["train"].images[2]["file_name"]).unlink()
    with pytest.warns(UserWarning, match="1 skipped, the file is missing"):
        data = load("captions", min_count=1)
    texts = [r for batch in data.train_dataloader() for r in batch.references]
    assert len(texts) == 10
    assert not any("A cat, number 2!" in references for references in texts)


def test_images_without_captions_are_left_out_and_counted(both, load):
    names = [both[split].images[-1]["file_name"] for split in ("train", "val")]
    for split in both.values():
        split.captions = [c for c in split.captions if c["image_id"] != split.images[-1]["id"]]
        split.write()
    with pytest.warns(UserWarning, match="1 skipped, the image has no caption"):
        data = load("captions", min_count=1)
    assert sum(len(batch.images) for batch in data.train_dataloader()) == 10
    assert sum(len(batch.images) for batch in data.val_dataloader()) == 2
    assert data.skipped == {
        f"captions_{split}2017.json": {"the image has no caption": [name]}
        for split, name in zip(("train", "val"), names, strict=True)
    }
