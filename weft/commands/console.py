"""What the commands share: where the user's own output goes, consoles, tables."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Container, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from weft.errors import WeftError

WIDE = 200
"""Columns of piped text, unless COLUMNS says otherwise."""


def user_output(options: argparse.Namespace) -> AbstractContextManager[object]:
    """With --json what the user's code prints goes to stderr: the last line of stdout is ours."""
    return redirect_stdout(sys.stderr) if options.json else nullcontext()


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns, however wide: a tensor's name is never shortened."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in (head, *rows)
    )


def wide_console() -> Console:
    """For tables: as wide as the terminal, or as COLUMNS says; other piped text is not squeezed into 80 columns."""
    console = Console(highlight=False, markup=False)
    narrow = console.is_terminal or os.environ.get("COLUMNS", "").isdigit()
    return console if narrow else Console(highlight=False, markup=False, width=WIDE)


def plain_console(*, stderr: bool = False) -> Console:
    """For lines: what users call their things is printed as it is, however long."""
    return Console(stderr=stderr, highlight=False, markup=False, soft_wrap=True)


def check_writable(path: str, place: str) -> None:
    """Refuse a file that cannot be written, before the work for it begins."""
    file = Path(path)
    there = file if file.exists() else file.absolute().parent
    if file.is_dir() or not there.exists() or not os.access(there, os.W_OK):
        raise WeftError(f"{path} cannot be written", place=place, remedy="a file in a folder that is there")


Row = Sequence[str | Text]


def fitted(
    console: Console,
    heads: Sequence[str],
    rows: Sequence[Row],
    *,
    right: Container[str] = (),
    optional: Sequence[str] = (),
    styles: Sequence[str] = (),
) -> Table:
    """A table as wide as the console at most: first optional columns are left out, then cells are broken.

    Args:
        heads: of the columns; the first is never broken.
        right: columns that stand to the right.
        optional: columns that may be left out, the first to go first.
        styles: of the rows, if they have some.
    """
    widths = {head: max([len(head), *(len(str(row[number])) for row in rows)]) for number, head in enumerate(heads)}
    shown = list(heads)
    for head in optional:
        if sum(widths[one] + len(GAP) for one in shown) - len(GAP) > console.width:
            shown.remove(head)
    found = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    for head in shown:
        found.add_column(head, no_wrap=head == heads[0], justify="right" if head in right else "left")
    for number, row in enumerate(rows):
        cells = [
            Text(str(one)) if isinstance(one, str) else one
            for one, head in zip(row, heads, strict=True)
            if head in shown
        ]
        found.add_row(*cells, style=styles[number] if styles else "")
    return found


GAP = "  "
"""Between columns."""
