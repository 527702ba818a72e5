"""Symbols: a cell is traced by running it on symbols instead of tensors.

A symbol stands for the rows of one value. Its operators append ops to a builder.
"""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real
from typing import Any, NoReturn

from hoconv.recurrent.frontend.errors import find_caller, locate_error
from hoconv.recurrent.ir.kinds import (
    SOURCES,
    SUMS,
    OperandError,
    check_operands,
    is_boolean,
    result_shape,
)
from hoconv.recurrent.ir.program import Op, Operand, Rate, Type, Value

_LANGUAGE = "the functions of hoconv.recurrent and the operators + - * / < <= > >= == != & | ~ **"


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
        inputs = tuple(self._operand(kind, o) for o in operands)
        try:
            check_operands(kind, inputs)
            shape = result_shape(kind, inputs, attrs)
        except OperandError as error:
            fail(str(error))
        values = [i for i in inputs if isinstance(i, Value)]
        once = kind not in SOURCES and all(v.type.rate == "once" for v in values)
        dtype = "bool" if is_boolean(kind, inputs) else dtype or self.dtype
        rate = "once" if once or kind in SUMS else self.rate
        return self._append(Op(kind, inputs, Value(Type(rate, shape, dtype)), attrs))

    def zeros(self, size: int, like: Value) -> Symbol:
        """Zeros to concatenate with parts of the gradient of `like`."""
        rate = like.type.rate if self.rate == "sequence" else self.rate
        return self._append(Op("fill", (), Value(Type(rate, (size,), self.dtype)), (0.0, size)))

    def _append(self, op: Op) -> Symbol:
        (self.before if op.result.type.rate == "once" else self.ops).append(op)
        return Symbol(self, op.result)

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
            return operand.value
        if isinstance(operand, Value):
            return operand
        if isinstance(operand, Real):  # NumPy's scalars, too
            return float(operand)
        fail(
            f"{kind}: expected values of the step or numbers, got {type(operand).__name__}; "
            "what is learned is made by rnn.parameter or rnn.linear"
        )


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


class Symbol:
    """Rows (B, n) of features in a cell that is being traced."""

    def __init__(self, builder: Builder, value: Value) -> None:
        self.builder = builder
        self.value = value

    @property
    def shape(self) -> tuple[int, int]:
        """(-1, n): the batch is not known when a cell is traced."""
        return -1, self.value.type.size

    __add__, __radd__ = _binary("add"), _reflected("add")
    __sub__, __rsub__ = _binary("sub"), _reflected("sub")
    __mul__, __rmul__ = _binary("mul"), _reflected("mul")
    __truediv__ = _binary("div")
    __lt__, __le__, __gt__, __ge__ = _binary("lt"), _binary("le"), _binary("gt"), _binary("ge")
    __eq__ = _binary("eq")  # pyright: ignore[reportAssignmentType]
    __ne__ = _binary("ne")  # pyright: ignore[reportAssignmentType]
    __and__, __or__ = _binary("and"), _binary("or")
    __iadd__, __isub__, __imul__ = _assigned("+"), _assigned("-"), _assigned("*")
    __itruediv__, __ipow__ = _assigned("/"), _assigned("**")
    __iand__, __ior__ = _assigned("&"), _assigned("|")
    __hash__ = object.__hash__
    __array_ufunc__ = None  # NumPy's functions refuse it

    def __neg__(self) -> Symbol:
        return self.builder.apply("neg", self)

    def __abs__(self) -> Symbol:
        return self.builder.apply("abs", self)

    def __invert__(self) -> Symbol:
        return self.builder.apply("not", self)

    def __pow__(self, exponent: Any) -> Symbol:
        if not isinstance(exponent, int) or exponent < 1:
            fail(f"**: expected a whole exponent of at least 1, got {exponent!r}; else use rnn.exp")
        result = self
        for _ in range(exponent - 1):
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
        features = index[1] if isinstance(index, tuple) and len(index) == 2 else None
        leading = index[0] if isinstance(index, tuple) and index else None
        whole = leading is Ellipsis or leading == slice(None)
        if not (whole and isinstance(features, slice) and features.step in (None, 1)):
            fail("indexing: expected a slice of the features, value[:, start:stop]")
        start, stop, _ = features.indices(self.value.type.size)
        return self.builder.apply("slice", self, attrs=(start, stop))

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
        fail(f"a value of the step has no {name!r}; the language has {_LANGUAGE}")

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        name = getattr(function, "__name__", str(function))
        fail(
            f"torch's {name} is outside of the language, which has {_LANGUAGE}; what torch.nn's "
            "modules learn, rnn.linear and rnn.parameter do"
        )

    def __repr__(self) -> str:
        return f"<value of the step, {self.value.type}>"
