"""Loss scaling for a parallel module: torch's GradScaler, with one answer on all ranks.

In: scaled losses, and optimizers over a rank's parameters. Out: updates that all ranks of a replica make, or none:
whether gradients are finite is asked of all of them together. What replicas average is the same on each.

    scaler = weft.GradScaler("cpu")
    scaler.scale(parallel(*batch)).backward()
    scaler.step(optimizer); scaler.update()

Promised: a scale that overflows step after step, whatever it is lowered to, is an error and not an endless loop. So are
losses that are not finite: what underflows on its way back looks like gradients without fault. A scale that has become
zero, or has no reciprocal, is an error: gradients could not be scaled back. All of that is worked out where the scale
lies. On a device the host looks at it in some steps only (`is_due`), and does not wait in the others; where gradients
cannot be scaled back nothing is updated.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from weft.runtime.checks.guards import Guard, guard_of
from weft.runtime.checks.replicated import is_due

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
        self._num_updates = 0
        self._skipped: Tensor | None = None
        """Steps in a row without an update."""
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
        if self._enabled:
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
        scale = self._check_scale_growth_tracker("unscale_")[0]
        # torch has looked at gradients before it scaled them back
        useless = torch.isfinite(scale).logical_and(scale >= SMALLEST).logical_not().float()
        for one in found.values():
            torch.maximum(one, useless.to(one.device), out=one)
        for guard in self._guards:
            wrong = guard.most(torch.stack([found_inf, *(one.to(found_inf.device) for one in found.values())]).amax())
            found = found or {found_inf.device: found_inf}
            for one in found.values():
                one.copy_(wrong)
            # scaled back, on all ranks alike
            guard.remember()
        return found

    @property
    def _looks(self) -> bool:
        """The host is to look at numbers in this step."""
        return self._scale is None or self._scale.device.type == "cpu" or is_due(self._num_updates)

    def _refuse_useless(self) -> None:
        """What was multiplied by nothing cannot be divided by it."""
        scale = self.get_scale() if self._looks else 1.0
        if not SMALLEST <= scale < math.inf:
            raise self._refuse(f"the loss scale is {scale:.0e}: gradients cannot be scaled back")

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """As torch's; refuses to go on where nothing helps."""
        if not self._enabled:
            return
        scale = self._check_scale_growth_tracker("update")[0]
        states = self._per_optimizer_states.values()
        wrong = [one > 0 for state in states for one in state["found_inf_per_device"].values()]
        wrong += [~one for one in self._finite]
        self._finite = []
        if wrong:
            known = torch.zeros_like(scale) if self._skipped is None else self._skipped
            self._skipped = (known + 1) * torch.stack([one.to(scale.device) for one in wrong]).any()
        super().update(new_scale)
        if self._looks and self._skipped is not None and self._skipped.item() >= PATIENCE:
            raise self._refuse(
                f"gradients or losses were not finite in {PATIENCE} steps in a row; the loss scale is "
                f"{self.get_scale():.0e}"
            )
        self._num_updates += 1

    def _refuse(self, message: str) -> Exception:
        return (self._guards[0].refuse if self._guards else _plain)(message, REMEDY)


def _plain(message: str, remedy: str) -> Exception:
    return RuntimeError(f"{message}; {remedy}")
