"""Faults seeded into Programs: each kind changes one thing, as a bug of the compiler or a hand edit would.

`mutant(program, rng)` returns the name of a kind and the changed Program, or None where the kind finds nothing to
change. Some mutants are harmless (a region no longer recomputed, a step done twice): they tell false alarms.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from weft.ir.layout import COPY, PARTIAL, Axis, Grid, Layout, Role, even, split
from weft.ir.oplayout import Carried, Copied, Cut, OpLayout, Use as OpUse, plain_cut
from weft.ir.program import Chunks, Compute, Give, Move, Program, Recompute, Reshard, Step, Sync, Take, Use
from weft.ir.ranges import Ranges
from weft.ops.book import RuleBook

Path = tuple[int, ...]
Kind = Callable[[Program, random.Random], Program | None]


def mutant(program: Program, rng: random.Random) -> tuple[str, Program] | None:
    """One fault of a random kind."""
    name = rng.choice(sorted(KINDS))
    changed = KINDS[name](program, rng)
    return None if changed is None or same(changed, program) else (name, changed)


def same(a: Program, b: Program) -> bool:
    """True if nothing changed."""
    return (a.steps, a.values, a.stored, a.outputs, a.loss) == (b.steps, b.values, b.stored, b.outputs, b.loss)


# --- the tree of steps ------------------------------------------------------------------------------------------


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


# --- steps ------------------------------------------------------------------------------------------------------


def drop_step(program: Program, rng: random.Random) -> Program | None:
    found = pick(program, rng)
    return None if found is None else put(program, found[0])


def double_step(program: Program, rng: random.Random) -> Program | None:
    found = pick(program, rng)
    return None if found is None else put(program, found[0], found[1], found[1])


def swap_steps(program: Program, rng: random.Random) -> Program | None:
    found = [(path, step) for path, step in paths(program.steps) if len(path) == 1]
    if len(found) < 2:
        return None
    first = rng.randrange(len(found) - 1)
    second = first + 1 if rng.random() < 0.5 else rng.randrange(len(found))
    steps = list(program.steps)
    steps[first], steps[second] = steps[second], steps[first]
    return replace(program, steps=tuple(steps))


def unwrap(program: Program, rng: random.Random) -> Program | None:
    """A loop or region becomes its body, or a loop is recomputed that was not."""
    found = pick(program, rng, Chunks, Recompute)
    if found is None:
        return None
    path, step = found
    if isinstance(step, Chunks) and rng.random() < 0.6:
        return put(program, path, replace(step, recompute=not step.recompute))
    return put(program, path, *step.body)


def drop_inside(program: Program, rng: random.Random) -> Program | None:
    """A Take or Give is missing, or takes the place of the other."""
    found = pick(program, rng, Take, Give)
    if found is None:
        return None
    path, step = found
    other = Give if isinstance(step, Take) else Take
    return put(program, path, *([other(step.source, step.target)] if rng.random() < 0.3 else []))


# --- moves ------------------------------------------------------------------------------------------------------

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
        moves = tuple(moves if i == index else old for i, old in enumerate(step.moves))  # type: ignore[assignment,misc]
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


def _reversed(move: Move, rng: random.Random) -> Sequence[Move]:
    return [Move(move.kind, move.target, move.source)]


def _rekinded(move: Move, rng: random.Random) -> Sequence[Move]:
    kinds = ["local", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "exchange"]
    return [replace(move, kind=rng.choice([kind for kind in kinds if kind != move.kind]))]


def _one_side(change: Callable[[Layout, random.Random], Layout | None]) -> Callable[..., Sequence[Move] | None]:
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
        return None if layout is None else [replace(move, **{side: layout})]

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


def _regrouped(layout: Layout, rng: random.Random) -> Layout | None:
    grid = regridded(layout.grid, rng)
    return None if grid is None else replace(layout, grid=grid)


def _reranged(layout: Layout, rng: random.Random) -> Layout | None:
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


def _rerolled(layout: Layout, rng: random.Random) -> Layout | None:
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


# --- backward and syncs -----------------------------------------------------------------------------------------


def drop_backward(program: Program, rng: random.Random) -> Program | None:
    """A reshard without backward, with an empty one, or with one where there was none."""
    found = pick(program, rng, Reshard)
    if found is None:
        return None
    path, step = found
    backward = tuple(Move(move.kind, move.target, move.source) for move in reversed(step.forward))
    options = [None, (), backward]
    return put(program, path, replace(step, backward=rng.choice([o for o in options if o != step.backward])))


def alter_sync(program: Program, rng: random.Random) -> Program | None:
    """A source is missing, comes twice, or takes the way of another; or the sync is missing."""
    found = pick(program, rng, Sync)
    if found is None:
        return None
    path, step = found
    i, j = rng.randrange(len(step.sources)), rng.randrange(len(step.sources))
    match rng.randrange(4):
        case 0:
            return put(program, path)
        case 1:
            sources, moves = list(step.sources), list(step.moves)
            del sources[i], moves[i]
            return put(program, path, replace(step, sources=tuple(sources), moves=tuple(moves)))
        case 2:
            twice = replace(step, sources=(*step.sources, step.sources[i]), moves=(*step.moves, step.moves[i]))
            return put(program, path, twice)
        case _:
            moves = list(step.moves)
            moves[i], moves[j] = moves[j], moves[i]
            other = pick(program, rng, Sync)
            if i == j and other is not None:
                moves[i] = rng.choice(other[1].moves)
            return put(program, path, replace(step, moves=tuple(moves)))


def other_parameter(program: Program, rng: random.Random) -> Program | None:
    """A sync that brings gradients to another parameter."""
    found = pick(program, rng, Sync)
    names = [name for name in program.graph.parameter_tensors if found and name != found[1].parameter]
    if found is None or not names:
        return None
    return put(program, found[0], replace(found[1], parameter=rng.choice(names)))


# --- ops and values ---------------------------------------------------------------------------------------------


def reread(program: Program, rng: random.Random) -> Program | None:
    """A step reads another value: of the same tensor, or of one of the same shape."""
    found = pick(program, rng, Compute, Reshard, Take, Give)
    if found is None:
        return None
    path, step = found
    old = rng.choice(step.inputs) if isinstance(step, Compute) and step.inputs else getattr(step, "source", None)
    if old is None:
        return None
    value = program.values[old]
    same_tensor = [v.name for v in program.values.values() if v.tensor == value.tensor and v.name != old]
    shape = program.graph.tensors[value.tensor].sizes
    same_shape = [
        v.name for v in program.values.values() if program.graph.tensors[v.tensor].sizes == shape and v.name != old
    ]
    options = same_tensor if same_tensor and rng.random() < 0.6 else same_shape
    if not options:
        return None
    new = rng.choice(options)
    if isinstance(step, Compute):
        at = rng.choice([i for i, name in enumerate(step.inputs) if name == old])
        inputs = tuple(new if i == at else name for i, name in enumerate(step.inputs))
        return put(program, path, replace(step, inputs=inputs))
    return put(program, path, replace(step, source=new))


def rewrite(program: Program, rng: random.Random) -> Program | None:
    """A step makes a value of another name."""
    found = pick(program, rng, Reshard, Use, Take, Give)
    if found is None:
        return None
    path, step = found
    name = rng.choice(sorted(program.values))
    return put(program, path, replace(step, **{"value" if isinstance(step, Use) else "target": name}))


def end_elsewhere(program: Program, rng: random.Random) -> Program | None:
    """Backward starts from another value, or an output is another value."""
    tensor = program.graph.loss
    options = [v.name for v in program.values.values() if v.tensor == tensor]
    options += [v.name for v in program.values.values() if program.graph.tensors[v.tensor].sizes == ()]
    if not options or tensor is None:
        return None
    if rng.random() < 0.5:
        return replace(program, loss=rng.choice([*options, None]))  # type: ignore[list-item]
    return replace(program, outputs={**program.outputs, tensor: rng.choice(options)})


def _relaid(change: Callable[[OpLayout, Program, Compute, random.Random], OpLayout | None]) -> Kind:
    """A kind that changes the layout of one op."""

    def kind(program: Program, rng: random.Random) -> Program | None:
        found = pick(program, rng, Compute)
        if found is None:
            return None
        layout = change(found[1].layout, program, found[1], rng)
        return None if layout is None else put(program, found[0], replace(found[1], layout=layout))

    return kind


def _op_regrouped(layout: OpLayout, program: Program, step: Compute, rng: random.Random) -> OpLayout | None:
    grid = regridded(layout.grid, rng)
    return None if grid is None else replace(layout, grid=grid)


def _op_reshared(layout: OpLayout, program: Program, step: Compute, rng: random.Random) -> OpLayout | None:
    """Other shares, groups or units of a cut."""
    axes = [i for i, use in enumerate(layout.uses) if isinstance(use, Cut)]
    if not axes:
        return None
    axis = rng.choice(axes)
    use = layout.uses[axis]
    assert isinstance(use, Cut)
    shares = list(use.shares)
    if rng.random() < 0.3 and sum(use.groups) % 2 == 0:
        half = sum(use.groups) // 2
        return _with_use(layout, axis, replace(use, groups=(half, half), units=half))
    if len(set(shares)) > 1 and rng.random() < 0.5:
        shares.reverse()
    else:
        shares[rng.randrange(len(shares))] += 1
    return _with_use(layout, axis, replace(use, shares=tuple(shares)))


def _op_recut(layout: OpLayout, program: Program, step: Compute, rng: random.Random) -> OpLayout | None:
    """Cut along another name, copied, or carried."""
    if not layout.uses:
        return None
    axis = rng.randrange(len(layout.uses))
    rule = RuleBook(program.graph).rule(program.graph.by_name[step.op])
    size = layout.grid.axes[axis].size
    options: list[OpUse] = [Copied(), *(Carried(operands) for operands in rule.linear)]
    options += [plain_cut(name, rule.sizes[name], (1,) * size) for name in rule.names]
    return _with_use(layout, axis, rng.choice(options))


def _with_use(layout: OpLayout, axis: int, use: OpUse) -> OpLayout:
    return replace(layout, uses=tuple(use if i == axis else old for i, old in enumerate(layout.uses)))


def other_op(program: Program, rng: random.Random) -> Program | None:
    """A compute step runs another op, or its outputs or inputs change places."""
    found = pick(program, rng, Compute)
    if found is None:
        return None
    path, step = found
    if len(step.inputs) > 1 and rng.random() < 0.6:
        return put(program, path, replace(step, inputs=tuple(reversed(step.inputs))))
    if len(step.outputs) > 1 and rng.random() < 0.6:
        return put(program, path, replace(step, outputs=tuple(reversed(step.outputs))))
    return put(program, path, replace(step, op=rng.choice(sorted(program.graph.by_name))))


def restore(program: Program, rng: random.Random) -> Program | None:
    """A tensor is stored elsewhere than the steps believe."""
    name = rng.choice(sorted(program.stored))
    change = rng.choice([_regrouped, _reranged, _rerolled, _narrowed])
    layout = change(program.stored[name], rng)
    return None if layout is None else replace(program, stored={**program.stored, name: layout})


def _narrowed(layout: Layout, rng: random.Random) -> Layout | None:
    """On one device only."""
    grid = Grid((Axis("all", 1),), (rng.choice(layout.grid.devices),))
    return Layout(layout.shape, grid, (COPY,), (None,) * len(layout.shape))


def misdeclare(program: Program, rng: random.Random) -> Program | None:
    """A value is declared to lie, or to get its gradient, otherwise than it does."""
    name = rng.choice(sorted(program.values))
    value = program.values[name]
    change = rng.choice([_regrouped, _reranged, _rerolled, _narrowed])
    if rng.random() < 0.5:
        layout = change(value.layout, rng)
        new = None if layout is None else replace(value, layout=layout)
    else:
        grad = None if value.grad is None or rng.random() < 0.3 else change(value.grad, rng)
        new = replace(value, grad=grad)
    return None if new is None else replace(program, values={**program.values, name: new})


KINDS: Mapping[str, Kind] = {
    "drop step": drop_step,
    "double step": double_step,
    "swap steps": swap_steps,
    "unwrap loop or region": unwrap,
    "drop take or give": drop_inside,
    "drop move": change_move(lambda move, rng: []),
    "double move": change_move(lambda move, rng: [move, move]),
    "reverse move": change_move(_reversed),
    "other kind of move": change_move(_rekinded),
    "regroup move": change_move(_one_side(_regrouped)),
    "re-range move": change_move(_one_side(_reranged)),
    "other role in move": change_move(_one_side(_rerolled)),
    "drop backward": drop_backward,
    "alter sync": alter_sync,
    "sync to another parameter": other_parameter,
    "read another value": reread,
    "make another value": rewrite,
    "end elsewhere": end_elsewhere,
    "regroup op": _relaid(_op_regrouped),
    "re-share op": _relaid(_op_reshared),
    "cut op otherwise": _relaid(_op_recut),
    "other op or operands": other_op,
    "store elsewhere": restore,
    "misdeclare value": misdeclare,
}
