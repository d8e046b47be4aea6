"""What a simulation asks of the machine, and the same machine with parts that are faster or slower.

In: a rank and a kernel, a group and bytes. Out: seconds. The engine remembers the answers: an equal question is asked
once for each rank that is played.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Protocol

from weft.cost.compute.device import Device
from weft.cost.compute.kernel import Kernel


class Machine(Protocol):
    """The devices of a job and the links between them."""

    def device(self, rank: int) -> Device:
        """The device of a rank; ranks that do the same have the same kind."""
        ...

    def seconds(self, rank: int, kernel: Kernel) -> float:
        """What a kernel takes on the device of a rank."""
        ...

    def collective(self, kind: str, group: tuple[int, ...], bytes: int) -> float:
        """What a collective takes that has its links to itself, from when all members have issued it."""
        ...

    def message(self, source: int, target: int, bytes: int) -> float:
        """What a message takes that has its link to itself."""
        ...

    def overhead(self, phase: str) -> float:
        """Seconds of the host for each kernel, where the host is the device."""
        ...

    def occupies(self, rank: int) -> bool:
        """Whether a collective under way takes the time of the rank's own core. Asked where `overlaps` is False."""
        ...

    def link(self, group: tuple[int, ...]) -> str | None:
        """The link that a member's collectives of this group share with those of its other groups; None: no other."""
        ...


@dataclass(frozen=True)
class Scaled:
    """A machine of which parts are so many times faster.

    Args:
        compute: devices. links: the bandwidth of links. latency: what a collective or a message of no bytes takes.
        host: what the host does for each kernel.
    """

    machine: Machine
    compute: float = 1.0
    links: float = 1.0
    latency: float = 1.0
    host: float = 1.0

    def device(self, rank: int) -> Device:
        found = self.machine.device(rank)
        return replace(
            found,
            launch=found.launch / self.host,
            flops={dtype: flops * self.compute for dtype, flops in found.flops.items()},
        )

    def seconds(self, rank: int, kernel: Kernel) -> float:
        return self.machine.seconds(rank, kernel) / self.compute

    def collective(self, kind: str, group: tuple[int, ...], bytes: int) -> float:
        return self._link(self.machine.collective(kind, group, bytes), self.machine.collective(kind, group, 0))

    def message(self, source: int, target: int, bytes: int) -> float:
        return self._link(self.machine.message(source, target, bytes), self.machine.message(source, target, 0))

    def overhead(self, phase: str) -> float:
        return self.machine.overhead(phase) / self.host

    def occupies(self, rank: int) -> bool:
        return self.machine.occupies(rank)

    def link(self, group: tuple[int, ...]) -> str | None:
        return self.machine.link(group)

    def _link(self, whole: float, empty: float) -> float:
        return empty / self.latency + (whole - empty) / self.links


CHANGES: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "twice the bandwidth": {"links": 2.0},
        "half the latency": {"latency": 2.0},
        "twice the compute": {"compute": 2.0},
        "a host twice as fast": {"host": 2.0},
    }
)
"""Changes that `weft explain` tells of: arguments of Scaled by their names in words."""
