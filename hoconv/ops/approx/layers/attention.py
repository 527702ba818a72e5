"""Multi-head attention whose products go through an approximate multiplier.

B batch, E features, H heads, D features of a head, L queries, S keys.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hoconv.dispatch.registration import check_dense
from hoconv.ops.approx.gradients import Gradient
from hoconv.ops.approx.layers.approximate import ApproxLinear, ApproxMatmul, Projection
from hoconv.ops.approx.sources.find import AnyMultiplier


class ApproxMultiheadAttention(nn.MultiheadAttention):
    """:class:`torch.nn.MultiheadAttention` whose multiplications are approximate: those of the
    projections, of queries with keys, and of their weights with values.

    Arguments, initialisation and parameters are those of that class. Biases, masks and the softmax
    are exact, and so is the factor 1 / sqrt(D) of the queries. The weights of a query that sees no
    key are zeros; that class has NaN for them where it returns weights.

    Args:
        embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first,
        device: as for :class:`torch.nn.MultiheadAttention`.
        multiplier, gradient, impl: as for :class:`hoconv.ApproxConv2d`, of all products.

    Modules: query, key, value: the products with the weights of the projections; scores, mix: those
    of two inputs (:class:`hoconv.ApproxMatmul`); out_proj. With a multiplier of integers each has a
    quantizer of its own.

    Shape:
        as of :class:`torch.nn.MultiheadAttention`, float32.

    Raises:
        ValueError: an argument is out of range; a shape does not fit; `is_causal` without
            `attn_mask`.
        TypeError: a mask that is neither of bool nor of floats.
        RuntimeError, NotImplementedError: as :class:`hoconv.ApproxConv2d`.
    """

    out_proj: nn.Linear  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        *,
        multiplier: AnyMultiplier = "mbm16",
        gradient: Gradient | None = None,
        impl: str = "auto",
        device: Any = None,
    ) -> None:
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim,
            batch_first, device,
        )  # fmt: skip
        options: Any = {"multiplier": multiplier, "gradient": gradient, "impl": impl}
        self.query, self.key, self.value = (
            Projection(embed_dim, **options, device=device) for _ in range(3)
        )
        self.scores, self.mix = (ApproxMatmul(**options, device=device) for _ in range(2))
        out = self.out_proj
        with torch.random.fork_rng(devices=[]):  # its own parameters are drawn, and go
            self.out_proj = ApproxLinear(embed_dim, embed_dim, bias, **options, device=device)
        self.out_proj.weight, self.out_proj.bias = out.weight, out.bias
        # PyTorch's encoders then call this module, and do not read its weights.
        self._qkv_same_embed_dim = False

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        for name, t in (("query", query), ("key", key), ("value", value)):
            check_dense(t, name)
            if t.dim() not in (2, 3) or t.dim() != query.dim():
                raise ValueError(
                    f"{name}: expected 3 dimensions, or 2 of all three without a batch, got shape "
                    f"{tuple(t.shape)}"
                )
        if is_causal and attn_mask is None:
            raise ValueError("is_causal: expected attn_mask, too, of which it is a hint")
        is_batch = query.dim() == 3
        if not is_batch:
            query, key, value = (t.unsqueeze(0) for t in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = (t.transpose(0, 1) for t in (query, key, value))
        self._check_sizes(query, key, value)
        mask = _join_masks(key_padding_mask, attn_mask, query, key, self.num_heads)

        q, k, v = self._project(query, key, value)
        added = 0
        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat((k, self.bias_k.expand(len(k), 1, -1)), 1)
            v = torch.cat((v, self.bias_v.expand(len(v), 1, -1)), 1)
            added += 1
        if self.add_zero_attn:
            k, v = (F.pad(t, (0, 0, 0, 1)) for t in (k, v))
            added += 1
        q, k, v = (t.unflatten(2, (self.num_heads, -1)).transpose(1, 2) for t in (q, k, v))
        scores = self.scores(q * self.head_dim**-0.5, k.mT)  # (B, H, L, S)
        if mask is None:
            weights = scores.softmax(-1)
        else:
            mask = F.pad(mask, (0, added))
            sees_none = mask.isneginf().all(-1, keepdim=True)
            weights = (scores + mask).masked_fill(sees_none, 0).softmax(-1)
            weights = weights.masked_fill(sees_none, 0)
        weights = F.dropout(weights, self.dropout, self.training)
        out = self.out_proj(self.mix(weights, v).transpose(1, 2).flatten(2))

        shown = None
        if need_weights:
            shown = weights.mean(1) if average_attn_weights else weights
        if not is_batch:
            return out.squeeze(0), None if shown is None else shown.squeeze(0)
        return out if self.batch_first else out.transpose(0, 1), shown

    def _check_sizes(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        batch, keys = key.shape[:2]
        expected = {
            "query": (query, batch, query.shape[1], self.embed_dim),
            "key": (key, batch, keys, self.kdim),
            "value": (value, batch, keys, self.vdim),
        }
        for name, (t, *shape) in expected.items():
            if [*t.shape] != shape:
                raise ValueError(
                    f"{name}: expected a batch of {shape[0]} with {shape[1]} vectors of {shape[2]} "
                    f"features, for keys of shape {tuple(key.shape)}; got {tuple(t.shape)}"
                )

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Returns queries (B, L, E), keys and values (B, S, E)."""
        rows = self.in_proj_weight
        weights = (
            (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            if rows is None
            else rows.chunk(3)
        )
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        products = (
            self.query(query, weights[0]),
            self.key(key, weights[1]),
            self.value(value, weights[2]),
        )
        return tuple(t if b is None else t + b for t, b in zip(products, biases, strict=True))


def _join_masks(
    padding: Tensor | None, pairs: Tensor | None, query: Tensor, key: Tensor, heads: int
) -> Tensor | None:
    """Returns what is added to the scores (B, H, L, S), where True of a mask is minus infinity.

    Args:
        padding: (B, S). pairs: (L, S) or (B * H, L, S). Either is of bool, or is added.
        query, key: (B, L, E) and (B, S, E).
    """
    (B, L), S = query.shape[:2], key.shape[1]
    added = []
    for name, mask, shapes in (
        ("key_padding_mask", padding, [(B, S)]),
        ("attn_mask", pairs, [(L, S), (B * heads, L, S)]),
    ):
        if mask is None:
            continue
        if mask.shape not in shapes:
            expected = " or ".join(map(str, shapes))
            raise ValueError(f"{name}: expected shape {expected}, got {tuple(mask.shape)}")
        if mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape, device=mask.device).masked_fill(mask, -torch.inf)
        elif not mask.is_floating_point():
            raise TypeError(
                f"{name}: expected bool, True for what is not seen, or floats, which are added; "
                f"got {mask.dtype}"
            )
        if name == "key_padding_mask":
            mask = mask[:, None, None]
        elif mask.dim() == 3:
            mask = mask.unflatten(0, (B, heads))
        added.append(mask)
    return sum(added[1:], added[0]) if added else None
