"""Programs as text: one line a step, the same between runs.

use      %w <- stored                      local
compute  %y = h.0.attn.c_attn/addmm(%b, %x, %w)   tp:cut n 2
reshard  %y -> %y~1   forward all_reduce   backward -
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from weft.ir import show
from weft.ir.program import Chunks, Compute, Give, Move, Program, Recompute, Reshard, Step, Sync, Take, Use


def show_program(program: Program) -> str:
    """The whole Program."""
    lines = [f"program of {program.graph.name or 'a model'} on {program.devices} devices"]
    lines += [f"stored   %{name}: {program.stored[name]}" for name in sorted(program.graph.parameter_tensors)]
    lines += [text for _, text in _lines(program.steps, 0)]
    lines += [f"loss     %{program.loss}"] if program.loss else []
    lines += [f"root     %{name}" for name in program.roots]
    return "\n".join(lines)


def around(program: Program, step: Step | None, reach: int = 10) -> str:
    """The steps around one of them, marked."""
    lines = list(_lines(program.steps, 0))
    at = next((i for i, (other, _) in enumerate(lines) if other is step), len(lines))
    return show.around([text for _, text in lines], at, reach)


def _lines(steps: Iterable[Step], depth: int) -> Iterator[tuple[Step, str]]:
    pad = "  " * depth
    for step in steps:
        yield step, pad + show_step(step)
        if isinstance(step, Chunks | Recompute):
            yield from _lines(step.body, depth + 1)


def show_step(step: Step) -> str:
    """One step on one line."""
    match step:
        case Use(value, moves):
            return f"use      %{value} <- stored   {show_moves(moves)}"
        case Compute(op, layout, inputs, outputs):
            operands = ", ".join(f"%{name}" for name in inputs)
            results = ", ".join(f"%{name}" for name in outputs)
            return f"compute  {results} = {op}({operands})   {layout}"
        case Take(source, target):
            return f"take     %{target} out of %{source}"
        case Give(source, target):
            return f"give     %{source} into %{target}"
        case Reshard(source, target, forward, backward):
            back = "none" if backward is None else show_moves(backward)
            return f"reshard  %{source} -> %{target}   forward {show_moves(forward)}   backward {back}"
        case Chunks(axis, body, again):
            return f"chunks   along {axis}: {len(body)} steps{', recomputed' if again else ''}"
        case Recompute(body):
            return f"recompute {len(body)} steps"
        case Sync(parameter, sources, moves):
            parts = [f"%{name} {show_moves(path)}" for name, path in zip(sources, moves, strict=True)]
            return f"sync     %{parameter}: {' + '.join(parts)}"


def show_moves(moves: Iterable[Move]) -> str:
    """The kinds of the moves, `-` if there are none."""
    return " then ".join(move.kind for move in moves) or "-"
