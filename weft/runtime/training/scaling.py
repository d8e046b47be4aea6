"""Loss scaling for a parallel module: torch's GradScaler, with one answer on all ranks.

In: scaled losses, and optimizers over a rank's parameters. Out: updates that all ranks of a replica make, or none:
whether gradients are finite is asked of all of them together. What replicas average is the same on each.

    scaler = weft.GradScaler("cpu")
    scaler.scale(parallel(*batch)).backward()
    scaler.step(optimizer); scaler.update()

Promised: a scale that overflows step after step, whatever it is lowered to, is an error and not an endless loop. So are
losses that are not finite: what underflows on its way back looks like gradients without fault. A scale that has become
zero, or has no reciprocal, is an error at once: gradients could not be scaled back.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from weft.runtime.checks.guards import Guard, guard_of

PATIENCE = 64
"""Steps in a row without an update: the scale has been halved as often by then."""
SMALLEST = torch.finfo(torch.float32).smallest_normal
"""Of a scale whose reciprocal is finite."""
REMEDY = (
    "look at the loss: it is not finite by itself, or a layer overflows in float16 whatever the scale; bfloat16 needs "
    "no scaling"
)


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler, for parallel modules too; arguments as of torch's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_skipped = 0
        self._guards: list[Guard] = []
        self._finite: list[Tensor] = []

    def scale(self, outputs: Any) -> Any:
        """As torch's; losses are looked at."""
        for one in pytree.tree_leaves(outputs):
            if self._enabled and isinstance(one, Tensor):
                self.saw(one)
        return super().scale(outputs)

    def saw(self, loss: Tensor) -> None:
        """A loss of this step: `update()` asks whether it is finite."""
        self._finite.append(torch.isfinite(loss.detach()).all())

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Called by torch's `unscale_` and `step`: what was found not to be finite, by device."""
        found: dict[torch.device, Tensor] = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        parameters = (one for group in optimizer.param_groups for one in group["params"])
        guards = {id(guard): guard for one in parameters if (guard := guard_of(one)) is not None}
        self._guards = list(guards.values())
        self._refuse_useless()
        for guard in self._guards:
            wrong = guard.tell([float(any(bool(one.item()) for one in found.values()))])
            for one in found.values():
                one.fill_(max(wrong))
            found = found or {found_inf.device: torch.full_like(found_inf, max(wrong))}
            # scaled back, on all ranks alike
            guard.remember()
        return found

    def _refuse_useless(self) -> None:
        """What was multiplied by nothing cannot be divided by it."""
        scale = self.get_scale()
        if not SMALLEST <= scale < math.inf:
            raise self._refuse(f"the loss scale is {scale:.0e}: gradients cannot be scaled back")

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """As torch's; refuses to go on where nothing helps."""
        states = self._per_optimizer_states.values()
        wrong = any(bool(one.item()) for state in states for one in state["found_inf_per_device"].values())
        finite, self._finite = self._finite, []
        wrong = wrong or not all(bool(one) for one in finite)
        self._num_skipped = self._num_skipped + 1 if wrong else 0
        super().update(new_scale)
        if self._num_skipped >= PATIENCE:
            raise self._refuse(
                f"gradients or losses were not finite in {PATIENCE} steps in a row; the loss scale is "
                f"{self.get_scale():.0e}"
            )

    def _refuse(self, message: str) -> Exception:
        return (self._guards[0].refuse if self._guards else _plain)(message, REMEDY)


def _plain(message: str, remedy: str) -> Exception:
    return RuntimeError(f"{message}; {remedy}")
