"""clip_grad_norm_(): torch's, for a parallel module.

In: what `parallelize` gave, or some of its parameters, after backward; parameters of other parallel modules, and of
modules beside them, which each rank has whole, may be among them. Out: the norm of all these gradients, each element
counted once; they are scaled in place if it is above the bound. All ranks call it at the same place:

    loss = parallel(*batch); loss.backward()
    weft.clip_grad_norm_(parallel, 1.0)
    optimizer.step()
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor, nn

from weft.errors import RunError
from weft.runtime.checks.guards import Guard, guard_of
from weft.runtime.training.clip import clip_rank, scale_by
from weft.runtime.training.parallel import Parallel
from weft.train.emulated import Emulated

EMPTY = (
    "clip_grad_norm_ was given no parameters",
    "give some of parallel.parameters(); or clip all of them: weft.clip_grad_norm_(parallel, max_norm)",
)


def clip_grad_norm_(module: nn.Module | Tensor | Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale gradients so that the norm over all of them is at most `max_norm`; the norm before.

    Args:
        module: what `parallelize` gave, or a module that holds it: the norm is that of all of its gradients; or a list
            of parameters.
    """
    if not isinstance(max_norm, int | float) or not max_norm > 0:
        raise RunError(f"a norm of {max_norm} leaves nothing of a gradient", remedy="a bound above 0")
    if isinstance(module, Parallel | Emulated):
        return _clipped(module, max_norm)
    if isinstance(module, nn.Module):
        module = module.parameters()
    if not isinstance(module, Iterable):
        raise RunError(
            f"clip_grad_norm_ was given a {type(module).__name__}, not a module",
            remedy="weft.clip_grad_norm_(parallel, max_norm): the norm is that of all of its gradients",
        )
    chosen = [module] if isinstance(module, Tensor) else list(module)
    guards = {id(guard): guard for one in chosen if (guard := guard_of(one)) is not None}
    if not chosen:
        raise RunError(EMPTY[0], remedy=EMPTY[1])
    if not guards:
        return torch.nn.utils.clip_grad_norm_(chosen, max_norm)
    parts = [(_watched(guard), _names(guard, chosen)) for guard in guards.values()]
    beside = [one.grad for one in chosen if guard_of(one) is None and one.grad is not None]
    # of several modules, each counts in the norm of the others
    norms = [_clipped(whole, None, names) for whole, names in parts] if len(parts) > 1 else [torch.zeros(())]
    found = [
        _clipped(whole, max_norm, names, [*beside, *norms[:i], *norms[i + 1 :]])
        for i, (whole, names) in enumerate(parts)
    ]
    with torch.no_grad():
        scale_by(beside, found[0], max_norm)
    return found[0]


def _watched(guard: Guard) -> Parallel | Emulated:
    whole = None if guard.module is None else guard.module()
    assert isinstance(whole, Parallel | Emulated), "parameters of a parallel module that is gone"
    return whole


def _names(guard: Guard, chosen: Collection[Tensor]) -> set[str]:
    """What parameters are called, on every rank."""
    given = set(map(id, chosen))
    return {name.partition("@")[0] for rank in guard.ranks for name, one in rank.trained if id(one) in given}


def _clipped(
    module: Parallel | Emulated,
    max_norm: float | None,
    names: Collection[str] | None = None,
    beside: Collection[Tensor] = (),
) -> Tensor:
    if isinstance(module, Parallel):
        return clip_rank(module, max_norm, names, beside)
    norms: list[Tensor] = module._crew.each(lambda rank: clip_rank(rank, max_norm, names, beside))
    return norms[0]
