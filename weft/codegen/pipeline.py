"""Pipelined -> files: a program for each piece, and what crosses between them.

    program.json    batches, pieces, their devices, crossings, ties, the events of every device
    piece0/ ...     the program of each piece, as `emit.py` writes it, for its own devices counted from 0

The only piece of a program without events (`one_piece`) has no folder of its own.

In: a Pipelined and a Schedule, or a Program. Out: files by name, the hash of all of them among them. A pure function of
both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from weft.codegen.emit import emit_piece
from weft.codegen.form import form_of
from weft.codegen.irregular import exchange_entry
from weft.codegen.piece_text import crossing_names, events_text, head
from weft.ir.program import Move, Program
from weft.ir.schedule import Schedule, Segment
from weft.lower.pipeline import Crossing, Part, Pipelined, Tie
from weft.lower.returned import returned
from weft.lower.segments import Piece
from weft.lower.spans import spans_of
from weft.lower.transfer import Transfers
from weft.runtime.program.batch import dtype_name
from weft.runtime.program.files import with_description


def generate(program: Program, *, about: Mapping[str, Any] | None = None, traced: bool = False) -> dict[str, bytes]:
    """The files by name of a Program of the whole batch: a pipeline of one piece, which its user calls."""
    return generate_pipeline([one_piece(program)], Schedule({}), about=about, traced=traced)


def one_piece(program: Program) -> Pipelined:
    """A Program of the whole batch as the only piece: it takes and gives nothing but what its caller does."""
    piece = Piece(Segment("", tuple(range(program.devices))), program.graph.ops, (), ())
    return Pipelined(program.graph, program.devices, (Part(piece, program),), (), ())


def generate_pipeline(
    sizes: Sequence[Pipelined],
    schedule: Schedule,
    *,
    about: Mapping[str, Any] | None = None,
    returns: Sequence[str] = (),
    traced: bool = False,
) -> dict[str, bytes]:
    """The files by name.

    Args:
        sizes: the same plan at each size that micro-batches have.
        schedule: without events if its user calls the only piece.
        about: more to write about it.
        returns: tensors that every device gets whole, in evaluation.
        traced: every op tells the module's `trace` what it made, and no layer is folded into another's text.
    """
    files: dict[str, bytes] = {}
    words, first = _Words(), sizes[0]
    described = []
    for size, pipelined in enumerate(sizes):
        pieces = _emit_pieces(files, size, pipelined, schedule, traced=traced)
        crossings = [words.crossing(crossing, pipelined) for crossing in pipelined.crossings]
        described.append({"pieces": pieces, "crossings": crossings, "returns": words.returned(pipelined, returns)})
    spans = spans_of(first) if schedule.events else {}
    told = {
        "devices": first.devices,
        "batch": form_of(first.graph).to_json(),
        "size_of": [0],
        "dims": None,
        "loss": first.graph.loss,
        "loss_dtype": None if first.graph.loss is None else _dtype(first, first.graph.loss),
        "spans": {name: [span.f, span.b, span.w] for name, span in spans.items()},
        "sizes": described,
        "ties": [words.tie(one, first) for one in first.ties],
        "loans": [
            [first.graph.parameter_tensors[one.parameter].names[0], one.owner, one.borrower] for one in first.loans
        ],
        "events": {
            str(device): [[event.phase, event.segment, event.number] for event in events]
            for device, events in schedule.events.items()
        },
        **(about or {}),
    }
    return with_description(files, told)


def _emit_pieces(
    files: dict[str, bytes], size: int, pipelined: Pipelined, schedule: Schedule, *, traced: bool
) -> list[dict[str, Any]]:
    """Put the files of all pieces at one size among the others; what is written about each piece."""
    names, found = crossing_names(pipelined), []
    for number, part in enumerate(pipelined.parts):
        folder = title = ends = ""
        if schedule.events:
            folder, title = _folder(size, number), head(pipelined, part, names)
            ends = events_text(part, pipelined, schedule)
        taken = {name: names[name] for name in part.piece.takes}
        content, told = emit_piece(part.program, title=title, inputs=taken, traced=traced)
        for name, text in content.items():
            where = f"{folder}/{name}" if folder else name
            files[where] = text + ends.encode() if name.endswith(".py") else text
        found.append({"folder": folder, **_piece(part, pipelined), **told})
    return found


def _folder(size: int, number: int) -> str:
    """Of a piece: those of the first size are numbered, others stand beside them."""
    return f"piece{number}" if size == 0 else f"piece{number}-size{size}"


def _piece(part: Part, pipelined: Pipelined) -> dict[str, Any]:
    tensors = {one.tensor: at for at, one in enumerate(pipelined.graph.inputs)}
    graph = part.program.graph
    return {
        **asdict(part.piece.segment),
        "inputs": [tensors[one.tensor] for one in graph.inputs if one.tensor in tensors],
        "takes": list(part.piece.takes),
        "gives": [[name, graph.tensors[name].needs_grad] for name in part.piece.gives],
    }


class _Words:
    """Moves as what each device does."""

    def __init__(self) -> None:
        self._transfers = Transfers()

    def crossing(self, one: Crossing, pipelined: Pipelined) -> dict[str, Any]:
        return {
            "tensor": one.tensor,
            "source": one.source,
            "target": one.target,
            "place": pipelined.graph.producers[one.tensor].source.place,
            "dtype": _dtype(pipelined, one.tensor),
            "trained": one.backward is not None,
            "forward": self.by_device(one.forward),
            "backward": None if one.backward is None else self.by_device(one.backward),
        }

    def tie(self, one: Tie, pipelined: Pipelined) -> dict[str, Any]:
        return {
            "parameter": pipelined.graph.parameter_tensors[one.parameter].names[0],
            "holders": list(one.holders),
            "moves": [[self.by_device(move) for move in moves] for moves in one.moves],
        }

    def returned(self, pipelined: Pipelined, names: Sequence[str]) -> list[dict[str, Any]]:
        return [
            {"tensor": name, "dtype": _dtype(pipelined, name), "moves": self.by_device(move)}
            for name, move in returned(pipelined, names).items()
        ]

    def by_device(self, move: Move) -> dict[str, Any]:
        devices = sorted({*move.source.grid.devices, *move.target.grid.devices})
        found = {device: self._transfers.of(move, device) for device in devices}
        return {str(device): exchange_entry(one) for device, one in found.items() if one is not None}


def _dtype(pipelined: Pipelined, name: str) -> str:
    return dtype_name(pipelined.graph.tensors[name].dtype)
