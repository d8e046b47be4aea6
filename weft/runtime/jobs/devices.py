"""Devices: where the ranks of a job compute, and which backend carries what they send. Decided once, for all of them.

In: what every rank sees (`Seen`: its host, its accelerators, what the user asked for). Out: for one rank its device and
the backend, the same on all ranks, in words why; or an error that every rank raises, since all decide from the same
facts. Promised, if nothing is asked for: accelerators where every rank has one of its own, else the CPU, with a
warning if accelerators lie idle by that. Two ranks never share an accelerator.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from weft.errors import RunError, did_you_mean
from weft.runtime.links.backend import BACKENDS

Device = torch.device | str | int
"""As users write it: `cuda`, `cuda:1`, `cpu`."""

PLACES = (
    ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
)
"""Variables in which launchers tell a process its number on its host, and how many there are."""
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
"""Variables that say which devices of a host a process sees."""
DOCTOR = "see what weft doctor tells of this machine"
BOOT = Path("/proc/sys/kernel/random/boot_id")
"""Tells hosts of one name apart."""


@dataclass(frozen=True)
class Seen:
    """What one rank sees, and what it was asked for.

    Args:
        host: the same on ranks of one host.
        local: its number there and how many there are, if its launcher told.
        kind: of accelerator, `cuda`; "" if there is none.
        count: how many it sees.
        first: which of the host's is the first that it sees; "" if that is not known.
        backend: that carries messages between accelerators of this kind; "" if this build has none.
        asked, over: the device and the backend that the user asked for.
    """

    host: str = ""
    local: tuple[int, int] | None = None
    kind: str = ""
    count: int = 0
    first: str = ""
    backend: str = ""
    asked: str | None = None
    over: str | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> Seen:
        found = json.loads(text)
        local = found.pop("local")
        return Seen(**found, local=None if local is None else (local[0], local[1]))


@dataclass(frozen=True)
class Chosen:
    """Where a rank computes.

    Args:
        why: in words; idle: accelerators that are there and not used, in words, or "".
    """

    device: torch.device
    backend: str
    num_ranks: int
    why: str
    idle: str = ""

    def __str__(self) -> str:
        ranks = "1 rank" if self.num_ranks == 1 else f"{self.num_ranks} ranks"
        over = "" if self.num_ranks == 1 else f" over {self.backend}"
        return f"{ranks} on {self.device.type}{over}: {self.why}"

    def tell(self) -> None:
        """Say it, once in a process; warn of what lies idle."""
        choice = self.device.type, self.backend, self.num_ranks
        if choice not in _told:
            _told.add(choice)
            print(f"weft: {self}", file=sys.stderr)
            if self.idle:
                warnings.warn(self.idle, stacklevel=3)


_told: set[tuple[str, str, int]] = set()


def use_device(device: torch.device) -> torch.device:
    """Make a device the process's current one."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)
    return device


def look(device: Device | None = None, backend: str | None = None, environment: Mapping[str, str] = os.environ) -> Seen:
    """What this process sees; refuses a device or backend that no machine has."""
    asked = None if device is None else str(_read(device))
    over = None if backend is None else _read_backend(backend)
    boot = BOOT.read_text().strip() if BOOT.exists() else ""
    found = Seen(f"{socket.gethostname()} {boot}", told_place(environment), asked=asked, over=over)
    there = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if there is None:
        return found
    count = torch.accelerator.device_count()
    carrier = dist.Backend.default_device_backend_map.get(there.type, "")
    usable = carrier in BACKENDS and dist.is_backend_available(carrier)
    first = _identity(there.type) if count == 1 else ""
    visible = next((environment[name] for name in VISIBLE if name in environment), "")
    return replace(found, kind=there.type, count=count, first=first or visible, backend=carrier if usable else "")


def told_place(environment: Mapping[str, str]) -> tuple[int, int] | None:
    """A process's number on its host and how many are there, as its launcher tells.

    >>> told_place({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}), told_place({"LOCAL_RANK": "1"})
    ((1, 4), None)
    """
    for names in PLACES:
        if all(environment.get(name, "").isdigit() for name in names):
            rank, size = (int(environment[name]) for name in names)
            return rank, size
    return None


def _read(device: Device) -> torch.device:
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        kinds = ("cpu", "cuda", "xpu")
        near = did_you_mean(str(device), kinds)
        raise RunError(f"device={device!r} is no device", remedy=f"{near}one of {', '.join(kinds)}") from error
    if found.type == "cpu" and found.index:
        raise RunError(f"device={device!r} is no device: the CPU of a host is one", remedy="'cpu'")
    return found


