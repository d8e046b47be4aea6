"""What the file of a piece says of itself: where it stands in the pipeline, its arguments' names, its devices' events.

In: a piece of a Pipelined and the Schedule. Out: a docstring for the head of its file, names for what it takes, and at
the end of the file the events of its devices as a comment:

    # A step of device 0, F forward and B backward of a micro-batch:
    # F0 F1 B0 F2 B1 F3 B2 B3

A device that runs several pieces has their letters in its row (`Fa0 Fb0`), in the order of the pipeline.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence

from weft.codegen.names import legal, targets_in
from weft.codegen.text import WIDTH
from weft.ir.graph import Graph, Op
from weft.ir.schedule import Event, Schedule
from weft.lower.pipeline import Part, Pipelined
from weft.order.draw import letters_of

PHASES = {"f": "F forward", "b": "B backward", "w": "W weight gradients"}
MOST_NAMES = 4
"""Of values that a line names."""


def head(pipelined: Pipelined, part: Part, names: Mapping[str, str]) -> str:
    """The docstring of a piece's file.

    Args:
        names: of the values that cross.
    """
    segment, parts = part.piece.segment, pipelined.parts
    number = next(at for at, one in enumerate(parts, 1) if one is part)
    first = f"{pipelined.graph.name}, {segment.name}: piece {number} of {len(parts)}, on {_devices(segment.devices)}."
    lines = [first, ""]
    for word, ends in (("Takes", "source"), ("Gives", "target")):
        lines += _wrapped(_crossing_words(pipelined, segment.name, names, word, ends))
    return "\n".join([*lines, "Made by weft; edit freely, then verify it again.", ""])


def _crossing_words(pipelined: Pipelined, piece: str, names: Mapping[str, str], word: str, ends: str) -> str:
    """`Takes x from a on device 0.`, or nothing if nothing crosses that way."""
    devices = {part.piece.segment.name: part.piece.segment.devices for part in pipelined.parts}
    found: dict[str, list[str]] = {}
    for one in pipelined.crossings:
        here, other = (one.target, one.source) if ends == "source" else (one.source, one.target)
        if here == piece:
            found.setdefault(other, []).append(names[one.tensor])
    way = "from" if ends == "source" else "to"
    texts = [f"{_some(values)} {way} {other} on {_devices(devices[other])}" for other, values in found.items()]
    return f"{word} {'; '.join(texts)}." if texts else ""


def _some(values: Sequence[str]) -> str:
    if len(values) > MOST_NAMES:
        return f"{', '.join(values[: MOST_NAMES - 1])} and {len(values) - MOST_NAMES + 1} more"
    return _listed(values)


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _devices(devices: Sequence[int]) -> str:
    """`device 0`, `devices 0 and 1`, `devices 0 to 7`."""
    if len(devices) == 1:
        return f"device {devices[0]}"
    if len(devices) > 2 and list(devices) == list(range(devices[0], devices[-1] + 1)):
        return f"devices {devices[0]} to {devices[-1]}"
    return f"devices {_listed(list(map(str, devices)))}"


def crossing_names(pipelined: Pipelined) -> dict[str, str]:
    """A name for each value that crosses: the user's own, or that of the module that gives it."""
    graph, taken, found = pipelined.graph, Counter[str](), dict[str, str]()
    last = {(op.path, op.call): op for op in graph.ops}
    for tensor in dict.fromkeys(one.tensor for one in pipelined.crossings):
        base = _telling(graph, graph.producers[tensor], tensor, last)
        found[tensor] = base if not taken[base] else f"{base}_{taken[base]}"
        taken[base] += 1
    return found


def _telling(graph: Graph, op: Op, tensor: str, last: Mapping[tuple[str, int], Op]) -> str:
    following = graph.ops[place + 1] if (place := graph.ops.index(op)) + 1 < len(graph.ops) else None
    same = following is not None and (following.path, following.call, following.source) == (op.path, op.call, op.source)
    targets = () if same else targets_in(op.source.text)
    if len(targets) == len(op.outputs) and "_" not in targets:
        return legal(targets[op.outputs.index(tensor)])
    words = op.path.split(".")
    start = next((at for at in reversed(range(len(words))) if not words[at].isdigit()), 0)
    module = "_".join(words[start:])
    return legal(module if last[op.path, op.call] is op and module else f"{module}_{op.kind}")


def events_text(part: Part, pipelined: Pipelined, schedule: Schedule) -> str:
    """The events of the piece's devices, as the last lines of its file."""
    devices = part.piece.segment.devices
    rows = {device: schedule.events[device] for device in devices}
    order = [one.piece.segment.name for one in pipelined.parts]
    same = len(set(rows.values())) == 1
    events = rows[devices[0]] if same else [event for row in rows.values() for event in row]
    letters = _letters(order, events)
    phases = [word for phase, word in PHASES.items() if any(event.phase == phase for event in events)]
    lines = [f"A step of {_devices(devices)}, {_listed(phases)} of a micro-batch:"]
    if letters:
        mine = part.piece.segment.name
        told = [f"{letter} is {'this piece' if name == mine else name}" for name, letter in letters.items()]
        lines = [lines[0].replace(":", ";"), f"{_listed(told)}:"]
    for device, row in rows.items() if not same else [(None, rows[devices[0]])]:
        text = " ".join(f"{one.phase.upper()}{letters.get(one.segment, '')}{one.micro}" for one in row)
        lines.append(text if device is None else f"{device}: {text}")
    return "\n".join(["", "", *(f"# {each}" for line in lines for each in _wrapped(line, WIDTH - 2)), ""])


def _letters(order: Sequence[str], events: Sequence[Event]) -> dict[str, str]:
    """A letter for each piece among the events, in the order of the pipeline; none if there is one piece."""
    held = {event.segment for event in events}
    names = [name for name in order if name in held]
    return letters_of(names) if len(names) > 1 else {}


def _wrapped(text: str, width: int = WIDTH) -> list[str]:
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
