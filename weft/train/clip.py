"""clip_grad_norm_(): torch's, for a parallel module.

In: what `parallelize` gave, or some of its parameters, after backward; parameters of other parallel modules, and of
modules beside them, which each rank has whole, may be among them. Out: the norm of all these gradients, each element
counted once; they are scaled in place if it is above the bound. All ranks call it at the same place:

    loss = parallel(*batch); loss.backward()
    weft.clip_grad_norm_(parallel, 1.0)
    optimizer.step()
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Any

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


def clip_grad_norm_(
    module: nn.Module | Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale gradients so that the norm over all of them is at most `max_norm`; the norm before.

    Args:
        module: what `parallelize` gave, or a module that holds it: the norm is that of all of its gradients; or a list
            of parameters.
        norm_type: the order of the norm, above 0; `inf` for the largest element.
        error_if_nonfinite: raise an error, on all ranks, and scale nothing where the norm is not finite.
        foreach: as torch's; it changes no number, and nothing where the module is a parallel one.
    """
    if not isinstance(max_norm, int | float) or not max_norm > 0:
        raise RunError(f"a norm of {max_norm} leaves nothing of a gradient", remedy="a bound above 0")
    order = _order(norm_type)
    how: dict[str, Any] = {"order": order, "only_finite": error_if_nonfinite}
    if isinstance(module, Parallel | Emulated):
        return _finite(_clipped(module, max_norm, **how), error_if_nonfinite)
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
        return torch.nn.utils.clip_grad_norm_(chosen, max_norm, order, error_if_nonfinite, foreach)
    parts = [(_watched(guard), _names(guard, chosen)) for guard in guards.values()]
    beside = [one.grad for one in chosen if guard_of(one) is None and one.grad is not None]
    # of several modules, each counts in the norm of the others
    norms = (
        [_clipped(whole, None, names, order=order) for whole, names in parts] if len(parts) > 1 else [torch.zeros(())]
    )
    found = [
        _clipped(whole, max_norm, names, [*beside, *norms[:i], *norms[i + 1 :]], **how)
        for i, (whole, names) in enumerate(parts)
    ]
    norm = _finite(found[0], error_if_nonfinite)
    with torch.no_grad():
        scale_by(beside, norm, max_norm)
    return norm


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
    **how: Any,
) -> Tensor:
    if isinstance(module, Parallel):
        return clip_rank(module, max_norm, names, beside, **how)
    norms: list[Tensor] = module._crew.each(lambda rank: clip_rank(rank, max_norm, names, beside, **how))
    return norms[0]


def _order(norm_type: Any) -> float:
    try:
        order = float(norm_type)
    except (TypeError, ValueError):
        order = math.nan
    if not order > 0:
        raise RunError(f"clip_grad_norm_ was given norm_type={norm_type!r}", remedy="a number above 0, or inf")
    return order


def _finite(norm: Tensor, is_asked: bool) -> Tensor:
    """A norm, the same on all ranks; an error if it is not finite and that was asked for."""
    if is_asked and not bool(norm.isfinite()):
        raise RunError(
            f"the norm of the gradients is {float(norm)}: nothing was scaled",
            remedy="error_if_nonfinite=False scales them all the same; weft.GradScaler leaves such steps out",
        )
    return norm
