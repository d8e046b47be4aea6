"""Devices: what a device can do at most, and what of that operators reach.

A Device is data: of one that is known by name (`weft/cost/cluster`), or of the one that is here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Device:
    """A kind of device.

    Args:
        name: as `A100-80GB`. kind: of torch's devices, as `cuda`.
        memory: bytes.
        flops: of products at most, by dtype (`float32`, `bfloat16`, ...), operations a second.
        bandwidth: of its memory, bytes a second.
        launch: seconds that the host takes to issue one operator. Where the host is the device (`cpu`) it is part of
            every operator's time.
        overlaps: whether collectives travel while the device computes.
        sources: where each number is from, by the field's name.
    """

    name: str
    kind: str
    memory: int
    flops: Mapping[str, float]
    bandwidth: float
    launch: float
    overlaps: bool = True
    sources: Mapping[str, str] = field(default_factory=dict)
