"""The tables at the head of a file: how parameters and buffers are stored, and how gradients become complete.

In: a Sheet. Out: the lines of PARAMETERS and BUFFERS. Parameters stand in the order of use; those of layers that are
stored alike stand once, with `*` for the layer's number.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weft.codegen.irregular import move_entry
from weft.codegen.sheet import Sheet
from weft.codegen.text import literal, statement, top_level
from weft.ir.graph import Buffer, Parameter
from weft.ir.layout import Layout
from weft.lower.idle import reached_from_some
from weft.runtime.layout.cuts import axes_text

_NUMBER = re.compile(r"^(.*?)\.(\d+)\.(.*)$")


@dataclass(frozen=True)
class Entry:
    """One line of a table."""

    name: str
    text: str


def parameter_entries(sheet: Sheet) -> list[Entry]:
    """Parameters in the order of use, then those that no gradient reaches."""
    program = sheet.program
    names = [one.tensor for one in program.graph.parameters]
    # pieces of a pipeline give what is used, all of it
    is_open = program.roots and not program.given
    trained = [sync.parameter for sync in reversed(program.syncs)]
    rest = [one.tensor for one in program.graph.parameters if one.tensor not in set(trained)]
    some: dict[str, tuple[int, ...]] = {} if program.given else dict.fromkeys(rest, ())
    some.update(reached_from_some(program.graph, list(program.outputs), names) if is_open else {})
    found = program.graph.parameter_tensors
    return [_entry(sheet, found[name], some.get(name)) for name in (*trained, *rest)]


def buffer_entries(sheet: Sheet) -> list[Entry]:
    return [_entry(sheet, buffer) for buffer in sheet.graph.buffers]


def _entry(sheet: Sheet, one: Parameter | Buffer, some: tuple[int, ...] | None = None) -> Entry:
    tensor = sheet.graph.tensors[one.tensor]
    layout = sheet.program.stored[one.tensor]
    words = [literal(tensor.sizes)]
    cuts = _cuts(sheet, layout, one.names[0])
    words += [cuts] if cuts else []
    words += [f"dtype={tensor.dtype}"] if tensor.dtype != torch.float32 else []
    if isinstance(one, Parameter):
        words += ["trained=False"] if not one.trainable else [*_use(sheet, one), *_sync(sheet, one)]
        words += _keeps(sheet, one)
        words += [f"reached_from={literal(some)}"] if some is not None and one.trainable else []
    elif not one.persistent:
        words.append("persistent=False")
    words += [f"tied={literal(one.names[1:])}"] if len(one.names) > 1 else []
    return Entry(one.names[0], f"Part({', '.join(words)})")


def _cuts(sheet: Sheet, layout: Layout, name: str) -> str:
    """How a tensor is cut, as text."""
    spread = sheet.spreads.of(layout)
    if spread is not None:
        words = []
        for dim, axes in enumerate(spread.dims):
            table = layout.ranges[dim]
            if not axes or table is None:
                continue
            cut = sheet.spreads.describe(table, layout.shape[dim], axes)
            if cut is None:
                break
            words.append(f"{dim}: {sheet.need_cut(cut)}")
        else:
            return f"{{{', '.join(words)}}}" if words else ""
    entries = {
        rank: layout.parts_on(rank)[0].ranges if layout.parts_on(rank) else None
        for rank in range(sheet.program.devices)
    }
    sheet.need("weft.runtime.program.module", {"Table"})
    return f'Table("{sheet.tables.key("stored", name, entries)}")'


def _use(sheet: Sheet, one: Parameter) -> list[str]:
    """How the full weight is gathered from what is stored, if in one way; and how many operators read what is stored,
    if not one."""
    reads, ways = sheet.readings(one.tensor)
    found = [] if reads == 1 else [f"reads={reads}"]
    if len(ways) == 1:
        (words,) = ways
        found.append(f"use={sheet.need_moves(words)}")
    return found


def _sync(sheet: Sheet, one: Parameter) -> list[str]:
    """How the gradient of a parameter that is used as stored becomes complete."""
    direct = next((sync for sync in sheet.program.syncs if sync.parameter == one.tensor), None)
    if direct is None:
        return ["sync=None"]
    for source, moves in zip(direct.sources, direct.moves, strict=True):
        if sheet.used_as_stored(source):
            if not moves:
                return []
            words = sheet.words.all(moves, sheet.program.values[source].grad)
            if words is None:
                entries = {
                    rank: move_entry(sheet.program, sheet.words.transfers, rank, source, moves, None, one.tensor, None)
                    for rank in sheet.ranks
                }
                sheet.need("weft.runtime.program.module", {"Table"})
                return [f'sync=Table("{sheet.tables.key("moves", "sync", entries)}")']
            if len(words) == 1 and words[0].kind == "all_reduce":
                return [f"sync={axes_text(words[0].axes)}"]
            return [f"sync={sheet.need_moves(words)}"]
    return ["sync=None"]


def _keeps(sheet: Sheet, one: Parameter) -> list[str]:
    """What is kept as it is used of a parameter that the optimizer updates in parts."""
    if one.tensor not in sheet.program.kept:
        return []
    return ['keeps=("weight", "gradient")' if sheet.program.kept[one.tensor] else 'keeps=("weight",)']


def folded(entries: Sequence[Entry]) -> tuple[list[Entry], dict[str, int]]:
    """Entries with those of like layers as one, and how many layers each stack has."""
    out: list[Entry] = []
    layers: dict[str, int] = {}
    at = 0
    while at < len(entries):
        stack = _stack(entries[at].name)
        end = at
        while end < len(entries) and stack and _stack(entries[end].name) == stack:
            end += 1
        patterns = _patterns(entries[at:end], stack) if stack and stack not in layers else None
        if patterns is None:
            end = max(end, at + 1)
            out.extend(entries[at:end])
        else:
            layers[stack] = (end - at) // len(patterns)
            out.extend(patterns)
        at = end
    return out, layers


def _stack(name: str) -> str:
    match = _NUMBER.match(name)
    return match[1] if match else ""


def _patterns(entries: Sequence[Entry], stack: str) -> list[Entry] | None:
    """The entries of one layer with `*`, if all layers are alike and numbered from 0."""
    by_layer: dict[int, list[Entry]] = {}
    for entry in entries:
        match = _NUMBER.match(entry.name)
        assert match is not None
        number = int(match[2])
        if number < max(by_layer, default=number):
            return None
        star = Entry(f"{stack}.*.{match[3]}", entry.text.replace(f'"{stack}.{number}.', f'"{stack}.*.'))
        by_layer.setdefault(number, []).append(star)
    alike = list(by_layer) == list(range(len(by_layer))) and all(one == by_layer[0] for one in by_layer.values())
    return by_layer[0] if alike and len(by_layer) > 1 else None


def table_lines(name: str, entries: Sequence[Entry]) -> list[str]:
    """The table as text."""
    lines = [f"{name}: dict[str, Part] = {{"]
    for entry in entries:
        arguments = top_level(entry.text.removeprefix("Part(").removesuffix(")"))
        lines += statement(f'"{entry.name}": Part(', arguments, "),", 1)
    return [*lines, "}"] if entries else [f"{name}: dict[str, Part] = {{}}"]
