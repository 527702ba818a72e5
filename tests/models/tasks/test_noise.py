import numpy as np
import torch

from models.tasks.noise import draw_normal


def test_numbers_are_normal_and_independent():
    drawn = draw_normal(torch.arange(8), 2**16)
    count = drawn.numel()
    assert drawn.mean().abs() < 4 / count**0.5
    for power, moment, variance in ((2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert (drawn**power).mean().sub(moment).abs() < 4 * (variance / count) ** 0.5
    correlations = torch.corrcoef(drawn).fill_diagonal_(0)
    assert correlations.abs().max() < 5 / 2**8
    for distance in (1, 2, 64, 4096):
        later, earlier = drawn[:, distance:], drawn[:, :-distance]
        assert (later * earlier).mean().abs() < 4 / (count - 8 * distance) ** 0.5


def test_they_are_made_of_the_bits_of_splitmix64():
    """In NumPy, which has integers without a sign."""
    seeds = np.array([1, 2**62 - 1], np.uint64)
    state = seeds[:, None] + np.arange(1, 1001, dtype=np.uint64) * np.uint64(0xD1B54A32D192ED03)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = (state ^ (state >> np.uint64(shift))) * np.uint64(factor)
    first, second = (
        (state >> np.uint64(shift)).astype(np.int64) % 2**24 / 2**24 for shift in (40, 16)
    )
    expected = np.sqrt(-2 * np.log(1 - first)) * np.cos(2 * np.pi * second)
    drawn = draw_normal(torch.tensor([1, 2**62 - 1]), 1000)
    torch.testing.assert_close(drawn, torch.from_numpy(expected).float(), rtol=1e-5, atol=1e-5)


def test_those_of_a_seed_are_the_same_in_every_batch():
    seeds = torch.tensor([3, 2**62 - 1, -5, 0])
    drawn = draw_normal(seeds, 100)
    assert drawn.isfinite().all()
    for i, seed in enumerate(seeds):
        assert torch.equal(draw_normal(seed[None], 50), drawn[i : i + 1, :50])
