"""Seeded faults: the checker, checked.

In: a Program. Out: the files of one that has one thing wrong on purpose, the sort of thing that lowering, code
generation or the runtime could get wrong: a sum left out, an addend counted twice, rows mixed up, a stream that ignores
the part. Every one must come out of verify as different. A fault is seeded in the Program, or in the text of it;
`Fault.apply` returns None where a program offers no place for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from weft.codegen import generate
from weft.ir.layout import Layout
from weft.ir.program import Chunks, Move, Program, Recompute, Reshard, Step, Sync, Use

Files = dict[str, bytes]


@dataclass(frozen=True)
class Fault:
    """One thing to get wrong."""

    name: str
    apply: Callable[[Program], Files | None]


def in_steps(change: Callable[[Program, Step], Step | None]) -> Callable[[Program], Files | None]:
    """A fault of the first step for which `change` gives another."""

    def apply(program: Program) -> Files | None:
        done = False

        def turn(step: Step) -> Step:
            nonlocal done
            if isinstance(step, Chunks | Recompute):
                return replace(step, body=tuple(map(turn, step.body)))
            other = None if done else change(program, step)
            done = done or other is not None
            return step if other is None else other

        steps = tuple(map(turn, program.steps))
        return generate(replace(program, steps=steps)) if done else None

    return apply


def in_text(pattern: str, other: str | Callable[[re.Match[str]], str]) -> Callable[[Program], Files | None]:
    """A fault of the first place in the text that fits."""

    def apply(program: Program) -> Files | None:
        files = generate(program)
        for name in (name for name in files if name.endswith(".py")):
            text, count = re.subn(pattern, other, files[name].decode(), count=1)
            if count:
                return {**files, name: text.encode()}
        return None

    return apply


# sums


def _sums(moves: Sequence[Move] | None) -> bool:
    return any(move.kind == "all_reduce" for move in moves or ())


def _without_sums(moves: Sequence[Move] | None) -> tuple[Move, ...]:
    return tuple(move for move in moves or () if move.kind != "all_reduce")


def drop_forward_sum(program: Program, step: Step) -> Step | None:
    if isinstance(step, Reshard) and _sums(step.forward):
        return replace(step, forward=_without_sums(step.forward))
    return None


def drop_backward_sum(program: Program, step: Step) -> Step | None:
    if isinstance(step, Reshard) and _sums(step.backward):
        return replace(step, backward=_without_sums(step.backward))
    return None


def double_forward_sum(program: Program, step: Step) -> Step | None:
    if isinstance(step, Reshard) and _sums(step.forward) and len(step.forward) == 1:
        return replace(step, forward=step.forward * 2)
    return None


def double_backward_sum(program: Program, step: Step) -> Step | None:
    if isinstance(step, Reshard) and step.backward is not None and _sums(step.backward) and len(step.backward) == 1:
        return replace(step, backward=step.backward * 2)
    return None


def drop_backward(program: Program, step: Step) -> Step | None:
    return replace(step, backward=None) if isinstance(step, Reshard) and step.backward else None


def bias_everywhere(program: Program, step: Step) -> Step | None:
    """The bias of a row-cut linear added once per rank."""
    if isinstance(step, Use) and step.moves and program.values[step.value].layout.partial_axes:
        return replace(step, moves=())
    return None


# gradients and what is stored


def drop_sync_sum(program: Program, step: Step) -> Step | None:
    if isinstance(step, Sync) and any(map(_sums, step.moves)):
        return replace(step, moves=tuple(map(_without_sums, step.moves)))
    return None


def double_sync_sum(program: Program, step: Step) -> Step | None:
    if isinstance(step, Sync) and len(step.moves) == 1 and len(step.moves[0]) == 1 and _sums(step.moves[0]):
        return replace(step, moves=(step.moves[0] * 2,))
    return None


def drop_tied_addend(program: Program, step: Step) -> Step | None:
    if isinstance(step, Sync) and len(step.sources) > 1:
        return replace(step, sources=step.sources[:1], moves=step.moves[:1])
    return None


def swap_parts(program: Program) -> Files | None:
    """Two ranks hold each other's part of a parameter."""
    for name in program.graph.parameter_tensors:
        layout = program.stored[name]
        ranges = {device: layout.parts_on(device)[0].ranges for device in layout.grid.devices}
        a, b = layout.grid.devices[0], layout.grid.devices[-1]
        if len(layout.grid.devices) == program.devices and ranges[a] != ranges[b]:
            return generate(replace(program, stored={**program.stored, name: _swapped(layout, a, b)}))
    return None


