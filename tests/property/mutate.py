"""Faults seeded into Programs: each kind changes one thing, as a bug of the compiler or a hand edit would.

`mutant(program, rng)` returns the name of a kind and the changed Program, or None where the kind finds nothing to
change. Some mutants are harmless (a region no longer recomputed, a step done twice): they tell false alarms.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace

from tests.property.edits import (
    Kind,
    change_move,
    narrowed,
    one_side,
    paths,
    pick,
    put,
    regridded,
    regrouped,
    rekinded,
    reranged,
    rerolled,
    turned,
)
from weft.ir.oplayout import Carried, Copied, Cut, OpLayout, plain_cut
from weft.ir.oplayout import Use as OpUse
from weft.ir.program import Chunks, Compute, Give, Move, Program, Recompute, Reshard, Sync, Take, Use
from weft.ops.book import RuleBook


def mutant(program: Program, rng: random.Random) -> tuple[str, Program] | None:
    """One fault of a random kind."""
    name = rng.choice(sorted(KINDS))
    changed = KINDS[name](program, rng)
    return None if changed is None or same(changed, program) else (name, changed)


def same(a: Program, b: Program) -> bool:
    """True if nothing changed."""
    ends = (a.outputs, a.loss, a.roots, a.entries, a.given) == (b.outputs, b.loss, b.roots, b.entries, b.given)
    return ends and (a.steps, a.values, a.stored) == (b.steps, b.values, b.stored)


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
    if tensor is None:
        return _piece_ends(program, rng)
    options = [v.name for v in program.values.values() if v.tensor == tensor]
    options += [v.name for v in program.values.values() if program.graph.tensors[v.tensor].sizes == ()]
    if not options or tensor is None:
        return None
    if rng.random() < 0.5:
        return replace(program, loss=rng.choice([*options, None]))
    return replace(program, outputs={**program.outputs, tensor: rng.choice(options)})


def _piece_ends(program: Program, rng: random.Random) -> Program | None:
    """What a piece takes from its caller or gives to it is another value, is missing, or comes twice."""
    change = rng.choice(["root", "entry", "output", "given"])
    names = sorted(program.values)
    if change == "root" and program.roots:
        at = rng.randrange(len(program.roots))
        new = rng.choice([(), program.roots[at : at + 1] * 2, (rng.choice(names),)])
        return replace(program, roots=(*program.roots[:at], *new, *program.roots[at + 1 :]))
    ends = {"entry": program.entries, "output": program.outputs, "given": program.given}.get(change)
    if not ends:
        return None
    tensor = rng.choice(sorted(ends))
    if change == "given":
        layout = rng.choice([regrouped, reranged, rerolled, narrowed])(program.given[tensor], rng)
        rest = {name: one for name, one in program.given.items() if name != tensor}
        return replace(program, given=rest if layout is None else {**rest, tensor: layout})
    alike = [name for name in names if program.values[name].tensor == tensor]
    name = rng.choice(alike if rng.random() < 0.6 and alike else names)
    if change == "output":
        return replace(program, outputs={**program.outputs, tensor: name})
    rest = {one: value for one, value in program.entries.items() if one != tensor}
    return replace(program, entries=rest if rng.random() < 0.3 else {**rest, tensor: name})


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
    change = rng.choice([regrouped, reranged, rerolled, narrowed])
    layout = change(program.stored[name], rng)
    return None if layout is None else replace(program, stored={**program.stored, name: layout})


def misdeclare(program: Program, rng: random.Random) -> Program | None:
    """A value is declared to lie, or to get its gradient, otherwise than it does."""
    name = rng.choice(sorted(program.values))
    value = program.values[name]
    change = rng.choice([regrouped, reranged, rerolled, narrowed])
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
    "reverse move": change_move(turned),
    "other kind of move": change_move(rekinded),
    "regroup move": change_move(one_side(regrouped)),
    "re-range move": change_move(one_side(reranged)),
    "other role in move": change_move(one_side(rerolled)),
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
