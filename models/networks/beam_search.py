"""Beam search: finds probable sentences, word by word.

B batch, W beam width, V words of the vocabulary, T words, n features of a state.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from datamodules.coco.captions import END, PAD, START, UNKNOWN

States = tuple[Tensor, ...]
# Maps words (B, W) and states (..., B * W, n) to logits (B, W, V) of the next word and new states.
Step = Callable[[Tensor, States], tuple[Tensor, States]]


def beam_search(step: Step, states: States, width: int, max_length: int) -> Tensor:
    """Returns the best sentence of each image.

    Each step keeps the `width` best continuations of an image's sentences; finished sentences stay
    among them. The score is the mean log-probability of a word, the end included: the sum would
    favour short sentences. Padding, starts and unknown words are never chosen.

    Args:
        step: one step of the model.
        states: before the first word, (..., B, n).
        width: W; 1 is greedy search.
        max_length: number of words after which a sentence is cut off.

    Returns:
        (B, T) int64 without the start, padded after the end; T at most `max_length`.
    """
    device, batch = states[0].device, states[0].shape[-2]
    states = tuple(state.repeat_interleave(width, -2) for state in states)
    first_row = width * torch.arange(batch, device=device)[:, None]  # of each image
    sentences = torch.full((batch, width, 1), START, device=device)
    total = torch.full((batch, width), -torch.inf, device=device)
    total[:, 0] = 0  # all W are equal at first: only one is continued
    length = torch.zeros(batch, width, device=device)
    finished = torch.zeros(batch, width, dtype=torch.bool, device=device)
    for _ in range(max_length):
        logits, states = step(sentences[..., -1], states)
        logits[..., [PAD, START, UNKNOWN]] = -torch.inf
        gain = logits.float().log_softmax(2)
        gain[finished] = -torch.inf
        gain[..., PAD].masked_fill_(finished, 0)
        longer = length + ~finished
        mean = (total[..., None] + gain) / longer[..., None]
        best = mean.flatten(1).topk(width).indices  # (B, W), into W * V
        parent, word = best // logits.shape[2], best % logits.shape[2]
        sentences = sentences.gather(1, parent[..., None].expand_as(sentences))
        sentences = torch.cat((sentences, word[..., None]), 2)
        total = (total[..., None] + gain).flatten(1).gather(1, best)
        length = longer.gather(1, parent)
        finished = (word == END) | (word == PAD)
        rows = (first_row + parent).flatten()
        states = tuple(state.index_select(-2, rows) for state in states)
        if finished.all():
            break
    return sentences[:, 0, 1:]
