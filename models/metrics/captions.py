"""Scores generated captions against those that people wrote: BLEU-4 and CIDEr-D.

A sentence is a sequence of words, from :func:`datamodules.coco.captions.split_words`. Both
functions take one candidate an image and, in the same order, the references of each image.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from torchmetrics.functional.text import bleu_score

MAX_N = 4  # words in the longest n-gram
SIGMA = 6.0  # of CIDEr-D's length penalty, in words

Sentence = Sequence[str]
NGrams = Counter[tuple[str, ...]]


def bleu4(candidates: Sequence[Sentence], references: Sequence[Sequence[Sentence]]) -> float:
    """BLEU-4 of the whole corpus (Papineni et al., 2002, https://aclanthology.org/P02-1040).

    torchmetrics computes it in float32. The brevity penalty compares a candidate with the reference
    of the nearest length, and with the shorter one of two that are equally near.

    Returns a number from 0 to 1; 0 where no n-gram of one of the lengths matches, and NaN where no
    reference has a word.

    Raises:
        ValueError: an image has no references, or the numbers of candidates and of images with
            references differ.
        TypeError: a sentence is a string.
    """
    _check(candidates, references)
    if not any(map(any, references)):
        return math.nan
    # torchmetrics takes the first of several references that are equally near in length.
    sorted_references = [sorted(described, key=len) for described in references]
    score = bleu_score(
        [" ".join(candidate) for candidate in candidates],
        [[" ".join(reference) for reference in described] for described in sorted_references],
        n_gram=MAX_N,
    )
    return score.item()


def cider_d(candidates: Sequence[Sentence], references: Sequence[Sequence[Sentence]]) -> float:
    """CIDEr-D (Vedantam et al., 2015, https://arxiv.org/abs/1411.5726), as computed by the scorer
    that was published with it.

    For each n from 1 to 4, a sentence is the vector of the counts of its n-grams. Each count is
    multiplied by log(number of images / number of images whose references contain the n-gram). A
    candidate and a reference score the cosine of their vectors, the candidate's counts clipped to
    the reference's, times exp(-(difference in length)^2 / (2 sigma^2)). The score is 10 times the
    mean over the references, over n and over the images.

    Returns a number from 0 to 10. N-grams that occur in the references of every image have the
    weight 0; where there are no others, as of a single image, the score is NaN.

    Raises:
        ValueError, TypeError: as :func:`bleu4`.
    """
    _check(candidates, references)
    images_with: NGrams = Counter()
    for described in references:
        images_with.update({gram for r in described for n in _lengths() for gram in _ngrams(r, n)})
    if all(count == len(references) for count in images_with.values()):
        return math.nan
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
    if len(candidates) != len(references):
        raise ValueError(
            f"references: expected as many as candidates; got {len(references)} for "
            f"{len(candidates)} candidates"
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
