"""The static check: a Program is proven before it runs.

In: a Program. Out: a Report, or a CheckError that shows the neighbourhood of the fault. The steps are followed on all
devices at once, forward and then backward, with Contents in place of tensors. Proven:

- every operand of every op is exactly the part that the op's rule asks for there, with every sum complete, unless the
  op is linear in it and passes it on as an addend,
- the gradient that arrives at every op's output, and at every stored parameter, holds the contribution of every
  use exactly once,
- every collective is entered by all of its members, with pieces that match.

It trusts the rules (each is proven against its operator by the tests) and nothing else: layouts written into values are
not believed, only what the moves really carry. Most Programs are proven faster, by their layouts as types (`typed`);
what that proof does not accept is followed as above, which decides, and names the fault.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.errors import CheckError, LayoutError, PlanError
from weft.ir.program import Compute, Program
from weft.ir.show_program import around
from weft.lower.held import FaultError
from weft.lower.prove import Prover
from weft.lower.typed import prove_by_types
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


def check(program: Program, book: RuleBook | None = None, *, full: bool = False) -> Report:
    """Prove a Program; raise CheckError if it is wrong. `full`: follow it on every device in any case."""
    book = book or RuleBook(program.graph)
    counts = None if full else prove_by_types(program, book)
    if counts is not None:
        return Report(**counts)
    prover = Prover(program, book)
    try:
        return Report(**prover.run())
    except FaultError as fault:
        step = prover.step
        place = ""
        if isinstance(step, Compute):
            place = program.graph.by_name[step.op].place
        raise CheckError(
            f"the program is wrong: {fault}\n\n{around(program, step)}",
            place=place,
            remedy="this is a fault of the program, not of the model: report it, or undo the edit",
        ) from None
    except (LayoutError, PlanError) as error:
        raise CheckError(f"the program is wrong: {error}\n\n{around(program, prover.step)}") from None
