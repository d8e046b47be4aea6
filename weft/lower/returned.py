"""Returned: what a model in pieces gives back, whole on every device.

In: pieces, and the tensors that the caller wants. Out: for each the exchange that brings it there from the piece that
makes it.
"""

from __future__ import annotations

from collections.abc import Iterable

from weft.errors import PlanError
from weft.ir.layout import copied_on
from weft.ir.program import Move
from weft.lower.pipeline import Pipelined


def returned(pipelined: Pipelined, names: Iterable[str]) -> dict[str, Move]:
    """For each tensor the way from where it is made to all devices."""
    home = {name: part for part in pipelined.parts for name in part.piece.gives}
    every = tuple(range(pipelined.devices))
    found = {}
    for name in names:
        if name not in home:
            raise PlanError(
                f"the forward returns {name}, which no stage computes",
                remedy="return what the model makes of its inputs, or evaluate under a plan without stages",
            )
        part = home[name]
        lies = part.at_home(part.program.values[part.program.outputs[name]].layout)
        found[name] = Move("exchange", lies, copied_on(pipelined.graph.tensors[name].sizes, every))
    return found
