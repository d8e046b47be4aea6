"""`weft show FILE --plan P --memory`: bytes by kind and rank; with `--measure`, expected next to measured.

In: a compiled program and its model. Out: a table, or plain values for JSON. Expected is what the rank's code does with
tensors without content (`train/expected.py`); measured what two steps on processes of this machine left alive
(`train/measured.py`), which takes as long as these steps do. Ranks of the same shapes share a row: one of them is
foreseen, and of what was measured the largest is shown. What this machine has no memory for is not run, and that is
said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from weft.commands.console import fitted, wide_console
from weft.commands.modules import devices_text, show_bytes
from weft.compile import Compiled
from weft.compile.model_file import Subject
from weft.runtime.checks.ledger import KINDS, Bytes
from weft.train.memory.expected import Unforeseen, alike_ranks, expect_memory
from weft.train.memory.limit import NAMES, available
from weft.train.memory.measured import measure

Say = Callable[[str], None]

HEADS = {**{kind: NAMES.get(kind, kind) for kind in KINDS}, "peak": "peak of a step"}
FAR = 0.02
"""A measured number that is further from the expected one is marked."""


@dataclass(frozen=True)
class Row:
    """Ranks that are alike.

    Args:
        expected: None if it cannot be foreseen; measured: None if nothing was run.
    """

    ranks: tuple[int, ...]
    expected: Bytes | None
    measured: Bytes | None

    def as_json(self) -> dict[str, Any]:
        expected, measured = (None if one is None else one.as_json() for one in (self.expected, self.measured))
        return {"ranks": list(self.ranks), "expected": expected, "measured": measured}


@dataclass(frozen=True)
class Memory:
    """What is known of the memory of a program; `notes`: what is not, and why."""

    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {"memory": [row.as_json() for row in self.rows], "notes": list(self.notes)}


def memory_of(compiled: Compiled, subject: Subject, *, measures: bool = False, say: Say = lambda text: None) -> Memory:
    """Foresee, then measure if that is asked for."""
    groups, notes = alike_ranks(compiled), []
    expected: list[Bytes | None] = []
    try:
        for number, group in enumerate(groups, 1):
            say(f"foreseeing memory: {number} of {len(groups)} kinds of ranks")
            expected += [one.bytes for one in expect_memory(compiled.files, subject, [group])]
    except Unforeseen as error:
        notes.append(f"{error.message}{'' if measures else '; --measure measures it'}")
        expected = [None] * len(groups)
    measured = _measured(groups, expected, compiled, subject, notes, say) if measures else ()
    rows = [
        Row(group, one, max((measured[rank] for rank in group), key=lambda each: each.peak) if measured else None)
        for group, one in zip(groups, expected, strict=True)
    ]
    return Memory(tuple(rows), tuple(notes))


def _measured(
    groups: Sequence[Sequence[int]],
    expected: Sequence[Bytes | None],
    compiled: Compiled,
    subject: Subject,
    notes: list[str],
    say: Say,
) -> Sequence[Bytes]:
    """What each rank held; nothing, and a note, where this machine has no memory for it."""
    needed, there = _needed(groups, expected, subject), available()
    if there is not None and needed > there:
        notes.append(f"not measured: the processes would need {show_bytes(needed)}, {show_bytes(there)} are free here")
        return ()
    say(f"measuring memory: two steps on {compiled.devices} processes")
    return measure(subject.origin, compiled.files, precision=subject.precision)


def _needed(groups: Sequence[Sequence[int]], expected: Sequence[Bytes | None], subject: Subject) -> int:
    """Bytes of all processes together: each makes one tensor after the other whole, or all if they are not recorded."""
    tensors = [one.nbytes for one in (*subject.model.parameters(), *subject.model.buffers())]
    whole = sum(tensors) if subject.record is None else max(tensors, default=0)
    return sum(
        len(group) * (whole + (0 if one is None else one.peak)) for group, one in zip(groups, expected, strict=True)
    )


def show_memory(memory: Memory, title: str) -> None:
    """The table, for people."""
    console = wide_console()
    console.print(f"{title}: bytes of a rank", soft_wrap=True)
    known = [one for row in memory.rows for one in (row.expected, row.measured) if one is not None]
    kinds = [kind for kind in HEADS if any(getattr(one, kind) for one in known)]
    heads = [HEADS[kind] for kind in kinds]
    rows: list[tuple[str | Text, ...]] = []
    for row in memory.rows:
        lines = [("expected", row.expected), ("measured", row.measured)]
        for number, (name, one) in enumerate((name, one) for name, one in lines if one is not None):
            cells = [_cell(one, kind, row.expected if name == "measured" else None) for kind in kinds]
            rows.append(("" if number else devices_text(row.ranks), name, *cells))
    console.print(fitted(console, ("rank", "", *heads), rows, right=heads))
    for note in memory.notes:
        console.print(note, soft_wrap=True)
    console.print("tensors only: the interpreter, torch and its threads come on top of them in every process")


def _cell(one: Bytes, kind: str, other: Bytes | None) -> Text:
    size = getattr(one, kind)
    known = size if other is None else getattr(other, kind)
    far = abs(size - known) > FAR * max(size, known)
    return Text(show_bytes(size) or "0", style="yellow" if far else "")
