"""From an op's layout to its operands' layouts: the table of the layout algebra, executed.

In: a Rule, an OpLayout. Out: for every operand and output the Layout of its value and of its gradient.

    axis of the op            operand                        value     gradient
    cut along n               has n                          split     split
    cut along unsummed n      input without n                copy      partial
    cut along summed k        output without k               partial   copy
    cut along summed k        added input without k          partial   copy      (value in one cell)
    cut along summed k        other input without k          copy      partial
    carried                   carried operand, output        partial   copy
    carried                   any other input                copy      partial
    cut by an algorithm       without the name               as the algorithm's Exchange says
    copied                    any                            copy      copy
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from weft.errors import PlanError
from weft.ir.graph import Op
from weft.ir.layout import COPY, PARTIAL, Cell, Layout, Role, split
from weft.ir.oplayout import Carried, Copied, Cut, OpLayout
from weft.ir.ranges import Ranges, whole
from weft.ops.rule import CellView, Dim, Dims, Rule, dim_ranges


@dataclass(frozen=True)
class Operand:
    """Where an operand lies, and where its gradient does."""

    layout: Layout
    grad: Layout


@dataclass(frozen=True)
class Operands:
    """The operands of one op."""

    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]


def operands(rule: Rule, layout: OpLayout) -> Operands:
    """Layouts of all operands of an op that is cut as `layout` says."""
    return Operands(
        tuple(_operand(rule, layout, dims, i) for i, dims in enumerate(rule.inputs)),
        tuple(_operand(rule, layout, dims, None) for dims in rule.outputs),
    )


def _operand(rule: Rule, layout: OpLayout, dims: Dims, position: int | None) -> Operand:
    """`position` among the inputs; None for an output."""
    roles = [_roles(rule, use, dims, position) for use in layout.uses]
    shape = tuple(one.extent(rule.sizes) for one in dims)
    tables = tuple(_table(rule, layout, one) for one in dims)
    value = Layout(shape, layout.grid, tuple(role for role, _ in roles), tables)
    return Operand(value, Layout(shape, layout.grid, tuple(grad for _, grad in roles), tables))


def _roles(rule: Rule, use: Cut | Copied | Carried, dims: Dims, position: int | None) -> tuple[Role, Role]:
    """The role of one axis for one operand and for its gradient."""
    match use:
        case Copied():
            return COPY, COPY
        case Carried(carried):
            return (PARTIAL, COPY) if position is None or position in carried else (COPY, PARTIAL)
        case Cut(name):
            return cut_roles(rule, name, dims, position)


def cut_roles(rule: Rule, name: str, dims: Dims, position: int | None) -> tuple[Role, Role]:
    """The role of an axis that cuts a name, for one operand and for its gradient."""
    holding = [d for d, one in enumerate(dims) if name in one.names]
    if holding:
        return split(holding[0]), split(holding[0])
    if name in rule.algorithms:
        exchange = rule.algorithms[name]
        if position is None:
            return (PARTIAL, COPY) if exchange.output == "partial" else (COPY, COPY)
        return COPY, PARTIAL if exchange.gradient == "partial" else COPY
    if name in rule.summed and (position is None or position in rule.added):
        return PARTIAL, COPY
    return COPY, PARTIAL


def _table(rule: Rule, layout: OpLayout, one: Dim) -> tuple[Ranges, ...] | None:
    """Ranges of one dim for each combination of coordinates on the axes that cut it."""
    axes = [i for i, use in enumerate(layout.uses) if isinstance(use, Cut) and use.name in one.names]
    if not axes:
        return None
    sizes = [layout.grid.axes[i].size for i in axes]
    return tuple(
        dim_ranges(one, _names_at(layout, dict(zip(axes, coordinates, strict=True)), one.names), rule.sizes)
        for coordinates in itertools.product(*map(range, sizes))
    )


def _names_at(layout: OpLayout, coordinates: dict[int, int], names: frozenset[str]) -> dict[str, Ranges]:
    """Ranges of the cut names among `names` at the given coordinates."""
    return {
        name: layout.table(name)[layout.grid.position(layout.axes_cutting(name), coordinates)]
        for name in layout.cut_names
        if name in names
    }


def cell_view(rule: Rule, layout: OpLayout, cell: Cell) -> CellView:
    """What one cell holds, for the rule's `local`."""
    cut = _names_at(layout, dict(enumerate(cell)), frozenset(layout.cut_names))
    names = {name: cut.get(name, whole(size)) for name, size in rule.sizes.items()}

    def ranges(dims: Dims) -> tuple[Ranges, ...]:
        return tuple(dim_ranges(one, names, rule.sizes) for one in dims)

    return CellView(
        names=names,
        inputs=tuple(map(ranges, rule.inputs)),
        outputs=tuple(map(ranges, rule.outputs)),
        cut=frozenset(
            use.name
            for use, axis in zip(layout.uses, layout.grid.axes, strict=True)
            if isinstance(use, Cut) and axis.size > 1
        ),
    )


def why_not(op: Op, rule: Rule, cut: Cut) -> str:
    """The reason why the op may not be cut so, or an empty string."""
    if cut.name not in rule.sizes:
        known = ", ".join(rule.cuttable) or "none that can be cut"
        return f"{op.kind} has no name {cut.name!r}; its rule is `{rule}` (names: {known})"
    if cut.name in rule.frozen:
        free = ", ".join(rule.cuttable) or "nothing"
        return f"{op.kind} cannot be cut along {cut.name!r}: its rule is `{rule}` (can be cut: {free})"
    if sum(cut.groups) != rule.sizes[cut.name]:
        return f"{cut.name!r} has size {rule.sizes[cut.name]}, the groups {cut.groups} make {sum(cut.groups)}"
    if any(size % cut.units for size in cut.groups):
        return f"groups {cut.groups} of {cut.name!r} do not divide into {cut.units} units"
    if sum(1 for share in cut.shares if share > 0) > cut.units:
        return f"{cut.name!r} has {cut.units} units, fewer than the {len(cut.shares)} parts asked for"
    return ""


def require(op: Op, rule: Rule, cut: Cut) -> None:
    """Refuse a cut that the rule does not allow."""
    reason = why_not(op, rule, cut)
    if reason:
        raise PlanError(reason, place=op.place, remedy="cut another name, fewer parts, or copy the op")
