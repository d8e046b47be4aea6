"""Pipelines, loaded: a rank's share of a program in pieces.

In: the files of one, in a directory or in memory (`files.py`), and the transport of a replica. Out: the rank's pieces,
crossings and events. Needs no compiler.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from weft.runtime.layout.transfer import Transfer
from weft.runtime.links.replicas import Replica
from weft.runtime.links.subgroup import Subgroup
from weft.runtime.program.files import ProgramFiles, Source, files_of
from weft.runtime.program.load import SELF, load_class, load_piece, transfer_of
from weft.runtime.program.stored import Part as Stored
from weft.runtime.training.pipeline import Event, Piece, Rank, Returned, Share, Tie
from weft.runtime.training.stage_io import Crossing


def load_pipeline(source: Source, transport: Replica) -> Rank:
    """The rank's share, its parts still zeros."""
    files, rank = files_of(source), transport.rank
    told = files.about
    transport.open([tuple(range(transport.num_ranks))])
    transport.job.open([tuple(range(transport.job.num_ranks)), transport.twins])
    sizes = load_sizes(files, transport)
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
    teller = makers[0] if makers else -1
    pairs = pairs_of(move for one in told["ties"] for moves in one["moves"] for move in moves)
    found = Rank(sizes, ties, events, transport, (loss or "", teller), getattr(torch, dtype), pairs=pairs)
    transport.meet(found.all_pairs)
    return found


def pairs_of(moves: Iterable[Mapping[str, Any] | None]) -> frozenset[tuple[int, int]]:
    """Who sends to whom, in transfers of all ranks."""
    sent = ((int(rank), one["sends"]) for move in moves if move is not None for rank, one in move.items())
    return frozenset((rank, piece[0]) for rank, sends in sent for piece in sends if piece[0] not in (SELF, rank))


def load_sizes(source: Source, transport: Replica, known: Share | None = None) -> list[Share]:
    """A Share for each size of micro-batches; all hold the parameters of the first, or of one that is known."""
    files = files_of(source)
    sizes = [_share(files, one, transport) for one in files.about["sizes"]]
    for told, share in zip(files.about["sizes"], sizes, strict=True):
        _open(files, told, share)
    first = known or sizes[0]
    for one in sizes:
        for parameter, owner, borrower in files.about["loans"]:
            if borrower in one.pieces:
                one.pieces[borrower].module.borrow(parameter, first.pieces[owner].module.part(parameter))
    for other in sizes:
        for name, piece in other.pieces.items():
            if other is not first:
                piece.module.share(first.pieces[name].module)
    return sizes


def _open(files: ProgramFiles, told: Mapping[str, Any], share: Share) -> None:
    """Make the ways between ranks that the pieces use, and the replicas for their gradients; in one order on all."""
    for one in told["pieces"]:
        if one["name"] in share.pieces:
            module, piece = share.pieces[one["name"]].module, files.pieces[one["folder"]]
            classes, transport = [load_class(piece, file) for file in piece.texts], module.transport
            transport.open(module.groups({axes for cls in classes for axes in cls.axes()}))
            sums = {module.place.group(axes) for cls in classes for axes in cls.sum_axes()}
            if transport.num_replicas > 1:
                transport.job.open([transport.everywhere(group) for group in sums])


def pipeline_parts(source: Source) -> tuple[dict[str, Stored], dict[str, Stored]]:
    """How all pieces store parameters and buffers, by first name, and how those that are trained."""
    found: tuple[dict[str, Stored], dict[str, Stored]] = {}, {}
    files = files_of(source)
    for one in files.about["sizes"][0]["pieces"]:
        piece = files.pieces[one["folder"]]
        for cls in (load_class(piece, file) for file in piece.texts):
            found[0].update(cls.stored_parts())
            found[1].update(cls.trained_parts())
    return found


def _share(files: ProgramFiles, told: Mapping[str, Any], transport: Replica) -> Share:
    pieces = {
        one["name"]: Piece(
            one["name"],
            load_piece(
                files.pieces[one["folder"]], transport if files.is_whole else Subgroup(transport, one["devices"])
            ),
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
    ways = [*(one[way] for one in told["crossings"] for way in ("forward", "backward"))]
    return Share(pieces, mine, returns, pairs_of(ways))


def crossings_of(told: Sequence[Mapping[str, Any]], rank: int) -> list[Crossing]:
    """What crosses, as a rank sees it. What several pieces need alike of a tensor crosses once."""
    messages: dict[str, str] = {}
    backs: dict[str, str] = {}
    found = []
    for one in told:
        tensor, target, spared, comes_for = one["tensor"], one["target"], set[int](), dict[int, str]()
        for sender, transfer in one["forward"].items():
            for taker in {peer for peer, _, _ in transfer["sends"]}:
                parts = [part for part in transfer["sends"] if part[0] == taker]
                leader = messages.setdefault(json.dumps([tensor, sender, parts]), target)
                if leader != target and int(sender) == rank:
                    spared.add(taker)
                if taker == rank:
                    comes_for[int(sender)] = leader
        back = backs.setdefault(json.dumps([tensor, one["backward"]]), target)
        crossing = Crossing(
            tensor,
            one["source"],
            target,
            one.get("place", ""),
            getattr(torch, one["dtype"]),
            _transfer(one["forward"], rank),
            None if one["backward"] is None else _transfer(one["backward"], rank),
            one["trained"],
            spared=frozenset(spared),
            comes_for=comes_for,
            back_for=back,
        )
        found.append(crossing)
    return found


def _transfer(by_device: Mapping[str, Any], rank: int) -> Transfer | None:
    one = by_device.get(str(rank))
    return None if one is None else transfer_of(one, rank)
