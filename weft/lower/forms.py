"""Forms: what must be true of values and cuts before a Program can be followed at all.

In: a Value, or a Compute with its op's rule. Out: nothing, or a FaultError: a layout of another tensor, a cut that the
rule does not allow or that does not fit the grid, cells that talk at different turns and so would wait for ever.
"""

from __future__ import annotations

from weft.ir.graph import Graph, Op
from weft.ir.layout import Cell, verify_layout
from weft.ir.oplayout import Cut
from weft.ir.program import Compute, Value
from weft.lower.held import FaultError
from weft.ops.derive import why_not
from weft.ops.rule import Rule


def refuse_malformed(value: Value, graph: Graph) -> None:
    """A value must be of a tensor of the graph, and its layouts layouts of that."""
    if value.tensor not in graph.tensors:
        raise FaultError(f"{value.name} is of no tensor of the graph")
    for layout in (value.layout, value.grad):
        if layout is not None and layout.shape != graph.tensors[value.tensor].sizes:
            raise FaultError(f"{value.name} has a layout of another shape: {layout}")
        if layout is not None:
            verify_layout(layout, value.name)


def refuse_cuts(op: Op, rule: Rule, step: Compute, num_devices: int) -> None:
    """What the rule does not allow, or what does not fit the grid or the devices."""
    grid, uses = step.layout.grid, step.layout.uses
    if len(grid.axes) != len(uses) or not set(grid.devices) <= set(range(num_devices)):
        raise FaultError(f"{op.name} cannot lie so: {len(uses)} uses of {grid}")
    for use, axis in zip(uses, grid.axes, strict=True):
        reason = why_not(op, rule, use) if isinstance(use, Cut) else ""
        if isinstance(use, Cut) and len(use.shares) != axis.size:
            reason = f"{op.name} is cut into {len(use.shares)} parts along {axis}"
        if reason:
            raise FaultError(reason)


def refuse_hanging_talk(op: Op, rule: Rule, step: Compute) -> int:
    """An algorithm's collectives: all members must enter them, at the same turn. Returns how many there are."""
    found, grid = 0, step.layout.grid
    slots = {cell: slot for cells in grid.cells_on.values() for slot, cell in enumerate(cells)}
    for name in step.layout.cut_names:
        exchange = rule.algorithms.get(name)
        if exchange is None or not (exchange.forward or exchange.backward):
            continue
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
