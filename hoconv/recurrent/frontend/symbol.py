"""Symbols: a cell is traced by running it on symbols instead of tensors.

A symbol stands for the rows of one value. Its operators append ops to a builder.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, NoReturn

from hoconv.recurrent.frontend.errors import find_caller, locate_error
from hoconv.recurrent.ir.axes import Layout
from hoconv.recurrent.ir.kinds import (
    SOURCES,
    SUMS,
    OperandError,
    check_operands,
    is_boolean,
    is_elementwise,
    result_shape,
)
from hoconv.recurrent.ir.program import Op, Operand, Rate, Type, Value, find_rate

# What to write for names of PyTorch and NumPy.
INSTEAD = {
    **dict.fromkeys(("matmul", "mm", "bmm", "outer"), 'rnn.einsum("hk,hv->hkv", a, b)'),
    **dict.fromkeys(("stack", "concat", "concatenate", "hstack"), "rnn.cat(a, b)"),
    **dict.fromkeys(("view", "flatten", "unflatten", "unsqueeze"), "rnn.reshape(value, H, K)"),
    **dict.fromkeys(("split", "unbind"), "rnn.chunk(value, n)"),
    **dict.fromkeys(("transpose", "permute", "mT", "T"), 'rnn.einsum("hkv->hvk", value)'),
    **dict.fromkeys(("min", "amin"), "-rnn.max(-value), or rnn.minimum(a, b)"),
    **dict.fromkeys(("size", "dim", "ndim"), "value.shape[1:], the sizes of its axes"),
    **dict.fromkeys(
        ("to", "float", "double", "half", "type", "dtype", "device", "cpu", "cuda"),
        "nothing: the layer says in which dtype and where it computes",
    ),
    **dict.fromkeys(("clone", "contiguous"), "the value itself, which nothing changes"),
    **dict.fromkeys(
        ("item", "tolist", "numpy"),
        "rnn.where(condition, a, b): no number is known when a cell is traced",
    ),
    **dict.fromkeys(("zeros_like", "new_zeros"), "0.0, or 0.0 * value for a row of zeros"),
    **dict.fromkeys(("ones_like", "new_ones"), "1.0, or 0.0 * value + 1.0 for a row of ones"),
    **dict.fromkeys(("rand_like", "randn_like"), "rnn.dropout or rnn.zoneout, or give x the noise"),
    **dict.fromkeys(
        ("repeat", "expand", "tile"), "value[..., None]: an axis of size 1 is repeated"
    ),
    "squeeze": "rnn.reshape(value, n)",
    "amax": "rnn.max(value)",
    "detach": "rnn.stop_gradient(value)",
    "clip": "rnn.clamp(value, low, high)",
    "pow": "value ** n",
    "square": "value * value",
    "reciprocal": "1 / value",
    "norm": "rnn.sqrt(rnn.sum(value * value))",
    "round": "rnn.floor(value + 0.5)",
    "ceil": "-rnn.floor(-value)",
    "leaky_relu": "rnn.where(value > 0, value, 0.01 * value)",
    "lerp": "a + weight * (b - a)",
    "logical_not": "~a", "logical_and": "a & b", "logical_or": "a | b", "neg": "-a",
    "add": "a + b", "sub": "a - b", "mul": "a * b", "div": "a / b",
    "eq": "a == b", "ne": "a != b", "lt": "a < b", "le": "a <= b", "gt": "a > b", "ge": "a >= b",
}  # fmt: skip
_POWERS = {0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}
MOST_AXES = 3  # of a value, beside the batch
_LANGUAGE = "the functions of hoconv.recurrent and the operators + - * / % ** < <= > >= == != & | ~"


def _suggest(name: str) -> str:
    """Says what to write instead of a function or method that a cell calls."""
    language = sys.modules["hoconv.recurrent"]  # which imports this module
    name = name.rstrip("_")  # of what would write to a value
    if callable(getattr(language, name, None)):
        return f"write rnn.{name}(...)"
    if name in INSTEAD:
        return f"write {INSTEAD[name]}"
    return f"the language has {_LANGUAGE}"


def fail(message: str) -> NoReturn:
    """Raises a CellError at the line of the cell that is being run."""
    frame = find_caller()
    if frame is None:
        raise ValueError(message)
    raise locate_error(message, frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


class Builder:
    """Appends ops to a region.

    Args:
        rate: the rate of results: ``step``, or ``sequence`` if the region reads whole sequences.
        dtype: the dtype of numbers.

    Attributes:
        ops: the ops of the region.
        before: the ops of a step that depend on parameters alone.
    """

    def __init__(self, rate: Rate = "step", dtype: str = "real") -> None:
        self.rate: Rate = rate
        self.dtype = dtype
        self.ops: list[Op] = []
        self.before: list[Op] = [] if rate == "step" else self.ops

    def apply(
        self, kind: str, *operands: Any, attrs: tuple[int | float, ...] = (), dtype: str = ""
    ) -> Symbol:
        """Appends an op on symbols, values and numbers. Its rate is ``once`` if theirs are.

        Raises:
            CellError: operands that do not fit, or that are not values of the step.
        """
        given, along = self._repeat(kind, operands) if is_elementwise(kind) else (operands, None)
        inputs = tuple(self._operand(kind, o) for o in given)
        try:
            check_operands(kind, inputs)
            shape = result_shape(kind, inputs, attrs)
        except OperandError as error:
            fail(str(error))
        values = [i for i in inputs if isinstance(i, Value)]
        dtype = "bool" if is_boolean(kind, inputs) else dtype or self.dtype
        rate = self._find_rate(kind, values)
        return self._append(Op(kind, inputs, Value(Type(rate, shape, dtype)), attrs), along)

    def _find_rate(self, kind: str, values: Sequence[Value]) -> Rate:
        """The rate of an op's result."""
        if kind in SUMS:
            return "constant" if kind == "sum_steps" else "once"
        if kind in SOURCES:
            return self.rate
        whole = find_rate(values)
        return whole if whole == "once" or self.rate == "sequence" else self.rate

    def _repeat(
        self, kind: str, operands: Sequence[Any]
    ) -> tuple[Sequence[Any], tuple[int, ...] | None]:
        """Repeats operands along axes of size 1, as NumPy does; returns them and their shape, or
        None if they are rows, which kernels repeat themselves."""
        shapes = {o.along for o in operands if isinstance(o, Symbol)}
        if all(len(shape) == 1 for shape in shapes):
            return operands, None
        if len({len(shape) for shape in shapes}) > 1:
            fail(f"{kind}: {_list_shapes(operands)}: expected as many axes of each; write "
                 "value[..., None] or value[:, None] where an axis is missing")  # fmt: skip
        shape = tuple(max(sizes) for sizes in zip(*shapes, strict=True))
        for each in shapes:
            if any(n not in (1, size) for n, size in zip(each, shape, strict=True)):
                fail(f"{kind}: {_list_shapes(operands)}: expected operands of one size along "
                     "each axis, or of size 1")  # fmt: skip
        axes = tuple(range(len(shape)))
        repeated = []
        for operand in operands:
            if isinstance(operand, Symbol) and 1 < math.prod(operand.along) < math.prod(shape):
                own = tuple(a for a in axes if operand.along[a] > 1)
                operand = self.einsum(Layout(shape, (own,), axes), operand)
            repeated.append(operand)
        return repeated, shape

    def einsum(
        self, axes: Layout, *operands: Symbol | Value, kind: str = "einsum", dtype: str = ""
    ) -> Symbol:
        """Appends what sums the products of one or two operands (`kind` ``einsum``), or takes the
        largest of one (``largest``); along an axis that no operand has, the result is repeated."""
        read = {axis for own in axes.operands for axis in own}
        if len(operands) > 1:
            # As PyTorch does, sums what one operand has alone before it multiplies.
            given, lists = [*operands], [*axes.operands]
            for i, own in enumerate(axes.operands):
                lists[i] = tuple(a for a in own if a in axes.result or a in axes.operands[1 - i])
                if lists[i] != own:
                    given[i] = self.einsum(Layout(axes.sizes, (own,), lists[i]), operands[i])
            operands, axes = tuple(given), Layout(axes.sizes, tuple(lists), axes.result)
        if any(axis not in read for axis in axes.result):
            inner = tuple(axis for axis in axes.result if axis in read)
            part = self.einsum(Layout(axes.sizes, axes.operands, inner), *operands, kind=kind)
            return self._by_axes("arrange", Layout(axes.sizes, (inner,), axes.result), part)
        if len(operands) == 1 and not axes.reduced:
            kind = "arrange"
        return self._by_axes(kind, axes, *operands, dtype=dtype)

    def _by_axes(
        self, kind: str, axes: Layout, *operands: Symbol | Value, dtype: str = ""
    ) -> Symbol:
        """Appends an op that reads its operands by axes, or what equals it and does not."""
        shape = axes.shape(axes.result) or (1,)
        # Without the axes of size 1, and those that are nowhere.
        kept = [
            axis
            for axis in dict.fromkeys((*axes.result, *(a for own in axes.operands for a in own)))
            if axes.sizes[axis] > 1
        ]
        own, result = (
            tuple(tuple(kept.index(a) for a in of if a in kept) for of in lists)
            for lists in (axes.operands, (axes.result,))
        )
        axes = Layout(tuple(axes.sizes[axis] for axis in kept), own, result[0])
        whole = all(of in ((), axes.result) for of in own) and axes.result in own
        if whole and not axes.reduced:
            flat = [Symbol(self, o.value if isinstance(o, Symbol) else o) for o in operands]
            if len(flat) == 1:
                return Symbol(self, flat[0].value, shape)
            return Symbol(self, self.apply("mul", *flat, dtype=dtype).value, shape)
        made = self.apply(kind, *operands, attrs=axes.attrs, dtype=dtype)
        return Symbol(self, made.value, shape)

    def zeros(self, size: int, like: Value) -> Symbol:
        """Zeros to concatenate with parts of the gradient of `like`."""
        rate = like.type.rate if self.rate == "sequence" else self.rate
        return self._append(Op("fill", (), Value(Type(rate, (size,), self.dtype)), (0.0, size)))

    def _append(self, op: Op, along: tuple[int, ...] | None = None) -> Symbol:
        (self.before if op.result.type.rate == "once" else self.ops).append(op)
        return Symbol(self, op.result, along)

    def cast(self, symbol: Symbol, dtype: str) -> Symbol:
        """Casts a symbol to a dtype, unless it has that dtype."""
        if symbol.value.type.dtype == dtype:
            return symbol
        made = next((op for op in reversed(self.ops) if op.result is symbol.value), None)
        if made is not None and made.kind == "cat":  # cast the parts, where they are computed
            parts = (self.cast(Symbol(self, part), dtype) for part in made.values)
            return self.apply("cat", *parts, dtype=dtype)
        return self.apply("cast", symbol, dtype=dtype)

    def _operand(self, kind: str, operand: Any) -> Operand:
        if isinstance(operand, Symbol):
            if operand.builder is not self:
                fail(f"{kind}: a value of another call of a cell; a cell keeps none between calls")
            return operand.value
        if isinstance(operand, Value):
            return operand
        if isinstance(operand, Real):  # NumPy's scalars, too
            return float(operand)
        fail(
            f"{kind}: expected values of the step or numbers, got {type(operand).__name__}"
            + describe_learned(operand)
        )


