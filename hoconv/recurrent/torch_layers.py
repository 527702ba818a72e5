"""LSTM and GRU with the arguments and the state dicts of torch.nn's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hoconv.recurrent import cells
from hoconv.recurrent.cells import gated
from hoconv.recurrent.layers import RNN


class _LikePyTorch(RNN):
    """A layer that also takes the state dict of its namesake in torch.nn."""

    _gates: tuple[tuple[str, str], ...]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        for _, suffix in self.runs:
            if self._is_whole(state_dict, prefix, suffix):
                self._convert(state_dict, prefix, suffix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _is_whole(self, state_dict: Any, prefix: str, suffix: str) -> bool:
        """Returns whether nn's parameters of a layer and direction are all there, and of these
        gates; where they are not, PyTorch says which are missing and which are unexpected."""
        weights, biases = (
            [state_dict.get(f"{prefix}{name}_{of}{suffix}") for of in ("ih", "hh")]
            for name in ("weight", "bias")
        )
        missing = [sum(each is None for each in of) for of in (weights, biases)]
        rows = {len(each) % len(self._gates) for each in (*weights, *biases) if each is not None}
        return missing in ([0, 0], [0, 2]) and rows == {0}

    def _convert(self, state_dict: Any, prefix: str, suffix: str) -> None:
        """Converts nn's weights and biases of one layer and direction to the cell's parameters."""

        def blocks(name: str) -> tuple[Tensor, ...]:
            return state_dict.pop(f"{prefix}{name}{suffix}").chunk(len(self._gates))

        def put(name: str, value: Tensor) -> None:
            state_dict[f"{prefix}{name}{suffix}"] = value

        input_weights, hidden_weights = blocks("weight_ih"), blocks("weight_hh")
        biased = f"{prefix}bias_ih{suffix}" in state_dict
        biases = list(zip(blocks("bias_ih"), blocks("bias_hh"))) if biased else []
        for i, (of_x, of_h) in enumerate(self._gates):
            if of_x == of_h:
                put(f"weight_{of_x}", torch.cat((input_weights[i], hidden_weights[i]), 1))
            else:
                put(f"weight_{of_x}", input_weights[i])
                put(f"weight_{of_h}", hidden_weights[i])
            if biases and of_x == of_h:
                put(f"bias_{of_x}", biases[i][0] + biases[i][1])
            elif biases:
                put(f"bias_{of_x}", biases[i][0])
                put(f"bias_{of_h}", biases[i][1])
        if f"{prefix}weight_hr{suffix}" in state_dict:
            put("weight_projection", state_dict.pop(f"{prefix}weight_hr{suffix}"))


class LSTM(_LikePyTorch):
    """Arguments, shapes and results of nn.LSTM, whose state dict it takes; the cell is ours.

    The bias of a gate is the sum of nn's two. With `proj_size` the cell is
    :data:`hoconv.recurrent.projected_lstm`. See :class:`RNN`.
    """

    _gates = gated.LSTM_GATES

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        *,
        schedule: str = "auto",
        impl: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        recompute: bool = False,
    ) -> None:
        options: dict[str, Any] = {} if bias else {"bias": False}
        if proj_size:
            options["proj_size"] = proj_size
        super().__init__(
            cells.projected_lstm if proj_size else cells.lstm,
            input_size,
            hidden_size,
            num_layers,
            bidirectional,
            dropout,
            batch_first,
            schedule,
            impl,
            device,
            dtype,
            recompute,
            output=None,
            **options,
        )


class GRU(_LikePyTorch):
    """Arguments, shapes and results of nn.GRU, whose state dict it takes; the cell is ours.

    See :class:`RNN`.
    """

    _gates = gated.GRU_GATES

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        *,
        schedule: str = "auto",
        impl: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        recompute: bool = False,
    ) -> None:
        options = {} if bias else {"bias": False}
        super().__init__(
            cells.gru,
            input_size,
            hidden_size,
            num_layers,
            bidirectional,
            dropout,
            batch_first,
            schedule,
            impl,
            device,
            dtype,
            recompute,
            output=None,
            **options,
        )
