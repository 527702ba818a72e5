"""Associative recall: sequences that are generated, a test of a recurrent network's memory.

N sequences, P pairs, K keys, V values.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from datamodules.images import ImageDataModule
from datamodules.memory import LabelledImages

EVALUATED = 2000  # sequences that validate, and that test
SPLIT_SEEDS = {"train": 0, "val": 1, "test": 2}  # not the seed of the run: the same for every run


class Recall(ImageDataModule):
    """Sequences of pairs of a key and a value, and of one of the keys; the class is its value.

    After k1 v1 k2 v2 ... and, say, k2 the answer is v2: a network has to keep what it saw together
    (Ba et al., Using Fast Weights to Attend to the Recent Past, 2016). The keys of a sequence are
    different ones, and all are drawn uniformly; guessing is right once in V times.

    A batch has pictures whose rows are the steps, one-hot: (B, 1, 2 P + 1, K + V) float32, and the
    values (B,) int64. Networks that read rows read a sequence.

    Args:
        pairs: P, up to K.
        keys, values: K and V, at least 2.
        size: sequences to train on; 2,000 more validate and 2,000 test.
        batch_size, seed, device: as of :class:`ImageDataModule`.

    Raises:
        ValueError: an argument is out of range.
    """

    # One-hot numbers stay as they are.
    pixel_max = 1
    pixel_mean = 0.0
    pixel_std = 1.0

    def __init__(
        self,
        pairs: int,
        keys: int,
        values: int,
        size: int,
        batch_size: int,
        seed: int = 0,
        device: str = "auto",
    ) -> None:
        super().__init__(batch_size, seed, device)
        for name, number, least in (("keys", keys, 2), ("values", values, 2), ("size", size, 1)):
            if number < least:
                raise ValueError(f"{name}: expected at least {least}, got {number}")
        if not 1 <= pairs <= keys:
            raise ValueError(
                f"pairs: expected 1 to {keys}, as many as there are different keys; got {pairs}"
            )
        self.pairs, self.keys, self.values = pairs, keys, values
        self.size = size

    @property
    def image_shape(self) -> tuple[int, int, int]:  # pyright: ignore
        return 1, 2 * self.pairs + 1, self.keys + self.values

    @property
    def num_classes(self) -> int:  # pyright: ignore
        return self.values

    @property
    def class_names(self) -> tuple[str, ...]:  # pyright: ignore
        return tuple(str(value) for value in range(self.values))

    def load(self) -> dict[str, LabelledImages]:
        sizes = {"train": self.size, "val": EVALUATED, "test": EVALUATED}
        return {name: self._generate(sizes[name], seed) for name, seed in SPLIT_SEEDS.items()}

    def _generate(self, size: int, seed: int) -> LabelledImages:
        generator = torch.Generator().manual_seed(seed)
        keys = torch.rand(size, self.keys, generator=generator).argsort(1)[:, : self.pairs]
        values = torch.randint(self.values, (size, self.pairs), generator=generator)
        asked = torch.randint(self.pairs, (size, 1), generator=generator)
        pairs = torch.stack([keys, values + self.keys], 2).flatten(1)  # (N, 2 P)
        steps = torch.cat([pairs, keys.gather(1, asked)], 1)
        rows = F.one_hot(steps, self.keys + self.values).to(torch.uint8)
        return LabelledImages(rows.unsqueeze(1), values.gather(1, asked).squeeze(1))