def describe_learned(given: Any) -> str:
    """Says how a value of the step is made of an array or a map; nothing of anything else."""
    if callable(given):
        return "; a map is called with values, as in W(h)"
    if hasattr(given, "shape"):
        return (
            "; what is learned is made by rnn.parameter or rnn.linear, and a value of a tensor by "
            "rnn.parameter(name, init=tensor, learned=False)"
        )
    return ""


def _binary(kind: str) -> Callable[[Symbol, Any], Symbol]:
    return lambda self, other: self.builder.apply(kind, self, other)


def _reflected(kind: str) -> Callable[[Symbol, Any], Symbol]:
    return lambda self, other: self.builder.apply(kind, other, self)


def _assigned(operator: str) -> Callable[[Symbol, Any], Symbol]:
    def refuse(self: Symbol, other: Any) -> Symbol:
        fail(
            f"a {operator}= b writes to a, which may be a state, an output or x, too; write "
            f"a = a {operator} b"
        )

    return refuse


def _list_shapes(operands: Sequence[Any]) -> str:
    shapes = (f"(B, {', '.join(map(str, o.along))})" for o in operands if isinstance(o, Symbol))
    return " and ".join(shapes)


def _is_whole(given: slice) -> bool:
    """Returns whether both ends of a slice are whole numbers, or none."""
    return all(end is None or hasattr(end, "__index__") for end in (given.start, given.stop))


