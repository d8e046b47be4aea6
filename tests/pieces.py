"""Plans in pieces, compiled."""

from __future__ import annotations

from collections.abc import Callable

from weft.compile.model_file import Subject
from weft.compile.pieces import InPieces, lower_prepared, prepare_pieces
from weft.ir.graph import Graph
from weft.plan.plan import Plan


def compile_pieces(subject: Subject, plan: Plan, make: Callable[[Graph], Plan]) -> InPieces:
    """The pieces of a plan, at each size that its micro-batches have."""
    return lower_prepared(prepare_pieces(subject, plan, make))
