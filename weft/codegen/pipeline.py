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
from weft.ir.program import Move
from weft.ir.schedule import Schedule, row
from weft.lower.pipeline import Crossing, Part, Pipelined, Tie
from weft.lower.transfer import Transfers
from weft.runtime.pipeline_files import PIPELINE
from weft.runtime.program_files import content_hash, file_hash
from weft.runtime.script import Transfer


def generate_pipeline(
    sizes: Sequence[Pipelined], schedule: Schedule, *, about: dict[str, Any] | None = None
) -> dict[str, bytes]:
    """The files by name.

    Args:
        sizes: the same plan at each size that micro-batches have.
    """
    files: dict[str, bytes] = {}
    for size, pipelined in enumerate(sizes):
        for number, part in enumerate(pipelined.parts):
            ends = _schedule_text(part, schedule)
            for name, content in generate(part.program, title=_title(pipelined, part)).items():
                where = f"{_folder(size, number)}/{name}"
                files[where] = content + ends.encode() if name.endswith(".py") else content
    words, first = _Words(), sizes[0]
    described = {
        "devices": first.devices,
        "loss": first.graph.loss,
        "loss_dtype": str(first.graph.tensors[first.graph.loss or ""].dtype).removeprefix("torch."),
        "sizes": [
            {
                "pieces": [_piece(_folder(size, number), part, one) for number, part in enumerate(one.parts)],
                "crossings": [words.crossing(crossing, one) for crossing in one.crossings],
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
        "hash": content_hash(files),
        "hashes": {name: file_hash(content) for name, content in files.items()},
        **(about or {}),
    }
    return {**files, PIPELINE: (json.dumps(described, indent=1) + "\n").encode()}


def _folder(size: int, number: int) -> str:
    """Of a piece: those of the first size are numbered, others stand beside them."""
    return f"piece{number}" if size == 0 else f"piece{number}-size{size}"


def _title(pipelined: Pipelined, part: Part) -> str:
    segment = part.piece.segment
    where = f"device {segment.devices[0]}" if len(segment.devices) == 1 else f"devices {list(segment.devices)}"
    return f"{pipelined.graph.name}, {segment.name}, for {where}. Made by weft; edit freely, then verify it again."


def _schedule_text(part: Part, schedule: Schedule) -> str:
    """The events of the piece's devices, in a comment at the end of its file."""
    lines = {device: row(schedule.events[device]) for device in part.piece.segment.devices}
    shown = [f"# device {device}: {text}" for device, text in lines.items()]
    if len(set(lines.values())) == 1:
        shown = [f"# {next(iter(lines.values()))}"]
    return "\n".join(["", "# The order of things:", *shown, ""])


def _piece(folder: str, part: Part, pipelined: Pipelined) -> dict[str, Any]:
    tensors = {one.tensor: at for at, one in enumerate(pipelined.graph.inputs)}
    graph = part.program.graph
    return {
        "name": part.piece.segment.name,
        "folder": folder,
        "devices": list(part.piece.segment.devices),
        "inputs": [tensors[one.tensor] for one in graph.inputs if one.tensor in tensors],
        "takes": list(part.piece.takes),
        "gives": [[name, graph.tensors[name].needs_grad] for name in part.piece.gives],
    }


class _Words:
    """Moves as what each device does."""

    def __init__(self) -> None:
        self._transfers = Transfers()

    def crossing(self, one: Crossing, pipelined: Pipelined) -> dict[str, Any]:
        tensor = pipelined.graph.tensors[one.tensor]
        return {
            "tensor": one.tensor,
            "source": one.source,
            "target": one.target,
            "dtype": str(tensor.dtype).removeprefix("torch."),
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

    def by_device(self, move: Move) -> dict[str, Any]:
        devices = sorted({*move.source.grid.devices, *move.target.grid.devices})
        found = {device: self._transfers.of(move, device) for device in devices}
        return {str(device): _transfer(one) for device, one in found.items() if one is not None}


def _transfer(one: Transfer) -> dict[str, Any]:
    return {
        "sends": [[piece.peer, piece.slot, piece.index] for piece in one.sends],
        "receives": [[piece.peer, piece.slot, piece.index] for piece in one.receives],
        "shapes": one.shapes,
        "add": one.add,
    }
