"""Lightweight and dynamic convolutions over time as layers.

B batch, C channels, H heads, K taps, T time steps, n steps at once.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hoconv.dispatch.implementations import check_name
from hoconv.dispatch.registration import (
    FixedAttributes,
    check_dense,
    computes_as_made,
    get_parameter,
)
from hoconv.ops.dynamic_conv1d.composed import arrange
from hoconv.ops.dynamic_conv1d.operator import OPERATOR, dynamic_conv1d, generate_and_convolve


class _Conv1d(FixedAttributes):
    """The part that both layers share: everything except how the weights are made."""

    operator = OPERATOR
    fixed = "channels", "kernel_size", "heads"

    def __init__(
        self,
        channels: int,
        kernel_size: int,
        heads: int,
        padding: str,
        softmax: bool,
        weight_dropout: float,
        bias: bool,
        impl: str,
    ) -> None:
        super().__init__()
        if channels < 1:
            raise ValueError(f"channels: expected at least 1, got {channels}")
        if kernel_size < 1:
            raise ValueError(f"kernel_size: expected at least 1, got {kernel_size}")
        if heads < 1 or channels % heads:
            raise ValueError(f"heads: expected a divisor of channels={channels}, got {heads}")
        _check_padding(padding)
        if not 0 <= weight_dropout < 1:
            raise ValueError(
                f"weight_dropout: expected a probability from 0 to less than 1, "
                f"got {weight_dropout}"
            )
        check_name(OPERATOR, impl)
        self.channels = channels
        self.kernel_size = kernel_size
        self.heads = heads
        self.padding = padding
        self.softmax = softmax
        self.weight_dropout = weight_dropout
        self.impl = impl
        self.bias = nn.Parameter(torch.zeros(channels)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        check_dense(x)
        if x.dim() != 3 or x.shape[1] != self.channels:
            raise ValueError(f"x: expected (B, {self.channels}, T), got shape {tuple(x.shape)}")
        return self._add_bias(self._compute(x))

    def _compute(self, x: Tensor) -> Tensor:
        """Computes the output for x (B, C, T), without the bias."""
        return self._convolve(x, self._make_weight(x))

    def initial_state(self, batch: int) -> Tensor:
        """Returns the state before the first step: (batch, C, K - 1) zeros, like the padding."""
        like = next(self.parameters())
        return like.new_zeros(batch, self.channels, self.kernel_size - 1)

    def step(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Computes the next outputs of a sequence that comes step by step.

        The layer keeps no state. The state is the last K - 1 inputs; a beam search reorders it by
        indexing its first dimension.

        Args:
            x: (B, C), the next step, or (B, C, n), the next n.
            state: (B, C, K - 1), from :meth:`initial_state` or from the step before.

        Returns:
            The output, in the shape of x and equal to that of a call with the whole sequence; and
            the state for the next step.

        Raises:
            ValueError: the padding is not causal, so that an output depends on later steps; or a
                shape does not fit.
        """
        if self.padding != "causal":
            raise ValueError(
                f"step: needs padding='causal', got {self.padding!r}: its outputs depend on later "
                f"steps"
            )
        steps = x.unsqueeze(2) if x.dim() == 2 else x
        if steps.dim() != 3 or steps.shape[1] != self.channels:
            raise ValueError(
                f"x: expected (B, {self.channels}) or (B, {self.channels}, n), "
                f"got shape {tuple(x.shape)}"
            )
        before = self.kernel_size - 1
        expected = (x.shape[0], self.channels, before)
        if tuple(state.shape) != expected:
            raise ValueError(f"state: expected shape {expected}, got {tuple(state.shape)}")
        inputs = torch.cat((state, steps), 2)
        weight = self._make_weight(steps)
        if weight.shape[3] != 1:  # the state's outputs are dropped: any weights do
            weight = F.pad(weight, (before, 0))
        out = self._add_bias(self._convolve(inputs, weight)[..., before:])
        return out.reshape(x.shape), inputs[..., steps.shape[2] :]

    def _make_weight(self, x: Tensor) -> Tensor:
        """Computes the operator's weights for x (B, C, T): (B or 1, H, K, T or 1)."""
        raise NotImplementedError

    def _drop(self, weight: Tensor) -> Tensor:
        """Applies DropConnect, in training."""
        return F.dropout(weight, self.weight_dropout) if self._drops() else weight

    def _drops(self) -> bool:
        # In this order: a graph of torch.compile is of one mode if it has read the mode.
        return self.weight_dropout > 0 and self.training

    def _padding(self) -> int:
        _check_padding(self.padding)
        before = self.kernel_size - 1
        return before if self.padding == "causal" else before // 2

    def _convolve(self, x: Tensor, weight: Tensor) -> Tensor:
        return dynamic_conv1d(x, weight, padding=self._padding(), impl=self.impl)

    def _add_bias(self, out: Tensor) -> Tensor:
        bias = get_parameter(self, "bias")
        if bias is None:
            return out
        _check_shape("bias", bias, self.channels)
        return out + bias.to(out.dtype).unsqueeze(1)

    def extra_repr(self) -> str:
        return (
            f"{self.channels}, kernel_size={self.kernel_size}, heads={self.heads}, "
            f"padding={self.padding!r}, softmax={self.softmax}, "
            f"weight_dropout={self.weight_dropout}, bias={self.bias is not None}, "
            f"impl={self.impl!r}"
        )


