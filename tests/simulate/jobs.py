"""Jobs and machines of plain numbers: a kernel, a collective, a message take as long as their keys and bytes say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weft.cost.compute.device import Device
from weft.cost.compute.kernel import Kernel
from weft.simulate.trace import BACKWARD, FORWARD, Event, Hold, Issue, Job, Place, Post, Run, Take, Trace, Wait

HERE = Place(FORWARD, "net.py:1")
THERE = Place(BACKWARD, "net.py:2", "b0")


@dataclass(frozen=True)
class Plain:
    """Seconds are what the key of a kernel says, and the bytes of what travels, over `bandwidth` and with `latency`."""

    overlaps: bool = True
    launch: float = 0.0
    host: float = 0.0
    bandwidth: float = 1.0
    latency: float = 0.0
    core: bool = True
    links: Mapping[tuple[int, ...], str] | None = None
    slow: float = 1.0

    def device(self, rank: int) -> Device:
        return Device("plain", "cpu", 100, {"float32": 10.0}, 1.0, self.launch * self.slow, self.overlaps)

    def seconds(self, rank: int, kernel: Kernel) -> float:
        return float(kernel.key) * self.slow

    def collective(self, kind: str, group: tuple[int, ...], bytes: int) -> float:
        return self.message(0, 0, bytes)

    def message(self, source: int, target: int, bytes: int) -> float:
        return (self.latency + bytes / self.bandwidth) * self.slow

    def overhead(self, phase: str) -> float:
        return self.host * self.slow

    def occupies(self, rank: int) -> bool:
        return self.core

    def link(self, group: tuple[int, ...]) -> str | None:
        return (self.links or {}).get(group)


def run(seconds: float, place: Place = HERE, flops: int = 0) -> Run:
    return Run(Kernel("mm", str(seconds), "float32", flops, 0, 0), place)


def issue(call: int, seconds: int, *group: int, kind: str = "all_reduce", place: Place = THERE) -> Issue:
    return Issue(call, kind, group or (0, 1), seconds, place)


def post(peer: int, tag: str, seconds: int = 0) -> Post:
    return Post(peer, tag, seconds, HERE)


def take(peer: int, tag: str) -> Take:
    return Take(peer, tag, 0, THERE)


def hold(size: int, kind: str = "activations", line: str = "net.py:1") -> Hold:
    return Hold(size, kind, Place(FORWARD, line))


def wait(call: int) -> Wait:
    return Wait(call)


def job(*events: Sequence[Event], tokens: int = 0, flops: int = 0) -> Job:
    """Every rank does something of its own."""
    return Job(len(events), [Trace(rank, (rank,), mine, {}) for rank, mine in enumerate(events)], tokens, flops)


def alike(*classes: tuple[tuple[int, ...], Sequence[Event]]) -> Job:
    """Ranks of a class do the same."""
    return Job(sum(len(ranks) for ranks, _ in classes), [Trace(one[0], one, events, {}) for one, events in classes])
