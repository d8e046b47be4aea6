"""A plan in pieces, for people: the table of its stages, and its time table.

In: a pipeline, compiled. Out: a row for each piece: its modules, devices, share of the estimated time, what it gives to
others; and the order of events, drawn with the idle share as if all pieces took equally long, a backward twice its
forward. The idle share by estimated times is told beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from weft.commands.console import fitted, wide_console
from weft.commands.modules import MODEL, show_bytes
from weft.commands.verify import idle_words
from weft.compile.pieces import InPieces
from weft.lower.pipeline import Part, Pipelined
from weft.ops.work import work_of
from weft.order import draw, simulate
from weft.plan.plan import Plan

HEADS = ("piece", "modules", "devices", "ops", "time", "weights", "gives, per micro-batch")
SOME = 4
"""Modules that a row names."""
LIVE = "live: for how many micro-batches a device keeps values at a time"
WHOLE = f"F forward, B backward, twice as long; {LIVE}"
DIVIDED = f"F forward, B backward, W weight gradients, each as long; {LIVE}"


@dataclass(frozen=True)
class PieceRow:
    """One piece.

    Args:
        work: its share of the floating-point work of a forward; time: of the estimated time of a micro-batch, over all
            pieces, each on its own devices.
        stored: bytes of the parameters that it reads.
        gives: bytes that each piece which reads from it gets, per micro-batch; as many come back, as gradients.
    """

    piece: str
    modules: list[str]
    devices: list[int]
    operators: int
    work: float
    time: float
    stored: int
    gives: dict[str, int]


def piece_rows(made: InPieces) -> list[PieceRow]:
    """All pieces, in the order of the pipeline."""
    first = made.sizes[0]
    flops = [_flops(part, made.plan) for part in first.parts]
    total = sum(flops) or 1
    times = {name: span.f + span.b + span.w for name, span in made.spans.items()}
    step = sum(times.values()) or 1
    return [
        PieceRow(
            piece=part.piece.segment.name,
            modules=_modules(part),
            devices=list(part.piece.segment.devices),
            operators=len(part.program.graph.ops),
            work=count / total,
            time=times[part.piece.segment.name] / step,
            stored=sum(first.graph.tensors[one.tensor].num_bytes for one in part.program.graph.parameters),
            gives=_gives(part.piece.segment.name, first),
        )
        for part, count in zip(first.parts, flops, strict=True)
    ]


def _flops(part: Part, plan: Plan) -> int:
    graph = part.program.graph
    return sum(work_of(op, plan.rules.rule(op), graph).flops for op in graph.ops)


def _modules(part: Part) -> list[str]:
    """Paths of the outermost modules that lie in the piece, layers spelled out as ranges."""
    found: dict[str, None] = {}
    for op in part.piece.ops:
        words = op.path.split(".")
        depth = next((at + 1 for at, word in enumerate(words) if word.isdigit()), 1)
        found.setdefault(".".join(words[:depth]))
    return _ranges([path for path in found if path]) or [MODEL]


def _ranges(paths: Sequence[str]) -> list[str]:
    """Numbers that follow each other as one.

    >>> _ranges(["emb", "h.0", "h.1", "h.2", "ln"])
    ['emb', 'h.0-2', 'ln']
    """
    found: list[tuple[str, list[int]]] = []
    for path in paths:
        head, _, last = path.rpartition(".")
        if last.isdigit() and found and found[-1][0] == head and found[-1][1] and found[-1][1][-1] + 1 == int(last):
            found[-1][1].append(int(last))
        else:
            found.append((head, [int(last)]) if last.isdigit() else (path, []))
    return [
        head if not numbers else f"{head}.{numbers[0]}" + (f"-{numbers[-1]}" if len(numbers) > 1 else "")
        for head, numbers in found
    ]


def _gives(name: str, pipelined: Pipelined) -> dict[str, int]:
    found: dict[str, int] = {}
    for one in pipelined.crossings:
        if one.source == name:
            found[one.target] = found.get(one.target, 0) + pipelined.graph.tensors[one.tensor].num_bytes
    return found


def idle_shares(made: InPieces) -> dict[str, float]:
    """By unit times, and by estimated ones."""
    estimated = simulate(made.pipeline, made.schedule, made.spans)
    return {"idle": simulate(made.pipeline, made.schedule).idle, "idle_estimated": estimated.idle}


def as_json(made: InPieces) -> dict[str, Any]:
    """What the tables show, as plain values."""
    return {
        "pieces": [asdict(row) for row in piece_rows(made)],
        "microbatches": made.plan.microbatches,
        **idle_shares(made),
        "schedule": {
            str(device): [str(event) for event in events] for device, events in sorted(made.schedule.events.items())
        },
    }


def show_pieces(made: InPieces, title: str) -> None:
    """The table of pieces."""
    console = wide_console()
    devices = "1 device" if made.plan.devices == 1 else f"{made.plan.devices} devices"
    console.print(f"{title}: {devices}, {_counts(made)}", soft_wrap=True)
    rows = []
    for row in piece_rows(made):
        some = ", ".join(row.modules[:SOME]) + (", ..." if len(row.modules) > SOME else "")
        gives = ", ".join(f"{show_bytes(count)} to {name}" for name, count in row.gives.items())
        where = ", ".join(map(str, row.devices))
        rows.append((row.piece, some, where, str(row.operators), f"{row.time:.0%}", show_bytes(row.stored), gives))
    console.print(fitted(console, HEADS, rows, right=("ops", "time", "weights"), optional=("ops",)))
    for one in made.sizes[0].ties:
        name = made.sizes[0].graph.parameter_tensors[one.parameter].names[0]
        console.print(f"tied: {name} in {', '.join(one.holders)}; gradients are added up")
    console.print(f"{idle_words(idle_shares(made))}; --schedule draws the order of events")


def show_schedule(made: InPieces, title: str) -> None:
    """The time table, coloured by micro-batch."""
    console = wide_console()
    console.print(f"{title}: {_counts(made)}", soft_wrap=True)
    console.print(
        draw(made.pipeline, simulate(made.pipeline, made.schedule), width=console.width - len(" ...")), soft_wrap=True
    )
    divided = any(event.phase == "w" for event in made.schedule.every())
    console.print(DIVIDED if divided else WHOLE)
    console.print(idle_words(idle_shares(made)))


def _counts(made: InPieces) -> str:
    pieces, parts = len(made.pipeline.segments), made.plan.microbatches
    return f"{pieces} piece{'s' * (pieces > 1)}, {parts} micro-batch{'es' * (parts > 1)}"
