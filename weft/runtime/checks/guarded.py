"""Guarded modules: what the ranks of a parallel module hold, told to the Guard of its parameters.

In: a rank's module, or all ranks of an emulated one. Out: the module, watched: its parameters carry marks, and at the
end of every backward its gradients are remembered; what the rank holds in part is shown as shards. All ranks of a
replica call `guard_rank` at the same place.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from functools import partial
from threading import Event

from torch import Tensor

from weft.errors import Refuse
from weft.runtime.checks.guards import ALONE, Guard, RankParameters
from weft.runtime.checks.scales import Scales
from weft.runtime.checks.whole_state import PartOf
from weft.runtime.layout.execute import size
from weft.runtime.training.full_tensor import Here, show_shards
from weft.runtime.training.one_rank import OneRank
from weft.runtime.training.shard_owners import ShardOwners, exchange, tell_all


def held_by(module: OneRank) -> RankParameters:
    """What a rank holds of the trained parameters."""
    parts = module.program.trained_parts()
    stored, copies = module.stored, module.masters.apart
    trained = tuple(
        (name, one)
        for name, one in module.named_parameters()
        if name in parts or (name in copies and copies[name].name in parts)
    )
    held = {**stored, **{name: copy.index for name, copy in copies.items()}}
    shapes = {name: parts[copies[name].name if name in copies else name].shape for name, _ in trained}
    # of a number there are no parts
    cut = {name: PartOf(shape, held[name]) for name, shape in shapes.items() if shape and size(held[name]) != shape}
    return RankParameters(trained, cut, not cut and all(name in module.program.stored for name in parts))


def guard_rank(module: OneRank, refuse: Refuse) -> Guard:
    """Watch over what an optimizer does to one rank of several processes."""
    transport, held = module.program.transport, held_by(module)

    everyone = tuple(range(transport.num_ranks))
    told = transport.tell([float(held.complete), float(held.holds), float(module.holds_all)], everyone)
    complete, holds, holds_all = zip(*told, strict=True)

    def most(mine: Tensor) -> Tensor:
        return transport.all_reduce(mine.to(transport.device), everyone, "max")

    if not all(holds_all):
        show_shards(module, exchange(module.masters), refuse, Event())
    holders = tuple(rank for rank, one in enumerate(holds) if one)
    job = transport.job

    def compare(update: int, mine: list[float]) -> list[float]:
        (factor,) = mine
        found = job.compared(update, factor, transport.outside(holders))
        quiet = [rank for rank, one in zip(holders, found.values(), strict=True) if one is None]
        if quiet:
            error = refuse(ALONE[0].format(transport.rank, quiet[0]), ALONE[1])
            job.fail(error)
            raise error
        return [one for one in found.values() if one is not None]

    guard = Guard((held,), transport.num_ranks, all(complete), refuse, most, compare, holders, job.passed)
    if guard.watches_scales:
        names = tell_all(transport, _remembered(held, guard.scales[0]))
        _look_at(held, guard.scales[0], itertools.chain.from_iterable(names))
    guard.waits = transport.device.type != "cpu"
    began = job.progress(min(holders, default=0))
    if held.holds:
        guard.began = began
    module.watched_by(guard, guard.remember)
    return guard


def _remembered(held: RankParameters, scales: Scales) -> list[str]:
    """The parameters of which a rank remembers elements of gradients."""
    own = set(map(id, scales.remembered))
    return [name for name, one in held.trained if id(one) in own]


def _look_at(held: RankParameters, scales: Scales, names: Iterable[str]) -> None:
    """Let a rank notice what is done to gradients of which any remembers elements: of its own it may have none."""
    others, own = dict(held.trained), _remembered(held, scales)
    scales.others = [others[name] for name in dict.fromkeys(names) if name in others and name not in own]


def guard_all(ranks: Sequence[OneRank], refuse: Refuse) -> Guard:
    """Watch over what one optimizer does to all ranks of an emulated module."""
    held = tuple(map(held_by, ranks))
    holders = tuple(rank for rank, one in enumerate(held) if one.holds)
    guard = Guard(
        held,
        len(held),
        all(one.complete for one in held),
        refuse,
        lambda mine: mine,
        lambda update, mine: mine,
        holders,
    )
    names = [name for one, scales in zip(held, guard.scales, strict=True) for name in _remembered(one, scales)]
    for one, scales in zip(held, guard.scales, strict=True):
        _look_at(one, scales, names)
    owners, here, told = ShardOwners(tuple(dict(one.stored) for one in ranks)), Here(ranks), Event()
    for number, module in enumerate(ranks):
        show_shards(module, owners, refuse, told, here)
        module.watched_by(guard, partial(guard.remember, number))
    return guard
