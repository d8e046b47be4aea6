"""Seeded faults: the checker, checked.

In: the Scripts of all ranks. Out: the same with one thing wrong on purpose, the sort of thing that lowering or runtime
could get wrong: a sum left out, an addend counted twice, rows mixed up, a stream that ignores the part. Every one must
come out of verify as different. `Fault.apply` returns None where a program offers no place for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from weft.runtime.random import Draw
from weft.runtime.script import Give, Instruction, Load, Loop, Peers, Region, Reshard, Run, Script, Sync, Take, Transfer

Scripts = list[Script]


@dataclass(frozen=True)
class Fault:
    """One thing to get wrong."""

    name: str
    apply: Callable[[Scripts], Scripts | None]


def walk(instructions: Sequence[Instruction]) -> Iterator[Instruction]:
    """All instructions, those inside loops and regions too."""
    for one in instructions:
        yield one
        if isinstance(one, Loop):
            for body in one.bodies:
                yield from walk(body)
        elif isinstance(one, Region):
            yield from walk(one.body)


def rewrite(
    instructions: Sequence[Instruction], change: Callable[[Instruction], Instruction | None]
) -> tuple[Instruction, ...]:
    """The instructions with each replaced, or left out where `change` gives None."""
    out: list[Instruction] = []
    for one in instructions:
        if isinstance(one, Loop):
            made: Instruction | None = replace(one, bodies=tuple(rewrite(body, change) for body in one.bodies))
        elif isinstance(one, Region):
            made = replace(one, body=rewrite(one.body, change))
        else:
            made = change(one)
        if made is not None:
            out.append(made)
    return tuple(out)


def on_first(
    scripts: Scripts,
    fits: Callable[[Instruction], bool],
    key: Callable[[Any], Any],
    change: Callable[[Script, Any], Instruction | None],
) -> Scripts | None:
    """Change, on every rank, the instructions with the same key as the first that fits anywhere."""
    found = next((key(one) for mine in scripts for one in walk(mine.instructions) if fits(one)), None)
    if found is None:
        return None

    def changed(mine: Script) -> Script:
        def turn(one: Instruction) -> Instruction | None:
            return change(mine, one) if fits(one) and key(one) == found else one

        return replace(mine, instructions=rewrite(mine.instructions, turn))

    return [changed(mine) for mine in scripts]


# reshards and loads


def _sums(transfers: Sequence[Transfer] | None) -> bool:
    return any(one.kind == "all_reduce" for one in transfers or ())


def _without_sums(transfers: Sequence[Transfer] | None) -> tuple[Transfer, ...]:
    return tuple(one for one in transfers or () if one.kind != "all_reduce")


def _reshard(
    scripts: Scripts, fits: Callable[[Reshard], bool], change: Callable[[Script, Reshard], Reshard]
) -> Scripts | None:
    return on_first(
        scripts, lambda one: isinstance(one, Reshard) and fits(one), lambda one: (one.source, one.target), change
    )


def drop_forward_sum(scripts: Scripts) -> Scripts | None:
    return _reshard(
        scripts, lambda one: _sums(one.forward), lambda _, one: replace(one, forward=_without_sums(one.forward))
    )


def drop_backward_sum(scripts: Scripts) -> Scripts | None:
    return _reshard(
        scripts, lambda one: _sums(one.backward), lambda _, one: replace(one, backward=_without_sums(one.backward))
    )


def double_forward_sum(scripts: Scripts) -> Scripts | None:
    return _reshard(
        scripts,
        lambda one: _sums(one.forward) and len(one.forward) == 1,
        lambda _, one: replace(one, forward=one.forward * 2),
    )


def double_backward_sum(scripts: Scripts) -> Scripts | None:
    return _reshard(
        scripts,
        lambda one: _sums(one.backward) and len(one.backward or ()) == 1,
        lambda _, one: replace(one, backward=(one.backward or ()) * 2),
    )


def drop_backward(scripts: Scripts) -> Scripts | None:
    return _reshard(scripts, lambda one: bool(one.backward), lambda _, one: replace(one, backward=None))


def bias_everywhere(scripts: Scripts) -> Scripts | None:
    """The bias of a row-cut linear added once per rank."""
    empty = {
        one.key
        for mine in scripts
        for one in walk(mine.instructions)
        if isinstance(one, Load) and one.leaf and one.transfers and not one.transfers[-1].receives
    }
    return on_first(
        scripts,
        lambda one: isinstance(one, Load) and one.key in empty,
        lambda one: one.key,
        lambda _, one: replace(one, transfers=()),
    )


def same_rows_everywhere(scripts: Scripts) -> Scripts | None:
    """Every rank reads the rows of the first one."""
    first = {
        one.key: one.transfers
        for one in walk(scripts[0].instructions)
        if isinstance(one, Load) and not one.leaf and len(one.transfers) == 1 and one.transfers[0].kind == "local"
    }

    def differs(one: Instruction) -> bool:
        return (
            isinstance(one, Load)
            and one.key in first
            and one.transfers != first[one.key]
            and one.transfers[0].shapes == first[one.key][0].shapes
        )

    def change(mine: Script, one: Load) -> Load:
        sends = tuple(replace(piece, peer=mine.rank) for piece in first[one.key][0].sends)
        return replace(one, transfers=(replace(one.transfers[0], sends=sends),))

    return on_first(scripts, differs, lambda one: one.key, change)


# syncs and what is stored


def _sync(scripts: Scripts, fits: Callable[[Sync], bool], change: Callable[[Sync], Sync]) -> Scripts | None:
    found = next((sync.parameter for mine in scripts for sync in mine.syncs if fits(sync)), None)
    if found is None:
        return None
    return [
        replace(mine, syncs=tuple(change(sync) if sync.parameter == found else sync for sync in mine.syncs))
        for mine in scripts
    ]


def drop_sync_sum(scripts: Scripts) -> Scripts | None:
    return _sync(
        scripts,
        lambda sync: any(map(_sums, sync.transfers)),
        lambda sync: replace(sync, transfers=tuple(map(_without_sums, sync.transfers))),
    )


def double_sync_sum(scripts: Scripts) -> Scripts | None:
    return _sync(
        scripts,
        lambda sync: len(sync.transfers) == 1 and len(sync.transfers[0]) == 1 and _sums(sync.transfers[0]),
        lambda sync: replace(sync, transfers=(sync.transfers[0] * 2,)),
    )


def drop_tied_addend(scripts: Scripts) -> Scripts | None:
    return _sync(
        scripts,
        lambda sync: len(sync.sources) > 1,
        lambda sync: replace(
            sync, sources=sync.sources[:1], source_shapes=sync.source_shapes[:1], transfers=sync.transfers[:1]
        ),
    )


def sum_of_copies(scripts: Scripts) -> Scripts | None:
    """A gradient that is complete on every rank, summed all the same."""
    everyone = tuple(mine.rank for mine in scripts)

    def complete(sync: Sync) -> bool:
        same = {mine.stored.get(sync.parameter) for mine in scripts}
        return len(everyone) > 1 and len(same) == 1 and sync.shape is not None and not any(sync.transfers)

    def change(sync: Sync) -> Sync:
        assert sync.shape is not None
        total = Transfer("all_reduce", everyone, (), (), (sync.shape,))
        return replace(sync, transfers=((total,), *sync.transfers[1:]))

    return _sync(scripts, complete, change)


def swap_parts(scripts: Scripts) -> Scripts | None:
    """Two ranks hold each other's part of a parameter."""
    for a, b in ((a, b) for a in scripts for b in scripts if a.rank < b.rank):
        for sync in a.syncs:
            ours, theirs = a.stored.get(sync.parameter), b.stored.get(sync.parameter)
            if ours is not None and theirs is not None and ours != theirs and _shape(ours) == _shape(theirs):
                swapped = {a.rank: theirs, b.rank: ours}
                return [
                    replace(mine, stored={**mine.stored, sync.parameter: swapped[mine.rank]})
                    if mine.rank in swapped
                    else mine
                    for mine in scripts
                ]
    return None


