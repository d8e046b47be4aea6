"""Pipelines on disk: how a rank's share of one is loaded.

In: a directory with `pipeline.json` and a folder for each piece, and the transport of a replica. Out: the rank's
pieces, crossings and events. Needs no compiler.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from weft.runtime.mail import Crossing
from weft.runtime.module import GradSync
from weft.runtime.pipeline import Event, Piece, Rank, Returned, Share, Tie
from weft.runtime.program_files import changes, cut_parameters, file_hash, load_class, load_program, read_meta
from weft.runtime.replicas import Replica
from weft.runtime.script import Piece as Part
from weft.runtime.script import Transfer
from weft.runtime.stored import Part as Stored
from weft.runtime.teams import Team

PIPELINE = "pipeline.json"
NOT_RUN = ("key", "made_from", "spans", "hashes")
"""Of what is written there: where it came from, and estimates."""


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
    sizes = _sizes(folder, told, transport, make_sync)
    ties = [
        Tie(
            one["parameter"],
            tuple(one["holders"]),
            tuple(tuple(_transfer(move, rank) for move in moves) for moves in one["moves"]),
        )
        for one in told["ties"]
    ]
    events = [Event(phase, piece, micro) for phase, piece, micro in told["events"].get(str(rank), ())]
    loss, dtype = told["loss"], told["loss_dtype"] or "float32"
    makers = [one["devices"][0] for one in told["sizes"][0]["pieces"] if loss in dict(one["gives"])]
    # in evaluation there need not be a loss, and nobody tells it
    return Rank(sizes, ties, events, transport, (loss or "", makers[0] if makers else -1), getattr(torch, dtype))


def load_sizes(
    directory: str | Path, transport: Replica, make_sync: Callable[[], GradSync], first: Share
) -> list[Share]:
    """The rank's share of a pipeline's files for further sizes of micro-batches, on the parameters of the first."""
    return _sizes(Path(directory), read_pipeline(directory), transport, make_sync, first)


def _sizes(
    folder: Path,
    told: Mapping[str, Any],
    transport: Replica,
    make_sync: Callable[[], GradSync],
    known: Share | None = None,
) -> list[Share]:
    """A Share for each size; all hold the parameters of the first that is known."""
    sizes = [_share(folder, one, transport, make_sync) for one in told["sizes"]]
    first = sizes[0] if known is None else known
    for one in sizes:
        for parameter, owner, borrower in told["loans"]:
            if borrower in one.pieces:
                one.pieces[borrower].module.borrow(parameter, first.pieces[owner].module.part(parameter))
    for other in sizes:
        for name, piece in other.pieces.items():
            if other is not first:
                piece.module.share(first.pieces[name].module)
    return sizes


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


def described(directory: str | Path) -> dict[str, Any]:
    """What is written about a program, whole or in pieces."""
    return read_pipeline(directory) if is_pipeline(directory) else read_meta(directory)


def edits(directory: str | Path) -> dict[str, str]:
    """The files of a program, whole or in pieces, that are not as they were written: `edited` or `missing`, by name."""
    return pipeline_changes(directory) if is_pipeline(directory) else changes(directory)


def file_names(directory: str | Path) -> list[str]:
    """The files of a program, whole or in pieces, that are there."""
    folder = Path(directory)
    if is_pipeline(folder):
        return [name for name in read_pipeline(folder)["hashes"] if (folder / name).exists()]
    return [path.name for path in sorted(folder.iterdir()) if path.is_file()]


def pipeline_changes(directory: str | Path) -> dict[str, str]:
    """The same for a program in pieces; its table of events is a file like others."""
    folder, found, told = Path(directory), dict[str, str](), read_pipeline(directory)
    for name, wanted in told["hashes"].items():
        path = folder / name
        if not path.exists():
            found[name] = "missing"
        elif (description_hash(told) if name == PIPELINE else file_hash(path.read_bytes())) != wanted:
            found[name] = "edited"
    return found


def description_hash(told: Mapping[str, Any]) -> str:
    """A hash of what runs of all that is written about a pipeline: not of where it came from."""
    runs = {key: value for key, value in told.items() if key not in NOT_RUN}
    return hashlib.sha256(json.dumps(runs, sort_keys=True).encode()).hexdigest()


def cut_in_pieces(directory: str | Path) -> dict[str, int]:
    """Trained parameters of which some rank stores a part only, and how many dims each has."""
    folders = [Path(directory) / one["folder"] for one in read_pipeline(directory)["sizes"][0]["pieces"]]
    return {name: num_dims for folder in folders for name, num_dims in cut_parameters(folder).items()}


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
    mine = [one for one in crossings_of(told["crossings"], transport.rank) if {one.source, one.target} & pieces.keys()]
    returns = [
        Returned(one["tensor"], getattr(torch, one["dtype"]), _transfer(one["moves"], transport.rank))
        for one in told["returns"]
    ]
    return Share(pieces, mine, returns)


def crossings_of(told: Sequence[Mapping[str, Any]], rank: int) -> list[Crossing]:
    """What crosses, as a rank sees it. What several pieces need alike of a tensor crosses once."""
    letters: dict[str, str] = {}
    backs: dict[str, str] = {}
    found = []
    for one in told:
        tensor, target, spared, comes_for = one["tensor"], one["target"], set[int](), dict[int, str]()
        for sender, transfer in one["forward"].items():
            for taker in {peer for peer, _, _ in transfer["sends"]}:
                parts = [part for part in transfer["sends"] if part[0] == taker]
                leader = letters.setdefault(json.dumps([tensor, sender, parts]), target)
                if leader != target and int(sender) == rank:
                    spared.add(taker)
                if taker == rank:
                    comes_for[int(sender)] = leader
        back = backs.setdefault(json.dumps([tensor, one["backward"]]), target)
        found.append(replace(_crossing(one, rank), spared=frozenset(spared), comes_for=comes_for, back_for=back))
    return found


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
