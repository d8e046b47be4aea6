"""Clusters by name.

    name := part {"+" part} | dgx1-v100xDEVICES | dgx2-v100xDEVICES | cpu
    part := [HOSTSx]DEVICES-KIND

`2x8-A100-80GB` is two hosts with eight devices each; `1x8-A100-80GB+1x8-H100` has two kinds of hosts; `4-cpu` is four
processes of one host, `cpu` as many as this machine has cores. Hosts are those in which the devices are sold
(`known.yaml`); with fewer devices than those they have as much less of the network.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NoReturn

from weft.cost.cluster.cluster import Cluster, Hosts
from weft.cost.cluster.detect import cpu_cluster
from weft.cost.cluster.file import load_cluster
from weft.cost.cluster.known import find_device, known, near
from weft.cost.compute.device import Device
from weft.errors import WeftError

_PART = re.compile(r"(?:(\d{1,9})x)?(\d{1,9})-(\S+)")
_DGX = re.compile(r"(dgx[12])-v100x(\d{1,9})")
EXAMPLES = ("2x8-A100-80GB", "4x8-H100", "dgx1-v100x32", "dgx2-v100x32", "4-cpu", "cpu")


def cluster_of(text: str) -> Cluster:
    """A cluster by name, or from a file."""
    if text == "cpu":
        return cpu_cluster()
    if text.endswith((".yaml", ".yml")) or Path(text).is_file():
        return load_cluster(text)
    return named(text)


def named(text: str) -> Cluster:
    """A cluster by a name of the grammar."""
    dgx = _DGX.fullmatch(text)
    if dgx:
        return _dgx(text, dgx[1], int(dgx[2]))
    matches = [_PART.fullmatch(part) for part in text.split("+")]
    parts = [(int(found[1] or 1), int(found[2]), _device(text, found[3])) for found in matches if found]
    if len(parts) < len(matches):
        _refuse_unknown(text)
    devices, size = parts[0][1], sum(hosts * each for hosts, each, _ in parts)
    if any(each != devices for _, each, _ in parts):
        raise WeftError(
            f"cluster {text} has hosts of different sizes",
            remedy="as many devices in each host, as in 1x8-A100-80GB+1x8-H100",
        )
    return Cluster(text, devices, tuple(_hosts(text, hosts, devices, device, size) for hosts, _, device in parts))


def _hosts(text: str, hosts: int, devices: int, device: Device, size: int) -> Hosts:
    if not hosts or not devices:
        raise WeftError(f"cluster {text} has no devices", remedy=f"write a name such as {EXAMPLES[0]}")
    machine = known().machines[known().sold_in[device.name]]
    if machine.devices and devices > machine.devices:
        better = f"{hosts * -(-devices // machine.devices)}x{machine.devices}-{device.name}"
        raise WeftError(
            f"cluster {text}: a host with {device.name} has {machine.devices} devices, not {devices}",
            remedy=f"{better}, or a YAML file with levels of your own",
        )
    return Hosts(hosts, device, machine.levels(devices, size))


def _dgx(text: str, name: str, size: int) -> Cluster:
    machine = known().machines[name]
    devices = min(size, machine.devices)
    if not size or (size % machine.devices and size > machine.devices):
        full = max(1, round(size / machine.devices)) * machine.devices
        raise WeftError(
            f"cluster {text}: hosts have {machine.devices} devices, which do not add up to {size}",
            remedy=f"{name}-v100x{full}",
        )
    hosts = Hosts(size // devices, find_device("V100-32GB"), machine.levels(devices, size))
    return Cluster(text, devices, (hosts,))


def _device(text: str, kind: str) -> Device:
    try:
        return find_device(kind)
    except WeftError as error:
        raise WeftError(f"cluster {text}: {error.message}", remedy=error.remedy) from None


def _refuse_unknown(text: str) -> NoReturn:
    kinds = known().devices
    names = f"names: [HOSTSx]DEVICES-KIND as in {', '.join(EXAMPLES)}; kinds: {', '.join(kinds)}; or a YAML file"
    raise WeftError(f"no cluster is named {text!r}", remedy=near(text, (*EXAMPLES, *kinds)) + names)