def _shape(index: tuple[tuple[tuple[int, int], ...], ...]) -> tuple[int, ...]:
    return tuple(sum(stop - start for start, stop in intervals) for intervals in index)


# calls


def _call(scripts: Scripts, fits: Callable[[Run], bool], change: Callable[[Script, Run], Run]) -> Scripts | None:
    return on_first(scripts, lambda one: isinstance(one, Run) and fits(one), lambda one: one.op, change)


def _with(run: Run, **changes: Any) -> Run:
    return replace(run, kwargs=tuple((name, changes.get(name, value)) for name, value in run.kwargs))


def _draw(run: Run) -> Draw | None:
    return next((value for _, value in run.kwargs if isinstance(value, Draw)), None)


def draws_ignore_the_part(scripts: Scripts) -> Scripts | None:
    """Every rank drops the elements that the first rank drops."""
    first = {one.op: _draw(one) for one in walk(scripts[0].instructions) if isinstance(one, Run) and _draw(one)}

    def moved(run: Run) -> bool:
        draw, other = _draw(run), first.get(run.op)
        return draw is not None and other is not None and draw.at != other.at and _shape(draw.at) == _shape(other.at)

    return _call(scripts, moved, lambda _, run: _with(run, draw=first[run.op]))


def draws_another_number(scripts: Scripts) -> Scripts | None:
    def change(_: Script, run: Run) -> Run:
        draw = _draw(run)
        assert draw is not None
        return _with(run, draw=replace(draw, number=draw.number + 1000))

    return _call(scripts, lambda run: _draw(run) is not None, change)


