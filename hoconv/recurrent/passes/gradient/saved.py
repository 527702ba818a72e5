"""What the forward steps save for the backward ones, and what those compute again.

A minimum cut between what only the forward steps know (states, products, costly functions) and
what the backward steps read, weighed by the bytes of a row: everything behind the cut is computed
again by cheap functions from what is saved on it. The construction is that of the min-cut
partitioner of torch.compile (He and Yu, Transcending Runtime-Memory Tradeoffs, 2023).
"""

from __future__ import annotations

from collections.abc import Iterable

from hoconv.recurrent.ir.kinds import is_cheap
from hoconv.recurrent.ir.program import Op, Program, Value, flat


def choose_saved(program: Program, needed: Iterable[Value]) -> list[Value]:
    """The values of the steps to save, so that the needed ones can be computed from them.

    Args:
        program: a forward program without groups.
        needed: values of rate ``step``, results of ops or states.
    """
    import networkx  # here: importing hoconv is not to wait for it

    # A value is an edge from "in" to "out", whose capacity is what saving it costs: the cut is
    # through values. Edges without a capacity cannot be cut.
    network = networkx.DiGraph()
    network.add_nodes_from(("forward", "backward"))
    free = {v for _, v in program.sequences}  # kept for the gradients of weights anyway
    ops = list(flat(program.step))
    made_by = {op.result: op for op in ops}
    for value in {v for op in ops for v in (*op.values, op.result)} | set(needed):
        if value.type.rate == "once":
            continue
        cost = 0 if value in free else value.type.row_bytes
        network.add_edge((value, "in"), (value, "out"), capacity=cost)
        op = made_by.get(value)
        if op is None or not is_cheap(op.kind):
            network.add_edge("forward", (value, "in"))
        else:
            network.add_edges_from(((source, "out"), (value, "in")) for source in op.values)
    network.add_edges_from(((value, "out"), "backward") for value in needed)
    # Of all cuts that cost the least, networkx gives the one nearest to the backward steps.
    _, (_, behind) = networkx.minimum_cut(network, "forward", "backward")
    values = (*(state.value for state in program.states), *made_by)
    return [v for v in values if (v, "out") in behind and (v, "in") not in behind]


def computed_again(program: Program, needed: Iterable[Value], saved: Iterable[Value]) -> list[Op]:
    """The ops of the forward steps that give the needed values, given the saved ones."""
    wanted, known = set(needed), set(saved)
    again = []
    for op in reversed(list(flat(program.step))):
        if op.result in wanted and op.result not in known:
            again.append(op)
            wanted.update(op.values)
    return again[::-1]
