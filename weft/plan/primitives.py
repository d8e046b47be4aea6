"""What primitives are given, as data: transforms (`Plan.trans`, `Plan.store`) and relations (`Plan.order`).

    Transform := CutBy(name, shares, axis, groups, units, algorithm, copies) | CopyOver(parts, axis) | RecomputeMark
    Relation  := Before(Event, Event), the nouns of `weft/ir/schedule.py`

In: a Transform, an op and its Rule. Out: an `AxisUse`, one axis of the op's grid and what it does to the op
(`Cut`, `Copied` of ir/oplayout), or a PlanError that says which argument does not fit and what would. Every
transform but the recompute mark adds one axis; axes stand in the order in which they were added. Promised of relations:
an event does not stand before itself, and none contradicts the natural order (forward, then backward, then weight
gradients of one block and micro-batch).
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from weft.errors import PlanError, did_you_mean
from weft.ir.graph import Op
from weft.ir.oplayout import Copied, Cut, Use
from weft.ir.schedule import PHASES, Before, Event, Micro
from weft.ops.registered import unknown
from weft.ops.rule import Dim, Rule
from weft.runtime.operators.algorithms import OWN, REGISTRY


@dataclass(frozen=True)
class CutBy:
    """Cut along a name (or a dim: of the first output of an op, of a stored parameter)."""

    name: str | int
    shares: tuple[int, ...]
    axis: str = ""
    groups: int | tuple[int, ...] = 1
    units: int | None = None
    algorithm: str = ""
    copies: int = 1
    """Of a stored parameter: in how many groups of cells along the axis each part lies."""

    @property
    def size(self) -> int:
        return len(self.shares) * self.copies

    def __str__(self) -> str:
        parts = str(len(self.shares)) if len(set(self.shares)) == 1 else str(list(self.shares))
        more = "" if self.groups == 1 else f" groups {self.groups}"
        more += "" if self.units is None else f" units {self.units}"
        more += "" if self.copies == 1 else f" copies {self.copies}"
        return f"{self.algorithm or 'cut'} {self.name} {parts}{more} ({self.axis})"


@dataclass(frozen=True)
class CopyOver:
    """Each of `parts` cells runs the op."""

    parts: int
    axis: str = ""

    @property
    def size(self) -> int:
        return self.parts

    def __str__(self) -> str:
        return f"copy {self.parts} ({self.axis})"


@dataclass(frozen=True)
class RecomputeMark:
    """Run again in backward."""

    def __str__(self) -> str:
        return "recompute"


Transform = CutBy | CopyOver | RecomputeMark


def cut(
    name: str | int,
    parts: int | Sequence[int],
    axis: str = "",
    *,
    groups: int | Sequence[int] = 1,
    units: int | None = None,
    copies: int = 1,
) -> CutBy:
    """Cut an op along a name of its rule.

    rewrite: y = op(x) on cell c  ->  y_i = op(x_i) on cells (c, i), i = 0 .. parts - 1

    Args:
        name: of the op's rule, or the number of a dim of its first output (in `store`: of the parameter).
        parts: how many equal parts, or the shares of uneven ones (`[3, 1]`; a share of 0 is an empty part).
        axis: name of the new grid axis; made up if not given.
        groups: the name's indices are so many groups laid end to end (or the size of each), and every part takes
            its share of each group: 3 for a fused query-key-value projection.
        units: each group consists of so many units that stay whole (heads).
        copies: in `store` alone: each part lies so many times. The axis has parts * copies cells; the first `parts` of
            them hold the parameter once, the next ones once more, and so on.

    >>> print(cut("n", [3, 1], "tp"))
    cut n [3, 1] (tp)
    """
    sizes = groups if isinstance(groups, int) else tuple(groups)
    place = f"cut({name!r}, {parts!r})"
    if not is_count(copies):
        raise PlanError(f"cannot make {copies!r} copies", place=place, remedy="give a whole number of at least 1")
    return CutBy(name, _shares(parts, place), _axis(axis), sizes, units, copies=copies)


def copy(parts: int, axis: str = "") -> CopyOver:
    """Run an op on several cells, each with the same values.

    rewrite: y = op(x) on cell c  ->  y = op(x) on cells (c, i), i = 0 .. parts - 1
    """
    if not is_count(parts):
        raise PlanError(
            f"cannot make {parts!r} copies", place=f"copy({parts!r})", remedy="give a whole number of at least 1"
        )
    return CopyOver(parts, _axis(axis))


def algorithm(kind: str, name: str, parts: int | Sequence[int], axis: str = "") -> CutBy:
    """Cut along a name whose parts must talk to each other, by the named algorithm.

    rewrite: y = op(x) on cell c  ->  y_i = kind(op, x_i, group) on cells (c, i) that form a group

    Args:
        kind: a name given to `weft.register_algorithm`, or `default`: the operator's own.
    """
    if kind != OWN and kind not in REGISTRY.names():
        error = unknown(kind)
        raise PlanError(error.message, remedy=f"{error.remedy}; {OWN!r} is the operator's own")
    return CutBy(name, _shares(parts, f"algorithm({kind!r}, {name!r}, {parts!r})"), _axis(axis), algorithm=kind)


def recompute() -> RecomputeMark:
    """Keep nothing inside these ops; run them again in backward. Ops marked by one call are recomputed together.

    rewrite: f: y = op(x), keep x, ...; b: dx = op'(dy)  ->  f: y = op(x); b: y = op(x), dx = op'(dy)
    """
    return RecomputeMark()


@contextmanager
def placed(place: str) -> Iterator[None]:
    """Around what reads a user's words: an error that says no place has this one."""
    try:
        yield
    except PlanError as error:
        raise PlanError(error.message, place=error.place or place, remedy=error.remedy) from None