def talks_to_itself(scripts: Scripts) -> Scripts | None:
    """An algorithm that forgets to ask the others."""

    def alone(mine: Script, arg: Any) -> Any:
        if isinstance(arg, Peers):
            return Peers((mine.rank,))
        return tuple(alone(mine, item) for item in arg) if isinstance(arg, tuple) else arg

    def talks(arg: Any) -> bool:
        return isinstance(arg, Peers) or (isinstance(arg, tuple) and any(map(talks, arg)))

    return _call(
        scripts,
        lambda run: talks((run.args, run.kwargs)),
        lambda mine, run: replace(
            run, args=alone(mine, run.args), kwargs=tuple((name, alone(mine, value)) for name, value in run.kwargs)
        ),
    )


def mean_of_the_part(scripts: Scripts) -> Scripts | None:
    """A mean that divides by the part's count where it should divide by the whole's."""

    def counts(run: Run) -> bool:
        return any(name == "count" and isinstance(value, int) and value > 1 for name, value in run.kwargs)

    def change(_: Script, run: Run) -> Run:
        return _with(run, count=dict(run.kwargs)["count"] // 2)

    return _call(scripts, counts, change)


def no_gradient(scripts: Scripts) -> Scripts | None:
    """An op in the middle that runs without gradient."""
    ops = [one.op for one in walk(scripts[0].instructions) if isinstance(one, Run) and one.grad]
    middle = ops[len(ops) // 2]
    return _call(scripts, lambda run: run.op == middle, lambda _, run: replace(run, grad=False))


# chunks


def drop_a_chunk(scripts: Scripts) -> Scripts | None:
    """The last chunk's share of a sum is never added."""

    def last(one: Instruction) -> bool:
        return isinstance(one, Give) and one.index is None and one.source.slot > 0

    return on_first(scripts, last, lambda one: (one.target, one.source.slot), lambda _, one: None)


def take_the_first_chunk(scripts: Scripts) -> Scripts | None:
    """Every chunk works on the first one's part of its input."""
    first = {
        one.target.key: one
        for mine in scripts
        for one in walk(mine.instructions)
        if isinstance(one, Take) and one.target.slot == 0
    }

    def differs(one: Instruction) -> bool:
        return isinstance(one, Take) and one.index != first[one.target.key].index

    return on_first(
        scripts,
        differs,
        lambda one: one.target.key,
        lambda _, one: replace(one, index=first[one.target.key].index),
    )


def load_the_first_chunk(scripts: Scripts) -> Scripts | None:
    """Every chunk uses the first one's part of a parameter."""

    def several(one: Instruction) -> bool:
        return (
            isinstance(one, Load)
            and one.leaf
            and len(one.transfers) == 1
            and len(one.transfers[0].shapes) > 1
            and len({piece.index for piece in one.transfers[0].sends}) > 1
        )

    def change(_: Script, one: Load) -> Load:
        (only,) = one.transfers
        sends = tuple(replace(piece, index=only.sends[0].index) for piece in only.sends)
        return replace(one, transfers=(replace(only, sends=sends),))

    return on_first(scripts, several, lambda one: one.key, change)


FAULTS: tuple[Fault, ...] = (
    Fault("a forward sum left out", drop_forward_sum),
    Fault("a forward sum taken twice", double_forward_sum),
    Fault("a backward sum left out", drop_backward_sum),
    Fault("a backward sum taken twice", double_backward_sum),
    Fault("an edge without backward", drop_backward),
    Fault("a bias added on every rank", bias_everywhere),
    Fault("the first rank's rows on every rank", same_rows_everywhere),
    Fault("a gradient sync left out", drop_sync_sum),
    Fault("a gradient synchronised twice", double_sync_sum),
    Fault("a tied addend missing", drop_tied_addend),
    Fault("copies of a gradient summed", sum_of_copies),
    Fault("two ranks' parts swapped", swap_parts),
    Fault("random numbers that ignore the part", draws_ignore_the_part),
    Fault("random numbers of another draw", draws_another_number),
    Fault("an algorithm that asks nobody", talks_to_itself),
    Fault("a mean over the part", mean_of_the_part),
    Fault("an op without gradient", no_gradient),
    Fault("a chunk left out of a sum", drop_a_chunk),
    Fault("the first chunk's input in every chunk", take_the_first_chunk),
    Fault("the first chunk's parameter in every chunk", load_the_first_chunk),
)
