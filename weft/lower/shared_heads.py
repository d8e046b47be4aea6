"""Attention with shared heads: keys and values that are repeated for it alone are read as they are.

In: a Program, proven. Out: the same Program for those who spell it out (`transfer.py`, `codegen/`); where an attention
without a mask reads keys and values whose heads are repeated on the spot, one copy for each of the query heads that
share them, it reads those that are repeated, and is called with `enable_gqa`. Whoever cuts the heads does not notice:
what is left is a repetition on each device, and that is all that is looked at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from weft.ir.graph import Op
from weft.ir.program import Compute, Program, Recompute, Step
from weft.ir.ranges import count
from weft.ops.arguments import arguments

ATTENTION = "aten.scaled_dot_product_attention.default"
VIEWS = ("aten.reshape.default", "aten.view.default", "aten.unsqueeze.default", "aten.expand.default")
REPEAT = "aten.repeat_interleave.self_int"
GROUPED = "enable_gqa"
"""The argument of a call whose query heads share those of keys and values."""
HEADS = -3
"""The dim of the heads."""

Shape = tuple[int, ...]


def with_shared_heads(program: Program) -> Program:
    """The Program, nothing repeated that attention can share."""
    return replace(program, steps=_rewritten(program, program.steps))


def shares_heads(program: Program, op: Op, step: Compute) -> bool:
    """True if an attention reads keys that are not yet repeated."""
    return op.target == ATTENTION and program.values[step.inputs[1]].tensor != op.inputs[1]


def _rewritten(program: Program, steps: Sequence[Step]) -> tuple[Step, ...]:
    makers = {name: step for step in steps if isinstance(step, Compute) for name in step.outputs}
    finder = _Finder(program, makers)
    gone: set[str] = set()
    found: list[Step] = []
    for step in steps:
        repeated = finder.repeated(step) if isinstance(step, Compute) else None
        if isinstance(step, Recompute):
            found.append(replace(step, body=_rewritten(program, step.body)))
        elif isinstance(step, Compute) and repeated is not None:
            gone.update(*(one.made for one in repeated))
            found.append(replace(step, inputs=(step.inputs[0], *(one.source for one in repeated))))
        else:
            found.append(step)
    return tuple(step for step in found if not isinstance(step, Compute) or gone.isdisjoint(step.outputs))


@dataclass(frozen=True)
class _Repeated:
    """A value whose heads are repeated, and all that is made on the way."""

    source: str
    made: tuple[str, ...]


@dataclass(frozen=True)
class _Finder:
    program: Program
    makers: Mapping[str, Compute]

    def repeated(self, step: Compute) -> tuple[_Repeated, _Repeated] | None:
        """What the keys and values of an attention were before they were repeated."""
        op = self.program.graph.by_name[step.op]
        if op.target != ATTENTION or step.layout.algorithm or len(step.inputs) != 3:
            return None
        given = arguments(op)
        if given[GROUPED] or given["attn_mask"] is not None:
            return None
        key, value = self._source(step.inputs[1]), self._source(step.inputs[2])
        if key is None or value is None or key.made == value.made:
            return None
        return (key, value) if self._num_heads(key.source) == self._num_heads(value.source) else None

    def _num_heads(self, name: str) -> int:
        shape = self._shape(name)
        assert shape is not None, "heads that are repeated have a shape"
        return shape[HEADS]

    def _source(self, name: str) -> _Repeated | None:
        """Where the heads of a value come from, if each is there several times, next to itself."""
        made, shapes, at = [], [self._shape(name)], name
        while (step := self.makers.get(at)) is not None and self.program.reads[at] == 1:
            op = self.program.graph.by_name[step.op]
            if op.target not in (*VIEWS, REPEAT) or len(step.inputs) != 1 or op.autocast is not None:
                return None
            made.append(at)
            at = step.inputs[0]
            shapes.append(self._shape(at))
            if op.target == REPEAT:
                dim = arguments(op)["dim"]
                plain = len(made) == 1 and dim in (HEADS, len(shapes[0] or ()) + HEADS)
                return _Repeated(at, tuple(made)) if plain and None not in shapes else None
            if _is_repeat(shapes[::-1]):
                return _Repeated(at, tuple(made))
        return None

    def _shape(self, name: str) -> Shape | None:
        """The local shape of a value, if it is the same on every device and each holds one part."""
        layout = self.program.values[name].layout
        if any(len(cells) != 1 for cells in layout.grid.cells_on.values()):
            return None
        found = []
        for size, table in zip(layout.shape, layout.ranges, strict=True):
            sizes = {size} if table is None else {count(ranges) for ranges in table}
            if len(sizes) != 1:
                return None
            found.append(sizes.pop())
        return tuple(found)


def _is_repeat(shapes: Sequence[Shape | None]) -> bool:
    """True for `b g s d`, `b g 1 s d`, `b g r s d`, `b (g r) s d`, the way in which heads are repeated by views.

    >>> _is_repeat([(4, 2, 128, 64), (4, 2, 1, 128, 64), (4, 2, 3, 128, 64), (4, 6, 128, 64)])
    True
    """
    if len(shapes) != 4 or None in shapes:
        return False
    source, opened, spread, result = (shape or () for shape in shapes)
    if len(source) < -HEADS or len(spread) != len(source) + 1:
        return False
    lead, heads, rest = source[:HEADS], source[HEADS], source[HEADS + 1 :]
    times = spread[HEADS]
    return (
        times > 1
        and opened == (*lead, heads, 1, *rest)
        and spread == (*lead, heads, times, *rest)
        and result == (*lead, heads * times, *rest)
    )
