"""Devices and machines that are known: `known.yaml`, and how devices and levels are written.

In: values of a YAML file. Out: Devices and Levels; for a device that is known, the levels of its machine, cut to as
many devices and hosts as there are. Every number of a known device or level has its source beside it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from weft.cost.cluster.levels import Level
from weft.cost.cluster.spots import Spot, read
from weft.cost.compute.device import Device
from weft.cost.links import DEFAULTS, Links, from_json
from weft.errors import WeftError, did_you_mean

LAUNCH = 5e-6
"""Seconds to issue an operator of eager torch."""
LAUNCH_SOURCE = "assumption: eager torch on a server's CPU"
DTYPES = ("float64", "float32", "tf32", "bfloat16", "float16", "float8")
DEVICE = ("name", "kind", "memory", "flops", "bandwidth", "launch", "overlaps", "sources")
LEVEL = ("name", "span", "bandwidth", "latency", "peer_latency", "shape", "links", "efficiency", "table", "sources")


@dataclass(frozen=True)
class Machine:
    """A host as it is sold.

    Args:
        devices: in one host; 0: any number.
        inside: levels in one host; a span of 0 is all of it. between: what connects hosts.
    """

    devices: int
    inside: tuple[Level, ...]
    between: Level

    def levels(self, devices: int, size: int) -> tuple[Level, ...]:
        """Levels of hosts with `devices` devices, which may be fewer than it has, in a cluster of `size` ranks."""
        found: list[Level] = []
        below = 1
        for level in self.inside:
            whole = level.span if level.span > 1 else self.devices
            span = min(whole, devices) if whole else devices
            if span > below or (span == size == 1 and not found):
                found.append(_smaller(replace(level, span=span), whole, below))
                below = span
        if size > devices or not found:
            found.append(self._between(devices, size))
        return tuple(found)

    def _between(self, devices: int, size: int) -> Level:
        level = replace(self.between, span=size)
        if not self.devices or devices >= self.devices or not level.links:
            return level
        links = max(1, level.links * devices // self.devices)
        sources = {**level.sources, "links": f"{level.sources.get('links', '')}; {devices} of {self.devices} devices"}
        return replace(level, links=links, sources=sources)


@dataclass(frozen=True)
class Known:
    """All that is known.

    Args:
        machines: by name. sold_in: the machine of a device, by names. fabrics: fields of a level by its technology.
    """

    devices: Mapping[str, Device]
    machines: Mapping[str, Machine]
    sold_in: Mapping[str, str]
    fabrics: Mapping[str, Mapping[str, Spot]]


@cache
def known() -> Known:
    path = Path(__file__).with_name("known.yaml")
    parts = read(path.read_text(encoding="utf-8"), path.name).fields(("fabrics", "devices", "machines"))
    fabrics = {name: spot.items() for name, spot in parts["fabrics"].items().items()}
    machines = {name: _machine(spot, fabrics) for name, spot in parts["machines"].items().items()}
    devices, sold_in = {}, {}
    for name, spot in parts["devices"].items().items():
        fields = spot.items()
        sold_in[name] = fields.pop("machine").text()
        devices[name] = read_device(replace(spot, value=fields), name)
    return Known(devices, machines, sold_in, fabrics)


def find_device(name: str) -> Device:
    """A device by name, whatever the case of its letters."""
    devices = known().devices
    found = next((device for key, device in devices.items() if key.lower() == name.lower()), None)
    if found is None:
        raise WeftError(f"no device is named {name!r}", remedy=f"{near(name, devices)}one of: {', '.join(devices)}")
    return found


def near(word: str, words: Iterable[str]) -> str:
    """`did you mean ...? `: those that begin with the word, else the nearest; nothing if none is near.

    >>> near("A100", ["A100-40GB", "A100-80GB", "H100"]), near("H10O", ["A100-40GB", "H100"])
    ("did you mean 'A100-40GB' or 'A100-80GB'? ", "did you mean 'H100'? ")
    """
    found = [one for one in words if word and one.lower().startswith(word.lower())]
    return f"did you mean {' or '.join(map(repr, found))}? " if found else did_you_mean(word, words)


def read_device(spot: Spot, name: str = "") -> Device:
    """A device with numbers of its own."""
    needed = ("memory", "flops", "bandwidth", *(() if name else ("name",)))
    fields = spot.fields(DEVICE, needed)
    sources = {key: one.text() for key, one in fields["sources"].items().items()} if "sources" in fields else {}
    if "launch" not in fields:
        sources.setdefault("launch", LAUNCH_SOURCE)
    memory = fields["memory"].number("bytes")
    flops = {key: one.number("FLOP/s") for key, one in fields["flops"].fields(DTYPES).items()}
    bandwidth = fields["bandwidth"].number("bytes/s")
    for key, number in (("memory", memory), ("bandwidth", bandwidth)):
        if not number:
            fields[key].refuse(f"{key} is 0", "write what the device has")
    if not flops or not all(flops.values()):
        fields["flops"].refuse("no rate of products, or one of 0", "write float32: and the rates of other dtypes")
    return Device(
        name or fields["name"].text(),
        fields["kind"].text() if "kind" in fields else "cuda",
        int(memory),
        flops,
        bandwidth,
        fields["launch"].number("seconds") if "launch" in fields else LAUNCH,
        fields["overlaps"].flag() if "overlaps" in fields else True,
        sources,
    )


def read_level(spot: Spot, fabrics: Mapping[str, Mapping[str, Spot]], span: int | None = None) -> Level:
    """A level; what it does not say is that of its fabric, if it names one.

    Args:
        span: for a level that names none.
    """
    fields = spot.fields((*LEVEL, "fabric"))
    if "fabric" in fields:
        fabric = fields.pop("fabric")
        if fabric.text() not in fabrics:
            fabric.refuse(
                f"no fabric is named {fabric.text()!r}",
                f"{near(fabric.text(), fabrics)}one of: {', '.join(fabrics)}",
            )
        of_fabric = dict(fabrics[fabric.text()])
        texts = of_fabric["sources"].items()
        texts = {key: one for key, one in texts.items() if key not in fields}
        own = fields["sources"].items() if "sources" in fields else {}
        fields = {**of_fabric, **fields, "sources": replace(spot, value={**texts, **own})}
    needed = ("name", "bandwidth", "latency", "peer_latency", *(() if span is not None else ("span",)))
    fields = replace(spot, value=fields).fields(LEVEL, needed)
    counts = {"bandwidth": "bytes/s", "latency": "seconds", "peer_latency": "seconds", "efficiency": ""}
    found = {key: fields[key].number(unit) for key, unit in counts.items() if key in fields}
    try:
        return Level(
            name=fields["name"].text(),
            span=fields["span"].whole(1) if "span" in fields else span or 1,
            shape=fields["shape"].text() if "shape" in fields else "switch",
            links=fields["links"].whole(0) if "links" in fields else 0,
            table=_table(fields["table"]) if "table" in fields else None,
            sources={key: one.text() for key, one in fields["sources"].items().items()} if "sources" in fields else {},
            **found,
        )
    except WeftError as error:
        if error.place:
            raise
        field = fields.get(error.message.partition(":")[0], spot)
        raise WeftError(error.message, place=field.place, remedy=error.remedy) from None


def _table(spot: Spot) -> Links:
    """A table of links: the name of a built-in one, or its fields."""
    if not isinstance(spot.value, str):
        return from_json(json.dumps(spot.plain()), place=spot.place)
    if spot.value not in DEFAULTS:
        spot.refuse(f"no table of links is named {spot.value!r}", f"one of: {', '.join(DEFAULTS)}; or its fields")
    return DEFAULTS[spot.value]


def _machine(spot: Spot, fabrics: Mapping[str, Mapping[str, Spot]]) -> Machine:
    fields = spot.fields(("devices", "inside", "between"), ("inside", "between"))
    inside = tuple(read_level(one, fabrics, 1) for one in fields["inside"].list())
    devices = fields["devices"].whole(1) if "devices" in fields else 0
    return Machine(devices, inside, read_level(fields["between"], fabrics, 1))


def _smaller(level: Level, whole: int, below: int) -> Level:
    """In an island with fewer devices than there could be, a mesh lacks the links that lead to the others."""
    if level.shape != "mesh" or not whole or level.span in (1, whole):
        return level
    return replace(level, bandwidth=level.bandwidth * (level.span // below - 1) / (whole // below - 1))
