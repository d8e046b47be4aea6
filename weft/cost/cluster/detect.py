"""What is here: the accelerators of this host, or its cores, as a Cluster.

In: what torch and the operating system say. Out: a Cluster of one host. An accelerator is matched to a known device by
its name; its memory is what the driver says. One that is not known is refused: a guess at its rates would look like
knowledge.
"""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from weft.cost.cluster.cluster import Cluster, Hosts
from weft.cost.cluster.known import find_device, known
from weft.cost.compute.device import Device
from weft.errors import WeftError

YAML = "write its numbers into a file: name, devices, device: {name, kind, memory, flops, bandwidth}, levels"


def detect() -> Cluster:
    """Accelerators if there are any, else one rank for each core."""
    there = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if there is None:
        return cpu_cluster()
    module = torch.get_device_module(there)
    found = [module.get_device_properties(index) for index in range(torch.accelerator.device_count())]
    names = sorted({one.name for one in found})
    if len(names) > 1:
        raise WeftError(
            f"this host has accelerators of several kinds: {', '.join(names)}", remedy="hide all but one kind"
        )
    return accelerators(there.type, names[0], min(one.total_memory for one in found), len(found))


def accelerators(kind: str, name: str, memory: int, count: int) -> Cluster:
    """One host with accelerators of the name and memory that a driver tells."""
    device = match(name, memory)
    here = {**device.sources, "memory": "of this device, as its driver tells"}
    device = replace(device, kind=kind, memory=memory, sources=here)
    machine = known().machines[known().sold_in[device.name]]
    return Cluster(f"{count}-{device.name}", count, (Hosts(1, device, machine.levels(count, count)),))


def match(name: str, memory: int) -> Device:
    """The known device that a driver calls `name`; of those with several sizes of memory the nearest.

    >>> match("NVIDIA A100-SXM4-80GB", 85_000_000_000).name, match("Tesla V100-SXM2-16GB", 16 << 30).name
    ('A100-80GB', 'V100-16GB')
    """
    words = name.upper().replace("-", " ").split()
    fitting = [one for one in known().devices.values() if one.name.split("-")[0].upper() in words]
    # the same chips on cards have lower rates and no NVLink to all
    if not fitting or any(word.startswith("PCI") or word == "NVL" for word in words):
        raise WeftError(f"the rates of {name} are not known", remedy=YAML)
    return min(fitting, key=lambda one: abs(one.memory - memory))


def cpu_cluster(ranks: int = 0) -> Cluster:
    """Processes of this host, by default one for each core that this process may use."""
    ranks = ranks or cores()
    device, machine = find_device("cpu"), known().machines[known().sold_in["cpu"]]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks
    device = replace(
        device, memory=memory, sources={**device.sources, "memory": "of this machine, shared by its ranks"}
    )
    return Cluster("cpu", ranks, (Hosts(1, device, machine.levels(ranks, ranks)),))


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
