"""Chooses what the forward steps save for the backward steps, and what those rematerialise.

The choice is a minimum cut of the data flow. Its source is what the backward steps cannot compute
themselves: states, products and costly functions. Its sink is what they read. A value costs the
bytes of its row. Values on the cut are saved; the ops behind it are rematerialised: those that
:data:`Recompute` allows. Steps without products wait for memory: there what is in memory already
costs half, since nobody need write it. The construction is that of the
min-cut partitioner of torch.compile (He and Yu, Transcending Runtime-Memory Tradeoffs, 2023).

The same cut divides what is made before the loop, where only ops after the gradient's loop read it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Literal

from hoconv.recurrent.ir.axes import layout
from hoconv.recurrent.ir.functions import FUNCTIONS
from hoconv.recurrent.ir.kinds import PRODUCTS, is_cheap, is_elementwise
from hoconv.recurrent.ir.program import Op, Program, Value, flat, step_outputs
from hoconv.recurrent.passes.rewrite import substitute

# What the backward steps compute again, rather than read what the forward steps have written:
# - cheap: what costs less than to write and read it.
# - functions: in steps without products also costly functions, from results of the products before
#   the loop, which are kept. A GPU has the time, since it waits for memory; two cores do not.
# - all: every op, a product, too, and what is computed before the loop: memory counts most.
Recompute = Literal["cheap", "functions", "all"]


def choose_saved(
    program: Program, needed: Iterable[Value], recompute: Recompute, sparse: bool = False
) -> list[Value]:
    """The values of the steps to save, so that the needed ones can be computed from them.

    Args:
        program: a forward program without groups.
        needed: values of rate ``step``, results of ops or states.
        recompute: what may be computed again.
        sparse: whether of the states few are saved: then outer products, too, are computed again,
            since their results are as large.
    """
    free = {v for _, v in program.sequences}  # saved for the gradients of weights anyway
    ops = list(flat(program.step))
    made = {op.result for op in ops}
    # Loops of sparse states have no product: what only the output waits for moves after them.
    alone = sparse or not any(op.kind in PRODUCTS for op in ops)
    functions = recompute == "functions" and alone
    if sparse:
        free |= {state.value for state in program.states}
    if recompute == "all" or functions:
        free |= {op.result for op in flat(program.before)}

    def again(op: Op) -> bool:
        if sparse and op.kind == "einsum" and not layout(op).reduced:
            return True
        return recompute == "all" or is_cheap(op.kind) or (functions and op.kind in FUNCTIONS)

    def cost(value: Value) -> int:
        return 0 if value in free else value.type.row_bytes * (1 + (alone and value in made))

    cut = _find_cut(ops, set(needed), again, cost)
    values = (*(state.value for state in program.states), *(op.result for op in ops))
    return [v for v in values if v in cut]


def _find_cut(
    ops: Sequence[Op], needed: Collection[Value], again: Callable[[Op], bool],
    cost: Callable[[Value], int],
) -> set[Value]:  # fmt: skip
    """Finds the values that cost the least, of which those needed can be computed.

    Args:
        again: whether an op may be computed again.
    """
    import networkx  # not at the top: it takes long to import

    # A value is an edge from its "in" to its "out" node, whose capacity is the cost of saving it.
    # The other edges have no capacity and cannot be cut.
    network = networkx.DiGraph()
    network.add_nodes_from(("forward", "backward"))
    made_by = {op.result: op for op in ops}
    for value in {v for op in ops for v in (*op.values, op.result)}.union(needed):
        if value.type.rate in ("once", "constant"):
            continue
        network.add_edge((value, "in"), (value, "out"), capacity=cost(value))
        op = made_by.get(value)
        if op is None or not again(op):
            network.add_edge("forward", (value, "in"))
        else:
            network.add_edges_from(((source, "out"), (value, "in")) for source in op.values)
    network.add_edges_from(((value, "out"), "backward") for value in needed)
    # Of all cuts that cost the least, networkx gives the one nearest to the backward steps.
    _, (_, behind) = networkx.minimum_cut(network, "forward", "backward")
    values = {v for v, _ in behind - {"backward"}}
    return {v for v in values if (v, "out") in behind and (v, "in") not in behind}


def select_rematerialized(
    ops: Sequence[Op], needed: Iterable[Value], saved: Iterable[Value]
) -> list[Op]:
    """The ops, of those of the forward steps, that give the needed values, given the saved ones."""
    wanted, known = set(needed), set(saved)
    again = []
    for op in reversed(ops):
        if op.result in wanted and op.result not in known:
            again.append(op)
            wanted.update(op.values)
    return again[::-1]


def make_again(forward: Program, backward: Program) -> Program:
    """Returns the gradient without what costs more to read than to compute again.

    Args:
        forward: returns, as ``kept_<i>``, the result of op i before its loop.
        backward: its gradient, which reads those. What its loop reads is in memory already, since
            that of `forward` reads it, too; of what only ops after the loop read, they compute
            again what needs no products and sums of features.
    """
    ops = list(flat(forward.before))
    numbers, given = {op.result: i for i, op in enumerate(ops)}, dict(backward.sequences)
    named = {v: f"kept_{i}" for v, i in numbers.items()} | {v: n for n, v in forward.sequences}
    values = {v: given[name] for v, name in named.items() if name in given}
    values |= {a.value: b.value for a, b in zip(forward.params, backward.params, strict=True)}
    others = {v for region in (backward.before, backward.step) for op in flat(region)
              for v in op.values}  # fmt: skip
    others |= {*step_outputs(backward), *backward.returned}
    after = {v for op in flat(backward.after) for v in op.values}
    wanted = {
        v for v in numbers.keys() & values.keys()
        if values[v] in after - others and v.type.rate == "sequence"
    }  # fmt: skip
    free = {v for v, own in values.items() if v not in numbers or own in others}
    free |= {v for v in numbers if v.type.rate != "sequence"}

    def again(op: Op) -> bool:
        """Returns whether an op may be: costly functions, too, since memory is waited for."""
        if op.kind == "einsum":
            return not layout(op).reduced
        return op.kind != "keep" and (is_cheap(op.kind) or is_elementwise(op.kind))

    def cost(value: Value) -> int:
        """Returns the bytes to read and, but for products, which are in memory, to write."""
        in_memory = value in numbers and ops[numbers[value]].kind in PRODUCTS
        return 0 if value in free else value.type.row_bytes * (1 if in_memory else 2)

    cut = _find_cut(ops, wanted, again, cost)
    made = select_rematerialized(ops, wanted, cut | free)
    made = [replace(substitute(op, values), result=values.get(op.result, op.result)) for op in made]
    results = {op.result for op in made}
    sequences = [(name, v) for name, v in backward.sequences if v not in results]
    sequences += [(named[v], v) for v in cut - values.keys()]
    return replace(backward, sequences=tuple(sequences), after=(*made, *backward.after))
