"""Megatron's tensor parallelism, by the book, for any model that has its structure.

In: a Plan and a number of parts. Out: the Plan with cuts of

    attention    the heads: the name that both factors and the result of a product of two activations have, and all
                 ops of its color: projections that make heads by columns, the one that takes them by rows
    hidden       a color between two products with trained weights, with nothing that sums or talks on the way
    vocabulary   the classes of a loss, with the head that makes them, a table tied to it, and tables of as many rows

No module is known by name. Parts may be uneven (4 heads on 3 devices); fewer heads than parts are refused. Heads of
keys and values fewer than the parts are left whole on every device, as usual.
"""

from __future__ import annotations

from collections.abc import Mapping

from weft.errors import PlanError
from weft.ir.graph import Op
from weft.ops.rule import names_of
from weft.ops.work import multiplications
from weft.plan.colors import Color, Member, OpName, find_colors, is_of_inputs
from weft.plan.plan import Plan
from weft.plan.primitives import CutBy
from weft.plan.recipes.basic import check_count, cut_all, no_chain
from weft.plan.recipes.chains import cut_names, free_groups
from weft.plan.recipes.weigh import weigh

LOSSES = ("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d")
"""Operators that know their classes."""
TABLE = "embedding"


def megatron(plan: Plan, parts: int, *, axis: str = "tp") -> Plan:
    """Cut attention by heads, multi-layer perceptrons by hidden units, embedding, head and loss by vocabulary."""
    check_count("megatron", parts)
    cuts = _Cuts(plan, parts, axis)
    cuts.attention()
    cuts.vocabulary()
    cuts.hidden()
    if not cuts.chosen:
        raise no_chain(plan, f"megatron={parts}", parts)
    return cut_all(plan, cuts.chosen)


def vocabulary_cuts(plan: Plan, parts: int, *, axis: str = "tp") -> dict[str, CutBy]:
    """The cuts of embedding, head and loss by vocabulary alone, by op; none if the model has no such."""
    cuts = _Cuts(plan, parts, axis)
    cuts.vocabulary()
    return cuts.chosen


class _Cuts:
    """The cuts chosen so far. Local to this module."""

    def __init__(self, plan: Plan, parts: int, axis: str) -> None:
        self.plan, self.parts, self.axis = plan, parts, axis
        self.chosen: dict[str, CutBy] = {}
        self._colors = find_colors(plan.graph, plan.rules, parts)
        # a batch of fewer than `parts` rows is still the batch
        self._inputs = [color for color in find_colors(plan.graph, plan.rules, 2) if is_of_inputs(plan.graph, color)]

    def attention(self) -> None:
        for op in self.plan.graph.ops:
            if op.name in self.chosen or op.constant or not _multiplies_activations(self.plan, op):
                continue
            for name in self._heads(op):
                color = self._colors.at(OpName(op.name, name))
                if color is None:
                    raise self._too_few(op, name)
                self._take(op.name, color)

    def vocabulary(self) -> None:
        sizes = set()
        for op in self.plan.graph.ops:
            if op.kind not in LOSSES:
                continue
            rule = self.plan.rule(op)
            for name in rule.algorithms:
                color = self._colors.at(OpName(op.name, name))
                if name not in rule.made and color is not None and not self._is_input(op.name, name):
                    sizes.add(rule.sizes[name])
                    self._take(op.name, color)
        for op in self.plan.graph.ops:
            if op.kind == TABLE and not op.constant and op.name not in self.chosen:
                self._table(op, sizes)

    def _table(self, op: Op, sizes: set[int]) -> None:
        """Cut a table of as many rows as a loss has classes."""
        rule = self.plan.rule(op)
        for name in rule.summed | rule.algorithms.keys():
            color = self._colors.at(OpName(op.name, name))
            if color is not None and rule.sizes[name] in sizes:
                self._take(op.name, color)

    def hidden(self) -> None:
        """Take the colors between two products, those that move the fewest bytes per multiplication first."""
        found = []
        for color in self._colors:
            if color in self._inputs or is_of_inputs(self.plan.graph, color):
                continue
            for members in free_groups(self.plan, color, self.parts, self.chosen):
                if self._is_hidden(members):
                    weight = weigh(self.plan.graph, self.plan.rules, cut_names(members))
                    found.append((weight.bytes_per_flop, color.number, members))
        for _, _, members in sorted(found, key=lambda one: one[:2]):
            if not self.chosen.keys() & members.keys():
                self._cut(members)

    def _take(self, op: str, color: Color) -> None:
        for members in free_groups(self.plan, color, self.parts, self.chosen):
            if op in members:
                self._cut(members)

    def _cut(self, members: Mapping[str, Member]) -> None:
        self.chosen.update((op, member.cut(self.parts, self.axis)) for op, member in members.items())

    def _heads(self, op: Op) -> list[str]:
        """Names of a product that both factors and the result have, the batch aside."""
        rule = self.plan.rule(op)
        held = [frozenset(names_of(dims)) for dims in (*rule.inputs[:2], rule.outputs[0])]
        shared = frozenset.intersection(*held) - rule.frozen
        return [name for name in rule.names if name in shared and not self._is_input(op.name, name)]

    def _is_input(self, op: str, name: str) -> bool:
        return any(OpName(op, name) in color.nodes for color in self._inputs)

    def _is_hidden(self, members: Mapping[str, Member]) -> bool:
        """True if one trained product makes the color, another sums it, and all others pass it on."""
        made = summed = False
        for op, member in members.items():
            rule = self.plan.rule(op)
            if multiplications(rule):
                made |= member.name in rule.made
                summed |= member.name in rule.summed
            elif member.talks or member.name in rule.summed or member.name not in rule.made:
                return False
        return made and summed

    def _too_few(self, op: Op, name: str) -> PlanError:
        heads = self.plan.rule(op).sizes[name]
        even = [n for n in range(2, heads + 1) if heads % n == 0]
        what = f"cut them into {' or '.join(map(str, even))} parts" if even else "cut something else with tp"
        return PlanError(
            f"the attention of {op.path or self.plan.graph.name} has {heads} heads: they cannot be cut into "
            f"{self.parts} parts",
            place=op.place,
            remedy=f"{what} (at most {heads}; uneven parts are allowed), or fill the devices with dp",
        )


def _multiplies_activations(plan: Plan, op: Op) -> bool:
    """True for a product of two tensors that ops made."""
    made = [name for name in op.inputs if name in plan.graph.producers]
    return len(made) > 1 and made[:2] == list(op.inputs[:2]) and multiplications(plan.rule(op)) > 0
