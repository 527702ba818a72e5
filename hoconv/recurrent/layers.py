"""Recurrent layers of any cell, used as PyTorch's are.

B batch, D directions, I input size, L layers, T time steps, n features of a state.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from hoconv.dispatch.implementations import check_name, resolve
from hoconv.dispatch.registration import FixedAttributes, autocasts, check_dense, get_parameter
from hoconv.recurrent.directions import run_directions
from hoconv.recurrent.frontend.cell import BoundCell, Cell
from hoconv.recurrent.frontend.symbol import Symbol, fail
from hoconv.recurrent.frontend.traced import Traced, explain_misfit, read_size, trace_cell
from hoconv.recurrent.inputs import (
    State,
    find_ends,
    gather_inputs,
    gather_states,
    pack_like,
    read_lengths,
    read_reset,
)
from hoconv.recurrent.ir.evaluate import NAMES
from hoconv.recurrent.ladder import SCHEDULES
from hoconv.recurrent.operator import OPERATOR
from hoconv.recurrent.ops import Call
from hoconv.recurrent.plans import request


class RNN(FixedAttributes):
    """A recurrent layer of any cell; arguments, shapes and packing are those of nn.LSTM.

    Args:
        cell: made by :func:`hoconv.recurrent.frontend.cell`, or a ready one.
        input_size: I.
        hidden_size: the default size of the cell's linear maps and states.
        num_layers: L; the outputs of one are the inputs of the next.
        bidirectional: whether each layer also runs backwards in time, with parameters of its own;
            the outputs of both are beside each other.
        dropout: in training, the probability with which an element between two layers is zero.
        batch_first: whether inputs and outputs are (B, T, ...); states are not.
        schedule: one of :data:`hoconv.recurrent.SCHEDULES`, which optimise more and more; by
            default the fastest. The reference ignores it.
        impl: ``"auto"``, ``"reference"``, ``"cpp"`` or ``"cuda"``.
        output: of a cell that names its outputs, the one that the next layer reads.
        recompute: whether the gradient computes gates and other values of the steps again, so that
            between forward and backward little more than the inputs, outputs and states is kept.
            That takes one more product a step. The reference ignores it.
        options: the cell's own options, by name.

    Parameters: of each layer l and direction ``weight_<name>_l<l>``, ``bias_<name>_l<l>`` of every
    ``rnn.linear`` and ``<name>_l<l>`` of every ``rnn.parameter``, with ``_reverse`` at the end for
    the second direction. All start uniform in +-1/sqrt(hidden_size) unless the cell says otherwise.

    Later calls follow the attributes as they are then; those by which the parameters were made,
    such as `num_layers`, cannot change.

    Raises:
        CellError: the cell leaves the language.
        TypeError, ValueError: an argument or option out of its range; states whose sizes differ
            between layers.
    """

    operator = OPERATOR
    fixed = "input_size", "hidden_size", "num_layers", "bidirectional", "output", "options", "runs"

    def __init__(
        self,
        cell: Cell,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bidirectional: bool = False,
        dropout: float = 0.0,
        batch_first: bool = False,
        schedule: str = "auto",
        impl: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        recompute: bool = False,
        output: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if not isinstance(cell, Cell):
            raise TypeError(
                f"cell: expected a function decorated with @rnn.cell(state=...), got {cell!r}"
            )
        for name, value in (
            ("input_size", input_size), ("hidden_size", hidden_size), ("num_layers", num_layers)
        ):  # fmt: skip
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: expected an int of at least 1, got {value!r}")
        for name, value in (
            ("bidirectional", bidirectional), ("batch_first", batch_first), ("recompute", recompute)
        ):  # fmt: skip
            if not isinstance(value, bool):
                raise TypeError(f"{name}: expected True or False, got {value!r}")
        if not 0 <= dropout <= 1:
            raise ValueError(f"dropout: expected a probability from 0 to 1, got {dropout!r}")
        _check_schedule(schedule)
        check_name(OPERATOR, impl)
        _check_dtype("dtype", torch.get_default_dtype() if dtype is None else dtype)
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.num_layers = num_layers
        self.bidirectional = bidirectional
        self.dropout = dropout
        self.batch_first = batch_first
        self.schedule = schedule
        self.impl = impl
        self.recompute = recompute
        self.output = output
        self.options = options
        # Of each layer and direction: the cell with its sizes, and the suffix of its parameters.
        runs: list[tuple[BoundCell, str]] = []
        self._traced: list[Traced] = []  # likewise
        size = input_size
        for layer in range(num_layers):
            # A copy: changing an option later, for example a list, does not change the layer.
            bound = copy.deepcopy(cell.bind(size, hidden_size, options))
            if runs:
                _check_states(runs[0][0], bound, layer)
            traced = trace_cell(bound)
            for suffix in (f"_l{layer}", f"_l{layer}_reverse")[: 1 + bidirectional]:
                runs.append((bound, suffix))
                self._traced.append(traced)
                for d in traced.declarations:
                    empty = torch.empty(d.shape, device=device, dtype=dtype)
                    if d.learned:
                        self.register_parameter(d.name + suffix, nn.Parameter(empty))
                    else:
                        self.register_buffer(d.name + suffix, empty)
            size = read_size(traced, output, num_layers) * (1 + bidirectional)
        self.runs = tuple(runs)
        self.reset_parameters()

    def __getstate__(self) -> dict[str, Any]:
        # Traces may hold functions that cannot be pickled; they are made again.
        return {name: value for name, value in self.__dict__.items() if name != "_traced"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({"output": None} | state)  # which older versions do not have
        # Traced again: the pickled traces may be of another version of the cell.
        self._traced = [trace_cell(bound) for bound, _ in self.runs]

    @property
    def cell(self) -> Cell:
        """The cell of every layer."""
        return self.runs[0][0].cell

    @property
    def output_size(self) -> int:
        """The features of the outputs, D * n, or of the output that the next layer would read."""
        size = read_size(self._traced[-1], self.output, 1)
        return size * (1 + self.bidirectional)

    def reset_parameters(self) -> None:
        """Draws all parameters anew; those with a parametrization through its right inverse."""
        bound = 1 / math.sqrt(self.hidden_size)
        for (_, suffix), traced in zip(self.runs, self._traced, strict=True):
            for d in traced.declarations:
                name = d.name + suffix
                with torch.no_grad():
                    value = torch.empty_like(getattr(self, name))
                    if d.init is None:
                        value.uniform_(-bound, bound)
                    elif isinstance(d.init, Tensor):
                        value.copy_(d.init)
                    elif callable(d.init):
                        _fill(value, d.init, f"the init of {name}")
                    else:
                        value.fill_(d.init)
                    if parametrize.is_parametrized(self, name):
                        setattr(self, name, value)
                    else:
                        getattr(self, name).copy_(value)

    def forward(
        self,
        x: Tensor | PackedSequence,
        state: State | None = None,
        lengths: Tensor | Sequence[int] | None = None,
        reset: Tensor | None = None,
        **inputs: Tensor,
    ) -> tuple[Tensor | PackedSequence | dict[str, Tensor], State]:
        """Runs all layers.

        Args:
            x: (T, B, I), or (B, T, I) with `batch_first`; (T, I), one sequence; or a
                PackedSequence.
            state: a tensor (L * D, B, n) for each state of the cell, in a tuple where it has
                several; without B for one sequence. Zeros by default. Detach the returned ones to
                cut backpropagation through time.
            lengths: (B) int, the steps of each sequence of a padded x, in any order. Past its
                length a sequence's outputs are 0; its final states are those after its last step.
            reset: (T, B) bool, or (B, T) with `batch_first`, or (T) of one sequence: where it is
                true, a new sequence begins at that step, and its states are zero before it. Each
                gives what it would give by itself, in both directions. `state` is the one before
                the first step, unless that is reset, and before the last one of the second
                direction. For a PackedSequence, pad it.
            inputs: the cell's inputs beside x, by name: (T, B, ...) of their sizes, laid out as x;
                and its constants, (B, ...), or (1, ...) for all sequences. Every layer reads them.
                For a PackedSequence, pad it.

        Returns:
            The outputs (T, B, D * n), as x is, in a dict by name where the cell names them; and the
            final states, as `state` is.

        Raises:
            ValueError: a shape that does not fit.
            TypeError: x is no tensor, or of a dtype that is not the parameters', or not one of
                float64, float32, bfloat16 and float16; a state is no tensor of floating point.
        """
        _check_schedule(self.schedule)
        packed = x if isinstance(x, PackedSequence) else None
        if packed is not None:
            if reset is not None:
                raise ValueError("reset: not for a PackedSequence; pad it, and give its lengths")
            if lengths is not None:
                raise ValueError("lengths: a PackedSequence has its own; leave them out")
            if inputs or self._outputs:
                raise ValueError("x: a cell of several inputs or outputs takes no PackedSequence; "
                                 "pad it, and give its lengths")  # fmt: skip
            x, lengths = pad_packed_sequence(packed)
        if isinstance(x, Symbol):
            fail("a layer runs all steps, and a cell one; write a cell within the cell, as in "
                 'output, following = rnn.gru("lower", x, h)')  # fmt: skip
        if not isinstance(x, Tensor):
            raise TypeError(f"x: expected a tensor or a PackedSequence, got {type(x).__name__}")
        check_dense(x)
        single = x.dim() == 2
        if single:
            x = x.unsqueeze(1)
        elif self.batch_first and packed is None and x.dim() == 3:
            x = x.transpose(0, 1)
        if x.dim() != 3 or x.shape[2] != self.input_size:
            order = "(B, T, " if self.batch_first else "(T, B, "
            raise ValueError(
                f"x: expected {order}{self.input_size}) or (T, {self.input_size}), got shape "
                f"{tuple(x.shape)}"
            )
        if x.shape[0] == 0:
            raise ValueError("x: expected at least one time step, got none")
        begins = None if reset is None else read_reset(reset, x, single, self.batch_first)
        beside, constants = gather_inputs(self.runs[0][0], inputs, x, single, self.batch_first)
        x, parameters = self._cast(x, self._gather_parameters(x))
        states = gather_states(self.runs[0][0], state, x, len(self.runs), single)
        valid = None if lengths is None else read_lengths(lengths, x)
        constants = [each.to(x.dtype) for each in constants]
        outputs, final = self._layers(x, beside, constants, states, parameters, valid, begins)
        shaped = tuple(s.squeeze(1) if single else s for s in final)
        following = shaped[0] if len(shaped) == 1 else shaped
        if packed is not None:
            assert isinstance(lengths, Tensor)
            return pack_like(packed, outputs, lengths), following
        if single:
            outputs = outputs.squeeze(1)
        elif self.batch_first:
            outputs = outputs.transpose(0, 1)
        if self._outputs:
            directions = 1 + self.bidirectional
            parts = outputs.split([directions * n for n in self._outputs.values()], -1)
            return dict(zip(self._outputs, parts, strict=True)), following
        return outputs, following

    def initial_state(self, batch: int) -> State:
        """The states of `batch` sequences before their first step: zeros (L * D, B, ...), in a
        tuple where the cell has several."""
        like = next(self.parameters(), torch.empty(0))
        shapes = self.runs[0][0].state_shapes.values()
        states = tuple(like.new_zeros(len(self.runs), batch, *shape) for shape in shapes)
        return states[0] if len(states) == 1 else states

    def step(self, x: Tensor, state: State | None = None, **inputs: Tensor) -> tuple[Any, State]:
        """Runs one step of sequences that come step by step, as a call with one step does.

        Args:
            x: (B, I).
            state: as of a call, from :meth:`initial_state` or from the step before.
            inputs: the cell's inputs beside x, (B, ...), and its constants.

        Returns:
            The outputs (B, n), in a dict by name where the cell names them; and the next states.

        Raises:
            ValueError: the layer is bidirectional, so that an output depends on later steps; or a
                shape does not fit.
        """
        if self.bidirectional:
            raise ValueError("step: a bidirectional layer reads later steps; call it with all")
        if not isinstance(x, Tensor) or x.dim() != 2:
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"x: expected (B, {self.input_size}), got {got}")
        at = int(self.batch_first)
        constants = self.cell.constants
        apart = {
            name: given.unsqueeze(at)
            if isinstance(given, Tensor) and name not in constants
            else given
            for name, given in inputs.items()
        }
        outputs, following = self(x.unsqueeze(at), state, **apart)
        if isinstance(outputs, dict):
            return {name: t.squeeze(at) for name, t in outputs.items()}, following
        return outputs.squeeze(at), following

    @property
    def _outputs(self) -> Mapping[str, int] | None:
        """The outputs of the last layer that have names, and their sizes."""
        return self._traced[-1].outputs

    def _layers(
        self,
        x: Tensor,
        beside: list[Tensor],
        constants: list[Tensor],
        states: list[list[Tensor]],
        parameters: list[list[Tensor]],
        valid: Tensor | None,
        begins: Tensor | None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Returns the outputs (T, B, D * n) and the final states of x (T, B, I)."""
        device_type = x.device.type
        directions = 1 + self.bidirectional
        recompute = "all" if self.recompute else "functions" if x.is_cuda else "cheap"
        resets = [begins]
        if self.bidirectional:
            resets.append(None if begins is None else find_ends(begins, valid))
        final: list[list[Tensor]] = []
        for layer in range(self.num_layers):
            if layer and self._outputs:
                x = self._read_output(x)
            if layer and self.dropout:
                x = F.dropout(x, self.dropout, self.training)
            if beside:
                x = torch.cat((x, *(each.to(x.dtype) for each in beside)), 2)
            if valid is not None:
                # Past its end a sequence repeats its first step: padding, which may be NaN, must
                # not reach a gradient, and the first step is an input that the cell can take.
                x = torch.where(valid, x, x[:1])
            calls = []
            for direction in range(directions):
                at = layer * directions + direction
                traced, reverse = self._traced[at], direction == 1
                noise = self.training and traced.draws
                seed = torch.randint(1 << 62, (), device=x.device) if noise else None
                text = traced.training if self.training else traced.evaluation
                plan = request(text, x.dtype, self.schedule, valid is not None,
                               begins is not None, reverse, recompute)  # fmt: skip
                call = Call(self.runs[at][0], traced.names, plan, x, states[at], parameters[at],
                            valid, resets[direction], self.training, seed, reverse,
                            constants)  # fmt: skip
                calls.append(call)
            impl, *_ = [
                resolve(OPERATOR.name, self.impl, device_type, call.plan, call.program)
                for call in calls
            ]
            found = run_directions(impl, calls)
            outputs = [output for output, *_ in found]
            final += [following for _, *following in found]
            x = self._join(outputs) if len(outputs) > 1 else outputs[0]
        stacked = (
            each[0].unsqueeze(0) if len(each) == 1 else torch.stack(each)
            for each in zip(*final, strict=True)
        )
        shapes = self.runs[0][0].state_shapes.values()
        return x, [
            state.unflatten(2, shape) if len(shape) > 1 else state
            for state, shape in zip(stacked, shapes, strict=True)
        ]

    def _join(self, outputs: list[Tensor]) -> Tensor:
        """The outputs of both directions beside each other: of each name, if they have names."""
        if self._outputs is None:
            return torch.cat(outputs, 2)
        sizes = list(self._outputs.values())
        parts = zip(*(output.split(sizes, 2) for output in outputs), strict=True)
        return torch.cat([part for of in parts for part in of], 2)

    def _read_output(self, x: Tensor) -> Tensor:
        """Returns those of a layer's outputs that the next layer reads."""
        assert self._outputs is not None
        directions = 1 + self.bidirectional
        names = list(self._outputs)
        parts = x.split([directions * n for n in self._outputs.values()], 2)
        return parts[names.index(self.output)] if self.output in names else parts[0]

    def _cast(self, x: Tensor, parameters: list[list[Tensor]]) -> tuple[Tensor, list[list[Tensor]]]:
        """x and the parameters of each run in the dtype to compute with."""
        if autocasts(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            parameters = [[_cast(p, dtype) for p in of] for of in parameters]
            x = _cast(x, dtype)
        own = next(iter(parameters[0]), x)
        if x.dtype != own.dtype:
            raise TypeError(
                f"x: expected the dtype of the parameters, {own.dtype}, got {x.dtype}; convert "
                f"one of them with .to(...)"
            )
        _check_dtype("x", x.dtype)
        return x, parameters

    def _gather_parameters(self, x: Tensor) -> list[list[Tensor]]:
        """The parameters of each run, or what replaces them (torch.func.functional_call), checked.

        Raises:
            ValueError, TypeError: a shape, device or dtype that does not fit.
        """
        own, device = self._parameters, x.device
        if self._buffers:
            own = {**own, **self._buffers}
        gathered: list[list[Tensor]] = []
        for (_, suffix), traced in zip(self.runs, self._traced, strict=True):
            names = [name + suffix for name in traced.names]
            try:
                found: list[Any] = [own[name] for name in names]
            except KeyError:  # something took the place of one: a parametrization, say
                found = [get_parameter(self, name) for name in names]
            gathered.append(found)
            first = next(iter(gathered[0]), x).dtype
            if (
                [t.shape for t in found] != traced.shapes
                or [t.dtype for t in found] != [first] * len(found)
                or [t.device for t in found] != [device] * len(found)
            ):
                raise explain_misfit(names, found, traced, first, device)
            for i in traced.flattened:
                found[i] = found[i].flatten()
        return gathered

    def explain(self, stages: bool = False) -> str:
        """Explains in words how each layer is compiled.

        Args:
            stages: whether the program after each pass is shown, too.

        Says what is hoisted out of the time loop, which products are combined, how many kernels and
        products a step has, what is saved for the gradient, and what runs on a CPU and on a GPU and
        why. The text is the same with and without a GPU.
        """
        from hoconv.recurrent.explain import explain  # both bring the compiler
        from hoconv.recurrent.schedule import plan

        dtype = next((p.dtype for p in self.parameters()), torch.get_default_dtype())
        directions = 1 + self.bidirectional
        made = functools.partial(
            plan, dtype=dtype, schedule=self.schedule, training=self.training,
            recompute="all" if self.recompute else "cheap",
        )  # fmt: skip
        lines = []
        for layer, (bound, _) in enumerate(self.runs[::directions]):
            plan_ = made(bound)
            lines.append(f"layer {layer}: {explain(plan_, directions)}")
            if stages:
                lines += [f"after the pass: {name}\n{program}" for name, program in plan_.stages]
        return "\n".join(lines)

    def extra_repr(self) -> str:
        shown = f"{self.cell.name}, {self.input_size}, {self.hidden_size}"
        for name, default in (
            ("num_layers", 1), ("bidirectional", False), ("dropout", 0.0), ("batch_first", False),
            ("schedule", "auto"), ("impl", "auto"), ("recompute", False), ("output", None),
        ):  # fmt: skip
            if getattr(self, name) != default:
                shown += f", {name}={getattr(self, name)!r}"
        return shown + "".join(f", {name}={value!r}" for name, value in self.options.items())


def _check_states(first: BoundCell, bound: BoundCell, layer: int) -> None:
    """Checks that a layer has states of the sizes of layer 0: those of all layers are stacked."""
    for name, shape in bound.state_shapes.items():
        if shape != first.state_shapes[name]:
            expected, got = (" x ".join(map(str, s)) for s in (first.state_shapes[name], shape))
            raise ValueError(
                f"num_layers: the state {name!r} of the cell {bound.name} has as many features as "
                f"the layer has inputs, {expected} in layer 0 and {got} in layer {layer}; "
                f"expected the same in all: give it a size of its own, as in "
                f"@rnn.cell(state={{{name!r}: 'hidden_size'}}), let the outputs of all directions "
                f"together have {expected} features, or make an RNN of one layer for each"
            )


def _fill(value: Tensor, init: Callable[[Tensor], Any], what: str) -> None:
    """Lets a function write the initial elements of a parameter."""
    try:
        found = init(value)
    except Exception as error:
        error.add_note(f"{what}: it is given a tensor of shape {tuple(value.shape)} to fill")
        raise
    if isinstance(found, Tensor) and found is not value:
        own, other = value.untyped_storage(), found.untyped_storage()
        if own.data_ptr() != other.data_ptr():
            raise ValueError(f"{what}: it returns a tensor of its own, and is to write into the "
                             "one that it is given, as nn.init.ones_ does")  # fmt: skip


def _check_schedule(schedule: str) -> None:
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule: expected one of {', '.join(SCHEDULES)}; got {schedule!r}")


def _check_dtype(name: str, dtype: torch.dtype) -> None:
    if dtype not in NAMES or dtype == torch.bool:
        raise TypeError(
            f"{name}: expected float32, float64, bfloat16 or float16, got {dtype}; convert the "
            "layer and its input with .to(...)"
        )


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Casts as autocast does: float64 stays."""
    return tensor if tensor.dtype == torch.float64 else tensor.to(dtype)
