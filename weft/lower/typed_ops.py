"""Ops as typed steps: what layouts an op asks of its operands and gives to its outputs, forward and backward.

In: an op, its rule and its OpLayout. Out: an OpType: the layouts that `ops/derive.py` derives, and what the op does
to sums; UndecidedError where the op is not one of the two plain kinds below. Why the derived layouts are right:

- nothing carried: a cell makes the terms of its ranges of the summed names, and the cells along the axes that cut those
  share them out; what is added arrives shared out along the same axes. So the output lies as derived. The gradient of
  an operand is a sum over the names it lacks, shared out along the axes that cut these, and equal along all others,
- carried: along some axes a set of operands, in which the op is jointly linear, arrives in addends, and so leaves the
  output. Their own gradients are equal along those axes; that of a factor has an addend for every addend that arrives.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.errors import LayoutError, PlanError
from weft.ir.graph import Op
from weft.ir.oplayout import Carried
from weft.ir.program import Compute
from weft.lower.forms import refuse_cuts, refuse_hanging_talk
from weft.lower.held import FaultError
from weft.lower.typed_moves import MoveProofs, UndecidedError, num_shares, require
from weft.ops.book import RuleBook
from weft.ops.derive import Operands
from weft.ops.rule import Rule


@dataclass(frozen=True)
class OpType:
    """An op in one layout.

    Args:
        operands: the derived layouts.
        cells: how many cells run it.
        talk: collectives of its algorithms.
        carried: operands that arrive in addends and pass them on; none if the op's own sum is cut, or nothing is.
        whole: the outputs are no sums at all.
    """

    operands: Operands
    cells: int
    talk: int
    carried: frozenset[int]
    whole: bool


class OpTypes:
    """Types of ops, each worked out once for all ops of one form in one layout."""

    def __init__(self, book: RuleBook, moves: MoveProofs) -> None:
        self.book, self.moves = book, moves
        self._known: dict[object, OpType] = {}

    def of(self, op: Op, step: Compute) -> OpType:
        """The type of an op as the step runs it."""
        key = (self.book.form(op), step.layout)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._typed(op, step)
        return known

    def _typed(self, op: Op, step: Compute) -> OpType:
        rule = self.book.rule(op, step.layout.algorithm)
        try:
            refuse_cuts(op, rule, step, self.moves.num_devices)
            operands = self.book.operands(op, step.layout)
            talk = refuse_hanging_talk(op, rule, step)
        except (FaultError, LayoutError, PlanError) as error:
            raise UndecidedError(str(error)) from None
        for operand in (*operands.inputs, *operands.outputs):
            self.moves.sound(operand.layout)
            self.moves.sound(operand.grad)
        require(not any(num_shares(output.grad) > 1 for output in operands.outputs), "a gradient in addends")
        space = _summed_names(rule, step)
        partial = frozenset(i for i, operand in enumerate(operands.inputs) if num_shares(operand.layout) > 1)
        carried = _carried(step)
        if carried:
            _require_linear(rule, carried, partial, space)
        else:
            require(partial <= rule.added, "addends that nobody passes on")
            _require_plain_sums(rule, step, space)
        return OpType(operands, len(step.layout.grid.devices), talk, carried, not space and not partial)


def _summed_names(rule: Rule, step: Compute) -> frozenset[str]:
    """The names whose cut leaves addends in the output."""
    return frozenset(
        name
        for name in step.layout.cut_names
        if name in rule.summed or (name in rule.algorithms and rule.algorithms[name].output == "partial")
    )


def _carried(step: Compute) -> frozenset[int]:
    """The operands carried along axes that have more than one cell."""
    sets = {
        use.operands
        for use, axis in zip(step.layout.uses, step.layout.grid.axes, strict=True)
        if isinstance(use, Carried) and axis.size > 1
    }
    require(len(sets) <= 1, "different operands are carried along different axes")
    found = sets.pop() if sets else frozenset()
    require(bool(found) or not any(isinstance(use, Carried) and not use.operands for use in step.layout.uses), "none")
    return found


def _require_linear(rule: Rule, carried: frozenset[int], partial: frozenset[int], space: frozenset[str]) -> None:
    require(not space, "a sum that is cut and carried")
    require(partial == carried, "other addends arrive than are carried")
    passed = next((operands for operands in (rule.added, *rule.linear) if partial <= operands), None)
    require(passed == carried and not carried <= rule.added, "the op does not pass its addends on alone")


def _require_plain_sums(rule: Rule, step: Compute, space: frozenset[str]) -> None:
    """Roles as derived are roles as summed."""
    require(set(step.layout.cut_names) <= set(rule.names), "a name that no operand has")
    for name in space:
        held = any(name in one.names for dims in rule.outputs for one in dims)
        require(not held, "an output has a summed name")
        if name in rule.algorithms:
            require(rule.algorithms[name].output == "partial" and not rule.added, "an algorithm with added operands")
