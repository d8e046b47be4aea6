"""Pipelines on disk: how a rank's share of one is loaded.

In: a directory with `pipeline.json` and a folder for each piece, and the transport of a replica. Out: the rank's
pieces, crossings and events. Needs no compiler.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from weft.runtime.module import GradSync
from weft.runtime.parallel import share
from weft.runtime.pipeline import Crossing, Event, Piece, Rank, Share, Tie
from weft.runtime.program_files import cut_parameter, file_hash, load_class, load_program, read_meta
from weft.runtime.replicas import Replica
from weft.runtime.script import Piece as Part
from weft.runtime.script import Transfer
from weft.runtime.stored import Part as Stored
from weft.runtime.teams import Team

PIPELINE = "pipeline.json"


def read_pipeline(directory: str | Path) -> dict[str, Any]:
    """What is written about the pipeline."""
    found: dict[str, Any] = json.loads((Path(directory) / PIPELINE).read_text(encoding="utf-8"))
    return found


def is_pipeline(directory: str | Path) -> bool:
    """True if the program in a directory is one in pieces."""
    return (Path(directory) / PIPELINE).exists()


def load_pipeline(directory: str | Path, transport: Replica, make_sync: Callable[[], GradSync]) -> Rank:
    """The rank's share, its parts still zeros.

    Args:
        make_sync: makes what completes the gradients of one piece.
    """
    folder, told, rank = Path(directory), read_pipeline(directory), transport.rank
    sizes = [_share(folder, one, transport, make_sync) for one in told["sizes"]]
    for one in sizes:
        for parameter, owner, borrower in told["loans"]:
            if borrower in one.pieces:
                one.pieces[borrower].module.borrow(parameter, sizes[0].pieces[owner].module.part(parameter))
    for other in sizes[1:]:
        for name, piece in other.pieces.items():
            share(sizes[0].pieces[name].module, piece.module)
    ties = [
        Tie(
            one["parameter"],
            tuple(one["holders"]),
            tuple(tuple(_transfer(move, rank) for move in moves) for moves in one["moves"]),
        )
        for one in told["ties"]
    ]
    events = [Event(phase, piece, micro) for phase, piece, micro in told["events"].get(str(rank), ())]
    teller = next(one["devices"][0] for one in told["sizes"][0]["pieces"] if told["loss"] in dict(one["gives"]))
    return Rank(sizes, ties, events, transport, (told["loss"], teller), getattr(torch, told["loss_dtype"]))


def pipeline_parts(directory: str | Path) -> tuple[dict[str, Stored], dict[str, Stored]]:
    """How all pieces store parameters and buffers, by first name, and how those that are trained."""
    found: tuple[dict[str, Stored], dict[str, Stored]] = {}, {}
    for one in read_pipeline(directory)["sizes"][0]["pieces"]:
        folder = Path(directory) / one["folder"]
        meta = read_meta(folder)
        for cls in (load_class(folder, meta, file) for file in meta["files"]):
            found[0].update(cls.stored_parts())
            found[1].update(cls.trained_parts())
    return found


def pipeline_changes(directory: str | Path) -> dict[str, str]:
    """The files that are not as they were written: `edited` or `missing`, by name."""
    folder, found = Path(directory), dict[str, str]()
    for name, wanted in read_pipeline(directory)["hashes"].items():
        path = folder / name
        if not path.exists():
            found[name] = "missing"
        elif file_hash(path.read_bytes()) != wanted:
            found[name] = "edited"
    return found


def cut_in_pieces(directory: str | Path) -> str | None:
    """The first trained parameter of which some rank stores a part only; None if there is none."""
    folders = [Path(directory) / one["folder"] for one in read_pipeline(directory)["sizes"][0]["pieces"]]
    return next((name for name in map(cut_parameter, folders) if name is not None), None)


def _share(folder: Path, told: Mapping[str, Any], transport: Replica, make_sync: Callable[[], GradSync]) -> Share:
    pieces = {
        one["name"]: Piece(
            one["name"],
            load_program(folder / one["folder"], Team(transport, one["devices"]), grad_sync=make_sync()),
            tuple(one["inputs"]),
            tuple(one["takes"]),
            tuple((name, trained) for name, trained in one["gives"]),
        )
        for one in told["pieces"]
        if transport.rank in one["devices"]
    }
    here = [one for one in told["crossings"] if {one["source"], one["target"]} & pieces.keys()]
    return Share(pieces, [_crossing(one, transport.rank) for one in here])


def _crossing(one: Mapping[str, Any], rank: int) -> Crossing:
    return Crossing(
        one["tensor"],
        one["source"],
        one["target"],
        getattr(torch, one["dtype"]),
        _transfer(one["forward"], rank),
        None if one["backward"] is None else _transfer(one["backward"], rank),
        one["trained"],
    )


def _transfer(by_device: Mapping[str, Any], rank: int) -> Transfer | None:
    one = by_device.get(str(rank))
    if one is None:
        return None
    return Transfer(
        "exchange", (), _parts(one["sends"]), _parts(one["receives"]), _tupled(one["shapes"]), bool(one["add"])
    )


def _parts(found: Any) -> tuple[Part, ...]:
    return tuple(Part(peer, slot, _tupled(index)) for peer, slot, index in found)


def _tupled(value: Any) -> Any:
    return tuple(map(_tupled, value)) if isinstance(value, list) else value
