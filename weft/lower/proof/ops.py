"""Ops as typed steps: what layouts an op asks of its operands and gives to its outputs, forward and backward.

In: an op, its rule and its OpLayout. Out: an OpType: the layouts that `ops/derive.py` derives, and what the op does
to sums; a FaultError for a cut that the rule does not allow or that does not fit the grid, for cells that talk at
different turns and so would wait for ever, and for addends that the op does not pass on. Why the derived layouts are
right:

- sums of its own: a cell makes the terms of its ranges of the summed names, and the cells along the axes that cut those
  share them out; what is added arrives shared out along the same axes. So the output lies as derived. The gradient of
  an operand is a sum over the names it lacks, shared out along the axes that cut these, and equal along all others,
- carried: along some axes a set of operands, in which the op is jointly linear, arrives in addends, and so leaves the
  output. Their own gradients are equal along those axes; that of a factor has an addend for every addend that arrives.

Both at once, along different axes: a cell makes its ranges of the sum of its addend. What is added belongs to the
carried operands then, and arrives shared out along all of these axes.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.errors import LayoutError, PlanError
from weft.ir.graph import Op
from weft.ir.layout import Cell
from weft.ir.oplayout import Carried, Cut
from weft.ir.program import Compute
from weft.lower.proof.moves import FaultError, MoveProofs, num_shares
from weft.ops.book import RuleBook
from weft.ops.derive import Operands, why_not
from weft.ops.rule import Rule


@dataclass(frozen=True)
class OpType:
    """An op in one layout.

    Args:
        operands: the derived layouts.
        cells: how many cells run it.
        talk: collectives of its algorithms.
        whole: the outputs are no sums at all.
    """

    operands: Operands
    cells: int
    talk: int
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
        try:
            rule = self.book.rule(op, step.layout.algorithm)
            refuse_cuts(op, rule, step, self.moves.num_devices)
            operands = self.book.operands(op, step.layout)
        except (LayoutError, PlanError) as error:
            raise FaultError(error.message) from None
        talk = refuse_hanging_talk(op, rule, step)
        for operand in (*operands.inputs, *operands.outputs):
            self.moves.sound(operand.layout, f"an operand of {op.name}")
            self.moves.sound(operand.grad, f"the gradient of an operand of {op.name}")
        for name, output in zip(op.outputs, operands.outputs, strict=True):
            if num_shares(output.grad) > 1:
                raise FaultError(f"{op.name} would need the gradient of {name} in addends: {output.grad}")
        space = _summed_names(rule, step)
        partial = frozenset(i for i, operand in enumerate(operands.inputs) if num_shares(operand.layout) > 1)
        carried = _carried(op, step)
        if carried:
            _refuse_unless_linear(op, rule, carried, partial)
        elif not partial <= rule.added:
            raise FaultError(f"{_operands(op, partial - rule.added)} would arrive in addends, which are not passed on")
        _refuse_odd_sums(op, rule, step, space)
        return OpType(operands, len(step.layout.grid.devices), talk, not space and not partial)


def refuse_cuts(op: Op, rule: Rule, step: Compute, num_devices: int) -> None:
    """What the rule does not allow, or what does not fit the grid or the devices."""
    grid, uses = step.layout.grid, step.layout.uses
    if len(grid.axes) != len(uses) or not set(grid.devices) <= set(range(num_devices)):
        raise FaultError(f"{op.name} cannot lie so on {num_devices} devices: {len(uses)} uses of {grid}")
    for use, axis in zip(uses, grid.axes, strict=True):
        reason = why_not(op, rule, use) if isinstance(use, Cut) else ""
        if isinstance(use, Cut) and len(use.shares) != axis.size:
            reason = f"{op.name} is cut into {len(use.shares)} parts along {axis}"
        if reason:
            raise FaultError(reason)


def refuse_hanging_talk(op: Op, rule: Rule, step: Compute) -> int:
    """An algorithm's collectives: all members must enter them, at the same turn. Returns how many there are."""
    found, grid = 0, step.layout.grid
    for name in step.layout.cut_names:
        exchange = rule.algorithms.get(name)
        if exchange is None or not (exchange.forward or exchange.backward):
            continue
        slots = {cell: slot for cells in grid.cells_on.values() for slot, cell in enumerate(cells)}
        axes = step.layout.axes_cutting(name)
        fibers: dict[Cell, list[Cell]] = {}
        for cell in grid.cells:
            fibers.setdefault(tuple(at for i, at in enumerate(cell) if i not in axes), []).append(cell)
        for cells in fibers.values():
            group = [grid.device(cell) for cell in cells]
            if len(set(group)) < len(group) or len({slots[cell] for cell in cells}) > 1:
                raise FaultError(f"{op.name} talks along {name!r} between cells that share a device: {group}")
        found += len(exchange.forward) + len(exchange.backward)
    return found


def _summed_names(rule: Rule, step: Compute) -> frozenset[str]:
    """The names whose cut leaves addends in the output."""
    return frozenset(
        name
        for name in step.layout.cut_names
        if name in rule.summed or (name in rule.algorithms and rule.algorithms[name].output == "partial")
    )


def _carried(op: Op, step: Compute) -> frozenset[int]:
    """The operands carried along axes that have more than one cell."""
    uses = zip(step.layout.uses, step.layout.grid.axes, strict=True)
    carried = [(use.operands, axis.size) for use, axis in uses if isinstance(use, Carried)]
    if not all(operands for operands, _ in carried):
        raise FaultError(f"{op.name} carries no operand along an axis that is to carry some: {step.layout}")
    sets = {operands for operands, size in carried if size > 1}
    if len(sets) > 1:
        raise FaultError(f"{op.name} carries different operands along different axes: {step.layout}")
    return sets.pop() if sets else frozenset()


def _refuse_unless_linear(op: Op, rule: Rule, carried: frozenset[int], partial: frozenset[int]) -> None:
    """What arrives in addends is a set of operands in which the op is jointly linear, and not what is added alone."""
    passed = next((operands for operands in (rule.added, *rule.linear) if partial <= operands), None)
    if partial != carried or passed != carried or carried <= rule.added:
        raise FaultError(
            f"{op.name} does not pass on addends of {_operands(op, carried | partial)}: it is not linear so"
        )


def _refuse_odd_sums(op: Op, rule: Rule, step: Compute, space: frozenset[str]) -> None:
    """Roles as derived must be roles as summed."""
    strange = set(step.layout.cut_names) - set(rule.names)
    if strange:
        raise FaultError(f"{op.name} is cut along {', '.join(sorted(strange))}, which no operand has")
    for name in sorted(space):
        if any(name in one.names for dims in rule.outputs for one in dims):
            raise FaultError(f"{op.name} sums {name!r} away, but an output has it: {rule}")
        if name in rule.algorithms and (rule.algorithms[name].output != "partial" or rule.added):
            added = _operands(op, rule.added) or "nothing"
            raise FaultError(f"{op.name} cut along {name!r} would add {added} in every cell")


def _operands(op: Op, positions: frozenset[int]) -> str:
    return ", ".join(f"operand {i} ({op.inputs[i]})" for i in sorted(positions))
