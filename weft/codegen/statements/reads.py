"""What steps read and make, and which values of a Program need a variable at all.

Parameters, buffers and constants that are used as they are stored stand in the text as attributes; inputs are
arguments of `forward`, named `input:NAME` here until something is made of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.ir.program import Chunks, Program, Recompute, Step, Use, outputs_of, values_read

INPUT = "input:"


@dataclass(frozen=True)
class Stack:
    """Like layers, one after the other.

    Args:
        iterations: the steps of each.
        stack, start: dotted name of the container, number of the first layer.
        initial: values that the first layer reads where later ones read what the one before left.
        given: values of the first layer that layers hand on: in place of `initial`, then what only the last one leaves.
        made: the same of the last layer.
        draw, stride: the first layer's first random draw, and how many draws a layer makes.
        outside: values that every layer reads.
    """

    iterations: tuple[tuple[Step, ...], ...]
    stack: str
    start: int
    initial: tuple[str, ...]
    given: tuple[str, ...]
    made: tuple[str, ...]
    draw: int
    stride: int
    outside: tuple[str, ...]


def reads_of(step: Step | Stack, program: Program) -> list[str]:
    """Values that a step reads, those of its body included; inputs of the model as `input:NAME`."""
    match step:
        case Use():
            tensor = program.values[step.value].tensor
            return [INPUT + tensor] if any(one.tensor == tensor for one in program.graph.inputs) else []
        case Chunks() | Recompute():
            return [name for inner in step.body for name in reads_of(inner, program)]
        case Stack():
            return [*step.initial, *step.outside]
        case _:
            return values_read(step)


def makes_of(step: Step | Stack) -> tuple[str, ...]:
    """Values that a step makes, those inside of it not included."""
    return step.made if isinstance(step, Stack) else outputs_of(step)


def last_reads(steps: Sequence[Step | Stack], program: Program, kept: Sequence[str]) -> dict[str, int]:
    """For each value the position of the step that reads it last; kept ones are read after the end."""
    last: dict[str, int] = {}
    for at, step in enumerate(steps):
        for name in makes_of(step):
            last.setdefault(name, at)
        for name in reads_of(step, program):
            last[name] = at
    return last | dict.fromkeys(kept, len(steps) + 1)


def from_outside(steps: Sequence[Step], program: Program) -> list[str]:
    """Values that steps read and do not make, in order of first use."""
    made: set[str] = set()
    found: dict[str, None] = {}
    for step in steps:
        if isinstance(step, Recompute):
            # what a region makes for itself is its own business
            found.update((name, None) for name in from_outside(step.body, program) if name not in made)
        else:
            found.update((name, None) for name in reads_of(step, program) if name not in made)
        if isinstance(step, Chunks):
            inner = {name for one in step.body for name in makes_of(one)}
            found = {name: None for name in found if name not in inner or name in made}
        made.update(makes_of(step))
    return list(found)
