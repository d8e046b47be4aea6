"""Timing: who says how long kernels and collectives take.

In: a cluster, a number of ranks, the user's profile. Out: Clocks: what was measured, if the cluster is this machine and
it was profiled, else what the devices' and links' numbers give. Which of the two is always told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from weft.compile import Compiled
from weft.compile.model_file import Subject
from weft.cost.cluster.cluster import Cluster
from weft.cost.compute.complete import complete, overhead_of
from weft.cost.compute.kernel import Kernel
from weft.cost.compute.profiled import Profile, default_path
from weft.cost.compute.roofline import Roofline
from weft.cost.compute.times import Times
from weft.cost.links import BUCKET, Links, load
from weft.cost.measure import measure_links
from weft.simulate.record import record
from weft.simulate.trace import BACKWARD, FORWARD, Run, Trace

BACKEND = "gloo"
Done = Callable[[str, int, int], None]
"""Is told what is measured, and how many of how many."""


@dataclass(frozen=True)
class Clocks:
    """Who says how long things take.

    Args:
        times: of kernels, for each kind of device by its name. source: where they are from.
        overheads: seconds of the host for each kernel, by phase, where the host is the device.
        links: as measured; the cluster's if None.
    """

    times: Mapping[str, Times]
    source: str
    overheads: Mapping[str, float] = field(default_factory=dict)
    links: Links | None = None

    def collective(self, cluster: Cluster, kind: str, group: tuple[int, ...], bytes: int) -> float:
        """Seconds of one member."""
        if self.links is not None and len(group) == self.links.members:
            return self.links.seconds(kind, len(group), bytes)
        return cluster.seconds(kind.removeprefix(BUCKET), group, bytes)


def clocks_of(cluster: Cluster, devices: int, path: Path | None = None) -> Clocks:
    """The clocks for plans on so many of the cluster's devices.

    Args:
        path: of the profile; the user's own if not given.
    """
    kinds = {kind.device.name: kind.device for kind in cluster.kinds}
    times: dict[str, Times] = {name: Roofline(device) for name, device in kinds.items()}
    file = default_path() if path is None else path
    # a profile is of this machine
    here = next((device for device in kinds.values() if device.kind == "cpu"), None)
    if here is None or len(kinds) > 1 or not file.is_file():
        hint = "" if here is None else "; weft profile FILE --plan P measures this machine"
        return Clocks(times, f"data sheets and rooflines of {', '.join(kinds)}{hint}")
    profile = Profile(here, file, processes=devices)
    overhead, links = overhead_of(profile), _links_file(file, devices)
    if overhead is None:
        hint = (
            f"nothing was measured here with {devices} process{'es' * (devices > 1)}: weft profile FILE --plan P does"
        )
        return Clocks(times, f"a roofline of {here.name}; {hint}")
    overheads = {FORWARD: overhead.forward, BACKWARD: overhead.backward}
    measured = load(links) if links.is_file() else None
    return Clocks({here.name: profile}, f"measured on this machine ({file})", overheads, measured)


def measure_here(
    compiled: Compiled,
    subject: Subject,
    cluster: Cluster,
    path: Path | None = None,
    done: Done = lambda what, count, total: None,
) -> Mapping[str, str]:
    """Measure on this machine what a plan's step needs and nobody has measured yet: its kernels, and what communication
    costs between as many processes. Why some kernels could not be measured, by key."""
    file, ranks = default_path() if path is None else path, compiled.devices
    profile = Profile(cluster.device(0), file, processes=ranks)
    kernels = kernels_of(record(compiled, subject, by_block=cluster.device(0).overlaps))
    refused = complete(profile, kernels, done=lambda count, total: done("operators", count, total))
    links = _links_file(file, ranks)
    if ranks > 1 and not links.is_file():
        measure_links(BACKEND, processes=ranks, done=lambda count, total: done("links", count, total)).save(links)
    return refused


def kernels_of(traces: Sequence[Trace]) -> list[Kernel]:
    """The distinct kernels of some traces."""
    runs = (event for trace in traces for event in trace.events if isinstance(event, Run))
    return list({event.kernel.key: event.kernel for event in runs}.values())


def _links_file(profile: Path, ranks: int) -> Path:
    return profile.with_name(f"{profile.stem}-{BACKEND}-{ranks}.json")
