"""Ambient: the per-thread state of torch that new threads and recomputation do not inherit.

Enters: what the calling thread has set (grad mode, autocast). Leaves: the same state in another thread or at another
time. The default dtype is process-wide in torch and needs no copying. `TorchModes`: what the calling thread has for
calls of torch and of its operators, which a thread that works for it is to have too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch.overrides import TorchFunctionMode
from torch.overrides import _get_current_function_mode_stack as function_modes
from torch.overrides import _pop_mode as pop_function_mode
from torch.overrides import _push_mode as push_function_mode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_modes
from torch.utils._python_dispatch import _pop_mode as pop_dispatch_mode
from torch.utils._python_dispatch import _push_mode as push_dispatch_mode


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


@dataclass(frozen=True)
class TorchModes:
    """The modes of a thread, the innermost last."""

    functions: tuple[TorchFunctionMode, ...]
    dispatches: tuple[TorchDispatchMode, ...]

    @staticmethod
    def here() -> TorchModes:
        """Those of this thread, now."""
        return TorchModes(tuple(function_modes()), tuple(dispatch_modes()))

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Work under these in a thread that has none. Their `__enter__` is not called: nothing begins anew."""
        with ExitStack() as stack:
            for inner in self.dispatches:
                push_dispatch_mode(inner)
                held = vars(inner)
                stack.callback(pop_dispatch_mode, held.get("_dispatch_key") or held.get("_mode_key"))
            for outer in self.functions:
                push_function_mode(outer)
                stack.callback(pop_function_mode)
            yield
