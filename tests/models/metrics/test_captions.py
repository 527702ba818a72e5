"""Against values worked out by hand from the published definitions; letters stand for words."""

import functools
import math
import operator
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.metrics.captions import bleu4, cider_d

sentences = st.lists(st.sampled_from("abcde"), max_size=8)
corpora = st.lists(st.tuples(sentences, st.lists(sentences, min_size=1, max_size=3)), min_size=1)


def split(texts: list[str]) -> list[list[str]]:
    return [text.split() for text in texts]


@pytest.mark.parametrize(
    ("candidates", "references", "expected"),
    [
        # all n-grams match
        (["a b c d e"], [["a b c d e"]], 1.0),
        # 4 of 5 words, 3 of 4 pairs, 2 of 3 triples, 1 of 2 quadruples
        (["a b c d e"], [["a b c d f"]], (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25),
        # too short: exp(1 - 6 / 4)
        (["a b c d"], [["a b c d e f"]], math.exp(-0.5)),
        # too long costs precision only: 4/6, 3/5, 2/4, 1/3
        (["a b c d e f"], [["a b c d"]], (4 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25),
        # of two references as near in length the shorter counts: no penalty
        (["a b c d"], [["a b c", "a b c d e"]], 1.0),
        # an n-gram matches as often as the reference has it: 4/8, 3/7, 2/6, 1/5
        (["a b c d a b c d"], [["a b c d"]], (4 / 8 * 3 / 7 * 2 / 6 * 1 / 5) ** 0.25),
        # ... as the one that has it most often, not as all together: of "a a" one a is matched
        (["a a b c d"], [["a b c d", "x a b c d"]], (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25),
        # n-grams of several references: b c d of the first, the rest of the second
        (["a b c d e"], [["b c d e x", "a b c d y"]], 1.0),
        # sums over the corpus, not the mean of sentences: 8/9, 6/7, 4/5, 2/3
        (["a b c d e", "a b c d"], [["a b c d f"], ["a b c d"]],
         (8 / 9 * 6 / 7 * 4 / 5 * 2 / 3) ** 0.25),
        # the penalty, too, is of the sums: 5 + 4 words against 4 + 5
        (["a b c d e", "a b c d"], [["a b c d"], ["a b c d e"]],
         (8 / 9 * 6 / 7 * 4 / 5 * 2 / 3) ** 0.25),
        (["a b c"], [["a b c"]], 0.0),
        ([""], [["a b c d"]], 0.0),
    ],
)  # fmt: skip
def test_bleu4(candidates, references, expected):
    score = bleu4(split(candidates), [split(described) for described in references])
    assert score == pytest.approx(expected, rel=1e-6)


def defined_bleu4(candidates: list[list[str]], references: list[list[list[str]]]) -> float:
    """BLEU-4 as the paper defines it, in float64; NaN where no reference has a word."""
    if not any(map(any, references)):
        return math.nan
    matches, counts = [0] * 4, [0] * 4
    length = nearest = 0
    for candidate, described in zip(candidates, references, strict=True):
        length += len(candidate)
        nearest += min((len(r) for r in described), key=lambda n: (abs(n - len(candidate)), n))
        for n in range(4):
            found = ngrams(candidate, n + 1)
            most = functools.reduce(operator.or_, (ngrams(r, n + 1) for r in described))
            matches[n] += (found & most).total()
            counts[n] += found.total()
    if 0 in matches:
        return 0.0
    precisions = (m / c for m, c in zip(matches, counts, strict=True))
    return min(1.0, math.exp(1 - nearest / length)) * math.prod(precisions) ** 0.25


def ngrams(sentence: list[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(sentence[i : i + n]) for i in range(len(sentence) - n + 1))


@pytest.mark.parametrize("words", [2, 4, 8])
def test_bleu4_of_random_sentences_is_as_defined(words):
    generator = random.Random(words)

    def sentence() -> list[str]:
        return [f"w{generator.randrange(words)}" for _ in range(generator.randrange(14))]

    positive = 0
    for _ in range(200):
        images = generator.randrange(1, 10)
        candidates = [sentence() for _ in range(images)]
        references = [[sentence() for _ in range(generator.randrange(1, 4))] for _ in candidates]
        expected = defined_bleu4(candidates, references)
        assert bleu4(candidates, references) == pytest.approx(expected, rel=1e-6, nan_ok=True)
        positive += expected > 0
    assert positive > 4


ONE_WORD = math.exp(-1 / 72)  # the penalty for a difference in length of one word, sigma = 6


@pytest.mark.parametrize(
    ("candidates", "references", "expected"),
    [
        # "a" is in both images' references and weighs nothing; b, c, "a b", "a c" weigh log 2.
        # The first candidate: cosine 1 for n = 1 and 2, and there are no triples: (1 + 1) / 4.
        # The second: its d and "a d" match nothing.
        (["a b", "a d"], [["a b"], ["a c"]], 10 * (2 / 4 + 0) / 2),
        # b twice against once, clipped to once: 1 * 1 / (2 * 1); pairs "a b", "b b": 1 / sqrt 2
        (["a b b", "a d"], [["a b"], ["a c"]],
         10 * (1 / 2 + 1 / math.sqrt(2)) / 4 * ONE_WORD / 2),
        # the other way round nothing is clipped: 2 / (1 * 2); "a b": 1 / sqrt 2
        (["a b", "a d"], [["a b b"], ["a c"]],
         10 * (1 + 1 / math.sqrt(2)) / 4 * ONE_WORD / 2),
        # the mean over references: "a b" gives 1 + 1, "b" gives 1 for n = 1, one word shorter
        (["a b", "a d"], [["a b", "b"], ["a c"]], 10 * (2 + ONE_WORD) / 2 / 4 / 2),
        # of three images b is in two: it weighs log 3/2, c log 3: b c against c:
        # cosine log 3 / sqrt(log(3/2)^2 + log(3)^2)
        (["b c", "x", "x"], [["c"], ["b"], ["b"]],
         10 * math.log(3) / math.hypot(math.log(1.5), math.log(3)) / 4 * ONE_WORD / 3),
        # four words that are nowhere else: all four cosines are 1
        (["p q r s", "a"], [["p q r s"], ["b"]], 10 * 1 / 2),
        (["", ""], [["a"], ["b"]], 0.0),
    ],
)  # fmt: skip
def test_cider_d(candidates, references, expected):
    score = cider_d(split(candidates), [split(described) for described in references])
    assert score == pytest.approx(expected, abs=1e-12)


@given(corpora)
def test_scores_are_in_their_ranges(corpus):
    candidates, references = zip(*corpus)
    scores = bleu4(candidates, references), cider_d(candidates, references)
    assert all(math.isnan(score) or score >= 0 for score in scores)
    assert not any(score > most + 1e-9 for score, most in zip(scores, (1, 10)))


@given(corpora, st.randoms())
def test_the_order_of_images_and_of_references_does_not_matter(corpus, random):
    def scores() -> tuple[float, float]:
        candidates, references = zip(*corpus)
        return bleu4(candidates, references), cider_d(candidates, references)

    before = scores()
    random.shuffle(corpus)
    for _, described in corpus:
        random.shuffle(described)
    assert scores() == pytest.approx(before, nan_ok=True)


@pytest.mark.parametrize("score", [bleu4, cider_d])
@pytest.mark.parametrize("references", [[], [[""]], [["", ""], [""]]])
def test_a_score_of_references_without_words_is_no_number(score, references):
    candidates = [["a"] for _ in references]
    assert math.isnan(score(candidates, [split(described) for described in references]))


@pytest.mark.parametrize("references", [[["a b c d"]], [["a b"], ["a b"]]])
def test_cider_d_is_no_number_where_nothing_is_particular_to_an_image(references):
    candidates = [["a", "b"] for _ in references]
    assert math.isnan(cider_d(candidates, [split(described) for described in references]))


@pytest.mark.parametrize("score", [bleu4, cider_d])
@pytest.mark.parametrize(
    ("candidates", "references", "message"),
    [
        ([["a"]], [], "as many as candidates.*got 0 for 1 candidates"),
        ([["a"], ["b"]], [[["a"]], []], "none for image 1"),
    ],
)
def test_what_does_not_fit_is_an_error(score, candidates, references, message):
    with pytest.raises(ValueError, match=message):
        score(candidates, references)


@pytest.mark.parametrize("score", [bleu4, cider_d])
def test_strings_are_not_taken_for_sequences_of_letters(score):
    with pytest.raises(TypeError, match="sequences of words"):
        score(["a cat"], [["a cat"]])
