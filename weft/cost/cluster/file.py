"""Cluster files: a Cluster as YAML.

    name: lab
    hosts: 4
    devices: 8                  in each host
    device: H100                or a mapping: name, kind, memory, flops, bandwidth, launch, overlaps, sources
    levels:                     innermost first; left out: those of the machine in which the device is sold
    - {name: nvlink, fabric: nvlink, span: 8, bandwidth: 450 GB/s}
    - {name: ethernet, span: 32, bandwidth: 100 Gb/s, links: 1, latency: 20 us, peer_latency: 15 us}

Hosts of several kinds are a list, `kinds`, whose entries have `hosts`, `device` and `levels` of their own.

In: a file or its text. Out: a Cluster. What is wrong is told with file, line and field. `to_yaml` writes a text that
gives an equal Cluster.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from weft.cost.cluster.cluster import Cluster, Hosts
from weft.cost.cluster.known import LEVEL, find_device, known, read_device, read_level
from weft.cost.cluster.levels import Level
from weft.cost.cluster.spots import Spot, read
from weft.cost.compute.device import Device
from weft.cost.links import DEFAULTS
from weft.errors import WeftError

KIND = ("hosts", "device", "levels")
FIELDS = ("name", "devices", *KIND, "kinds")
MOST = 1 << 40
"""Hosts, or devices in one: more is a slip."""


def load_cluster(path: str | Path) -> Cluster:
    """Read a cluster file."""
    file = Path(path)
    if not file.is_file():
        raise WeftError(f"there is no cluster file {file}", remedy="check the path, or name a cluster: 2x8-A100-80GB")
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise WeftError(f"{file} cannot be read: {error}", place=str(file), remedy="save it as UTF-8 text") from None
    return from_yaml(text, str(file))


def from_yaml(text: str, place: str = "cluster.yaml") -> Cluster:
    """Read the text of a cluster file; `place` is what errors call it."""
    spot = read(text, place)
    fields = spot.fields(FIELDS, ("devices",))
    devices = _count(fields["devices"])
    if "kinds" in fields:
        for name in KIND:
            if name in fields:
                fields[name].refuse(f"{name!r} beside kinds", f"write {name} for each of kinds")
        rows = [(one, one.fields(KIND, ("device",))) for one in fields["kinds"].list()]
    else:
        one = {name: fields[name] for name in KIND if name in fields}
        rows = [(spot, Spot(one, spot.file, spot.line).fields(KIND, ("device",)))]
    counts = [_count(row["hosts"]) if "hosts" in row else 1 for _, row in rows]
    size = sum(counts) * devices
    hosts = [_hosts(at, row, count, devices, size) for count, (at, row) in zip(counts, rows, strict=True)]
    name = fields["name"].text() if "name" in fields else Path(place).stem
    try:
        return Cluster(name, devices, tuple(hosts))
    except WeftError as error:
        field = next((row["levels"] for _, row in rows if "levels" in row), spot)
        raise WeftError(error.message, place=field.place, remedy=error.remedy) from None


def _count(spot: Spot) -> int:
    found = spot.whole(1)
    return found if found < MOST else spot.refuse(f"{found} are too many", "write how many there are")


def _hosts(at: Spot, fields: dict[str, Spot], count: int, devices: int, size: int) -> Hosts:
    spot = fields["device"]
    device = _named(spot) if isinstance(spot.value, str) else read_device(spot)
    if "levels" in fields:
        return Hosts(count, device, tuple(read_level(one, known().fabrics) for one in fields["levels"].list()))
    sold_in = known().sold_in.get(device.name)
    if sold_in is None:
        at.refuse(
            f"what connects devices of the kind {device.name} is not known",
            "write levels: [{name: ..., fabric: nvlink, span: 8, bandwidth: 450 GB/s}]",
        )
    machine = known().machines[sold_in]
    if machine.devices and devices > machine.devices:
        at.refuse(
            f"a host with {device.name} has {machine.devices} devices, not {devices}",
            f"write devices: {machine.devices} and more hosts, or levels of your own",
        )
    return Hosts(count, device, machine.levels(devices, size))


def _named(spot: Spot) -> Device:
    try:
        return find_device(spot.text())
    except WeftError as error:
        spot.refuse(error.message, error.remedy)


# --- writing ----------------------------------------------------------------------------------------------------


def to_yaml(cluster: Cluster) -> str:
    """The text of a cluster file that reads back equal."""
    data: dict[str, Any] = {"name": cluster.name, "devices": cluster.devices}
    kinds = [
        {
            "hosts": kind.count,
            "device": _device_data(kind.device),
            "levels": [_level_data(level) for level in kind.levels],
        }
        for kind in cluster.kinds
    ]
    data |= kinds[0] if len(kinds) == 1 else {"kinds": kinds}
    return yaml.safe_dump(data, sort_keys=False, width=120, allow_unicode=True)


def _device_data(device: Device) -> str | dict[str, Any]:
    if known().devices.get(device.name) == device:
        return device.name
    plain = {name: getattr(device, name) for name in ("name", "kind", "memory")}
    rates = {"flops": dict(device.flops), "bandwidth": device.bandwidth, "launch": device.launch}
    return {**plain, **rates, "overlaps": device.overlaps, "sources": dict(device.sources)}


def _level_data(level: Level) -> dict[str, Any]:
    found = {name: getattr(level, name) for name in LEVEL if name not in ("table", "sources")}
    if level.table is not None:
        named = DEFAULTS.get(level.table.name) == level.table
        found["table"] = level.table.name if named else json.loads(level.table.to_json())
    return {**found, "sources": dict(level.sources)}
