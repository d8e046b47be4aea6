"""Frame: one function that is being written: its names, its statements, what it needs from its caller.

In: the steps of the function (for when names die) and its arguments. Out: lines, gathered under the grad mode and
autocast that the ops need. The writers of ops, moves and loops say their statements here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from weft.codegen.cells import Where
from weft.codegen.names import Names
from weft.codegen.sheet import Layer, Sheet
from weft.codegen.sources import Run
from weft.codegen.statements.reads import Stack, last_reads
from weft.codegen.text import TAB, assign
from weft.ir.graph import Source
from weft.ir.program import Step

Context = tuple[bool, Any]
PLAIN: Context = (True, None)
"""Grad mode as it is, no autocast."""


@dataclass(frozen=True)
class Statement:
    """One statement: an assignment, a line that ends with a colon, or a comment on the ops below it."""

    targets: str
    expression: str
    comment: str = ""
    context: Context = PLAIN
    depth: int = 0
    run: Run | None = None


class Frame:
    """One function."""

    def __init__(
        self,
        sheet: Sheet,
        steps: Sequence[Step | Stack],
        arguments: Sequence[str],
        returned: Sequence[str],
        *,
        layer: Layer | None = None,
        chunked: bool = False,
    ) -> None:
        self.sheet, self.layer, self.chunked = sheet, layer, chunked
        self.program, self.rank = sheet.program, sheet.ranks[0]
        reserved = set(sheet.reserved) | ({layer.variable} if layer else set())
        self.names = Names(last_reads(steps, self.program, returned), reserved)
        self.env: dict[str, str] = {}
        """The variable of each value."""
        self.inside: set[str] = set()
        """Values made in this function: inside a loop, of the current chunk."""
        self.needs_layer = self.needs_draw = False
        self.now = -1
        self._statements: list[Statement] = []
        self._open_run: int | None = None
        """The statement that is the comment on the last ops, if more may follow."""
        for name in arguments:
            self.env[name] = self.names.give(name, sheet.base(name), -1)

    def say(self, targets: str, text: str, comment: str = "", context: Context = PLAIN, depth: int = 0) -> None:
        """One more statement."""
        self._statements.append(Statement(targets, text, comment, context, depth))

    def say_source(self, source: Source, operator: str) -> None:
        """The user's line that the op said next comes from."""
        at = self._open_run
        before = None if at is None else self._statements[at].run
        if at is not None and before is not None and before.line == (source.file, source.line):
            self._statements[at] = Statement("", "", run=replace(before, operators=(*before.operators, operator)))
        else:
            self._open_run = len(self._statements)
            self._statements.append(Statement("", "", run=Run(source, (operator,))))

    def end_source(self) -> None:
        """What comes now is of another function: the user's line begins anew after it."""
        self._open_run = None

    def name(self, value: str, *, parts: bool = False) -> str:
        """A variable for a value made now."""
        base = self.sheet.base(value) + ("_parts" if parts else "")
        self.env[value] = self.names.give(value, base, self.now)
        return self.env[value]

    def same(self, value: str, text: str) -> None:
        """The value is what another variable holds."""
        self.env[value] = text
        self.names.alias(text, value)

    def slots(self, value: str) -> int:
        """How many tensors a rank holds of a value."""
        return len(self.program.values[value].layout.grid.cells_on.get(self.rank, ()))

    def read(self, value: str, slot: int | None = None) -> str:
        """A value as an expression: inside a loop the part of the current chunk; else that of a slot if told."""
        text = self.env.get(value)
        if text is None:
            text, layered = self.sheet.stored(value, self.layer)
            self.needs_layer = self.needs_layer or layered
        elif self.slots(value) > 1 and value not in self.inside:
            if self.chunked:
                return f"{text}[chunk]"
            if slot is not None:
                return f"{text}[{slot}]"
        return text

    def home(self, tensor: str) -> str:
        """Where a stored tensor stands; None if the rank stores nothing of it."""
        if self.rank not in self.program.stored[tensor].grid.cells_on:
            return "None"
        text, layered = self.sheet.home(tensor, self.layer)
        self.needs_layer = self.needs_layer or layered
        return text

    def look_up(self, hint: str, values: Mapping[Where, Any], slot: int | None) -> str:
        """A lookup of what differs; `slot` None: inside a loop, where it may differ by chunk too."""
        by_rank: dict[int, list[Any]] = {}
        for (rank, _), value in sorted(values.items(), key=lambda item: item[0]):
            by_rank.setdefault(rank, []).append(value)
        varies = slot is None and any(one != found[0] for found in by_rank.values() for one in found)
        table = {rank: tuple(found) if varies else found[0] for rank, found in by_rank.items()}
        return f"self.here.{self.sheet.tables.key('here', hint, table)}{'[chunk]' if varies else ''}"

    def give_back(self, results: Sequence[str]) -> None:
        """The last statement of a method: its results, the only one without a name of its own if it was made last."""
        if not results:
            return
        last = self._statements[-1] if self._statements else Statement("", "")
        if list(results) == [last.targets] and last.context == PLAIN and last.depth == 0:
            self._statements[-1] = Statement("", f"return {last.expression}", last.comment)
        else:
            self._statements.append(Statement("", f"return {', '.join(results)}"))

    def lines(self, depth: int = 2) -> list[str]:
        """The statements as text, gathered under the contexts that they need."""
        out: list[str] = []
        current: Context = PLAIN
        pending: list[Run] = []
        for statement in self._statements:
            if statement.run is not None:
                pending.append(statement.run)
                continue
            if statement.context != current:
                out += _opening(statement.context, depth)
                current = statement.context
            inner = depth + (current != PLAIN)
            out += [f"{TAB * inner}# {self.sheet.sources.mark(run)}" for run in pending]
            pending.clear()
            if statement.expression.endswith(":") and not statement.targets:
                out.append(TAB * inner + statement.expression)
            else:
                out += assign(statement.targets, statement.expression, inner + statement.depth, statement.comment)
        return out


def _opening(context: Context, depth: int) -> list[str]:
    grad, autocast = context
    words = [] if grad else ["torch.no_grad()"]
    if autocast is not None:
        words.append(f"torch.autocast(self.device.type, dtype={autocast.dtype}, enabled={autocast.enabled})")
    return [f"{TAB * depth}with {', '.join(words)}:"] if words else []
