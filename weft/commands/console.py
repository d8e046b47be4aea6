"""What the commands share: where the user's own output goes, consoles, tables."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Container, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

WIDE = 200


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
    """For tables: piped text is not squeezed into 80 columns."""
    console = Console(highlight=False, markup=False)
    return console if console.is_terminal else Console(highlight=False, markup=False, width=WIDE)


def plain_console(*, stderr: bool = False) -> Console:
    """For lines: what users call their things is printed as it is, however long."""
    return Console(stderr=stderr, highlight=False, markup=False, soft_wrap=True)


def headed(heads: Sequence[str], right: Container[str] = ()) -> Table:
    """An empty table whose first column is never broken; columns in `right` stand to the right."""
    found = Table(box=SIMPLE_HEAD, pad_edge=False)
    for number, head in enumerate(heads):
        found.add_column(head, no_wrap=not number, justify="right" if head in right else "left")
    return found
