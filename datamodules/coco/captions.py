"""Images with sentences that describe them. B batch, T time steps, S image size."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from torchvision.transforms import v2

from datamodules.coco.annotations import Captions
from datamodules.coco.pixels import Images

PAD, START, END, UNKNOWN = range(4)
MARKS = ("<pad>", "<start>", "<end>", "<unk>")


def words(text: str) -> list[str]:
    """The words of a sentence in lower case, without punctuation: ``a man's dog`` has three."""
    return re.findall(r"[^\W_]+(?:'[^\W_]+)*", text.lower())


class Vocabulary:
    """Words by number; 0 is padding, 1 starts and 2 ends a sentence, and 3 stands for every other
    word.

    Args:
        words: by their numbers, the first four as in `MARKS`.
    """

    def __init__(self, words: Sequence[str] = MARKS) -> None:
        self.words = list(words)
        self._numbers = {word: number for number, word in enumerate(self.words)}

    @classmethod
    def of(cls, texts: Iterable[str], min_count: int) -> Vocabulary:
        """The words of sentences that occur at least `min_count` times, the most frequent first."""
        counts = Counter(word for text in texts for word in words(text))
        frequent = sorted((-n, word) for word, n in counts.items() if n >= min_count)
        return cls([*MARKS, *(word for _, word in frequent)])

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, text: str) -> list[int]:
        """The numbers of the words of a sentence, between those of its start and its end."""
        return [START, *(self._numbers.get(word, UNKNOWN) for word in words(text)), END]

    def decode(self, numbers: Iterable[int]) -> str:
        """The sentence up to its end, if it has one."""
        sentence = []
        for number in numbers:
            if number == END:
                break
            if number not in (PAD, START):
                sentence.append(self.words[number])
        return " ".join(sentence)


class CaptionBatch(NamedTuple):
    """Images and a caption of each.

    Attributes:
        images: (B, 3, S, S).
        tokens: (B, T) int64, each ``<start> words <end>``, then padding.
        lengths: (B,) int64, on the CPU, with start and end: at least 2.
        references: all captions of each image.
    """

    images: Tensor
    tokens: Tensor
    lengths: Tensor
    references: list[list[str]]


class CaptionItem(NamedTuple):
    image: Tensor
    tokens: list[int]
    references: list[str]


class CaptionSet(Dataset[CaptionItem]):
    """An item for each caption; or, with `per_image`, for each image with its first caption.

    Images without captions are left out, as are those that cannot be read. For an index and a seed,
    with `augment`, brightness and contrast change at random; nothing is mirrored, since captions
    say left and right.
    """

    def __init__(
        self,
        images: Images,
        captions: Captions,
        vocabulary: Vocabulary,
        *,
        per_image: bool = False,
        augment: bool = False,
    ) -> None:
        self.images = images
        self.captions = captions
        self.vocabulary = vocabulary
        of_annotations = captions.images_of_annotations()
        annotations = np.arange(len(of_annotations))
        if per_image:
            _, annotations = np.unique(of_annotations, return_index=True)
        self._annotations = annotations[np.isin(of_annotations[annotations], images.usable)]
        self._images = of_annotations[self._annotations]
        self.augment = augment
        self.augmentation = v2.ColorJitter(brightness=0.2, contrast=0.2)

    def __len__(self) -> int:
        return len(self._annotations)

    def __getitem__(self, item: int | tuple[int, int]) -> CaptionItem:
        index, seed = item if isinstance(item, tuple) else (item, None)
        number = int(self._images[index])
        image = self.images[number]
        if seed is not None and self.augment:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                image = self.augmentation(image)
        text = self.captions.text(int(self._annotations[index]))
        references = self.captions.of_image(number)
        return CaptionItem(image, self.vocabulary.encode(text), references)


def collate(items: Sequence[CaptionItem]) -> CaptionBatch:
    tokens = [torch.tensor(item.tokens) for item in items]
    return CaptionBatch(
        images=torch.stack([item.image for item in items]),
        tokens=pad_sequence(tokens, batch_first=True, padding_value=PAD),
        lengths=torch.tensor([len(t) for t in tokens]),
        references=[item.references for item in items],
    )
