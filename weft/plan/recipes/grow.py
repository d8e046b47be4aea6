"""Growing a chain from one multiplication: op by op, as long as fewer bytes are moved for each that is divided.

In: the ops that could be cut together, each with its name. Out: those around one of them that are better cut without
the rest: the result of a convolution that only begins a long stream of cheap ops is gathered at once, instead of
every norm of the stream talking. Ops that share a weight stay together: it is stored once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from weft.ir.graph import Graph
from weft.ops.book import RuleBook
from weft.ops.work import contraction
from weft.plan.plan import Plan
from weft.plan.recipes.weigh import Weight, moved

PATIENCE = 8
"""So many ops are taken in vain before a part counts as grown."""
SLACK = 1.01
"""A part may grow on for that much more than the least it moved: work is divided that is not counted here."""
GAIN = 0.9
"""A part is preferred to the whole if it moves less than that for each multiplication."""


def tightest(plan: Plan, cuts: Mapping[str, str], whole: Weight) -> tuple[frozenset[str], Weight] | None:
    """The part of these ops, around one multiplication, that moves fewest bytes for each; None if that is the whole.

    Args:
        plan: of which graph.
        cuts: the ops that could be cut together, and the name of each.
        whole: what cutting them all divides and moves.
    """
    limit = GAIN * whole.bytes_per_flop
    beside = neighbours(plan, cuts)
    best: tuple[frozenset[str], Weight] | None = None
    done: set[str] = set()
    for op in cuts:
        if op in done or not _flops(plan, op):
            continue
        grown = _Growth(plan.graph, plan.rules, cuts, beside)
        grown.start(op)
        done |= grown.inside
        if grown.weight.bytes_per_flop < limit:
            best, limit = (grown.inside, grown.weight), grown.weight.bytes_per_flop
    return best


def neighbours(plan: Plan, cuts: Mapping[str, str]) -> dict[str, dict[str, bool]]:
    """For each op those that cut a tensor with it, and whether that is a stored one."""
    holders: dict[str, list[str]] = {}
    for op, name in cuts.items():
        one, rule = plan.graph.by_name[op], plan.rule(op)
        for tensor, dims in zip((*one.inputs, *one.outputs), (*rule.inputs, *rule.outputs), strict=True):
            if any(name in dim.names for dim in dims):
                holders.setdefault(tensor, []).append(op)
    found: dict[str, dict[str, bool]] = {op: {} for op in cuts}
    for tensor, ops in holders.items():
        stored = tensor in plan.graph.parameter_tensors
        for op in ops:
            for other in ops:
                if other != op:
                    found[op][other] = found[op].get(other, False) or stored
    return found


def _flops(plan: Plan, op: str) -> int:
    one = plan.graph.by_name[op]
    return contraction(one, plan.rule(one), plan.graph)


class _Growth:
    """A part that grows by the op that adds the fewest bytes, and the best that it was. Local to `tightest`."""

    def __init__(
        self, graph: Graph, rules: RuleBook, cuts: Mapping[str, str], beside: Mapping[str, Mapping[str, bool]]
    ) -> None:
        self._graph, self._rules, self._cuts, self._beside = graph, rules, cuts, beside
        self._bytes: dict[str, int] = {}
        self._chosen: dict[str, str] = {}
        self._known: dict[str, int] = {}
        self._weight = Weight(0, 0)
        self.inside: frozenset[str] = frozenset()
        self.weight = Weight(0, 0)

    def start(self, op: str) -> None:
        """Take an op, then those around it, until no more bytes can be saved within reach."""
        self._take(self._bound(op))
        self._remember()
        least, patience = self.weight.bytes_per_flop, PATIENCE
        while patience and (around := self._around()):
            self._take(self._bound(min(around, key=self._added)))
            patience -= 1
            if self._weight.bytes_per_flop <= SLACK * least:
                least = min(least, self._weight.bytes_per_flop)
                self._remember()
                patience = PATIENCE

    def _remember(self) -> None:
        self.inside, self.weight = frozenset(self._chosen), self._weight

    def _bound(self, op: str) -> list[str]:
        """The op and those that use the same weights."""
        found = {op: None}
        queue = [op]
        while queue:
            for other, stored in self._beside[queue.pop()].items():
                if stored and other not in found and other not in self._chosen:
                    found[other] = None
                    queue.append(other)
        return list(found)

    def _around(self) -> list[str]:
        near = {other for op in self._chosen for other in self._beside[op] if other not in self._chosen}
        return [op for op in self._cuts if op in near]

    def _added(self, op: str) -> int:
        """Bytes that would be moved in addition if the op were taken."""
        if op not in self._known:
            ops = self._bound(op)
            chosen = self._chosen | {one: self._cuts[one] for one in ops}
            self._known[op] = sum(
                moved(self._graph, self._rules, chosen, tensor) - self._bytes.get(tensor, 0)
                for tensor in self._touched(ops)
            )
        return self._known[op]

    def _take(self, ops: list[str]) -> None:
        self._chosen.update((op, self._cuts[op]) for op in ops)
        for tensor in self._touched(ops):
            self._bytes[tensor] = moved(self._graph, self._rules, self._chosen, tensor)
            readers = [*self._graph.consumers[tensor], self._graph.producers.get(tensor)]
            for one in readers:
                if one is not None:
                    self._known.pop(one.name, None)
        made = map(self._graph.by_name.__getitem__, ops)
        flops = sum(contraction(op, self._rules.rule(op), self._graph) for op in made)
        self._weight = Weight(self._weight.flops + flops, sum(self._bytes.values()))

    def _touched(self, ops: list[str]) -> Iterable[str]:
        found = (self._graph.by_name[op] for op in ops)
        return dict.fromkeys(tensor for op in found for tensor in (*op.inputs, *op.outputs))
