"""Segments: which ops run as one piece, and which tensors go from piece to piece.

In: a Graph and a layout for every op. Out: Pieces in an order in which each stands after those it reads: each a convex
set of ops on one set of devices (and of one block, where the user named some). What needs no weight, no gradient and
hardly any work (positions, masks) belongs to no piece: every piece that reads it makes it itself.

Convex: every op has a level that grows along each edge between different places; ops of one place and level are a
piece. Between what an op reads and its readers there is room; in it a place uses as few levels as it can, so that what
a stage prepares from the inputs alone, or for a stage far behind it, is not a stage of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from weft.ir.graph import Graph, Op
from weft.ir.oplayout import OpLayout
from weft.ir.schedule import Segment
from weft.ops.book import RuleBook
from weft.ops.work import light_ops

Place = tuple[tuple[int, ...], str]
"""Devices, and the block."""


@dataclass(frozen=True)
class Piece:
    """One segment and its ops.

    Args:
        ops: in program order; those that any piece may make are among them where they are read.
        takes: tensors that other pieces make, in order of first use.
        gives: tensors that other pieces or the caller read.
        stage: the block or stage that its ops are in, "" if none.
    """

    segment: Segment
    ops: tuple[Op, ...]
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    stage: str = ""


def pieces(
    graph: Graph, layouts: Mapping[str, OpLayout], book: RuleBook, blocks: Mapping[str, str] | None = None
) -> tuple[Piece, ...]:
    """The pieces of a program.

    Args:
        blocks: the name of the block that an op is in, by op.
    """
    light = light_ops(graph, book)
    heavy = [op for op in graph.ops if op.name not in light]
    places = {op.name: (_devices(layouts[op.name]), (blocks or {}).get(op.name, "")) for op in heavy}
    levels = _levels(graph, heavy, places)
    groups: dict[tuple[int, Place], list[Op]] = {}
    for op in heavy:
        groups.setdefault((levels[op.name], places[op.name]), []).append(op)
    order = {op.name: number for number, op in enumerate(graph.ops)}
    found = sorted(groups.items(), key=lambda item: (item[0][0], order[item[1][0].name]))
    return _joined(graph, [(place[0], place[1], ops) for (_, place), ops in found], light, order)


def _devices(layout: OpLayout) -> tuple[int, ...]:
    return tuple(sorted(set(layout.grid.devices)))


def _levels(graph: Graph, ops: list[Op], places: Mapping[str, Place]) -> dict[str, int]:
    """A level for each op: not less than that of what it reads, and more where that stands at another place."""
    known = {op.name for op in ops}
    before = {
        op.name: [(one.name, int(places[one.name] != places[op.name])) for one in _makers(graph, op, known)]
        for op in ops
    }
    early: dict[str, int] = {}
    for op in ops:
        early[op.name] = max((early[one] + step for one, step in before[op.name]), default=0)
    late: dict[str, int] = {}
    for op in reversed(ops):
        late.setdefault(op.name, early[op.name])
        for one, step in before[op.name]:
            late[one] = min(late.get(one, late[op.name] - step), late[op.name] - step)
    chosen = _chosen(places, early, late)
    levels: dict[str, int] = {}
    for op in ops:
        least = max((levels[one] + step for one, step in before[op.name]), default=0)
        fits = [level for level in chosen[places[op.name]] if least <= level <= late[op.name]]
        levels[op.name] = min(fits, default=least)
    return levels


def _makers(graph: Graph, op: Op, known: set[str]) -> list[Op]:
    found = (graph.producers[name] for name in op.inputs if name in graph.producers)
    return [one for one in found if one.name in known]


def _chosen(places: Mapping[str, Place], early: Mapping[str, int], late: Mapping[str, int]) -> dict[Place, list[int]]:
    """The fewest levels of each place at which all of its ops can stand."""
    found: dict[Place, list[int]] = {}
    for name in sorted(late, key=lambda one: late[one]):
        levels = found.setdefault(places[name], [])
        if not levels or levels[-1] < early[name]:
            levels.append(late[name])
    return found


def _joined(
    graph: Graph, groups: list[tuple[tuple[int, ...], str, list[Op]]], light: frozenset[str], order: Mapping[str, int]
) -> tuple[Piece, ...]:
    """Pieces with names, what they take and give, and the light ops that they need."""
    home = {name: number for number, (_, _, ops) in enumerate(groups) for op in ops for name in op.outputs}
    returned = {name for name in graph.outputs if name is not None}
    whole = [sorted([*ops, *_needed(graph, ops, light)], key=lambda op: order[op.name]) for _, _, ops in groups]
    takes = [_read_elsewhere(ops, home, number) for number, ops in enumerate(whole)]
    wanted = {name for names in takes for name in names} | returned
    names = _names([ops for _, _, ops in groups])
    found = []
    for number, (devices, stage, ops) in enumerate(groups):
        gives = tuple(name for op in ops for name in op.outputs if name in wanted)
        reads = tuple(dict.fromkeys(names[home[name]] for name in takes[number]))
        trains = any(graph.tensors[name].needs_grad for op in ops for name in op.outputs)
        segment = Segment(names[number], devices, reads, trains=trains, splits=trains)
        found.append(Piece(segment, tuple(whole[number]), takes[number], gives, stage))
    return tuple(found)


def _needed(graph: Graph, ops: Iterable[Op], light: frozenset[str]) -> list[Op]:
    """The light ops behind the operands of ops."""
    found: dict[str, Op] = {}
    waiting = list(ops)
    while waiting:
        for name in waiting.pop().inputs:
            producer = graph.producers.get(name)
            if producer is not None and producer.name in light and producer.name not in found:
                found[producer.name] = producer
                waiting.append(producer)
    return list(found.values())


def _read_elsewhere(ops: Iterable[Op], home: Mapping[str, int], number: int) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for op in ops for name in op.inputs if home.get(name, number) != number))


def _names(groups: list[list[Op]]) -> list[str]:
    """A name for each piece: the modules from its first op to its last; numbered where two are alike."""
    found: list[str] = []
    for ops in groups:
        paths = [op.path for op in ops if op.path]
        plain = _between(paths[0], paths[-1]) if paths else "model"
        taken = sum(name == plain or name.startswith(f"{plain}#") for name in found)
        found.append(f"{plain}#{taken}" if taken else plain)
    return found


def _between(first: str, last: str) -> str:
    """`blocks.0` to `blocks.3` is `blocks.0-3`; what has nothing in common is told by its first and last module.

    >>> _between("h.0.attn", "h.3.mlp"), _between("wte", "h.1.mlp"), _between("head", "head")
    ('h.0-3', 'wte..h.1', 'head')
    """
    one, other = first.split("."), last.split(".")
    common = 0
    while common < min(len(one), len(other)) and one[common] == other[common]:
        common += 1
    shared = ".".join(one[:common])
    a, b = ".".join(_to_number(one[common:])), ".".join(_to_number(other[common:]))
    if not a or not b:
        return shared
    joint = "-" if a.isdigit() and b.isdigit() else ".."
    return (f"{shared}." if shared else "") + (f"{a}{joint}{b}" if a != b else a)


def _to_number(words: list[str]) -> list[str]:
    """The words up to the first number: the layer, not what is inside it."""
    for position, word in enumerate(words):
        if word.isdigit():
            return words[: position + 1]
    return words[:1]
