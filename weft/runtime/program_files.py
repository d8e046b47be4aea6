"""Generated programs on disk: what lies where, how to load one, how to tell whether it was edited.

    program.py ...   the text, one file per distinct program
    parts.json       what differs by rank: tables by coordinates on the grid, or by rank
    meta.json        which rank runs which file, inputs, versions, and the hash of all of the above
    constants.pt     tensors baked into the program, if there are any

In: a directory and a transport. Out: the rank's ParallelModule. Needs no compiler.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import linecache
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.runtime.by_chunk import Way
from weft.runtime.collectives import Irregular
from weft.runtime.cuts import Place, index_at
from weft.runtime.module import GradSync, ParallelModule
from weft.runtime.script import Index, Piece, Transfer
from weft.runtime.sizes import SizedTables, is_sized
from weft.runtime.stored import Table, Tables
from weft.runtime.transfers import size
from weft.runtime.transport import Transport

META, PARTS, CONSTANTS = "meta.json", "parts.json", "constants.pt"
ROOMS = ("here", "stored", "moves")
SELF = -1
"""Stands for the rank itself among the peers of a transfer that is the same on many ranks."""


def load_program(
    directory: str | Path,
    transport: Transport,
    state: Mapping[str, Tensor] | None = None,
    *,
    grad_sync: GradSync | None = None,
) -> ParallelModule:
    """The rank's module. `state`: its stored parts by name; zeros if not given."""
    folder = Path(directory)
    meta = read_meta(folder)
    assert transport.num_ranks == meta["devices"], (
        f"the program in {folder} is for {meta['devices']} devices, the transport has {transport.num_ranks}"
    )
    cls = load_class(folder, meta, meta["files"][_file_of(meta["ranks"], transport.rank)])
    path = folder / CONSTANTS
    constants = torch.load(path, weights_only=True, map_location=transport.device) if path.exists() else {}
    place = Place(tuple(cls.grid().items()), transport.rank)
    tables = read_tables(json.loads((folder / PARTS).read_text(encoding="utf-8")), place)
    return cls(transport, state, tables=tables, constants=constants, grad_sync=grad_sync)


def load_class(directory: Path, meta: Mapping[str, Any], file: str) -> type[ParallelModule]:
    """The class in one of the program's files, as it lies there."""
    spec = importlib.util.spec_from_file_location(
        f"weft_program_{meta['hash'][:12]}_{Path(file).stem}", directory / file
    )
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    # compiled here, not by the import system: its cache tells files apart by their times and sizes, and an edit may
    # change neither
    text, path = (directory / file).read_bytes(), str(directory / file)
    exec(compile(text, path, "exec"), vars(module))
    # traces show its lines also when the directory is gone
    linecache.cache[path] = (len(text), None, text.decode().splitlines(keepends=True), path)
    found: type[ParallelModule] = getattr(module, meta["class"])
    return found


def cut_parameters(directory: str | Path) -> dict[str, int]:
    """Trained parameters of which some rank stores a part only, and how many dims each has."""
    folder = Path(directory)
    meta = read_meta(folder)
    parts = json.loads((folder / PARTS).read_text(encoding="utf-8"))
    classes = [load_class(folder, meta, file) for file in meta["files"]]
    found: dict[str, int] = {}
    for rank in range(meta["devices"]):
        cls = classes[_file_of(meta["ranks"], rank)]
        place = Place(tuple(cls.grid().items()), rank)
        tables = read_tables(parts, place).parts
        for name, part in cls.trained_parts().items():
            cuts = part.cuts
            index = tables[cuts.key] if isinstance(cuts, Table) else index_at(part.shape, cuts or {}, place)
            if index is not None and size(index) != part.shape:
                found[name] = len(part.shape)
    return found


def read_meta(directory: str | Path) -> dict[str, Any]:
    """What is written about the program."""
    found: dict[str, Any] = json.loads((Path(directory) / META).read_text(encoding="utf-8"))
    return found


def status(directory: str | Path) -> str:
    """`as made`, or `edited` if a file is not as it was written."""
    return "edited" if changes(directory) else "as made"


