"""RuleBook: the rule of every op of a graph, computed once per distinct form.

Repeated layers call the same operators with the same shapes and arguments, so rules are looked up by form: what the
user has stated, then the table, then what is discovered by running the operator. An operator of which nothing can be
cut may only be copied: its rule freezes every name and has the source "none", which `unruled` reports. Nothing is
replicated in silence.
"""

from __future__ import annotations

from collections.abc import Hashable

from weft.ir.graph import Graph, Op
from weft.ir.layout import Layout
from weft.ir.oplayout import OpLayout
from weft.ops.arguments import family, signature
from weft.ops.build import OpView
from weft.ops.derive import Operand, Operands, operands
from weft.ops.discover import discovered_rule
from weft.ops.registered import registered_rule
from weft.ops.rule import Rule
from weft.ops.stated import stated, stated_rule
from weft.ops.table import look_up
from weft.runtime.operators.algorithms import REGISTRY


class RuleBook:
    """Rules and operand layouts of one graph's ops, memoised by form."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._rules: dict[Hashable, Rule] = {}
        self._forms: dict[str, Hashable] = {}
        self._operands: dict[Hashable, Operands] = {}
        self._layouts: dict[Layout, Layout] = {}

    def rule(self, op: Op, algorithm: str = "") -> Rule:
        """The op's rule; the one of an algorithm of that name, if a plan has chosen one."""
        key = (self.form(op), algorithm)
        if key not in self._rules:
            self._rules[key] = self._look_up(op, algorithm)
        return self._rules[key]

    def _look_up(self, op: Op, algorithm: str) -> Rule:
        if algorithm or REGISTRY.find(family(op)) is not None:
            return registered_rule(op, self.graph, algorithm)
        if stated(op) is not None:
            return stated_rule(op, self.graph)
        return look_up(OpView.of(op, self.graph)) or discovered_rule(op, self.graph)

    def operands(self, op: Op, layout: OpLayout) -> Operands:
        """Layouts of the op's operands when it is cut so."""
        key = (self.form(op), layout)
        if key not in self._operands:
            made = operands(self.rule(op, layout.algorithm), layout)
            self._operands[key] = Operands(
                tuple(map(self._shared, made.inputs)), tuple(map(self._shared, made.outputs))
            )
        return self._operands[key]

    def _shared(self, operand: Operand) -> Operand:
        """Equal layouts are one object, so that what is worked out for one serves all."""
        layout = self._layouts.setdefault(operand.layout, operand.layout)
        return Operand(layout, self._layouts.setdefault(operand.grad, operand.grad))

    def unruled(self) -> tuple[Op, ...]:
        """The ops without a rule, which every device must run whole."""
        return tuple(op for op in self.graph.ops if self.rule(op).source == "none")

    def form(self, op: Op) -> Hashable:
        """Equal for ops that a rule cannot tell apart."""
        if op.name not in self._forms:
            # a random op's number is part of its call, so its rule is its own
            self._forms[op.name] = (signature(op, self.graph), op.draw)
        return self._forms[op.name]
