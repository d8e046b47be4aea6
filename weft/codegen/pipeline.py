"""Pipelined -> files: a program for each piece, and what crosses between them.

    pipeline.json   pieces, their devices, crossings, ties, the events of every device
    piece0/ ...     the program of each piece, as `emit.py` writes it, for its own devices counted from 0

In: a Pipelined and a Schedule. Out: files by name. A pure function of both.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from weft.codegen.emit import generate
from weft.codegen.irregular import exchange_entry
from weft.codegen.piece_text import crossing_names, events_text, head
from weft.ir.program import Move
from weft.ir.schedule import Schedule
from weft.lower.pipeline import Crossing, Part, Pipelined, Tie
from weft.lower.returned import returned
from weft.lower.spans import spans_of
from weft.lower.transfer import Transfers
from weft.runtime.program.batch import dtype_name
from weft.runtime.program.files import PIPELINE, description_hash, file_hash


def generate_pipeline(
    sizes: Sequence[Pipelined],
    schedule: Schedule,
    *,
    about: dict[str, Any] | None = None,
    returns: Sequence[str] = (),
    traced: bool = False,
) -> dict[str, bytes]:
    """The files by name.

    Args:
        sizes: the same plan at each size that micro-batches have.
        returns: tensors that every device gets whole, in evaluation.
        traced: as of `generate`.
    """
    files: dict[str, bytes] = {}
    for size, pipelined in enumerate(sizes):
        names = crossing_names(pipelined)
        for number, part in enumerate(pipelined.parts):
            ends = events_text(part, pipelined, schedule).encode()
            taken = {name: names[name] for name in part.piece.takes}
            title = head(pipelined, part, names)
            for name, content in generate(part.program, title=title, inputs=taken, traced=traced).items():
                where = f"{_folder(size, number)}/{name}"
                files[where] = content + ends if name.endswith(".py") else content
    words, first = _Words(), sizes[0]
    described: dict[str, Any] = {
        "devices": first.devices,
        "loss": first.graph.loss,
        "loss_dtype": None if first.graph.loss is None else _dtype(first, first.graph.loss),
        "spans": {name: [span.f, span.b, span.w] for name, span in spans_of(first).items()},
        "sizes": [
            {
                "pieces": [_piece(_folder(size, number), part, one) for number, part in enumerate(one.parts)],
                "crossings": [words.crossing(crossing, one) for crossing in one.crossings],
                "returns": words.returned(one, returns),
            }
            for size, one in enumerate(sizes)
        ],
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
    described["hashes"] = {
        **{name: file_hash(content) for name, content in files.items()},
        PIPELINE: description_hash(json.loads(json.dumps(described))),
    }
    return {**files, PIPELINE: (json.dumps(described, indent=1) + "\n").encode()}


def _folder(size: int, number: int) -> str:
    """Of a piece: those of the first size are numbered, others stand beside them."""
    return f"piece{number}" if size == 0 else f"piece{number}-size{size}"


def _piece(folder: str, part: Part, pipelined: Pipelined) -> dict[str, Any]:
    tensors = {one.tensor: at for at, one in enumerate(pipelined.graph.inputs)}
    graph, segment = part.program.graph, part.piece.segment
    return {
        "name": segment.name,
        "folder": folder,
        "devices": list(segment.devices),
        "reads": list(segment.reads),
        "trains": segment.trains,
        "splits": segment.splits,
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
