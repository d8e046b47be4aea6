"""A model in another precision on one device, by the definition (`runtime/precision.py`) and nothing else.

In: a module and a Precision. Out: the module, trained so: masters beside it, its own parameters are the copies.
    one = OneDevice(module, precision)
    optimizer = torch.optim.AdamW(one.masters.values())
    with one.forward():
        loss = module(*one.inputs(batch))
    loss.backward(); one.add(); ...                      once per micro-batch
    one.finish(); optimizer.step()
Promised: nothing of the runtime's masters or of a capture takes part.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from weft.runtime.weights.precision import Precision, Rules


class OneDevice:
    """A module whose parameters are copies from now on.

    Args:
        module: is changed.
    """

    def __init__(self, module: nn.Module, precision: Precision) -> None:
        self.precision, self._module = precision, module
        dtypes = precision.masters(module)
        self._copies = {name: one for name, one in module.named_parameters() if name in dtypes}
        self.masters = {
            name: nn.Parameter(one.detach().to(dtypes[name], copy=True), one.requires_grad)
            for name, one in self._copies.items()
        }
        for one in self._copies.values():
            one.data = one.data.to(precision.compute)
        self._totals: dict[str, Tensor] = {}

    def named(self) -> dict[str, nn.Parameter]:
        """What an optimizer updates, in the order of `module.parameters()`."""
        return {name: self.masters.get(name, one) for name, one in self._module.named_parameters()}

    @torch.no_grad()
    def refresh(self) -> None:
        """A step begins: copies are as the masters."""
        for name, copy in self._copies.items():
            copy.copy_(self.masters[name])

    def forward(self) -> AbstractContextManager[Any]:
        """What the forward runs under."""
        return Rules(self.precision)

    def inputs(self, values: Any) -> Any:
        """Inputs as the forward takes them."""
        return self.precision.inputs(values)

    @torch.no_grad()
    def add(self) -> None:
        """A backward is over: its gradients are added to those of the micro-batches before."""
        for name, copy in self._copies.items():
            gradient, copy.grad = copy.grad, None
            if gradient is not None:
                before = self._totals.get(name)
                dtype = self.precision.accumulate or gradient.dtype
                self._totals[name] = gradient if before is None else before.to(dtype) + gradient.to(dtype)

    @torch.no_grad()
    def finish(self) -> None:
        """All micro-batches are through: masters have their gradients."""
        totals, self._totals = self._totals, {}
        for name, total in totals.items():
            master = self.masters[name]
            gradient = total.to(master.dtype)
            master.grad = gradient if master.grad is None else master.grad + gradient