def _read_backend(name: str) -> str:
    if name not in BACKENDS:
        near = did_you_mean(name, BACKENDS)
        raise RunError(f"backend={name!r} is none of Weft's", remedy=f"{near}one of {', '.join(BACKENDS)}")
    if not dist.is_backend_available(name):
        raise RunError(
            f"backend={name!r} is not in this build of torch", remedy="install a torch that has it, or leave it out"
        )
    return name


def _identity(kind: str) -> str:
    """Which device the only one that a process sees is: schedulers number it 0 for every process."""
    properties = getattr(torch.get_device_module(kind), "get_device_properties", None)
    return "" if properties is None else str(getattr(properties(0), "uuid", ""))


def choose(seen: Sequence[Seen], rank: int) -> Chosen:
    """Where a rank of a job computes. `seen`: of all ranks."""
    asked = _agreed("device", [None if one.asked is None else torch.device(one.asked).type for one in seen])
    over = _agreed("backend", [one.over for one in seen])
    if over is not None:
        carried = BACKENDS[over].device_type
        if asked not in (None, carried):
            raise RunError(
                f"backend={over!r} carries tensors on {carried}, and device={asked!r} is asked for",
                remedy="leave out one of them",
            )
        asked = carried
    places = _places(seen)
    wrong = "asked for" if asked == "cpu" else _unusable(seen, places, asked)
    if wrong and asked not in (None, "cpu"):
        is_there = any(one.kind == asked for one in seen)
        first = "start as many processes on a host as it has devices" if is_there else DOCTOR
        raise RunError(
            f"device={asked!r} is asked for, and {wrong}", remedy=f"{first}, or leave out device= and backend="
        )
    if wrong:
        return Chosen(torch.device("cpu"), "gloo", len(seen), wrong, "" if asked else _idle(seen, wrong))
    mine = seen[rank]
    device = torch.device(mine.kind, _index(mine, places[rank]))
    others = mine.count - places[rank][1]
    spare = f", {others} more here are not used" if others > 0 else ""
    return Chosen(device, mine.backend, len(seen), f"every rank has one of its own{spare}")


def _agreed(what: str, asked: Sequence[str | None]) -> str | None:
    """What all ranks ask for."""
    for rank, one in enumerate(asked):
        if one != asked[0]:
            raise RunError(
                f"rank 0 asks for {what}={asked[0]!r}, rank {rank} for {what}={one!r}",
                remedy=f"let every rank ask for the same {what}, or for none",
            )
    return asked[0]


def _places(seen: Sequence[Seen]) -> list[tuple[int, int]]:
    """The number of each rank on its host, and how many there are."""
    found = []
    for rank, one in enumerate(seen):
        alike = [other for other, others in enumerate(seen) if others.host == one.host]
        found.append(one.local or (alike.index(rank), len(alike)))
    return found


def _index(one: Seen, place: tuple[int, int]) -> int:
    """Which of the devices that a rank sees is its own."""
    index = None if one.asked is None else torch.device(one.asked).index
    if index is not None:
        return index
    return place[0] if place[1] <= one.count else 0


def _unusable(seen: Sequence[Seen], places: Sequence[tuple[int, int]], asked: str | None) -> str:
    """Why not every rank can have an accelerator of its own; "" if each can."""
    taken: dict[tuple[str, str, int], int] = {}
    for rank, (one, place) in enumerate(zip(seen, places, strict=True)):
        index = _index(one, place)
        if not one.kind or asked not in (None, one.kind):
            return (
                f"rank {rank} sees no {asked or 'accelerator'}"
                if len(seen) > 1
                else f"this process sees no {asked or 'accelerator'}"
            )
        if one.kind != seen[0].kind:
            return f"rank 0 sees {seen[0].kind}, rank {rank} {one.kind}"
        if index >= one.count:
            return f"rank {rank} sees {one.count}, numbered from 0, and {one.kind}:{index} is not among them"
        if len(seen) > 1 and not one.backend:
            return f"this build of torch has no backend for {one.kind}"
        few = place[1] > one.count
        if few and not one.first:
            return f"{place[1]} ranks of a host see {one.count} of {one.kind}"
        # what is first for each of several ranks may be the same device: only its identity tells
        other = taken.setdefault((one.host, one.first, index), rank)
        if other != rank and (few or one.asked not in (None, one.kind)):
            return f"ranks {other} and {rank} of a host would share {one.kind}:{index}"
    return ""


def _idle(seen: Sequence[Seen], wrong: str) -> str:
    there = next((one for one in seen if one.backend), None)
    if there is None:
        return ""
    number = "1" if there.count == 1 else f"{there.count}"
    return (
        f"this host has {number} of {there.kind}, and the job runs on the CPU: {wrong}. Start one process for each "
        "device (torchrun --nproc-per-node), or ask for what is meant: device='cpu'"
    )
