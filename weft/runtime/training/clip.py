"""Clipping by the norm of all gradients, as on one device.

In: a rank's module with complete gradients, after backward. Out: the same gradients, scaled if their common norm is
above a bound, and that norm. Promised: each element of the original counts once, however many ranks store it; all ranks
scale by the same number.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.runtime.training.parallel import Parallel
from weft.runtime.training.shard_owners import ShardOwners, exchange

EPSILON = 1e-6
"""As torch.nn.utils.clip_grad_norm_ has it."""


class Clip:
    """Knows which elements this rank answers for. Made and called on all ranks of a replica together."""

    def __init__(self, module: Parallel) -> None:
        self._module = module
        holdings: ShardOwners = exchange(module.masters)
        rank = module.program.transport.rank
        mine = {name: holdings.answers_for(name, rank) for name, _ in module.masters.trained()}
        device = module.program.transport.device
        self._others = {name: ~one.to(device) for name, one in mine.items() if isinstance(one, Tensor)}
        """Of parameters that others answer for in part, where."""
        self._mine = {name for name, one in mine.items() if one is not False}

    @torch.no_grad()
    def __call__(
        self,
        max_norm: float | None,
        names: Collection[str] | None = None,
        others: Collection[Tensor] = (),
        *,
        order: float = 2.0,
        only_finite: bool = False,
    ) -> Tensor:
        """Scale the gradients so that their norm is at most `max_norm`, if there is one; the norm before.

        Args:
            names: of some only.
            others: gradients that count too, whole on each rank; they are scaled by whoever gave them.
            order: of the norm; above 0.
            only_finite: nothing is scaled where the norm is not finite.
        """
        chosen = {
            id(one) for name, one in self._module.named_parameters() if names is None or name.partition("@")[0] in names
        }
        norm = self._norm(chosen, others, order)
        if max_norm is None or (only_finite and not bool(norm.isfinite())):
            return norm
        mine = [one for one in self._module.parameters() if id(one) in chosen]
        scale_by([one.grad for one in mine if one.grad is not None], norm, max_norm)
        self._module.gradients_are_right()
        return norm

    def _norm(self, chosen: Collection[int], others: Collection[Tensor], order: float) -> Tensor:
        """Of all these gradients of the model, and of others; the same on every rank."""
        transport = self._module.program.transport
        mine = [
            self._answered(name, one.grad.detach())
            for name, one in self._module.masters.trained()
            if one.grad is not None and one.grad.numel() and name in self._mine and id(one) in chosen
        ]
        total = torch.zeros((), dtype=torch.float64, device=transport.device)
        if mine:
            total = _joined(torch._foreach_norm(mine, order, dtype=torch.float64), order)
        # added in rank order: equal bit for bit on all ranks
        found = list(transport.all_gather(total, tuple(range(transport.num_ranks))))
        given = [_real(one.detach()) for one in others if one.numel()]
        if given:
            beside = torch._foreach_norm(given, order, dtype=torch.float64)
            found.append(_joined([one.to(total.device) for one in beside], order))
        return _joined(found, order)

    def _answered(self, name: str, gradient: Tensor) -> Tensor:
        """A gradient without the elements that others answer for, as real numbers."""
        if name in self._others:
            gradient = gradient.masked_fill(self._others[name], 0)
        return _real(gradient)


def _real(gradient: Tensor) -> Tensor:
    """What has the same norm of any order."""
    return gradient.abs() if gradient.is_complex() else gradient


def _joined(norms: Sequence[Tensor], order: float) -> Tensor:
    """The norm of all together."""
    each = torch.stack(tuple(norms))
    if order == 2.0:
        return each.square().sum().sqrt()
    return each.amax() if math.isinf(order) else each.pow(order).sum().pow(1 / order)


def scale_by(gradients: Collection[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale gradients whose common norm is this one, if it is above the bound."""
    scale = torch.clamp(max_norm / (norm + EPSILON), max=1.0)
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for one in gradients:
        alike.setdefault((one.device, one.dtype), []).append(one)
    for kind, some in alike.items():
        torch._foreach_mul_(some, scale.to(*kind))


def clip_rank(
    module: Parallel,
    max_norm: float | None,
    names: Collection[str] | None = None,
    others: Collection[Tensor] = (),
    **how: Any,
) -> Tensor:
    """Clip once; whoever clips in every step keeps a `Clip`. Arguments as of it."""
    held = vars(module).get("_clip")
    clip = held if isinstance(held, Clip) else Clip(module)
    module.__dict__["_clip"] = clip
    return clip(max_norm, names, others, **how)
