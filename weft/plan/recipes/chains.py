"""Choosing what tensor parallelism cuts.

In: a plan and a number of parts. Out: chains: connected ops of one color, each with the name to cut.

    minimise   bytes moved per multiplication divided, chain by chain (greedy)
    subject to no color that an input has (batch, sequence, features: other recipes cut those), unless a weight has it
               too and nothing else is left                                     choose_chains
               at least `parts` units                                           find_inner_colors
               every op in one chain at most                                    _best_chain
               at least LEAST_FLOPS_PER_BYTE, unless nothing else is left       choose_chains
               no op that only carries a result further at a cost               _tightened

Two ops are connected if a tensor lies between them (or a parameter is used by both) that both cut. Taking a chain
removes its ops from other colors, which as a rule move more bytes per multiplication afterwards: an old rank in the
heap is a lower bound, and a color is weighed again only when it comes up.
"""

from __future__ import annotations

import heapq
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from weft.ir.oplayout import Cut
from weft.ops.work import contraction
from weft.plan.colors import Color, Member, find_inner_colors, is_of_inputs
from weft.plan.plan import Plan
from weft.plan.primitives import CutBy
from weft.plan.recipes.grow import neighbours, tightest
from weft.plan.recipes.weigh import Weight, weigh

LEAST_FLOPS_PER_BYTE = 1.5
"""Below that even a laptop computes faster than it sends: dividing the work does not pay for moving the result."""


@dataclass(frozen=True)
class Chain:
    """Connected ops that are cut by one color, and the name of each, in execution order.

    Args:
        color: what they are cut by.
        members: the name of each.
        weight: what that divides and moves.
        ends: readers of what they make that are better left whole, unless another chain has them.
    """

    color: Color
    members: Mapping[str, Member]
    weight: Weight
    ends: tuple[str, ...] = ()

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
    colors = find_inner_colors(plan.graph, plan.rules, parts).all
    free = [color for color in colors if talking or not any(one.talks for one in color.members.values())]
    inner = [color for color in free if not is_of_inputs(plan.graph, color)]
    stored = [color for color in free if color not in inner and plan.graph.parameter_tensors & color.dims.keys()]
    return _choose(plan, parts, colors, inner, talking) or _choose(plan, parts, colors, stored, talking)


def _choose(plan: Plan, parts: int, colors: Sequence[Color], eligible: Iterable[Color], talking: bool) -> list[Chain]:
    """Chains of these colors."""
    taken: set[str] = set()
    chosen: list[Chain] = []
    poor: list[Chain] = []
    heap = [(0.0, color.number, -1) for color in eligible]
    while heap:
        _, number, seen = heapq.heappop(heap)
        chain = _best_chain(plan, colors[number], parts, taken)
        if chain is None:
            continue
        if seen != len(taken):
            heapq.heappush(heap, (chain.weight.bytes_per_flop, number, len(taken)))
            continue
        chain = _tightened(plan, chain) if talking else chain
        if _worth(plan, chain, talking):
            chosen.append(chain)
            taken |= set(chain.members)
            heapq.heappush(heap, (chain.weight.bytes_per_flop, number, -1))
        else:
            poor.append(chain)
    return sorted(chosen or poor[:1], key=lambda chain: chain.color.number)


def _worth(plan: Plan, chain: Chain, talking: bool) -> bool:
    ops = [plan.graph.by_name[op] for op in chain.members]
    contractions = sum(contraction(op, plan.rule(op), plan.graph) > 0 for op in ops)
    return chain.weight.bytes_per_flop * LEAST_FLOPS_PER_BYTE <= 1 and (talking or contractions > 1)


def _best_chain(plan: Plan, color: Color, parts: int, taken: set[str]) -> Chain | None:
    """The chain of a color among the ops not taken that moves the fewest bytes per multiplication."""
    chains = []
    for members in free_groups(plan, color, parts, taken):
        weight = weigh(plan.graph, plan.rules, cut_names(members))
        if weight.flops:
            chains.append(Chain(color, members, weight))
    return min(chains, key=lambda chain: chain.weight.bytes_per_flop, default=None)


def _tightened(plan: Plan, chain: Chain) -> Chain:
    """The part of a chain that moves fewer bytes for each multiplication than the whole; the whole if there is none, or
    if a multiplication would be left over that is not worth cutting by itself."""
    names = cut_names(chain.members)
    found = tightest(plan, names, chain.weight)
    if found is None:
        return chain
    left = (weigh(plan.graph, plan.rules, {op: name}) for op, name in names.items() if op not in found[0])
    if any(one.flops and one.bytes_per_flop * LEAST_FLOPS_PER_BYTE > 1 for one in left):
        return chain
    members = {op: member for op, member in chain.members.items() if op in found[0]}
    made = [name for op in members for name in plan.graph.by_name[op].outputs]
    readers = dict.fromkeys(one.name for name in made for one in plan.graph.consumers[name])
    return Chain(chain.color, members, found[1], tuple(op for op in readers if op not in members))


def free_groups(plan: Plan, color: Color, parts: int, taken: Container[str]) -> list[dict[str, Member]]:
    """Connected ops that the color may cut and nobody else does."""
    members = {
        op: member for op, member in color.members.items() if op not in taken and allowed(plan, op, member, parts)
    }
    return connected(plan, members)


def cut_names(members: Mapping[str, Member]) -> dict[str, str]:
    """The name along which each op is cut."""
    return {op: member.name for op, member in members.items()}


def connected(plan: Plan, members: Mapping[str, Member]) -> list[dict[str, Member]]:
    """The ops in groups that share a tensor which both cut, each in execution order."""
    beside = neighbours(plan, cut_names(members))
    position = {op: i for i, op in enumerate(members)}
    groups: list[dict[str, Member]] = []
    seen: set[str] = set()
    for start in members:
        group: list[str] = []
        queue = [start] if start not in seen else []
        while queue:
            op = queue.pop()
            if op not in seen:
                seen.add(op)
                group.append(op)
                queue += beside[op]
        if group:
            groups.append({op: members[op] for op in sorted(group, key=position.__getitem__)})
    return groups


def allowed(plan: Plan, op: str, member: Member, parts: int) -> bool:
    """True if the cuts that the op has already leave room: nested cuts of a name share groups and units."""
    if op not in plan.decisions:
        return True
    cuts = [one.use for one in plan.decisions[op].uses if isinstance(one.use, Cut) and one.use.name == member.name]
    for cut in cuts:
        parts *= len(cut.shares)
    return parts <= member.units and all((cut.groups, cut.units) == (member.groups, member.units) for cut in cuts)
