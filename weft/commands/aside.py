"""What the commands share: where the user's own output goes, and plain tables."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout


def aside(options: argparse.Namespace) -> AbstractContextManager[object]:
    """With --json what the user's code prints goes to stderr: the last line of stdout is ours."""
    return redirect_stdout(sys.stderr) if options.json else nullcontext()


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns, however wide: a tensor's name is never shortened."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in (head, *rows)
    )