def is_count(value: object, least: int = 1) -> bool:
    """True for a whole number of at least so many; True and False are no numbers."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _shares(parts: int | Sequence[int], place: str) -> tuple[int, ...]:
    if isinstance(parts, int):
        if not is_count(parts):
            raise PlanError(f"cannot cut into {parts!r} parts", place=place, remedy="give a whole number of at least 1")
        return (1,) * parts
    shares = tuple(parts)
    if not all(is_count(share, 0) for share in shares) or not any(shares):
        raise PlanError(
            f"shares {list(shares)} are not usable",
            place=place,
            remedy="give whole numbers of at least 0, not all of them 0",
        )
    return shares


def _axis(axis: str) -> str:
    if axis and not str(axis).isidentifier():
        raise PlanError(f"{axis!r} is no name for an axis", remedy="use letters, digits and _: 'dp', 'tp'")
    return axis


# --- relations --------------------------------------------------------------------------------------------------


def f(block: str, micro: int | Micro) -> Event:
    """The forward of a block for one micro-batch."""
    return _event("f", block, micro)


def b(block: str, micro: int | Micro) -> Event:
    """The backward of a block for one micro-batch."""
    return _event("b", block, micro)


def w(block: str, micro: int | Micro) -> Event:
    """The weight gradients of a block for one micro-batch."""
    return _event("w", block, micro)


def _event(phase: str, block: str, micro: int | Micro) -> Event:
    if isinstance(micro, int) and micro < 0:
        raise PlanError(f"there is no micro-batch {micro}", remedy="count micro-batches from 0")
    return Event(phase, block, micro)


def before(first: Event, second: Event) -> Before:
    """The first event ends before the second starts.

    rewrite: events in any order that data allows  ->  those orders in which `first` precedes `second`
    """
    if not all(isinstance(one, Event) for one in (first, second)):
        raise PlanError(
            f"before({first!r}, {second!r}) does not relate two events", remedy="write before(f(a, m), b(a, m))"
        )
    if isinstance(first.micro, int) != isinstance(second.micro, int):
        raise PlanError(
            f"{first} and {second} mix a numbered micro-batch with any micro-batch",
            remedy="number both, or write both with m",
        )
    same = first.segment == second.segment and first.micro == second.micro
    if same and PHASES.index(first.phase) >= PHASES.index(second.phase):
        raise PlanError(
            f"{first} cannot run before {second}", remedy="forward, backward and weight gradients follow each other"
        )
    return Before(first, second)


# --- for one op -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AxisUse:
    """One axis of an op's grid and what it does to the op."""

    axis: str
    size: int
    use: Use

    @property
    def copies(self) -> int:
        """In how many groups of the axis' cells each part lies."""
        return self.size // len(self.use.shares) if isinstance(self.use, Cut) else self.size

    def __str__(self) -> str:
        if isinstance(self.use, Cut):
            return f"{self.use}{f' copies {self.copies}' if self.copies > 1 else ''} ({self.axis})"
        return f"{self.use}{' ' + str(self.size) if isinstance(self.use, Copied) else ''} ({self.axis})"


def resolve(transform: CutBy | CopyOver, op: Op, rule: Rule, before: tuple[AxisUse, ...]) -> AxisUse:
    """What the transform means for one op that has the axes `before` already."""
    for used in before:
        if used.axis == transform.axis:
            raise PlanError(
                f"axis {used.axis!r} is on {op.name} already ({used.use}); {transform} contradicts it",
                place=op.place,
                remedy="give the second transform another axis name, or drop one of the lines",
            )
    if isinstance(transform, CopyOver):
        return AxisUse(transform.axis, transform.size, Copied())
    if transform.copies > 1:
        raise PlanError(
            f"{transform} has copies, which are for stored parameters",
            place=op.place,
            remedy=f"copies are an axis of their own here: copy({transform.copies}), cut(...)",
        )
    name = _name_of(transform, op, rule)
    use = cut_of_size(transform, name, rule.sizes[name], op.place)
    _check_nested(use, op, before)
    return AxisUse(transform.axis, transform.size, use)


def _operator(op: Op) -> str:
    return op.target.rpartition(".")[0] if op.target.startswith("aten.") else op.target