class LightweightConv1d(_Conv1d):
    """A depthwise convolution over time whose H kernels are normalised and shared by channels.

    The same kernels at every step: ``out[b, c, t] = sum over j of w[h(c), j] * x[b, c, t + j - p]``
    with ``w = softmax(weight, dim=1)`` and ``h(c) = c // (C / H)``. From Wu et al., Pay Less
    Attention with Lightweight and Dynamic Convolutions, ICLR 2019, section 3.

    Args:
        channels: C, of the input and of the output.
        kernel_size: K, at least 1.
        heads: H, dividing `channels`: consecutive channels of a head share a kernel.
        padding: ``"causal"``: an output depends on its own step and those before, as in a decoder;
            ``"same"``: centred, as in an encoder. With an even K ``"same"`` pads (K - 1) // 2 steps
            before and one more after, as PyTorch does.
        softmax: whether the taps of a kernel are normalised: positive, with sum one.
        weight_dropout: DropConnect: the probability with which, in training, a normalised weight is
            zero; the others are scaled by 1 / (1 - weight_dropout). One draw per call, for all
            sequences and steps.
        bias: whether a bias is added to the output.
        impl: ``"auto"``, ``"reference"``, ``"cpp"``, ``"triton"`` or ``"cuda"``.

    Parameters: weight (H, K), bias (C).

    Shape:
        input (B, C, T) -> output (B, C, T).

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        channels: int,
        kernel_size: int,
        *,
        heads: int = 1,
        padding: Literal["causal", "same"] = "causal",
        softmax: bool = True,
        weight_dropout: float = 0.0,
        bias: bool = False,
        impl: str = "auto",
    ) -> None:
        super().__init__(channels, kernel_size, heads, padding, softmax, weight_dropout, bias, impl)
        self.weight = nn.Parameter(torch.empty(heads, kernel_size))
        # With the fans of a depthwise convolution's weight, (H, 1, K).
        nn.init.xavier_uniform_(self.weight.detach().unsqueeze(1))

    def _make_weight(self, x: Tensor) -> Tensor:
        weight = get_parameter(self, "weight")
        _check_shape("weight", weight, self.heads, self.kernel_size)
        weight = weight.view(1, self.heads, self.kernel_size, 1)
        return self._drop(weight.softmax(2) if self.softmax else weight)


class DynamicConv1d(_Conv1d):
    """A convolution over time whose kernels are generated, for every step, from that step's input.

    ``out[b, c, t] = sum over j of w[b, h(c), j, t] * x[b, c, t + j - p]`` with
    ``w[b, h, :, t] = softmax(generator(x[b, :, t])[h * K : (h + 1) * K])`` and
    ``h(c) = c // (C / H)``. From Wu et al., Pay Less Attention with Lightweight and Dynamic
    Convolutions, ICLR 2019, section 4.

    Args:
        channels: C, of the input and of the output.
        kernel_size: K, at least 1.
        heads: H, dividing `channels`: consecutive channels of a head share a kernel.
        padding: ``"causal"``: an output depends on its own step and those before, as in a decoder;
            ``"same"``: centred, as in an encoder. With an even K ``"same"`` pads (K - 1) // 2 steps
            before and one more after, as PyTorch does.
        softmax: whether the taps of a kernel are normalised: positive, with sum one.
        weight_dropout: DropConnect: the probability with which, in training, a normalised weight is
            zero; the others are scaled by 1 / (1 - weight_dropout).
        bias: whether a bias is added to the output.
        generator_bias: whether the generator has a bias.
        impl: ``"auto"``, ``"reference"``, ``"cpp"``, ``"triton"`` or ``"cuda"``.

    The kernels are generated and applied in one op. A generator that has hooks, as pruning adds
    them, or that another module has replaced, is called, and :func:`hoconv.dynamic_conv1d` applies
    what it returns, (B, T, H * K); so is every generator while weights are dropped.

    Parameters: generator.weight (H * K, C), generator.bias (H * K), bias (C).

    Shape:
        input (B, C, T) -> output (B, C, T).

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        channels: int,
        kernel_size: int,
        *,
        heads: int = 1,
        padding: Literal["causal", "same"] = "causal",
        softmax: bool = True,
        weight_dropout: float = 0.0,
        bias: bool = False,
        generator_bias: bool = False,
        impl: str = "auto",
    ) -> None:
        super().__init__(channels, kernel_size, heads, padding, softmax, weight_dropout, bias, impl)
        self.generator = nn.Linear(channels, heads * kernel_size, bias=generator_bias)
        nn.init.xavier_uniform_(self.generator.weight)

    def _compute(self, x: Tensor) -> Tensor:
        generator: Any = self._modules["generator"]  # sooner than by Module.__getattr__
        if self._drops() or not computes_as_made(generator, nn.Linear):
            return super()._compute(x)
        weight, bias = get_parameter(generator, "weight"), get_parameter(generator, "bias")
        generated = self.heads * self.kernel_size
        _check_shape("generator.weight", weight, generated, self.channels)
        if bias is not None:
            _check_shape("generator.bias", bias, generated)
        return generate_and_convolve(
            x, weight, bias, self.heads, self._padding(), self.softmax, self.impl
        )

    def _make_weight(self, x: Tensor) -> Tensor:
        generated = self.generator(x.mT)
        expected = x.shape[0], x.shape[2], self.heads * self.kernel_size
        _check_shape("what the generator returns", generated, *expected)
        return self._drop(arrange(generated, self.heads, self.softmax))


def _check_padding(padding: str) -> None:
    if padding not in ("causal", "same"):
        raise ValueError(f"padding: expected 'causal' or 'same', got {padding!r}")


def _check_shape(name: str, tensor: Tensor, *expected: int) -> None:
    if tensor.shape != expected:
        raise ValueError(f"{name}: expected shape {expected}, got {tuple(tensor.shape)}")
