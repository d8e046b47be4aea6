"""Machine: what a process sees of the machine that it runs on, and what of it looks wrong.

In: torch, the system, environment variables (`look_around`). Out: a Machine, which is data, and lines for people
(`facts`, `choice_line`, `environment_lines`), which depend on it alone: a line that looks wrong is a warning, and says
what to do. Nothing here starts a process.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import permutations
from pathlib import Path

import torch
import torch.distributed as dist

from weft import __version__
from weft.runtime.jobs.devices import VISIBLE, Chosen, Seen, told_place
from weft.runtime.links.backend import BACKENDS
from weft.runtime.links.transport import listed

SHM, ENOUGH_SHM = Path("/dev/shm"), 1 << 30
HARDWARE = {"/dev/nvidia0": "an NVIDIA GPU", "/dev/kfd": "an AMD GPU"}
"""Files that say that a device and its driver are there, whether torch sees it or not."""
DRIVER = Path("/proc/driver/nvidia/version")
VERSION = re.compile(r"\d+\.[\d.]+")
NO_DEVICE = (
    "if devices are meant: install the torch that is built for them (https://pytorch.org), see whether nvidia-smi or "
    "rocm-smi lists them here, pass them on to a container (docker run --gpus all); if the CPU is meant: --device cpu"
)
HARMFUL = {
    "NCCL_P2P_DISABLE=1": "devices do not read each other's memory",
    "NCCL_SHM_DISABLE=1": "ranks of a host talk through the network",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING=0": "a collective that hangs is not ended",
    "CUDA_LAUNCH_BLOCKING=1": "the host waits for every kernel",
    **{f"{name}={value}": "all devices are hidden" for name in VISIBLE for value in ("", "-1")},
}
"""Variables with the value that costs something, and what."""
BOTH = (("MASTER_ADDR", "MASTER_PORT"), ("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
"""Variables of which one is no use without the other."""


@dataclass(frozen=True)
class Line:
    """What was looked at or run, how it is, and what to do if that is wrong."""

    name: str
    text: str
    remedy: str = ""
    failed: bool = False

    @property
    def state(self) -> str:
        return "failed" if self.failed else "warning" if self.remedy else "ok"


@dataclass(frozen=True)
class Machine:
    """What one process sees.

    Args:
        seen: accelerators, as the choice of devices sees them.
        torch: its version, and those of what it was built with.
        devices: each accelerator, its name and memory; apart: pairs that cannot read each other's memory.
        unseen: why torch sees none, where there might be some.
        memory: of the host; shm: bytes that are free in its shared memory.
    """

    seen: Seen
    torch: str = ""
    devices: tuple[str, ...] = ()
    apart: tuple[tuple[int, int], ...] = ()
    unseen: str = ""
    cores: int = 1
    memory: str = ""
    shm: int = ENOUGH_SHM
    environment: Mapping[str, str] = field(default_factory=dict)


def look_around(seen: Seen, environment: Mapping[str, str] = os.environ) -> Machine:
    """The machine."""
    built = " ".join(f"{name} {one}" for name in ("cuda", "hip", "xpu") if (one := getattr(torch.version, name)))
    told = [torch.__version__, f"built for {built or 'the CPU alone'}"]
    if dist.is_nccl_available():
        told.append(f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")
    if DRIVER.exists():
        told.append(f"driver {' '.join(VERSION.findall(DRIVER.read_text())[:1])}")
    module = torch.get_device_module(seen.kind or "cpu")
    every = range(seen.count) if hasattr(module, "can_device_access_peer") else ()
    found = [module.get_device_properties(one) for one in every]
    return Machine(
        seen,
        ", ".join(told),
        tuple(f"{one.name}, {gibibytes(one.total_memory)}" for one in found),
        tuple(pair for pair in permutations(every, 2) if not module.can_device_access_peer(*pair)),
        "" if seen.kind else _unseen(built),
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        f"{gibibytes(os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE'))} of memory",
        shutil.disk_usage(SHM).free if SHM.exists() else ENOUGH_SHM,
        environment,
    )


def _unseen(built: str) -> str:
    if built:
        try:
            torch.zeros(1, device="xpu" if torch.version.xpu else "cuda")
        except (RuntimeError, AssertionError) as error:
            return f"torch is built for {built} and sees no device ({str(error).splitlines()[0].split('. ')[0]})"
    there = [what for path, what in HARDWARE.items() if Path(path).exists()]
    return f"this host has {there[0]}, and torch is built for the CPU alone" if there else ""


def facts(machine: Machine, ranks: int) -> Iterator[Line]:
    """What is installed, and what is there."""
    seen, apart = machine.seen, [f"{a} -> {b}" for a, b in machine.apart]
    yield Line("weft", f"{__version__}, Python {platform.python_version()} on {platform.system()} {platform.release()}")
    yield Line("torch", machine.torch)
    if machine.unseen and seen.asked != "cpu":
        yield Line("devices", f"none: {machine.unseen}", NO_DEVICE)
    else:
        each = [f"{count} x {one}" for one, count in Counter(machine.devices).items()]
        yield Line("devices", f"{seen.count} of {seen.kind}: {'; '.join(each)}" if seen.kind else "no accelerator")
    if apart:
        remedy = "nothing if they are on different sockets; else turn off PCIe ACS, or the IOMMU"
        yield Line(
            "peer access", f"none for devices {listed(apart)}: what they send goes through the host's memory", remedy
        )
    elif len(machine.devices) > 1:
        yield Line("peer access", "every device reads the memory of every other")
    yield Line("host", f"{machine.cores} core{'s' * (machine.cores > 1)}, {machine.memory}")
    few = (
        f": NCCL and the workers of data loaders need more with {ranks} ranks"
        if ranks > 1 and machine.shm < ENOUGH_SHM
        else ""
    )
    yield Line("/dev/shm", f"{gibibytes(machine.shm)} free{few}", few and "docker run --shm-size=8g, or --ipc=host")
    yield Line("backends", ", ".join(name for name in BACKENDS if dist.is_backend_available(name)))


def choice_line(chosen: Chosen, seen: Seen) -> Line:
    """Where ranks compute, in the words of a job's rank 0."""
    remedy = ""
    if seen.kind and chosen.device.type == "cpu" and not (seen.asked or seen.over):
        remedy = chosen.idle.partition(". ")[2] or f"install a torch that has a backend for {seen.kind}"
    return Line("choice", str(chosen), remedy)


