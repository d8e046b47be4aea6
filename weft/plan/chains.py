"""Choosing what tensor parallelism cuts.

In: a plan and a number of parts. Out: chains: ops of one color, each with the name to cut, every op in one chain at most.

    minimise   bytes moved per multiplication divided, color by color (greedy)
    subject to no color that an input has (batch, sequence, features: other recipes cut those)
               at least `parts` units                                           find_colors
               every op in one color at most                                    Chain.members of what is left
               at least LEAST_FLOPS_PER_BYTE, unless nothing else is left       choose_chains

Taking a color removes its ops from the others, which can only move more bytes per multiplication afterwards; so a stale
rank in the heap is a lower bound, and a color is weighed again only when it comes up.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass

from weft.ir.oplayout import Cut
from weft.plan.colors import Color, Member, find_colors
from weft.plan.plan import Plan
from weft.plan.primitives import CutBy
from weft.plan.weigh import Weight, multiplications, weigh

LEAST_FLOPS_PER_BYTE = 1.0
"""Below that even a laptop computes faster than it sends: dividing the work does not pay for moving the result."""


@dataclass(frozen=True)
class Chain:
    """Ops that are cut by one color, and the name of each."""

    color: Color
    members: Mapping[str, Member]
    weight: Weight

    def cuts(self, parts: int, axis: str) -> dict[str, CutBy]:
        """The cut of every op."""
        return {op: member.cut(parts, axis) for op, member in self.members.items()}


def choose_chains(plan: Plan, parts: int, *, talking: bool = True) -> list[Chain]:
    """The chains to cut, in execution order.

    Args:
        plan: what was decided so far; cuts of other axes are respected.
        parts: how many parts a chain is cut into.
        talking: whether parts may exchange values inside an op. If not, they are meant to run one after the other on
            one device, which saves memory only where two multiplications follow each other.
    """
    inputs = {one.tensor for one in plan.graph.inputs}
    taken: set[str] = set()
    chosen: list[Chain] = []
    poor: list[Chain] = []
    heap: list[tuple[float, int, int]] = []
    colors = find_colors(plan.graph, plan.rules, parts).all
    for color in colors:
        if inputs.isdisjoint(color.dims) and (talking or not any(color.names[op][0].talks for op in color.ops)):
            heapq.heappush(heap, (0.0, color.number, -1))
    while heap:
        _, number, seen = heapq.heappop(heap)
        chain = _chain(plan, colors[number], parts, taken)
        if not chain.weight.flops:
            continue
        if seen != len(taken):
            heapq.heappush(heap, (chain.weight.bytes_per_flop, number, len(taken)))
        elif _worth(plan, chain, talking):
            chosen.append(chain)
            taken |= set(chain.members)
        else:
            poor.append(chain)
    return sorted(chosen or poor[:1], key=lambda chain: chain.color.number)


def _worth(plan: Plan, chain: Chain, talking: bool) -> bool:
    contractions = sum(multiplications(plan.rule(op)) > 0 for op in chain.members)
    return chain.weight.bytes_per_flop * LEAST_FLOPS_PER_BYTE <= 1 and (talking or contractions > 1)


def _chain(plan: Plan, color: Color, parts: int, taken: set[str]) -> Chain:
    members = {
        op: color.names[op][0]
        for op in color.ops
        if op not in taken and _allowed(plan, op, color.names[op][0], parts)
    }
    return Chain(color, members, weigh(plan.graph, plan.rules, {op: one.name for op, one in members.items()}))


def _allowed(plan: Plan, op: str, member: Member, parts: int) -> bool:
    """True if the cuts that the op has already leave room: nested cuts of a name share groups and units."""
    if op not in plan.decisions:
        return True
    cuts = [one.use for one in plan.decisions[op].uses if isinstance(one.use, Cut) and one.use.name == member.name]
    for cut in cuts:
        parts *= len(cut.shares)
    return parts <= member.units and all((cut.groups, cut.units) == (member.groups, member.units) for cut in cuts)
