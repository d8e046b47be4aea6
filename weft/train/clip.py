"""clip_grad_norm_(): torch's, for a parallel module.

In: what `parallelize` gave, after backward. Out: the norm of all gradients of the model, each counted once; they are
scaled in place if it is above the bound. All ranks call it at the same place:

    loss = parallel(*batch); loss.backward()
    weft.clip_grad_norm_(parallel, 1.0)
    optimizer.step()
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from weft.errors import RunError
from weft.runtime.training.clip import clip_rank
from weft.runtime.training.parallel import Parallel
from weft.train.emulated import Emulated


def clip_grad_norm_(module: nn.Module, max_norm: float) -> Tensor:
    """Scale gradients so that the norm over all of them is at most `max_norm`; the norm before."""
    if not isinstance(module, nn.Module):
        raise RunError(
            f"clip_grad_norm_ was given a {type(module).__name__}, not a module",
            remedy="weft.clip_grad_norm_(parallel, max_norm): the norm is that of all of its gradients",
        )
    if not isinstance(max_norm, int | float) or not max_norm > 0:
        raise RunError(f"a norm of {max_norm} leaves nothing of a gradient", remedy="a bound above 0")
    if isinstance(module, Emulated):
        norms: list[Tensor] = module._crew.each(lambda rank: clip_rank(rank, max_norm))
        return norms[0]
    if isinstance(module, Parallel):
        return clip_rank(module, max_norm)
    return torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm)
