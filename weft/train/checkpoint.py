"""save() and load(): the state of a training loop of one's own, in a folder that any plan can go on from.

    weft.save("run", parallel, optimizer, epoch=3)
    epoch = weft.load("run", parallel, optimizer)["epoch"]

In: what `parallelize` gave, its optimizers, plain values of the user's. Out: a folder as `weft train --save` writes it
(`saved.py`): whole weights and optimizer state, the step and seed of the random streams, the optimizer's rates. All
ranks call both at the same place. Promised: going on is as never having stopped, under another plan to rounding; a
folder is replaced when the new one is written whole; what is loaded is safetensors and JSON, which run nothing; a fault
on one rank is an error on all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from weft.errors import RunError, WeftError
from weft.runtime.program.stored import shapes_of
from weft.runtime.training.combined_optimizer import CombinedOptimizer
from weft.runtime.training.parallel import Parallel
from weft.runtime.training.shard_owners import tell_all
from weft.runtime.training.step import Optimizers, all_of
from weft.train.emulated import Emulated
from weft.train.saved import (
    Progress,
    Saved,
    check_model,
    check_target,
    open_saved,
    plain_values,
    restore,
    restore_model,
)
from weft.train.saved import save as write

PLAIN = "numbers, texts, None, lists and dicts of them with texts as keys; tensors are for buffers"


def save(path: str | Path, parallel: nn.Module, optimizer: Optimizers | None = None, **extra: Any) -> None:
    """Save the state of training: weights, optimizer, step.

    Args:
        path: of a folder; the state that was saved there before is replaced.
        optimizer: or several as a list.
        extra: plain values that `load` gives back: numbers, texts, lists and dicts of them (a scheduler's
            `state_dict()`, say).
    """
    ranks = _ranks(parallel, "save")
    first, combined = ranks[0], _combined(optimizer)
    kinds = [] if optimizer is None else [type(one).__name__ for one in all_of(optimizer)]
    progress = Progress(
        first.step,
        first.seed,
        ", ".join(kinds),
        groups=_groups(combined),
        extra=plain_values(extra, "weft.save: the value", PLAIN),
    )

    def written(rank: Parallel) -> str:
        if rank.replica:
            return ""
        return _fault(lambda: write(path, rank, combined, progress))

    if isinstance(parallel, Emulated):
        check_target(path)
        _raise(parallel.on_ranks(written))
    else:
        _agree(first, _fault(lambda: None if _number(first) else check_target(path)))
        _agree(first, written(first))


def load(path: str | Path, parallel: nn.Module, optimizer: Optimizers | None = None) -> dict[str, Any]:
    """Go on from what `save` or `weft train --save` has written, under any plan; what was saved besides.

    Args:
        optimizer: of the kind and with the groups of the one that was saved; None leaves its state out.
    """
    ranks, combined = _ranks(parallel, "load"), _combined(optimizer)
    found: list[Saved] = []
    wrong = _fault(lambda: found.append(_checked(path, ranks[0], optimizer, combined)))
    _raise([wrong]) if isinstance(parallel, Emulated) else _agree(ranks[0], wrong)
    (saved,) = found
    for rank in ranks:
        restore_model(saved, rank)
        rank.step, rank.seed, rank.evaluated = saved.progress.step, saved.progress.seed, (0, 0)
        if combined is not None:
            restore(saved, rank, combined)
    if combined is not None:
        _restore_groups(combined, saved.progress.groups)
    return dict(saved.progress.extra)


def _ranks(parallel: nn.Module, name: str) -> list[Parallel]:
    """The ranks that are here."""
    if isinstance(parallel, Emulated):
        return list(parallel.ranks)  # type: ignore[arg-type]
    if isinstance(parallel, Parallel):
        return [parallel]
    raise RunError(
        f"weft.{name} was given a {type(parallel).__name__}, not what parallelize() gave",
        remedy=f"weft.{name}(path, weft.parallelize(...), optimizer)",
    )


def _combined(optimizer: Optimizers | None) -> Any:
    """One optimizer for all."""
    if optimizer is None:
        return None
    several: Any = all_of(optimizer)
    return several[0] if len(several) == 1 else CombinedOptimizer(several)


def _groups(optimizer: Any) -> list[dict[str, Any]]:
    """The settings of each group that are plain values: rates, and what a schedule changes."""

    def plain(group: dict[str, Any]) -> dict[str, Any]:
        values = {key: value.item() if _is_number(value) else value for key, value in group.items() if key != "params"}
        return {key: value for key, value in values.items() if isinstance(value, bool | int | float | str | tuple)}

    return [] if optimizer is None else [plain(group) for group in optimizer.param_groups]


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def _restore_groups(optimizer: Any, groups: Sequence[Any]) -> None:
    for mine, saved in zip(optimizer.param_groups, groups, strict=False):
        for key, value in saved.items():
            if isinstance(mine.get(key), Tensor):
                mine[key].fill_(value)
            else:
                mine[key] = tuple(value) if isinstance(value, list) else value


def _checked(path: str | Path, rank: Parallel, optimizer: Optimizers | None, combined: Any) -> Saved:
    """What was saved, if it is of this model and of this optimizer."""
    saved = open_saved(path)
    held = {one.names: one.shape for one in shapes_of(rank.masters).values() if one.persistent}
    check_model(saved, held)
    if optimizer is None:
        return saved
    kind, place = ", ".join(type(one).__name__ for one in all_of(optimizer)), str(saved.folder)
    if saved.progress.optimizer != kind:
        raise RunError(
            f"the state of {saved.progress.optimizer or 'no optimizer'} was saved, and {kind} is to go on from it",
            place=place,
            remedy="the optimizer that was saved; or weft.load(path, parallel): the weights alone",
        )
    num_saved, num_mine = len(saved.progress.groups), len(combined.param_groups)
    if num_saved and num_saved != num_mine:
        raise RunError(
            f"the optimizer that was saved has {num_saved} parameter groups, this one has {num_mine}",
            place=place,
            remedy="make the optimizer with the groups that it had",
        )
    return saved


# A fault on one rank is everybody's.


def _fault(work: Callable[[], Any]) -> str:
    """What went wrong, if anything did."""
    try:
        work()
    except WeftError as error:
        return json.dumps([error.message, error.place, error.remedy])
    except OSError as error:
        return json.dumps([f"the state cannot be written or read: {error}", "", "a folder that all ranks can use"])
    return ""


def _number(rank: Parallel) -> int:
    return rank.program.transport.whole.rank


def _agree(rank: Parallel, mine: str) -> None:
    """All ranks of the job call this together."""
    _raise(tell_all(rank.program.transport.whole, mine))


def _raise(faults: Sequence[str]) -> None:
    if found := next(filter(None, faults), ""):
        message, place, remedy = json.loads(found)
        raise RunError(message, place=place, remedy=remedy)