def _name_of(transform: CutBy, op: Op, rule: Rule) -> str:
    name = transform.name if isinstance(transform.name, str) else _name_at(transform.name, op, rule)
    if name not in rule.sizes or name not in rule.names:
        raise PlanError(
            f"{_operator(op)} has names {' '.join(rule.names) or '(none)'}, not {name!r}",
            place=op.place,
            remedy=did_you_mean(name, rule.names) + _cuttable(rule),
        )
    if name in rule.frozen and transform.size > 1:
        raise PlanError(
            f"{name!r} of {_operator(op)} may not be cut: every cell needs all of its {rule.sizes[name]} indices",
            place=op.place,
            remedy=_cuttable(rule),
        )
    if transform.algorithm == OWN and name not in rule.algorithms:
        known = " ".join(rule.algorithms)
        raise PlanError(
            f"no algorithm cuts {name!r} of {_operator(op)}",
            place=op.place,
            remedy=f"algorithms cut: {known}" if known else f"use cut(); {_cuttable(rule)}",
        )
    return name


def _cuttable(rule: Rule) -> str:
    return f"can be cut: {' '.join(rule.cuttable) or 'none'}; rule: {rule}"


def _name_at(dim: int, op: Op, rule: Rule) -> str:
    """The outermost name in a dim of the first output."""
    dims = rule.outputs[0]
    if not -len(dims) <= dim < len(dims):
        raise PlanError(
            f"dim {dim} is not among the {len(dims)} dims of what {op.name} makes",
            place=op.place,
            remedy=f"name one of {' '.join(rule.cuttable)}",
        )
    name = outermost(dims[dim], rule)
    if name is None:
        raise PlanError(
            f"dim {dim} of what {op.name} makes has no name that could be cut",
            place=op.place,
            remedy=f"name one of {' '.join(rule.cuttable)}; rule: {rule}",
        )
    return name


def outermost(one: Dim, rule: Rule, without: Container[str] = ()) -> str | None:
    """The outermost name of more than one index that every product of the dim holds first, numbers and those `without`
    aside."""
    heads = {
        next((f for f in factors if isinstance(f, str) and rule.sizes[f] > 1 and f not in without), None)
        for factors in one.products
    }
    return heads.pop() if len(heads) == 1 else None


def cut_of_size(transform: CutBy, name: str, size: int, place: str) -> Cut:
    """The cut of a name of that size: groups and units filled in and checked."""
    if isinstance(transform.groups, int):
        if transform.groups < 1 or size % transform.groups:
            raise PlanError(
                f"{name} of size {size} is not {transform.groups} equal groups",
                place=place,
                remedy="give a number of groups that divides it, or the size of each group",
            )
        groups = (size // transform.groups,) * transform.groups
    else:
        groups = transform.groups
    if size and (sum(groups) != size or not all(is_count(group) for group in groups)):
        raise PlanError(
            f"groups {list(groups)} do not add up to {name} of size {size}",
            place=place,
            remedy="give the size of every group",
        )
    units = math.gcd(*groups) if transform.units is None else transform.units
    if units < 0 or (units == 0 and size) or (units and any(group % units for group in groups)):
        raise PlanError(
            f"{name} has groups of {' '.join(map(str, groups))}, which are not {units} whole units each",
            place=place,
            remedy="give a number of units that divides every group",
        )
    _check_parts(transform.shares, name, size, units, place)
    return Cut(name, transform.shares, groups, units)


def _check_parts(shares: tuple[int, ...], name: str, size: int, units: int, place: str) -> None:
    filled = sum(share > 0 for share in shares)
    if filled > max(units, 1):
        raise PlanError(
            f"cannot cut {name} of size {size} ({units} units) into {filled} parts",
            place=place,
            remedy=f"cut it into at most {units} parts, or give a share of 0 to the parts that stay empty",
        )


def _check_nested(use: Cut, op: Op, before: tuple[AxisUse, ...]) -> None:
    """Axes that cut one name nest: they must agree about groups and units, and leave something for every part."""
    others = [one for one in before if isinstance(one.use, Cut) and one.use.name == use.name]
    filled = sum(share > 0 for share in use.shares)
    for other in others:
        assert isinstance(other.use, Cut)
        if (other.use.groups, other.use.units) != (use.groups, use.units):
            raise PlanError(
                f"axis {other.axis!r} cuts {use.name} in {other.use.units} units of groups {list(other.use.groups)}, "
                f"the new one in {use.units} of {list(use.groups)}",
                place=op.place,
                remedy="give both cuts the same groups and units",
            )
        filled *= sum(share > 0 for share in other.use.shares)
    if others and filled > max(use.units, 1):
        raise PlanError(
            f"cannot cut {use.name} of size {sum(use.groups)} ({use.units} units) into {filled} parts "
            f"({len(others) + 1} nested axes)",
            place=op.place,
            remedy=f"cut it into at most {use.units} parts in all",
        )


def with_axis(transform: Transform, axis: str) -> Transform:
    """The same transform on a named axis."""
    return transform if isinstance(transform, RecomputeMark) else replace(transform, axis=axis)