def environment_lines(machine: Machine, ranks: int) -> list[Line]:
    """Variables that look wrong; one line that all is well if there are none."""
    name = "environment"
    return [Line(name, *found) for found in _wrong(machine, ranks)] or [Line(name, "no variable looks wrong")]


def _wrong(machine: Machine, ranks: int) -> Iterator[tuple[str, str]]:
    """What is wrong, and what to do."""
    there, count = machine.environment, machine.seen.count
    for name, value in there.items():
        if what := HARMFUL.get(f"{name}={value}"):
            yield f"{name}={value}: {what}", f"unset {name}, unless that is meant"
    for given, missing in (pair for both in BOTH for pair in permutations(both)):
        if given in there and missing not in there:
            yield f"{given} is set, and {missing} is not", f"set both, or unset {given}; torchrun sets them"
    place = told_place(there)
    # one that sees one device only is given it by its scheduler
    if place and 1 < count <= place[0]:
        yield f"this is rank {place[0]} of its host, which has {count} devices", "start one process for each device"
    ranks = place[1] if place else ranks
    given, fair = there.get("OMP_NUM_THREADS", ""), max(1, machine.cores // ranks)
    # torchrun sets it if it is not there, and so does Weft for the processes that it starts
    threads = int(given) if given.isdigit() else machine.cores if place else 1
    if ranks > 1 and threads > fair:
        text = f"OMP_NUM_THREADS is {given or 'not set'}: {threads} threads in each of {ranks} ranks of a host"
        yield f"{text} with {machine.cores} cores", f"export OMP_NUM_THREADS={fair}"


def gibibytes(size: int) -> str:
    """
    >>> gibibytes(80 << 30), gibibytes(100 << 20)
    ('80.0 GiB', '0.1 GiB')
    """
    return f"{size / (1 << 30):.1f} GiB"
