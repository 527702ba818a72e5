"""Chooses what the forward steps save for the backward steps, and what those rematerialise.

The choice is a minimum cut of the data flow. Its source is what the backward steps cannot compute
themselves: states, products and costly functions. Its sink is what they read. A value costs the
bytes of its row. Values on the cut are saved; the ops behind it are rematerialised: those that
:data:`Recompute` allows. Steps without products wait for memory: there what is in memory already
costs half, since nobody need write it. The construction is that of the
min-cut partitioner of torch.compile (He and Yu, Transcending Runtime-Memory Tradeoffs, 2023).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from hoconv.recurrent.ir.axes import layout
from hoconv.recurrent.ir.functions import FUNCTIONS
from hoconv.recurrent.ir.kinds import PRODUCTS, is_cheap
from hoconv.recurrent.ir.program import Op, Program, Value, flat

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
    import networkx  # not at the top: it takes long to import

    # A value is an edge from its "in" to its "out" node, whose capacity is the cost of saving it.
    # The other edges have no capacity and cannot be cut.
    network = networkx.DiGraph()
    network.add_nodes_from(("forward", "backward"))
    free = {v for _, v in program.sequences}  # saved for the gradients of weights anyway
    ops = list(flat(program.step))
    made_by = {op.result: op for op in ops}
    alone = not any(op.kind in PRODUCTS for op in ops)
    functions = recompute == "functions" and alone
    if sparse:
        free |= {state.value for state in program.states}
    if recompute == "all" or functions:
        free |= {op.result for op in flat(program.before)}

    def again(op: Op) -> bool:
        if sparse and op.kind == "einsum" and not layout(op).reduced:
            return True
        return recompute == "all" or is_cheap(op.kind) or (functions and op.kind in FUNCTIONS)

    for value in {v for op in ops for v in (*op.values, op.result)} | set(needed):
        if value.type.rate in ("once", "constant"):
            continue
        cost = 0 if value in free else value.type.row_bytes * (1 + (alone and value in made_by))
        network.add_edge((value, "in"), (value, "out"), capacity=cost)
        op = made_by.get(value)
        if op is None or not again(op):
            network.add_edge("forward", (value, "in"))
        else:
            network.add_edges_from(((source, "out"), (value, "in")) for source in op.values)
    network.add_edges_from(((value, "out"), "backward") for value in needed)
    # Of all cuts that cost the least, networkx gives the one nearest to the backward steps.
    _, (_, behind) = networkx.minimum_cut(network, "forward", "backward")
    values = (*(state.value for state in program.states), *made_by)
    return [v for v in values if (v, "out") in behind and (v, "in") not in behind]


def select_rematerialized(
    program: Program, needed: Iterable[Value], saved: Iterable[Value]
) -> list[Op]:
    """The ops of the forward steps that give the needed values, given the saved ones."""
    wanted, known = set(needed), set(saved)
    again = []
    for op in reversed(list(flat(program.step))):
        if op.result in wanted and op.result not in known:
            again.append(op)
            wanted.update(op.values)
    return again[::-1]
