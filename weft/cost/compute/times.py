"""Times: who says how long a kernel takes.

In: a Kernel. Out: seconds on one device. `Roofline` (from what a device can do) and `Profile` (from what was measured)
are two; whatever has the same method may take their place, such as a cost model of the user's own.
"""

from __future__ import annotations

from typing import Protocol

from weft.cost.compute.kernel import Kernel


class Times(Protocol):
    """Says how long a kernel takes."""

    def seconds(self, kernel: Kernel) -> float:
        """Of one call, without what autograd takes on the host."""
        ...
