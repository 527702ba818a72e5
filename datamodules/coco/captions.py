"""Images with sentences that describe them. B batch, T tokens, S image size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from datamodules.census import Counts
from datamodules.coco import augmentation
from datamodules.coco.annotations.captions import Captions, split_words
from datamodules.coco.pixels import Images
from datamodules.reading.threads import FileSet

PAD, START, END, UNKNOWN = range(4)
SPECIAL_TOKENS = ("<pad>", "<start>", "<end>", "<unk>")
# T is a multiple of it, so that batches have few shapes: each costs a CUDA graph.
LENGTH_STEP = 4


class Vocabulary:
    """Numbers the words: 0 is padding, 1 starts a sentence, 2 ends it, 3 is every unknown word.

    Args:
        words: in the order of their numbers; the first four are `SPECIAL_TOKENS`.
    """

    def __init__(self, words: Sequence[str] = SPECIAL_TOKENS) -> None:
        self.words = list(words)
        self._numbers = {word: number for number, word in enumerate(self.words)}

    @classmethod
    def of(cls, texts: Iterable[str], min_count: int) -> Vocabulary:
        """Numbers the words that occur at least `min_count` times, the most frequent first."""
        counts = Counter(word for text in texts for word in split_words(text))
        frequent = sorted((-n, word) for word, n in counts.items() if n >= min_count)
        return cls([*SPECIAL_TOKENS, *(word for _, word in frequent)])

    def __len__(self) -> int:
        return len(self.words)

    def knows(self, text: str) -> bool:
        """Returns whether a word of a sentence has a number of its own."""
        return any(word in self._numbers for word in split_words(text))

    def encode(self, text: str) -> list[int]:
        """Returns the numbers of ``<start>``, the words of a sentence and ``<end>``."""
        return [START, *(self._numbers.get(word, UNKNOWN) for word in split_words(text)), END]

    def decode(self, numbers: Iterable[int]) -> str:
        """Returns the sentence, up to ``<end>`` where it occurs."""
        sentence = []
        for number in numbers:
            if number == END:
                break
            if number not in (PAD, START):
                sentence.append(self.words[number])
        return " ".join(sentence)


class References:
    """All captions of each image of a batch.

    It is no sequence to what walks through a batch for its tensors, as Lightning does in every
    step: in 64 images it would look at 320 sentences, for 5 ms.
    """

    def __init__(self, of_images: Sequence[list[str]]) -> None:
        self._of_images = of_images

    def __len__(self) -> int:
        return len(self._of_images)

    def __getitem__(self, image: int) -> list[str]:
        return self._of_images[image]

    def __iter__(self) -> Iterator[list[str]]:
        return iter(self._of_images)


class CaptionBatch(NamedTuple):
    """Images with one caption each.

    Attributes:
        images: (B, 3, S, S).
        tokens: (B, T) int64, each ``<start> words <end>``, then padding; T is the length of the
            longest, rounded up to a multiple of `LENGTH_STEP`.
        lengths: (B,) int64; ``<start>`` and ``<end>`` count, so that it is at least 2.
        references: all captions of each image.
    """

    images: Tensor
    tokens: Tensor
    lengths: Tensor
    references: References


class CaptionItem(NamedTuple):
    image: Tensor
    tokens: list[int]
    references: list[str]


class CaptionSet(FileSet[CaptionItem]):
    """An item for each caption; or, with `per_image`, for each image with its first caption.

    Images without captions are left out. With `augment`, an item that is asked for as (index, seed)
    changes in brightness and contrast; the seed determines how much. Nothing is mirrored, since
    captions say left and right.

    Args:
        numbers: of the images that are used, in the annotation file, int64.

    Attributes:
        numbers: of the images of the items, in the annotation file, (N,) int64.
    """

    def __init__(
        self,
        images: Images,
        captions: Captions,
        vocabulary: Vocabulary,
        numbers: np.ndarray,
        *,
        per_image: bool = False,
        augment: bool = False,
    ) -> None:
        self.images = images
        self.captions = captions
        self.vocabulary = vocabulary
        described = captions.images_of_annotations()
        annotations = np.arange(len(described))
        if per_image:
            _, annotations = np.unique(described, return_index=True)
        self._annotations = annotations[np.isin(described[annotations], numbers)]
        self.numbers = torch.from_numpy(described[self._annotations])
        self.augment = augment

    def __len__(self) -> int:
        return len(self._annotations)

    def census(self) -> Counts:
        """Returns what counts in the images: their captions of which a word is known."""
        numbers = np.unique(self.numbers.numpy())
        known = [self.vocabulary.knows(text) for text in self.captions.texts(numbers)]
        unknown = "caption{s} of unknown words alone"
        fix = (
            "data.min_count=1 makes every word of train known" if known else "use described images"
        )
        others = {unknown: len(known) - sum(known)}
        return Counts(len(numbers), sum(known), "caption", others=others, fix=fix)

    def __getitem__(self, item: int | tuple[int, int]) -> CaptionItem:
        index, seed = item if isinstance(item, tuple) else (item, None)
        number = int(self.numbers[index])
        image = self.images[number]
        if seed is not None and self.augment:
            (changes,) = augmentation.draw_colours(torch.tensor([seed]))
            image = augmentation.colour(image, changes)
        return CaptionItem(image, self.tokens(index), self.captions.of_image(number))

    def tokens(self, index: int) -> list[int]:
        """Returns the caption of an item, as the vocabulary encodes it."""
        return self.vocabulary.encode(self.captions.text(int(self._annotations[index])))

    def collate(self, items: Sequence[CaptionItem]) -> CaptionBatch:
        """Makes a batch of items."""
        tokens, lengths = pad([item.tokens for item in items])
        return CaptionBatch(
            images=torch.stack([item.image for item in items]),
            tokens=tokens,
            lengths=lengths,
            references=References([item.references for item in items]),
        )


def round_length(longest: int) -> int:
    """Returns T of a batch, from the length of its longest caption."""
    return -(-longest // LENGTH_STEP) * LENGTH_STEP


def pad(captions: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
    """Returns the tokens (B, T) and lengths (B,) of captions, as in a :class:`CaptionBatch`."""
    lengths = torch.tensor([len(caption) for caption in captions])
    tokens = torch.full((len(captions), round_length(int(lengths.amax()))), PAD)
    for row, caption in zip(tokens, captions, strict=True):
        row[: len(caption)] = torch.tensor(caption)
    return tokens, lengths
