"""Finding and changing steps and moves of a Program: what the kinds of `mutate` are made of."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from weft.ir.layout import COPY, PARTIAL, Axis, Grid, Layout, Role, even, split
from weft.ir.program import Chunks, Move, Program, Recompute, Reshard, Step, Sync, Use
from weft.ir.ranges import Ranges

Path = tuple[int, ...]
Kind = Callable[[Program, random.Random], Program | None]


def paths(steps: Sequence[Step], prefix: Path = ()) -> list[tuple[Path, Step]]:
    """Every step with its place."""
    found: list[tuple[Path, Step]] = []
    for at, step in enumerate(steps):
        found.append(((*prefix, at), step))
        if isinstance(step, Chunks | Recompute):
            found.extend(paths(step.body, (*prefix, at)))
    return found


def changed_at(steps: tuple[Step, ...], path: Path, new: Sequence[Step]) -> tuple[Step, ...]:
    """The steps with the one at `path` replaced by others."""
    at = path[0]
    if len(path) == 1:
        return (*steps[:at], *new, *steps[at + 1 :])
    outer = steps[at]
    assert isinstance(outer, Chunks | Recompute)
    return (*steps[:at], replace(outer, body=changed_at(outer.body, path[1:], new)), *steps[at + 1 :])


def pick(program: Program, rng: random.Random, *sorts: type[Any]) -> tuple[Path, Any] | None:
    """A random step of these sorts."""
    found = [(path, step) for path, step in paths(program.steps) if not sorts or isinstance(step, sorts)]
    return rng.choice(found) if found else None


def put(program: Program, path: Path, *new: Step) -> Program:
    return replace(program, steps=changed_at(program.steps, path, new))


Place = tuple[Path, str, int]
"""A list of moves: the step, `forward`, `backward`, `moves`, and which source of a Sync."""


def move_lists(program: Program) -> list[tuple[Place, tuple[Move, ...]]]:
    found: list[tuple[Place, tuple[Move, ...]]] = []
    for path, step in paths(program.steps):
        match step:
            case Reshard():
                found.append(((path, "forward", 0), step.forward))
                if step.backward is not None:
                    found.append(((path, "backward", 0), step.backward))
            case Use():
                found.append(((path, "moves", 0), step.moves))
            case Sync():
                found.extend(((path, "moves", i), moves) for i, moves in enumerate(step.moves))
            case _:
                pass
    return [pair for pair in found if pair[1]]


def with_moves(program: Program, place: Place, moves: tuple[Move, ...]) -> Program:
    path, name, index = place
    step: Any = next(step for at, step in paths(program.steps) if at == path)
    if isinstance(step, Sync):
        moves = tuple(moves if i == index else old for i, old in enumerate(step.moves))  # type: ignore[misc]
    return put(program, path, replace(step, **{name: moves}))


def change_move(change: Callable[[Move, random.Random], Sequence[Move] | None]) -> Kind:
    """A kind that changes one move of one list."""

    def kind(program: Program, rng: random.Random) -> Program | None:
        lists = move_lists(program)
        if not lists:
            return None
        place, moves = rng.choice(lists)
        at = rng.randrange(len(moves))
        new = change(moves[at], rng)
        return None if new is None else with_moves(program, place, (*moves[:at], *new, *moves[at + 1 :]))

    return kind


def turned(move: Move, rng: random.Random) -> Sequence[Move]:
    return [Move(move.kind, move.target, move.source)]


def rekinded(move: Move, rng: random.Random) -> Sequence[Move]:
    kinds = ["local", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "exchange"]
    return [replace(move, kind=rng.choice([kind for kind in kinds if kind != move.kind]))]


def one_side(change: Callable[[Layout, random.Random], Layout | None]) -> Callable[..., Sequence[Move] | None]:
    """Change the source's layout of a move, the target's, or both alike."""

    def changed(move: Move, rng: random.Random) -> Sequence[Move] | None:
        side = rng.choice(["source", "target", "both"])
        if side == "both" and move.source.grid == move.target.grid:
            seed = rng.random()
            layouts = [change(layout, random.Random(seed)) for layout in (move.source, move.target)]
            if layouts[0] is None or layouts[1] is None:
                return None
            return [Move(move.kind, layouts[0], layouts[1])]
        side = "target" if side == "both" else side
        layout = change(getattr(move, side), rng)
        if layout is None:
            return None
        return [replace(move, source=layout) if side == "source" else replace(move, target=layout)]

    return changed


def regridded(grid: Grid, rng: random.Random) -> Grid | None:
    """Other devices in the cells: two swapped, all shuffled, one replaced by another."""
    devices = list(grid.devices)
    match rng.randrange(3):
        case 0 if len(devices) > 1:
            i, j = rng.sample(range(len(devices)), 2)
            devices[i], devices[j] = devices[j], devices[i]
        case 1:
            rng.shuffle(devices)
        case _:
            devices[rng.randrange(len(devices))] = rng.choice(sorted({*devices, 0, 1}))
    return Grid(grid.axes, tuple(devices))


def regrouped(layout: Layout, rng: random.Random) -> Layout | None:
    grid = regridded(layout.grid, rng)
    return None if grid is None else replace(layout, grid=grid)


def reranged(layout: Layout, rng: random.Random) -> Layout | None:
    """Range lists swapped, a boundary shifted, or the order within a list changed."""
    cut = [dim for dim, table in enumerate(layout.ranges) if table is not None and len(table) > 1]
    if not cut:
        return None
    dim = rng.choice(cut)
    table = list(layout.ranges[dim] or ())
    i, j = rng.sample(range(len(table)), 2)
    kind = rng.randrange(3)
    if kind == 0:
        table[i], table[j] = table[j], table[i]
    elif kind == 1 and table[i] and table[i][-1][1] < layout.shape[dim]:
        start, stop = table[i][-1]
        table[i] = (*table[i][:-1], (start, stop + 1))
        table = [_without(ranges, stop) if at != i else ranges for at, ranges in enumerate(table)]
    elif table[i]:
        table[i] = tuple(reversed(table[i])) if len(table[i]) > 1 else _bisected(table[i])
    ranges = tuple(tuple(table) if at == dim else old for at, old in enumerate(layout.ranges))
    return replace(layout, ranges=ranges)


def _without(ranges: Ranges, index: int) -> Ranges:
    found = []
    for start, stop in ranges:
        found += [(start, index), (index + 1, stop)] if start <= index < stop else [(start, stop)]
    return tuple(pair for pair in found if pair[0] < pair[1])


def _bisected(ranges: Ranges) -> Ranges:
    ((start, stop),) = ranges
    middle = (start + stop) // 2
    return ((middle, stop), (start, middle)) if start < middle else ranges


def rerolled(layout: Layout, rng: random.Random) -> Layout | None:
    """Another role on one axis."""
    if not layout.roles:
        return None
    axis = rng.randrange(len(layout.roles))
    options: list[Role] = [COPY, PARTIAL, *(split(dim) for dim in range(len(layout.shape)))]
    role = rng.choice([option for option in options if option != layout.roles[axis]])
    roles = tuple(role if i == axis else old for i, old in enumerate(layout.roles))
    # an even layout with these roles, but the tables that need not change are kept
    made = even(layout.shape, layout.grid, roles)
    touched = {layout.roles[axis], role}
    tables = tuple(
        made.ranges[dim] if split(dim) in touched else layout.ranges[dim] for dim in range(len(layout.shape))
    )
    return Layout(layout.shape, layout.grid, roles, tables)


def narrowed(layout: Layout, rng: random.Random) -> Layout | None:
    """On one device only."""
    grid = Grid((Axis("all", 1),), (rng.choice(layout.grid.devices),))
    return Layout(layout.shape, grid, (COPY,), (None,) * len(layout.shape))