def _show_index(item: Any) -> str:
    """An index as it is written; says how to take every n-th feature."""
    if not isinstance(item, slice):
        return repr(item)
    shown = ":".join("" if end is None else f"{end}" for end in (item.start, item.stop))
    if item.step in (None, 1):
        return f"{shown}; a // b is a whole number"
    return f"{shown}:{item.step}; rnn.reshape(value, m, n)[..., 0] has every n-th feature"


class _Batch:
    """The batch size, which is not known when a cell is traced."""

    def __repr__(self) -> str:
        return "B"

    def __index__(self) -> int:
        fail("the batch size is not known when a cell is traced; value.shape[1:] are the features")

    __int__ = __float__ = __len__ = __index__

    def _refuse(self, *_: Any) -> Any:
        return self.__index__()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _refuse
    __pow__ = __rpow__ = __neg__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __eq__ = __ne__ = __bool__ = _refuse  # pyright: ignore[reportAssignmentType]
    __hash__ = object.__hash__


def _missing(operator: str, instead: str) -> Callable[..., Any]:
    def refuse(self: Symbol, *others: Any) -> NoReturn:
        fail(f"the language has no {operator}; write {instead}")

    return refuse


class Symbol:
    """A value of the step in a cell that is being traced: (B, n), or (B, ...) of up to three axes.

    Attributes:
        value: its features in a row, the last axis fastest.
        along: its sizes along its axes, without the batch.
    """

    def __init__(
        self, builder: Builder, value: Value, along: tuple[int, ...] | None = None
    ) -> None:
        self.builder = builder
        self.value = value
        self.along = value.type.shape if along is None else along

    @property
    def shape(self) -> tuple[Any, ...]:
        """(B, ...), as of a tensor; B cannot be computed with."""
        return _Batch(), *self.along

    __add__, __radd__ = _binary("add"), _reflected("add")
    __sub__, __rsub__ = _binary("sub"), _reflected("sub")
    __mul__, __rmul__ = _binary("mul"), _reflected("mul")
    __truediv__ = _binary("div")
    __mod__ = _binary("mod")
    __rmod__ = _missing("number % value", "a - b * rnn.floor(a / b)")  # nor PyTorch its gradient
    __lt__, __le__, __gt__, __ge__ = _binary("lt"), _binary("le"), _binary("gt"), _binary("ge")
    __eq__ = _binary("eq")  # pyright: ignore[reportAssignmentType]
    __ne__ = _binary("ne")  # pyright: ignore[reportAssignmentType]
    __and__, __or__ = _binary("and"), _binary("or")
    __iadd__, __isub__, __imul__ = _assigned("+"), _assigned("-"), _assigned("*")
    __itruediv__, __ipow__, __imod__ = _assigned("/"), _assigned("**"), _assigned("%")
    __iand__, __ior__ = _assigned("&"), _assigned("|")
    __floordiv__ = __rfloordiv__ = _missing("//", "rnn.floor(a / b)")
    __matmul__ = __rmatmul__ = _missing("@", 'rnn.linear, or rnn.einsum("hkv,hk->hv", a, b)')
    __xor__ = __rxor__ = _missing("^", "a != b of conditions, or a ** n")
    __setitem__ = _missing("value[...] = ", "rnn.where(condition, a, b), or rnn.cat(a, b)")
    __delitem__ = _missing("del value[...]", "rnn.cat(a, b) of the parts that stay")
    __round__ = _missing("round", INSTEAD["round"])
    __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = _missing("<< and >>", "value * 2.0**n")
    __divmod__ = __rdivmod__ = _missing("divmod", "rnn.floor(a / b) and a % b")
    __contains__ = _missing("in", "rnn.max(rnn.where(a == b, 1.0, 0.0)) > 0")
    __hash__ = object.__hash__
    __array_ufunc__ = None  # NumPy's functions refuse it

    def __neg__(self) -> Symbol:
        return self.builder.apply("neg", self)

    def __abs__(self) -> Symbol:
        return self.builder.apply("abs", self)

    def __invert__(self) -> Symbol:
        return self.builder.apply("not", self)

    def __pow__(self, exponent: Any) -> Symbol:
        if isinstance(exponent, int | float) and exponent in _POWERS:
            return self.builder.apply(_POWERS[exponent], self)
        whole = isinstance(exponent, int) or (isinstance(exponent, float) and exponent.is_integer())
        if whole and exponent < 0:
            return (self ** -int(exponent)) ** -1
        times = int(exponent) if whole else 0
        if times < 1:
            fail(
                f"**: expected a whole exponent, but not 0, or 0.5 or -0.5; got {exponent!r}; "
                "write rnn.exp(exponent * rnn.log(value)) of a positive value"
            )
        result = self
        for _ in range(times - 1):
            result = result * self
        return result

    def __rpow__(self, base: Any) -> Symbol:
        if isinstance(base, bool) or not isinstance(base, int | float) or base <= 0:
            fail(f"**: expected a positive number before a value, got {base!r}")
        return self.builder.apply("pow", base, self)

    def __rtruediv__(self, other: Any) -> Symbol:
        # As of PyTorch's tensors; 1 / value has no product.
        reciprocal = self.builder.apply("reciprocal", self)
        return reciprocal if other == 1 else reciprocal * other

    def __getitem__(self, index: Any) -> Symbol:
        items = list(index) if isinstance(index, tuple) else [index]
        # By identity: an item may be a symbol, which compares to a symbol.
        indexed = sum(item is not None and item is not Ellipsis for item in items)
        whole = [slice(None)] * (1 + len(self.along) - indexed)
        at = next((i for i, item in enumerate(items) if item is Ellipsis), len(items))
        items[at : at + 1] = whole
        batch = items[0] if items else None
        if not (isinstance(batch, slice) and batch == slice(None)) or (
            sum(item is not None for item in items) != 1 + len(self.along)
        ):
            fail(
                f"indexing (B, {', '.join(map(str, self.along))}): expected value[:, ...], or "
                "value[..., start:stop]: the batch whole, then an index for each axis"
            )
        result, shape, axis = self, [], 0
        for item in items[1:]:
            if item is None:
                shape.append(1)
                continue
            size = self.along[axis]
            if isinstance(item, int) and not isinstance(item, bool) and -size <= item < size:
                start, stop = item % size, item % size + 1
            elif isinstance(item, slice) and item.step in (None, 1) and _is_whole(item):
                start, stop, _ = item.indices(size)
                shape.append(stop - start)
            else:
                fail(f"indexing an axis of size {size}: expected start:stop of ints, an int, or "
                     f"None for a new axis, got {_show_index(item)}")  # fmt: skip
            if (start, stop) != (0, size) or len(self.along) == 1:
                result = result._slice(axis, start, stop)
            axis += 1
        if not shape:
            fail("indexing: an int removes the last axis; value[:, i : i + 1] keeps it")
        if len(shape) > MOST_AXES:
            fail(f"indexing: expected 1 to {MOST_AXES} axes beside the batch, got {len(shape)}")
        return Symbol(self.builder, result.value, tuple(shape))

    def _slice(self, axis: int, start: int, stop: int) -> Symbol:
        """The features from `start` to `stop` along an axis."""
        if not 0 <= start < stop <= self.along[axis]:
            fail(f"indexing: expected part of 0:{self.along[axis]}, got {start}:{stop}")
        front = self.move(axis, 0)
        apart = math.prod(front.along[1:])
        cut = self.builder.apply("slice", front, attrs=(start * apart, stop * apart))
        return Symbol(self.builder, cut.value, (stop - start, *front.along[1:])).move(0, axis)

    def move(self, axis: int, to: int) -> Symbol:
        """Returns the same features with an axis at another place."""
        order = list(range(len(self.along)))
        order.insert(to, order.pop(axis))
        given = tuple(range(len(self.along)))
        return self.builder.einsum(Layout(self.along, (given,), tuple(order)), self)

    def __bool__(self) -> bool:
        fail(
            "a Python if, and, or, not or while needs one truth for all elements and steps, and a "
            "value has another for each; write rnn.where(condition, a, b), or & | ~"
        )

    def __float__(self) -> float:
        fail(f"a value of the step is no Python number; the language has {_LANGUAGE}")

    __int__ = __index__ = __float__  # pyright: ignore[reportAssignmentType]

    def __len__(self) -> int:
        fail("the batch is not known when a cell is traced; value.shape[-1] is the features")

    def __iter__(self) -> Any:
        fail("a value cannot be iterated over; rnn.chunk(value, n) cuts its features")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        fail(f"a value of the step has no {name!r}; {_suggest(name)}")

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        name = getattr(function, "__name__", str(function))
        if name in ("add", "sub", "mul", "div", "rsub"):  # an operator: another one is a tensor
            tensor = next((a for a in args if not isinstance(a, Symbol)), None)
            fail(f"{name}: expected values of the step or numbers, got "
                 f"{type(tensor).__name__}{describe_learned(tensor)}")  # fmt: skip
        fail(
            f"torch's {name} is outside of the language; {_suggest(name)}; what torch.nn's modules "
            "learn, rnn.linear and rnn.parameter do"
        )

    def __format__(self, given: str) -> str:
        if given:
            fail("a value has no numbers when a cell is traced; print(value) shows its sizes")
        return repr(self)

    def __repr__(self) -> str:
        return f"<value of the step, (B, {', '.join(map(str, self.along))})>"
