"""A Program by module: what is cut, where it runs, what is sent.

In: a Program. Out: one Row per module path, layers that repeat folded into one (`h.*`), in the order of first use.
Bytes are those that the busiest device sends in one step, forward and backward, recomputation counted again; what an
operator sends by itself (a softmax over cut classes) is not in the Program and not counted: such rows say `inside`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

from weft.cost.reshard import measure
from weft.ir.layout import Axis
from weft.ir.oplayout import Cut
from weft.ir.program import Chunks, Compute, Move, Program, Recompute, Reshard, Step, Sync, Use, walk
from weft.ir.routes import Routing
from weft.ops.book import RuleBook
from weft.plan.select import fold
from weft.train.memory.amounts import shown
from weft.verify.summary import axes_of

INPUTS, MODEL = "(inputs)", "(model)"
SOME = 3
"""So many different cuts are named in a row."""


@dataclass
class Row:
    """One module path.

    Args:
        cuts: for each axis that cuts something, which names of the operators' rules, in how many parts.
        devices: sets of devices, each as text.
        collectives: how many of each kind in a step.
        moved: bytes that a device sends in a step.
    """

    module: str
    layers: int = 1
    operators: int = 0
    cuts: dict[str, list[str]] = field(default_factory=dict)
    devices: list[str] = field(default_factory=list)
    collectives: Counter[str] = field(default_factory=Counter)
    moved: float = 0.0

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "collectives": dict(self.collectives), "moved": round(self.moved)}


Sent = tuple[str, tuple[Move, ...], int]
"""A tensor, moves of it, and how often they run in a step."""


def module_rows(program: Program) -> list[Row]:
    """The whole Program."""
    rows: dict[str, Row] = {}
    layers: dict[str, set[str]] = {}

    def row(path: str) -> Row:
        folded = fold(f"{path}/")[:-1] or MODEL
        layers.setdefault(folded, set()).add(path)
        return rows.setdefault(folded, Row(folded))

    inside = _ops_that_talk(program)
    for step in _computes(program.steps):
        op = program.graph.by_name[step.op]
        found = row(op.path)
        found.operators += 1
        found.collectives["inside"] += op.name in inside
        _add_cuts(found, step, main=any(name in program.graph.parameter_tensors for name in op.inputs))
        devices = devices_text(step.layout.grid.devices)
        found.devices += [devices] if devices not in found.devices else []
    load = cache(_bytes)
    for tensor, moves, times in _sent(program, program.steps, 1):
        itemsize = program.graph.tensors[tensor].dtype.itemsize
        for move in moves:
            if move.kind != "local":
                found = row(_owner(program, tensor))
                found.collectives[move.kind] += times
                found.moved += times * load(move, itemsize)
    for folded, found in rows.items():
        found.layers = len(layers[folded])
        found.collectives = Counter({kind: count for kind, count in found.collectives.items() if count})
    return list(rows.values())


def _add_cuts(row: Row, step: Compute, *, main: bool) -> None:
    """Operators with parameters say what is cut; the others follow them, under names of their own."""
    for axis, use in _cut_axes(step):
        names = row.cuts.setdefault(axis.name, [])
        text = str(use).removeprefix("cut ")
        if text not in names:
            names.insert(0, text) if main else names.append(text)


def _cut_axes(step: Compute) -> Iterator[tuple[Axis, Cut]]:
    """The axes that divide an operator, and how."""
    for axis, use in zip(step.layout.grid.axes, step.layout.uses, strict=True):
        if isinstance(use, Cut) and axis.size > 1:
            yield axis, use


def devices_text(devices: Sequence[int]) -> str:
    """`0-3`, or a list.

    >>> devices_text([1, 0, 2]), devices_text([0, 2, 2])
    ('0-2', '0 2')
    """
    found = sorted(set(devices))
    if len(found) > 1 and found == list(range(found[0], found[-1] + 1)):
        return f"{found[0]}-{found[-1]}"
    return " ".join(map(str, found))


def _computes(steps: Sequence[Step]) -> Iterator[Compute]:
    return (step for step in walk(steps) if isinstance(step, Compute))


def _sent(program: Program, steps: Sequence[Step], times: int) -> Iterator[Sent]:
    """All moves of a step. What is recomputed runs its forward twice."""
    for step in steps:
        match step:
            case Use(value, moves):
                yield program.values[value].tensor, moves, times
            case Reshard(source, _, forward, backward):
                tensor = program.values[source].tensor
                yield tensor, forward, times
                yield tensor, backward or (), 1
            case Sync(parameter, _, paths):
                for path in paths:
                    yield parameter, path, 1
            case Chunks(_, body, again):
                yield from _sent(program, body, times * (2 if again else 1))
            case Recompute(body):
                yield from _sent(program, body, times * 2)


def _owner(program: Program, tensor: str) -> str:
    """The module that makes or holds a tensor."""
    graph = program.graph
    if tensor in graph.producers:
        return graph.producers[tensor].path
    held = {one.tensor: one.names[0] for one in graph.parameters} | {one.tensor: one.names[0] for one in graph.buffers}
    return held[tensor].rpartition(".")[0] if tensor in held else INPUTS


def _bytes(move: Move, itemsize: int) -> float:
    """What the busiest device sends."""
    routing = Routing(move.source, move.target)
    if move.kind != "all_reduce":
        return measure(routing, itemsize).moved
    members = len(routing.group(move.source.grid.devices[0]))
    local = max(math.prod(part.shape) for part in move.source.parts())
    return 2 * (members - 1) / members * local * itemsize


def _ops_that_talk(program: Program) -> set[str]:
    """Operators that an algorithm cuts whose parts exchange something."""
    book = RuleBook(program.graph)

    def talks(step: Compute) -> bool:
        rule = book.rule(program.graph.by_name[step.op], step.layout.algorithm)
        return any(use.name in rule.algorithms for _, use in _cut_axes(step))

    return {step.op for step in _computes(program.steps) if talks(step)}


def show_bytes(count: float) -> str:
    """`1.5 MiB`.

    >>> show_bytes(0), show_bytes(512), show_bytes(1536 * 1024)
    ('', '512 B', '1.5 MiB')
    """
    return shown(count) if count else ""


def axis_sizes(program: Program) -> dict[str, int]:
    """Axes that cut something, and their sizes."""
    return {name: axis["size"] for name, axis in axes_of(program).items() if axis["cut"]}