def _swapped(layout: Layout, a: int, b: int) -> Layout:
    other: Mapping[int, int] = {a: b, b: a}
    devices = tuple(other.get(device, device) for device in layout.grid.devices)
    return replace(layout, grid=replace(layout.grid, devices=devices))


# calls


def first_rows_of_a_draw(found: re.Match[str]) -> str:
    """The intervals of the first part in place of one's own."""
    number, shape = found[1], tuple(int(size) for size in found[2].split(","))
    at = (((0, shape[0] // 2),), *(((0, size),) for size in shape[1:]))
    return f"self.draw({number}, {shape}, {at})"


def no_gradient(program: Program) -> Files | None:
    """An op in the middle that runs without gradient."""
    ops = program.graph.ops
    needing = [op for op in ops if any(program.graph.tensors[name].needs_grad for name in op.inputs)]
    middle = needing[len(needing) // 2]
    changed = tuple(replace(op, grad=False) if op is middle else op for op in ops)
    return generate(replace(program, graph=replace(program.graph, ops=changed)))


FAULTS: tuple[Fault, ...] = (
    Fault("a forward sum left out", in_steps(drop_forward_sum)),
    Fault("a forward sum taken twice", in_steps(double_forward_sum)),
    Fault("a backward sum left out", in_steps(drop_backward_sum)),
    Fault("a backward sum taken twice", in_steps(double_backward_sum)),
    Fault("an edge without backward", in_steps(drop_backward)),
    Fault("a bias added on every rank", in_steps(bias_everywhere)),
    Fault(
        "the first rank's rows on every rank", in_text(r"self\.comm\.slice\((\w+), 0, over=\"dp\"\)", r"\1.chunk(2)[0]")
    ),
    Fault("a gradient sync left out", in_steps(drop_sync_sum)),
    Fault("a gradient synchronised twice", in_steps(double_sync_sum)),
    Fault("a tied addend missing", in_steps(drop_tied_addend)),
    Fault(
        "copies of a gradient summed",
        in_text(r"(mlp\.c_fc\.weight\": Part\(.*) sync=\"dp\"\)", r'\1 sync=("dp", "tp"))'),
    ),
    Fault("two ranks' parts swapped", swap_parts),
    Fault(
        "random numbers that ignore the part",
        in_text(r"self\.draw\((\w+), \(([\d, ]+)\), \{0: \"dp\"\}\)", first_rows_of_a_draw),
    ),
    Fault("random numbers of another draw", in_text(r"self\.draw\((\w+),", r"self.draw(\1 + 1000,")),
    Fault(
        "an algorithm that asks nobody", in_text(r"self\.comm\.along\(\"tp\"\)", "self.comm.among((self.place.rank,))")
    ),
    Fault("a mean over the part", in_text(r"count=(\d+)", lambda found: f"count={int(found[1]) // 2}")),
    Fault("an op without gradient", no_gradient),
    Fault("a chunk left out of a sum", in_text(r"self\.chunks\(\s*2,", "self.chunks(1,")),
    Fault(
        "the first chunk's input in every chunk",
        in_text(r"self\.take\((\w+), ([\w.]+)\[chunk\]\)", r"self.take(\1, \2[0])"),
    ),
    Fault("the first chunk's parameter in every chunk", in_text(r"(\w+_weight)\[chunk\]", r"\1[0]")),
)
