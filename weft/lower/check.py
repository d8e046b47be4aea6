"""The static check: a Program is proven before it runs.

In: a Program, whole or a piece of a pipeline. Out: a Report, or a CheckError that shows the neighbourhood of the fault.
Proven:

- every operand of every op is exactly the part that the op's rule asks for there, with every sum complete, unless the
  op is linear in it and passes it on as an addend,
- the gradient that arrives at every op's output, at every stored parameter, and at every input whose gradient goes back
  to the caller, holds the contribution of every use exactly once,
- every collective is entered by all of its members, with pieces that match.

It trusts the rules (each is proven against its operator by the tests) and nothing else: a layout written into a value
is compared with what the moves and ops before it make. The proof takes layouts as types (`proof/walk.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.errors import CheckError
from weft.ir.graph import Op
from weft.ir.program import Compute, Give, Program, Reshard, Step, Take
from weft.ir.show_program import around
from weft.lower.proof.moves import FaultError
from weft.lower.proof.walk import TypedProof
from weft.ops.book import RuleBook


@dataclass(frozen=True)
class Report:
    """What was proven, in numbers."""

    operands: int
    sums: int
    collectives: int
    gradients: int
    parameters: int

    def __str__(self) -> str:
        return (
            f"{_many(self.operands, 'operand')} exact, {_many(self.sums, 'sum')} complete, "
            f"{_many(self.collectives, 'collective')} matched, {_many(self.gradients, 'gradient')} and "
            f"{_many(self.parameters, 'parameter gradient')} complete"
        )


def _many(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def check(program: Program, book: RuleBook | None = None) -> Report:
    """Prove a Program; raise CheckError if it is wrong."""
    proof = TypedProof(program, book or RuleBook(program.graph))
    try:
        return Report(**proof.run())
    except FaultError as fault:
        raise CheckError(
            f"the program is wrong: {fault}\n\n{around(program, proof.step)}",
            place=_place(program, proof.step),
            remedy="this is a fault of the program, not of the model: report it, or undo the edit",
        ) from None


def _place(program: Program, step: Step | None) -> str:
    """The user's line: of the op that a step runs, or of the one that made what it passes on."""
    op: Op | None = None
    if isinstance(step, Compute):
        op = program.graph.by_name.get(step.op)
    elif isinstance(step, Reshard | Take | Give) and step.source in program.values:
        op = program.graph.producers.get(program.values[step.source].tensor)
    return "" if op is None else op.place
