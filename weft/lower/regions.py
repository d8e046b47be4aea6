"""Regions: neighbouring steps whose ops are recomputed together become one Recompute.

In: a flat list of steps. Out: the list with every maximal run of Computes (and Chunks) that bear the same mark gathered
into a Recompute, together with the Reshards between them. A Use stays outside: the leaf of a parameter must be
one and the same in both runs.

What only a recomputed loop over chunks reads is recomputed with the loop: a norm before a co-sharded attention, so that
the norm's result is not kept for the loop. Regions of ops of which autograd keeps nothing are left to it: such a region
would keep what it reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from weft.ir.graph import Graph
from weft.ir.program import Chunks, Compute, Program, Recompute, Reshard, Step, Use, outputs_of, values_read

KEEPS_NOTHING = frozenset({"aten.add.Tensor", "aten.sub.Tensor"})
"""Operators of which autograd keeps no operand."""


def gather_regions(steps: Sequence[Step]) -> tuple[Step, ...]:
    """The steps with recomputed runs gathered."""
    out: list[Step] = []
    body: list[Step] = []
    waiting: list[Step] = []
    uses: list[Use] = []
    mark: int | None = None
    for step in steps:
        own = _mark(step)
        if isinstance(step, Use):
            uses.append(step)
        elif isinstance(step, Compute | Chunks):
            if own is None or own != mark:
                _flush(out, body, waiting)
                mark = own
            else:
                body.extend(waiting)
                waiting.clear()
            # before the region that needs them, after the one before it
            out.extend(uses)
            uses.clear()
            (out if own is None else body).append(step)
        else:
            if not {use.value for use in uses}.isdisjoint(values_read(step)):
                out.extend(uses)
                uses.clear()
            (out if mark is None else waiting).append(step)
    _flush(out, body, waiting)
    return (*out, *uses)


def _flush(out: list[Step], body: list[Step], waiting: list[Step]) -> None:
    """Close the region: what waits for another member of it comes after."""
    if body:
        out.append(Recompute(tuple(body)))
    out.extend(waiting)
    body.clear()
    waiting.clear()


def _mark(step: Step) -> int | None:
    """The recompute mark of a step; chunks that recompute themselves bear none."""
    return step.layout.recompute if isinstance(step, Compute) else None


def with_loops_joined(program: Program) -> Program:
    """The Program, with what only a recomputed loop reads recomputed with it."""
    out: list[Step] = []
    last = -1
    for step in program.steps:
        region = out[last] if last >= 0 else None
        joined = (
            _only_for(step, region, program.reads) if isinstance(region, Recompute) and isinstance(step, Chunks) else []
        )
        if isinstance(region, Recompute) and isinstance(step, Chunks) and joined:
            rest = tuple(inner for inner in region.body if not any(inner is one for one in joined))
            out[last : last + 1] = [Recompute(rest)] if rest else []
            out.append(Recompute((*joined, replace(step, ends=True))))
        else:
            out.append(step)
        last = len(out) - 1 if isinstance(out[-1], Recompute) else last
    return replace(program, steps=tuple(one for step in out for one in _worth(step, program.graph)))


def _only_for(loop: Chunks, region: Recompute, reads: Counter[str]) -> list[Step]:
    """The steps of a region whose results nobody reads but a recomputed loop, and each other."""
    if not loop.recompute or len(outputs_of(loop)) != 1:
        return []
    read = Counter(values_read(loop))
    found: list[Step] = []
    for step in reversed(region.body):
        names = outputs_of(step)
        if (
            isinstance(step, Compute | Reshard)
            and any(map(read.get, names))
            and all(reads[n] == read[n] for n in names)
        ):
            found.insert(0, step)
            read.update(values_read(step))
    return found


def _worth(step: Step, graph: Graph) -> Sequence[Step]:
    """A region, or its steps if it would keep no less."""
    if not isinstance(step, Recompute) or any(isinstance(inner, Chunks) for inner in step.body):
        return (step,)
    targets = {graph.by_name[inner.op].target for inner in step.body if isinstance(inner, Compute)}
    return step.body if targets <= KEEPS_NOTHING else (step,)
