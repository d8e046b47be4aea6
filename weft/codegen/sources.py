"""The user's lines as comments: the text of each once in a file.

In: runs of ops that stand together and come from one line, as functions are written; then the text of the file, in
which a mark stands above each run. Out: the text with comments. A line of the user's is cut where one of its ops is
moved before a loop, or is inside of one; the lines of a module that is called often come again and again. The text of a
line is above the run with the most ops, above others is its place alone: what is below a comment is of that line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from weft.codegen.text import WIDTH
from weft.ir.graph import Source

_METHOD = re.compile(r"^    def ", re.MULTILINE)
_MARK = re.compile(r"^( *)# \0(\d+)$", re.MULTILINE)


@dataclass(frozen=True)
class Run:
    """Ops that stand together and come from one line."""

    source: Source
    operators: tuple[str, ...]

    @property
    def line(self) -> tuple[str, int]:
        return self.source.file, self.source.line

    @property
    def place(self) -> str:
        return self.source.place

    @property
    def text(self) -> str:
        return f"{self.place}  {' '.join(self.source.text.split())}".rstrip()


class Sources:
    """The runs of one file."""

    def __init__(self) -> None:
        self._runs: dict[Run, int] = {}

    def mark(self, run: Run) -> str:
        """What stands for its comment until the file is complete: the same for like runs, as functions may be alike."""
        return f"\0{self._runs.setdefault(run, len(self._runs))}"

    def commented(self, text: str) -> str:
        """The text of a file with comments in place of marks."""
        runs = list(self._runs)
        by_line: dict[tuple[str, int], list[tuple[int, Run]]] = {}
        for mark in _MARK.finditer(text):
            run = runs[int(mark[2])]
            by_line.setdefault(run.line, []).append((mark.start(), run))
        _, *methods = [found.start() for found in _METHOD.finditer(text)]
        told = {_main(found, min(methods, default=0)) for found in by_line.values()}

        def comment(mark: re.Match[str]) -> str:
            run = runs[int(mark[2])]
            line = f"{mark[1]}# {run.text if mark.start() in told else f'{run.place} ...'}"
            return line if len(line) <= WIDTH else line[: WIDTH - 3].rstrip() + "..."

        return _MARK.sub(comment, text)


def _main(found: list[tuple[int, Run]], methods: int) -> int:
    """Where most of a line's ops are; of equals the last, or the first that does the same: in a method, which runs for
    many layers, if there is one.

    Args:
        methods: where those after forward begin.
    """
    most = max(len(run.operators) for _, run in found)
    largest = [(at, run) for at, run in found if len(run.operators) == most]
    same = [at for at, run in largest if run.operators == largest[-1][1].operators]
    return next((at for at in same if at > methods), same[0])
