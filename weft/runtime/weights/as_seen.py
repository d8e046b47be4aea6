"""As seen: parameters as a forward has left them, to be looked at again before its backward.

In: the parameters of a rank. Out: the first that was changed since. Where backward uses copies that forward made of a
weight, or runs a function again, a change in between would give other numbers than in eager, which reads the weight
itself: with the new values if it was changed through `.data`, or an error. In-place operations are seen by versions;
for `.data`, which has none, a few elements of each are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import Tensor

NUM_ELEMENTS = 4
"""Of each parameter, evenly spaced, the first among them."""

Named = Sequence[tuple[str, Tensor]]

_version = attrgetter("_version")


class Samples:
    """A few elements of each parameter of a module. What looks at them is made once: a step has many parameters."""

    def __init__(self) -> None:
        self._where: list[int] = []
        self._views: list[list[Tensor]] = []

    @torch.no_grad()
    def now(self, parameters: Named) -> list[Tensor]:
        """Copies of the elements as they are, those of a dtype end to end."""
        if torch._C._len_torch_dispatch_stack():
            return []  # without values
        where = [one.data_ptr() for _, one in parameters]
        if where != self._where:
            by_dtype: dict[torch.dtype, list[Tensor]] = {}
            for _, one in parameters:
                by_dtype.setdefault(one.dtype, []).append(_some_of(one))
            self._where, self._views = where, list(by_dtype.values())
        return [torch.cat(some) for some in self._views]


class AsSeen:
    """Parameters as they are now."""

    def __init__(self, parameters: Named, samples: Samples) -> None:
        self._parameters, self._samples = parameters, samples
        self._versions = [_version(one) for _, one in parameters]
        self._elements = samples.now(parameters)

    def changed(self) -> str | None:
        """The name of one that is not as it was; where an element tells, of the first of its dtype."""
        for (name, one), version in zip(self._parameters, self._versions, strict=True):
            if _version(one) != version:
                return name
        for before, now in zip(self._elements, self._samples.now(self._parameters), strict=False):
            # the same bits: not a number is what it was, too
            if not torch.equal(before.view(torch.uint8), now.view(torch.uint8)):
                return self._name_at(before, now)
        return None

    def _name_at(self, before: Tensor, now: Tensor) -> str:
        """Whose the first element is that is another."""
        place = int((before != now).nonzero()[0])
        for name, one in self._parameters:
            place -= _some_of(one).numel() if one.dtype == before.dtype else 0
            if place < 0:
                return name
        return self._parameters[0][0]


def _some_of(parameter: Tensor) -> Tensor:
    """A few elements, without a copy if they lie in order."""
    flat = parameter.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // NUM_ELEMENTS)]
