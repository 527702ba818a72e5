"""A network that describes an image in words.

It has a grid of image features, a recurrence over the words, and attention from each word to the
grid.

B batch, C channels, H height, W width, S positions of the grid, T words, V words of the vocabulary,
n hidden size.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from datamodules.coco.captions import SPECIAL_TOKENS
from hoconv import recurrent as rnn
from models.arguments import require_sizes
from models.networks.backbone import make_encoder
from models.networks.blocks import residual_high_order

State = tuple[Tensor, ...]  # h, c, and the image vector that joins each word; each (1, B, n)


@rnn.cell(state=("h", "c"))
def sentinel_lstm(x, h, c):
    """An LSTM with coupled gates and layer normalisation. It outputs h and the visual sentinel, a
    vector of what it knows without looking at the image."""
    f = rnn.sigmoid(rnn.layer_norm("norm_f", rnn.linear("f", x, h, bias=False)))
    g = rnn.tanh(rnn.layer_norm("norm_g", rnn.linear("g", x, h, bias=False)))
    o = rnn.sigmoid(rnn.linear("o", x, h))
    s = rnn.sigmoid(rnn.linear("s", x, h))
    c = f * c + (1 - f) * g
    h = o * rnn.tanh(c)
    return rnn.cat(h, s * rnn.tanh(c)), dict(h=h, c=c)


class Grid(NamedTuple):
    """The image features that the words attend to.

    Attributes:
        keys, values: (B, S, n).
        state: of the recurrence before the first word.
    """

    keys: Tensor
    values: Tensor
    state: State


class AttentionDecoder(nn.Module):
    """Adaptive attention with a visual sentinel (Lu et al., Knowing When to Look, CVPR 2017,
    https://arxiv.org/abs/1612.01887), with scaled dot products for scores.

    The inputs of the recurrence are the words, each joined with a vector of the mean of the grid.
    Attention follows the recurrence and is not part of it: in training all words run through one
    compiled loop, and then all attend at once. One residual high-order convolution filters the
    image, another one the encoder's coarsest features.

    Args:
        width: channels of the encoder at the finest resolution, doubled at each of the next four.
        depth: how often the encoder halves the resolution. A backbone does it five times.
        kernel_size: of the high-order convolutions.
        hidden_size: n, of the recurrence, the attention and the word vectors.
        dropout: the probability with which an element of a word vector, or of the vector that a
            word is predicted from, is set to zero in training.
        weights: the name of published weights, such as ``ResNet18_Weights.DEFAULT``: their ResNet
            from torchvision is the encoder. None: :class:`~models.networks.backbone.Encoder`.

    Shape: images (B, 3, H, W), floating point, and words (B, T) int64 to logits (B, T, V) of the
    word after each; H and W at least ``2 ** depth``. V is the argument of `set_vocabulary`.
    """

    def __init__(
        self,
        width: int = 16,
        depth: int = 3,
        kernel_size: int = 5,
        hidden_size: int = 128,
        dropout: float = 0.1,
        weights: str | None = None,
    ) -> None:
        super().__init__()
        require_sizes(width=width, depth=depth, kernel_size=kernel_size, hidden_size=hidden_size)
        self.hidden_size = hidden_size
        self.stem = residual_high_order(3, kernel_size)
        self.encoder = make_encoder(width, depth, weights)
        channels = self.encoder.channels[-1]
        self.gather = residual_high_order(channels, kernel_size)
        # Features of a residual layer grow, and would outweigh the word vectors.
        self.normalize = nn.BatchNorm2d(channels)
        self.keys_and_values = nn.Linear(channels, 2 * hidden_size)
        self.first_state = nn.Linear(channels, 3 * hidden_size)
        self.recurrence = rnn.RNN(sentinel_lstm, 2 * hidden_size, hidden_size, batch_first=True)
        self.query = nn.Linear(hidden_size, hidden_size)
        self.sentinel_key = nn.Linear(hidden_size, hidden_size)
        self.dropout = nn.Dropout(dropout)
        self.embedding = nn.Embedding(len(SPECIAL_TOKENS), hidden_size)
        self.classifier = nn.Linear(hidden_size, len(SPECIAL_TOKENS))

    def set_vocabulary(self, size: int) -> None:
        """Replaces the word vectors and the classifier's parameters by new ones for V = `size`
        words."""
        n, layer = self.hidden_size, self.classifier  # which may have become an approximate one
        self.embedding = nn.Embedding(size, n)
        layer.out_features = size
        layer.weight = nn.Parameter(layer.weight.new_empty(size, n))
        layer.bias = nn.Parameter(layer.bias.new_empty(size))
        layer.reset_parameters()

    def forward(self, images: Tensor, words: Tensor) -> Tensor:
        grid = self.look(images)
        outputs, _ = self.recur(words, grid.state)
        return self.attend(outputs, grid)

    def look(self, images: Tensor) -> Grid:
        """Computes the grid of images (B, 3, H, W)."""
        features = self.normalize(self.gather(self.encoder(self.stem(images))[-1]))
        positions = features.flatten(2).mT  # (B, S, C)
        keys, values = self.keys_and_values(positions).chunk(2, dim=2)
        state = self.first_state(positions.mean(1))[None].chunk(3, dim=2)
        return Grid(keys, values, state)

    def recur(self, words: Tensor, state: State) -> tuple[Tensor, State]:
        """Runs words (B, T) through the recurrence; returns the hidden states and sentinels
        (B, T, 2 n), and the state after the last word."""
        h, c, image = state
        vectors = self.dropout(self.embedding(words))  # (B, T, n)
        x = torch.cat((vectors, image[0][:, None].expand_as(vectors)), 2)
        outputs, (h, c) = self.recurrence(x, (h, c))
        return outputs, (h, c, image)

    def attend(self, outputs: Tensor, grid: Grid) -> Tensor:
        """Attends from each of the hidden states and sentinels (B, T, 2 n) to the grid; returns the
        logits (B, T, V)."""
        hidden, sentinel = outputs.chunk(2, dim=2)
        query = self.query(hidden)
        of_positions = query @ grid.keys.mT  # (B, T, S)
        of_sentinel = (query * self.sentinel_key(sentinel)).sum(2, keepdim=True)
        scores = torch.cat((of_positions, of_sentinel), 2) / math.sqrt(self.hidden_size)
        weights = scores.softmax(2)
        seen = weights[..., :-1] @ grid.values + weights[..., -1:] * sentinel
        return self.classifier(self.dropout(seen + hidden))
