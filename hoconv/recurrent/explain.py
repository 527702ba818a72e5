"""Explains a plan in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from hoconv.recurrent.codegen.cuda import emit_cuda
from hoconv.recurrent.codegen.matrix.chunks import ChunkSource, emit_chunks
from hoconv.recurrent.codegen.matrix.kernel import MatrixSource, emit_matrix
from hoconv.recurrent.codegen.scan import emit_scan
from hoconv.recurrent.ir.kinds import DELAY, PRODUCTS, is_rowwise
from hoconv.recurrent.ir.program import SEGMENT, Group, Op, Program, flat
from hoconv.recurrent.match import SMALL, match
from hoconv.recurrent.passes.affine import find_affine
from hoconv.recurrent.passes.stage import products
from hoconv.recurrent.runtime import chunks
from hoconv.recurrent.runtime.clusters import CAPABILITY, H200, Clusters
from hoconv.recurrent.runtime.scans import LEAST_STEPS, MOST_FEATURES
from hoconv.recurrent.runtime.workspace import CHUNK
from hoconv.recurrent.schedule import Plan

_WHY = {
    "naive": "every op by itself, at every step",
    "combined": "products of one operand are one product",
    "fused": "and what is between products is one kernel",
    "hoisted": "and what depends on the input alone is computed before the loop",
    "graph": "and the whole loop is one call",
    "persistent": "and one kernel keeps the weights on the chip for all steps",
    "auto": "the fastest rung of the ladder: persistent where it can and is faster, else graph",
}
_WHOLE = "one kernel for all steps"
_SCAN = (
    f"a scan of {LEAST_STEPS} steps or more, with up to {MOST_FEATURES:,} features of all rows, "
    "where blocks form clusters"
)
# Rows for which the choice of a kernel is explained.
_BATCHES = (64, 128, 256, 512, 1024, 4096)


def explain(plan: Plan, directions: int = 1) -> str:
    """Says what is hoisted, what a step costs, what is saved, and what runs on which device.

    Args:
        plan: of one direction of a layer that has so many.
    """
    forward, backward = plan.forward, plan.backward
    lines = [
        f"{forward.name.removesuffix(' forward')}, schedule {plan.schedule}: {_WHY[plan.schedule]}",
        f"  before the loop, once for all steps: {_list_work(forward.before)}",
        *_describe_delays(forward),
        f"  each step: {_list_work(forward.step)}",
        *_describe_moved("after the loop", forward.after),
        *_describe_moved("before the loop backwards", backward.before),
        f"  each step backwards: {_list_work(backward.step)}",
        f"  after the loop backwards, once for all steps: {_list_work(backward.after)}",
    ]
    lines.append(f"  next states: {_describe_states(forward)}")
    lines += [f"  combined into one product: {names}" for names in _list_combined(forward)]
    lines.append(f"  saved for backward: {_list_saved(forward)}")
    lines.append("  cpp: on a CPU, one call for all steps; on a GPU, op by op in PyTorch")
    on_gpu = replace(plan, recompute="functions") if plan.recompute == "cheap" else plan
    if (saved := _list_saved(on_gpu.forward)) != _list_saved(forward):
        lines.append(f"  on a GPU, saved for backward: {saved}; functions are computed again")
    lines += [f"  cuda: {said}" for said in _explain_gpu(on_gpu, directions)]
    return "\n".join(lines)


def _explain_gpu(plan: Plan, directions: int) -> Iterable[str]:
    """Says what `cuda` runs and why; the same with and without a GPU."""
    if plan.persistent and products(plan.forward):
        yield from _explain_clusters(plan, directions)
    chip = f"keeps the weights on the chip in float32 with up to {SMALL} hidden units"
    if plan.cudnn:
        name = plan.cudnn.function
        yield f"else cuDNN's {name}, which {chip}; with lengths, resets or torch.compile as follows"
    elif plan.recompute == "all":
        yield "not cuDNN, which keeps what its gradient needs"
    elif plan.schedule != "auto":
        yield "not cuDNN, which schedule auto alone calls"
    elif known := match(plan.common[0][1]):
        yield f"not cuDNN's {known.function}, which {chip} only"
    else:
        yield "not cuDNN: the cell is not exactly its LSTM, GRU or tanh cell"
    steps = f"graphs of up to {CHUNK} steps" if plan.recorded else "launches one by one"
    forward, backward = (
        _count_launches(program, plan.recorded) for program in (plan.forward, plan.backward)
    )
    if forward and backward:
        yield f"{steps}; each step {forward}, backwards {backward}"
    else:
        ways = (f"{steps}, each {each}" if each else _WHOLE for each in (forward, backward))
        yield "{}; backwards {}".format(*ways)
    if plan.recorded:
        yield from _explain_matrices(plan)
    named = ("forward", plan.forward), ("backward", plan.backward)
    if plan.recorded and (scanned := [name for name, each in named if emit_scan(each)]):
        yield f"{' and '.join(scanned)}: {_SCAN}"


def _explain_matrices(plan: Plan) -> Iterable[str]:
    """Says whether matrix states are kept in registers, or why not; nothing of other states."""
    if isinstance(plan.matrices, str):
        if any(op.kind == "einsum" for op in flat(plan.forward.step)):
            yield f"the states are not kept in registers: {plan.matrices}"
        return
    where = "the states in registers"
    yield f"{where}: {_describe_blocks(plan.inference)}"
    if isinstance(plan.matrix_gradient, str):
        yield f"for a gradient, they are not: {plan.matrix_gradient}"
        return
    yield (
        f"{where} backwards: {_describe_blocks(plan.backward)}; the states before segments of "
        f"{SEGMENT} steps are saved, those between computed again"
    )
    sources = {"forward": emit_chunks(plan.forward), "backward": emit_chunks(plan.backward)}
    if chunked := [name for name, each in sources.items() if isinstance(each, ChunkSource)]:
        yield (
            f"{' and '.join(chunked)}: chunks of {SEGMENT} steps on tensor cores, from "
            f"{chunks.LEAST_STEPS} steps on"
        )
    else:
        yield f"no chunks of steps: {plan.unchunked or sources['forward']}"


def _describe_blocks(program: Program) -> str:
    found = emit_matrix(program)
    assert isinstance(found, MatrixSource), found
    of = found.tiling
    has = f"{of.slab} of {of.columns}" if of.slabs > 1 else f"all {of.columns}"
    warps = _count(of.warps, "warp")
    heads = " of a head" if found.blocks > of.slabs else ""
    return f"a block of {warps} has {has} columns{heads}, each with {of.keys} keys in " + (
        f"{of.lanes} lanes" if of.lanes > 1 else "a lane"
    )


def _explain_clusters(plan: Plan, directions: int) -> Iterable[str]:
    """Says whether a GPU with clusters of blocks keeps the weights on the chip, or why not."""
    where = f"compute capability {'.'.join(map(str, CAPABILITY))} and later"
    for name, program in (("forward", plan.forward), ("backward", plan.backward)):
        clusters = Clusters(program, always=plan.schedule == "persistent")
        for runs in range(directions, 0, -1):
            one = "one kernel" if runs == 1 else "one kernel for both directions at once"
            found = [clusters.choose(B, H200, runs) for B in _BATCHES]
            if any(not isinstance(each, str) for each in found):
                yield f"{name}: {one} where blocks form clusters ({where})"
                break
            yield f"{name}: not {one}, since {found[0]}"


def _describe_states(program: Program) -> str:
    """Says whether the steps are affine in the states."""
    if not program.states:
        return "none in the loop"
    found = find_affine(program)
    if isinstance(found, str):
        return f"not affine: {found}"
    names = ", ".join(s.name for s in found.states)
    others = ", ".join(s.name for s in program.states if s not in found.states)
    unread = f"no step reads {others}"
    if not names:
        return unread
    how = f"but {found.mixing} mixes features" if found.mixing else "feature by feature"
    return f"affine in {names}, {how}" + (f"; {unread}" if others else "")


def _describe_moved(when: str, ops: tuple[Op | Group, ...]) -> Iterable[str]:
    """Says what no state waits for."""
    if ops:
        yield f"  {when}, once for all steps: {_list_work(ops)}"


def _describe_delays(program: Program) -> Iterable[str]:
    """Says which states are made before the loop."""
    if names := ", ".join(d.name for d in program.delays):
        yield f"  states before the loop: {names}, whose next values depend on no state"


def _count_launches(program: Program, recorded: bool) -> str | None:
    """Counts the products and kernels of a step; None where one kernel runs all steps."""
    source = emit_cuda(program, whole=recorded)
    if source.whole:
        return None
    launches = source.launches
    products = sum(isinstance(each, Op) for each in launches)
    return f"{_count(products, 'product')} and {_count(len(launches) - products, 'kernel')}"


def _list_work(region: Iterable[Op | Group]) -> str:
    """Lists products with their sizes, and kernels with their numbers of ops."""
    parts = []
    items = list(region)
    for item in items:
        if isinstance(item, Op) and item.kind in (*PRODUCTS, "outer"):
            first, second = (v.type for v in item.values[:2])
            if item.kind == "outer":
                parts.append(f"the gradient of a weight ({first.size} x {second.size})")
            else:
                parts.append(f"a product ({first.size} to {item.result.type.size} features)")
    if totals := sum(isinstance(i, Op) and i.kind in ("total", "sum_steps") for i in items):
        parts.append(_count(totals, "sum", "for the gradients of vectors"))
    if delays := sum(isinstance(i, Op) and i.kind == DELAY for i in items):
        parts.append(_count(delays, "delayed sequence"))
    alone = sum(isinstance(i, Op) and is_rowwise(i.kind) for i in items)
    if alone:
        parts.append(_count(alone, "kernel", "of one op each"))
    for item in items:
        if isinstance(item, Group):
            parts.append(f"a kernel of {_count(len(item.ops), 'op')}")
    shown = [f"{n} times {part}" if n > 1 else part for part, n in Counter(parts).items()]
    return f"{', '.join(shown)}; {_count(len(items), 'call')}" if shown else "nothing"


def _list_combined(program: Program) -> Iterable[str]:
    """The names of the linear maps that are combined into one product."""
    read = [op for op in flat((*program.before, *program.step)) if op.kind == "linear"]
    params = {p.value: p for p in program.params}
    for op in read:
        pieces = params[op.values[1]].pieces
        if len(pieces) > 1:
            names = ", ".join(p.parameter.removeprefix("weight_") for p in pieces)
            operand = op.values[0].hint or "a value of the step"
            yield f"{names} of {operand}"


def _list_saved(program: Program) -> str:
    made_by = {op.result: op.kind for op in flat(program.step)}
    states = {s.value: s.name for s in program.states}
    saved = [y.source for y in program.yields if y.name.startswith("saved") and not y.sparse]
    sparse = [y.source for y in program.yields if y.sparse]
    named = [f"the state {states[v]}" for v in saved if v in states]
    named += [f"the state {states[v]} before segments of {SEGMENT} steps" for v in sparse]
    counted = Counter(made_by[v] for v in saved if v in made_by)
    named += [f"{n} result{'s' * (n > 1)} of {kind}" for kind, n in counted.items()]
    kept = [v for name, v in program.results if name.startswith("kept")]
    if kept:
        named.append(_count(len(kept), "sequence", "made before the loop"))
    if not named:
        return "nothing"
    total = sum(v.type.row_bytes for v in (*saved, *kept) if v.type.rate in ("step", "sequence"))
    total += sum(v.type.row_bytes for v in sparse) // SEGMENT
    return f"{', '.join(named)}; {total} bytes a step and row"


def _count(n: int, noun: str, rest: str = "") -> str:
    return f"{n} {noun}{'s' * (n != 1)}{' ' * bool(rest)}{rest}"
