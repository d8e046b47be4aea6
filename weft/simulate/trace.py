"""Traces: what a rank does in one step, in the order in which its host does it.

    Trace := Event ...
    Event := Run | Issue | Wait | Post | Take | Hold

In: the rank's own code, run on tensors without content (`record.py`). Out: its Trace, which the simulator plays
(`engine.py`). A Trace holds no seconds: how long things take is the cluster's and the device's matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from weft.cost.compute.kernel import Kernel

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"
"""The phases of a step."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the model something is done.

    Args:
        phase: of the step.
        line: the user's source line, as `net.py:16`, or "".
        what: the event of a pipeline (`f0`), or what the runtime is doing ("gradients of ...").
    """

    phase: str
    line: str = ""
    what: str = ""


@dataclass(frozen=True, slots=True)
class Run:
    """The rank's device runs a kernel."""

    kernel: Kernel
    place: Place


@dataclass(frozen=True, slots=True)
class Issue:
    """A collective is issued: it begins when all members have issued theirs, the first of a group with each other's
    first, the second with the second, and so on.

    Args:
        call: its number among the rank's, for `Wait`.
        kind: as of `weft.cost.links`, KINDS and BUCKETS. group: ranks of the job.
        bytes: of its buffer, as Links count them.
    """

    call: int
    kind: str
    group: tuple[int, ...]
    bytes: int
    place: Place


@dataclass(frozen=True, slots=True)
class Wait:
    """What comes next needs the result of a collective."""

    call: int


@dataclass(frozen=True, slots=True)
class Post:
    """Tensors are sent to another rank, which takes them under the same tag. The sender does not wait."""

    peer: int
    tag: str
    bytes: int
    place: Place


@dataclass(frozen=True, slots=True)
class Take:
    """What another rank posts under a tag is waited for."""

    peer: int
    tag: str
    bytes: int
    place: Place


@dataclass(frozen=True, slots=True)
class Hold:
    """Memory is taken (bytes > 0) or let go (bytes < 0).

    Args:
        kind: of what: "activations", "gradients", "weights", "messages", "temporary".
    """

    bytes: int
    kind: str
    place: Place


Event = Run | Issue | Wait | Post | Take | Hold


@dataclass(frozen=True)
class Trace:
    """What one rank does in a step.

    Args:
        rank: whose it is. alike: ranks that do the same, each with its own peers; `rank` is the first of them.
        events: in the host's order.
        state: bytes held from step to step, by kind ("parameters", "optimizer", ...).
    """

    rank: int
    alike: tuple[int, ...]
    events: Sequence[Event]
    state: dict[str, int]

    @property
    def peak(self) -> int:
        """The most bytes that are held at once."""
        return max(accumulate((one.bytes for one in self.events if isinstance(one, Hold)), initial=self.held))

    @property
    def held(self) -> int:
        """Bytes that are held from step to step."""
        return sum(self.state.values())


@dataclass(frozen=True)
class Job:
    """All ranks' traces.

    Args:
        devices: how many ranks there are.
        tokens: elements of the batch's largest integer input, or its rows: what a step works through.
        flops: of the model's forward and backward on one device, without anything run twice.
    """

    devices: int
    traces: Sequence[Trace]
    tokens: int = 0
    flops: int = 0
