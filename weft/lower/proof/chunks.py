"""Takes and gives as typed steps: what enters a loop over chunks part by part, and what leaves it put together.

In: the values on both sides. Out: nothing, or a FaultError. The value outside lies as the *merged*
layout of the one inside (`ir/merge.py`): splits joined, addends summed, copies once. Along the axes on which cells
share a device:

    taken     split: each cell cuts out its own range;  copy: each reads all;  partial: the first gets all, others zeros
    backward  split: ranges join;  copy with addends as gradient: they sum;  partial with copies: the first's goes back
    given     split: ranges join;  partial: addends sum.  Backward: each cell gets its range, or all
"""

from __future__ import annotations

from collections.abc import Callable

from weft.ir.layout import COPY, PARTIAL, Layout, positions
from weft.ir.merge import Merge, merge
from weft.ir.program import Value
from weft.ir.ranges import select, text, tidy
from weft.lower.proof.moves import FaultError, difference


class ChunkTypes:
    """Takes and gives, each pair of values judged once."""

    def __init__(self, same: Callable[[Layout, Layout], bool]) -> None:
        self._same = same
        self._found: set[tuple[Layout, Layout]] = set()

    def take(self, source: Value, target: Value, back: bool) -> None:
        """The target is cut out of the source."""
        merged = self._merged(target, source, back)
        for axis in merged.shrunk if back else ():
            if _pairs(target, axis) not in ((COPY, PARTIAL), (PARTIAL, COPY)) and not _is_split(target, axis):
                raise FaultError(f"the chunks' gradients of %{target.name} cannot be put together: {_told(target)}")
        self._cut_out(source, target)

    def give(self, source: Value, target: Value, back: bool) -> None:
        """The target is put together from the source."""
        merged = self._merged(source, target, back)
        adds = merged.shrunk & set(source.layout.partial_axes)
        for axis in merged.shrunk:
            role = source.layout.roles[axis]
            if not (role == PARTIAL if adds else role.kind == "split"):
                raise FaultError(f"chunks of %{source.name} cannot be put together: {source.layout}")
            if back and adds and _pairs(source, axis) != (PARTIAL, COPY):
                raise FaultError(f"chunks of %{source.name} cannot share its gradient: {_told(source)}")
        self._cut_out(target, source)

    def _merged(self, inner: Value, outer: Value, back: bool) -> Merge:
        merged = merge(inner.layout.grid)
        if merged is None or outer.layout.grid.repeats:
            raise FaultError(f"%{inner.name} does not fall into chunks of %{outer.name}: {inner.layout.grid}")
        needed = merged.layout(inner.layout)
        if not self._same(needed, outer.layout):
            raise FaultError(f"%{outer.name} outside of the loop {difference(outer.layout, needed)}")
        if back:
            assert inner.grad is not None
            assert outer.grad is not None
            needed = merged.layout(inner.grad)
            if not self._same(needed, outer.grad):
                raise FaultError(f"the gradient of %{outer.name} outside of the loop {difference(outer.grad, needed)}")
        return merged

    def _cut_out(self, outer: Value, inner: Value) -> None:
        """Every part is found in the whole that its device holds, index by index."""
        if (outer.layout, inner.layout) in self._found:
            return
        for part in inner.layout.parts():
            held = outer.layout.parts_on(part.device)
            if len(held) != 1:
                raise FaultError(f"device {part.device} holds %{outer.name} {len(held)} times, not once")
            for ranges, at, mine in zip(held[0].ranges, positions(held[0], part), part.ranges, strict=True):
                if tidy(select(ranges, at)) != tidy(mine):
                    raise FaultError(
                        f"device {part.device} holds {text(ranges)} of %{outer.name}, which lacks a part of "
                        f"{text(mine)}, a chunk of %{inner.name}"
                    )
        self._found.add((outer.layout, inner.layout))


def _pairs(value: Value, axis: int) -> tuple[object, object]:
    assert value.grad is not None
    return value.layout.roles[axis], value.grad.roles[axis]


def _is_split(value: Value, axis: int) -> bool:
    return value.layout.roles[axis].kind == "split"


def _told(value: Value) -> str:
    return f"the value lies as {value.layout}, its gradient as {value.grad}"
