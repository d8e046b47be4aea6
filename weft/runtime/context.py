"""Ambient: the per-thread state of torch that new threads and recomputation do not inherit.

Enters: what the calling thread has set (grad mode, autocast). Leaves: the same state in another thread or at another
time. The default dtype is process-wide in torch and needs no copying. The only file of the runtime's interpreter that
names device types.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch


def _device_types() -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


@dataclass(frozen=True)
class Ambient:
    """Grad mode and, per device type, autocast's dtype and whether it is on."""

    grad: bool
    autocast: tuple[tuple[str, torch.dtype, bool], ...]

    @staticmethod
    def here() -> Ambient:
        """The state of this thread, now."""
        states = ((kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in _device_types())
        return Ambient(torch.is_grad_enabled(), tuple(states))

    @contextmanager
    def entered(self, *, grad: bool | None = None) -> Iterator[None]:
        """Work under this state; `grad` overrides the grad mode."""
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.grad if grad is None else grad))
            for kind, dtype, enabled in self.autocast:
                if enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            yield
