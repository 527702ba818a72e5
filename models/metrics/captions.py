"""Scores of generated captions against those that people wrote: BLEU-4 and CIDEr-D.

Sentences are sequences of words, as :func:`datamodules.coco.captions.split_words` splits them. All
functions take one candidate an image and, in the same order, that image's references.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from torchmetrics.functional.text import bleu_score

MAX_N = 4  # words in the longest n-gram
SIGMA = 6.0  # of CIDEr-D's penalty, words

Sentence = Sequence[str]
NGrams = Counter[tuple[str, ...]]


def bleu4(candidates: Sequence[Sentence], references: Sequence[Sequence[Sentence]]) -> float:
    """BLEU-4 of the whole corpus (Papineni et al., 2002, https://aclanthology.org/P02-1040).

    Computed by torchmetrics in float32. Of references equally near to the candidate in length the
    brevity penalty takes the shorter.

    Returns 0 ... 1; 0 where no n-gram of some length matches.

    Raises:
        ValueError: no images, an image without references, or not as many of both.
    """
    _check(candidates, references)
    # Of references equally near in length torchmetrics takes the first.
    sorted_references = [sorted(described, key=len) for described in references]
    score = bleu_score(
        [" ".join(candidate) for candidate in candidates],
        [[" ".join(reference) for reference in described] for described in sorted_references],
        n_gram=MAX_N,
    )
    return score.item()


def cider_d(candidates: Sequence[Sentence], references: Sequence[Sequence[Sentence]]) -> float:
    """CIDEr-D (Vedantam et al., 2015, https://arxiv.org/abs/1411.5726), as the scorer published
    with it computes it.

    A sentence is the vector of its n-grams' counts, each times log(images / images whose references
    have it). A candidate scores, for n from 1 to 4, the mean over its references of the vectors'
    cosine, counts clipped to the reference's, times exp(-(difference in length)^2 / (2 sigma^2));
    the mean of the four times 10 is averaged over the images.

    Returns 0 ... 10. N-grams that every image's references have weigh nothing: of a single image
    the score is 0.

    Raises:
        ValueError: as :func:`bleu4`.
    """
    _check(candidates, references)
    images_with: NGrams = Counter()
    for described in references:
        images_with.update({gram for r in described for n in _lengths() for gram in _ngrams(r, n)})
    total = math.log(len(references))

    def vector(sentence: Sentence, n: int) -> dict[tuple[str, ...], float]:
        return {
            gram: count * (total - math.log(max(1, images_with[gram])))
            for gram, count in _ngrams(sentence, n).items()
        }

    score = 0.0
    for candidate, described in zip(candidates, references, strict=True):
        for n in _lengths():
            found = vector(candidate, n)
            for reference in described:
                expected = vector(reference, n)
                clipped = sum(min(found.get(gram, 0.0), e) * e for gram, e in expected.items())
                norms = math.hypot(*found.values()) * math.hypot(*expected.values())
                penalty = math.exp(-((len(candidate) - len(reference)) ** 2) / (2 * SIGMA**2))
                score += penalty * clipped / norms / len(described) if norms else 0.0
    return 10 * score / MAX_N / len(candidates)


def _ngrams(sentence: Sentence, n: int) -> NGrams:
    return Counter(tuple(sentence[i : i + n]) for i in range(len(sentence) - n + 1))


def _lengths() -> Iterable[int]:
    return range(1, MAX_N + 1)


def _check(candidates: Sequence[Sentence], references: Sequence[Sequence[Sentence]]) -> None:
    if len(candidates) != len(references) or not candidates:
        raise ValueError(
            f"references: expected those of each of the {len(candidates)} candidates, at least "
            f"one candidate; got {len(references)}"
        )
    if not all(references):
        image = next(i for i, described in enumerate(references) if not described)
        raise ValueError(f"references: expected at least one an image, got none for image {image}")
    for sentence in (*candidates, *(r for described in references for r in described)):
        if isinstance(sentence, str):
            raise TypeError(
                f"candidates, references: expected sequences of words, got the string "
                f"{sentence!r}; split it with datamodules.coco.captions.split_words"
            )