def changes(directory: str | Path) -> dict[str, str]:
    """The files that are not as they were written: `edited` or `missing`, by name."""
    folder = Path(directory)
    meta = read_meta(folder)
    hashes: dict[str, str] = meta.get("hashes", {})
    names = {**dict.fromkeys((*meta["files"], PARTS)), **dict.fromkeys(hashes)}
    if (folder / CONSTANTS).exists():
        names[CONSTANTS] = None
    found = {name: (folder / name).read_bytes() for name in names if (folder / name).exists()}
    if found.keys() == names.keys() and content_hash(found) == meta["hash"]:
        return {}
    apart = {name: "edited" for name, content in found.items() if hashes.get(name) != file_hash(content)}
    return {**apart, **dict.fromkeys((name for name in names if name not in found), "missing")}


def file_hash(content: bytes) -> str:
    """The hash of one file."""
    return hashlib.sha256(content).hexdigest()


def content_hash(files: Mapping[str, bytes]) -> str:
    """One hash of files and their names."""
    found = hashlib.sha256()
    for name in sorted(files):
        found.update(name.encode() + b"\0" + hashlib.sha256(files[name]).digest())
    return found.hexdigest()


def _file_of(ranks: Any, rank: int) -> int:
    """Which file a rank runs: one number for all, or one per rank."""
    return ranks if isinstance(ranks, int) else int(ranks[rank])


# Tables by coordinates: {"axes": ["dp"], "values": [...]}, or by rank: {"ranks": {"0": ...}}.


def read_tables(parts: Mapping[str, Any], place: Place) -> Tables:
    """The tables as the rank at this place sees them."""
    mine = {room: {key: _look_up(table, place) for key, table in parts[room].items()} for room in ROOMS}
    sized = {(room, key): table for room in ROOMS for key, table in mine[room].items() if is_sized(table)}
    for room, key in sized:
        del mine[room][key]
    moves = {key: _irregular(table, place.rank) for key, table in mine["moves"].items()}
    return Tables(
        here={key: _tupled(table) for key, table in mine["here"].items()},
        parts={key: _tupled(table) for key, table in mine["stored"].items()},
        moves={key: found for key, found in moves.items() if found is not None},
        sized=SizedTables(
            parts["sizes"], sized, {"here": _tupled, "moves": lambda table: _irregular(table, place.rank)}
        )
        if "sizes" in parts
        else None,
    )


def _look_up(table: Mapping[str, Any], place: Place) -> Any:
    if "ranks" in table:
        return table["ranks"].get(str(place.rank))
    values = table["values"]
    for axis in table["axes"]:
        values = values[place.coordinates[axis]]
    return values


def _tupled(value: Any) -> Any:
    return tuple(map(_tupled, value)) if isinstance(value, list) else value


def _irregular(value: Mapping[str, Any] | None, rank: int) -> Irregular | None:
    if value is None:
        return None
    return Irregular(
        forward=_transfers(value["forward"], rank),
        backward=None if value["backward"] is None else _transfers(value["backward"], rank),
        source_shapes=_tupled(value["source_shapes"]),
        target_shapes=_tupled(value["target_shapes"]),
        dtype=getattr(torch, value["dtype"]),
        chunks=value["chunks"],
        by_chunk=tuple(
            Way(_transfers(one["forward"], rank), _transfers(one["backward"], rank))
            for one in value.get("by_chunk", ())
        ),
    )


def _transfers(items: Any, rank: int) -> tuple[Transfer, ...]:
    def peer(number: int) -> int:
        return rank if number == SELF else number

    def pieces(found: Any) -> tuple[Piece, ...]:
        return tuple(Piece(peer(number), slot, _index(index)) for number, slot, index in found)

    return tuple(
        Transfer(
            item["kind"],
            tuple(map(peer, item["group"])),
            pieces(item["sends"]),
            pieces(item["receives"]),
            _tupled(item["shapes"]),
            item["add"],
        )
        for item in items
    )


def _index(value: Any) -> Index:
    found: Index = _tupled(value)
    return found
