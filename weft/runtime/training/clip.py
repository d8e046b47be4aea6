"""Clipping by the norm of all gradients, as on one device.

In: a rank's module with complete gradients, after backward. Out: the same gradients, scaled if their common norm is
above a bound, and that norm. Promised: each element of the original counts once, however many ranks store it; all ranks
scale by the same number.
"""

from __future__ import annotations

from collections.abc import Collection

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
        self, max_norm: float | None, names: Collection[str] | None = None, others: Collection[Tensor] = ()
    ) -> Tensor:
        """Scale the gradients so that their norm is at most `max_norm`, if there is one; the norm before.

        Args:
            names: of some only.
            others: gradients that count too, whole on each rank; they are scaled by whoever gave them.
        """
        chosen = {
            id(one) for name, one in self._module.named_parameters() if names is None or name.partition("@")[0] in names
        }
        norm = self._norm(chosen)
        if others:
            beside = [one.detach().abs().double().square().sum().to(norm.device) for one in others]
            norm = (norm.square() + torch.stack(beside).sum()).sqrt()
        if max_norm is None:
            return norm
        mine = [one for one in self._module.parameters() if id(one) in chosen]
        scale_by([one.grad for one in mine if one.grad is not None], norm, max_norm)
        self._module.gradients_are_right()
        return norm

    def _norm(self, chosen: Collection[int]) -> Tensor:
        """Of all these gradients of the model, the same on every rank."""
        transport = self._module.program.transport
        mine = [
            self._answered(name, one.grad.detach())
            for name, one in self._module.masters.trained()
            if one.grad is not None and name in self._mine and id(one) in chosen
        ]
        total = torch.zeros((), dtype=torch.float64, device=transport.device)
        if mine:
            total = torch.stack(torch._foreach_norm(mine, 2.0, dtype=torch.float64)).square().sum()
        # added in rank order: equal bit for bit on all ranks
        return torch.stack(transport.all_gather(total, tuple(range(transport.num_ranks)))).sum().sqrt()

    def _answered(self, name: str, gradient: Tensor) -> Tensor:
        """A gradient without the elements that others answer for, as real numbers."""
        if name in self._others:
            gradient = gradient.masked_fill(self._others[name], 0)
        return torch.view_as_real(gradient) if gradient.is_complex() else gradient


def scale_by(gradients: Collection[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale gradients whose common norm is this one, if it is above the bound."""
    scale = torch.clamp(max_norm / (norm + EPSILON), max=1.0)
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for one in gradients:
        alike.setdefault((one.device, one.dtype), []).append(one)
    for kind, some in alike.items():
        torch._foreach_mul_(some, scale.to(*kind))


def clip_rank(
    module: Parallel, max_norm: float | None, names: Collection[str] | None = None, others: Collection[Tensor] = ()
) -> Tensor:
    """Clip once; whoever clips in every step keeps a `Clip`. Arguments as of it."""
    held = vars(module).get("_clip")
    clip = held if isinstance(held, Clip) else Clip(module)
    module.__dict__["_clip"] = clip
    return clip(max_norm, names, others)
