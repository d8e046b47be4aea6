"""Chunks: where the parts that a rank takes and gives inside a loop lie in what it holds.

In: a Take or Give of a Program, a rank and a chunk. Out: positions in the local tensor, dim by dim. Nothing is decided
here.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.ir.layout import positions
from weft.ir.merge import merge
from weft.ir.program import Give, Program, Take
from weft.runtime.layout.transfer import Index


@dataclass(frozen=True)
class Chunk:
    """Where a chunk's part lies, and a shape.

    Args:
        index: positions in the local tensor; of a Take None: zeros; of a Give None: the part is added.
        shape: of a Take that of the part, of a Give that of the whole target.
    """

    index: Index | None
    shape: tuple[int, ...]


def taken(program: Program, step: Take, rank: int, chunk: int) -> Chunk:
    """What a rank cuts out for a chunk."""
    source, target = program.values[step.source].layout, program.values[step.target].layout
    (held,) = source.parts_on(rank)
    part = target.parts_on(rank)[chunk]
    merged = merge(target.grid)
    assert merged is not None
    empty = not merged.first(part.cell, target.partial_axes)
    return Chunk(None if empty else positions(held, part), part.shape)


def given(program: Program, step: Give, rank: int, chunk: int) -> Chunk:
    """Where a rank puts what a chunk made."""
    source, target = program.values[step.source].layout, program.values[step.target].layout
    (held,) = target.parts_on(rank)
    part = source.parts_on(rank)[chunk]
    merged = merge(source.grid)
    assert merged is not None
    return Chunk(None if merged.shrunk & set(source.partial_axes) else positions(held, part), held.shape)
