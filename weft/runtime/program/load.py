"""Generated programs, loaded: from the files of one to the module of a rank.

In: a program's files, in a directory or in memory (`files.py`), and a transport. Out: the rank's ParallelModule. Needs
no compiler.
"""

from __future__ import annotations

import io
import linecache
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes as disabled_modes

from weft.runtime.layout.collectives import Irregular
from weft.runtime.layout.cuts import Place, index_at
from weft.runtime.layout.execute import size
from weft.runtime.layout.transfer import Piece, Transfer
from weft.runtime.links.transport import Transport
from weft.runtime.program.files import CONSTANTS, PieceFiles, ProgramFiles, Source, files_of
from weft.runtime.program.lines import MODULES
from weft.runtime.program.module import ParallelModule
from weft.runtime.program.sizes import SizedTables, is_sized
from weft.runtime.program.stored import Table, Tables
from weft.runtime.weights.by_chunk import ChunkRoute

SECTIONS = ("here", "stored", "moves")
SELF = -1
"""Stands for the rank itself among the peers of a transfer that is the same on many ranks."""


def load_program(source: Source, transport: Transport, state: Mapping[str, Tensor] | None = None) -> ParallelModule:
    """The rank's module of a program that is one piece. `state`: its stored parts by name; zeros if not given."""
    files = files_of(source)
    assert transport.num_ranks == files.devices, (
        f"the program{' in ' + files.where if files.where else ''} is for {files.devices} devices, "
        f"the transport has {transport.num_ranks}"
    )
    (piece,) = files.pieces.values()
    return load_piece(piece, transport, state)


def load_piece(piece: PieceFiles, transport: Transport, state: Mapping[str, Tensor] | None = None) -> ParallelModule:
    """The module of a rank of a piece."""
    cls = load_class(piece, piece.text_of(transport.rank))
    tables = read_tables(piece.parts, Place(tuple(cls.grid().items()), transport.rank))
    return cls(transport, state, tables=tables, constants=load_constants(piece, transport.device))


def load_constants(piece: PieceFiles, device: torch.device | str) -> dict[str, Tensor]:
    """The tensors baked into a piece."""
    content = piece.program.get(piece.name(CONSTANTS))
    if content is None:
        return {}
    # as they were saved, under whatever mode a program is loaded
    with disabled_modes():
        found: dict[str, Tensor] = torch.load(io.BytesIO(content), weights_only=True, map_location=device)
    return found


def load_class(piece: PieceFiles, file: str) -> type[ParallelModule]:
    """The class in one of a piece's texts. Loaded once: the ranks of an emulator share it."""
    files = piece.program
    if file not in files.classes:
        text, path = files[file], files.path(file)
        # tracebacks show its lines, wherever it is from
        linecache.cache[path] = (len(text), None, text.decode(errors="replace").splitlines(keepends=True), path)
        module = ModuleType(f"{MODULES}{files.about['hash'][:12]}_{file.removesuffix('.py').replace('/', '_')}")
        module.__file__ = path
        exec(compile(text, path, "exec"), vars(module))
        files.classes[file] = getattr(module, piece.about["class"])
    found: type[ParallelModule] = files.classes[file]
    return found


def load_classes(files: ProgramFiles) -> list[type[ParallelModule]]:
    """The classes of all pieces of a program."""
    return [load_class(piece, file) for piece in files.pieces.values() for file in piece.texts]


def cut_parameters(source: Source) -> dict[str, int]:
    """Trained parameters of which some rank stores a part only, and how many dims each has."""
    found: dict[str, int] = {}
    for piece in files_of(source).pieces.values():
        for rank in range(len(piece.about["devices"])):
            cls = load_class(piece, piece.text_of(rank))
            place = Place(tuple(cls.grid().items()), rank)
            tables = read_tables(piece.parts, place).parts
            for name, part in cls.trained_parts().items():
                cuts = part.cuts
                index = tables[cuts.key] if isinstance(cuts, Table) else index_at(part.shape, cuts or {}, place)
                if index is not None and size(index) != part.shape:
                    found[name] = len(part.shape)
    return found


# Tables by coordinates: {"axes": ["dp"], "values": [...]}, or by rank: {"ranks": {"0": ...}}.


def read_tables(parts: Mapping[str, Any], place: Place) -> Tables:
    """The tables as the rank at this place sees them."""
    mine = {section: {key: _look_up(table, place) for key, table in parts[section].items()} for section in SECTIONS}
    # forward asks for a table with the sizes if they are in anybody's row: this rank's may be a plain number
    wanted = [(section, key) for section in SECTIONS for key, table in parts[section].items() if is_sized(table)]
    sized = {(section, key): mine[section].pop(key) for section, key in wanted}
    moves = {key: _irregular(table, place.rank) for key, table in mine["moves"].items()}
    return Tables(
        here={key: tupled(table) for key, table in mine["here"].items()},
        parts={key: tupled(table) for key, table in mine["stored"].items()},
        moves={key: found for key, found in moves.items() if found is not None},
        sized=SizedTables(parts["sizes"], sized, {"here": tupled, "moves": lambda table: _irregular(table, place.rank)})
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


def tupled(value: Any) -> Any:
    """JSON's lists as tuples, at any depth."""
    return tuple(map(tupled, value)) if isinstance(value, list) else value


def _irregular(value: Mapping[str, Any] | None, rank: int) -> Irregular | None:
    if value is None:
        return None
    return Irregular(
        forward=_transfers(value["forward"], rank),
        backward=None if value["backward"] is None else _transfers(value["backward"], rank),
        source_shapes=tupled(value["source_shapes"]),
        target_shapes=tupled(value["target_shapes"]),
        dtype=getattr(torch, value["dtype"]),
        chunks=value["chunks"],
        by_chunk=tuple(
            ChunkRoute(_transfers(one["forward"], rank), _transfers(one["backward"], rank))
            for one in value.get("by_chunk", ())
        ),
    )


def _transfers(items: Any, rank: int) -> tuple[Transfer, ...]:
    return tuple(transfer_of(item, rank) for item in items)


def transfer_of(item: Mapping[str, Any], rank: int) -> Transfer:
    """A transfer as it is written; SELF stands for `rank`. What crosses between pieces is an exchange, of no group."""

    def peer(number: int) -> int:
        return rank if number == SELF else number

    def pieces(found: Any) -> tuple[Piece, ...]:
        return tuple(Piece(peer(number), slot, tupled(index)) for number, slot, index in found)

    return Transfer(
        item.get("kind", "exchange"),
        tuple(map(peer, item.get("group", ()))),
        pieces(item["sends"]),
        pieces(item["receives"]),
        tupled(item["shapes"]),
        item["add"],
    )
