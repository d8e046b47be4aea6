"""Logical lines: a program's text as statements, whatever lines they are broken into, and back.

In: text as the emitter leaves it. Out: one Line for each statement, comment or empty line. A Line that nobody changed
is printed as it stood; one that was changed is broken anew, by the rules of `text.py`.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from weft.codegen.text import TAB, last_bracket, statement, top_level

TOKEN = re.compile(
    r'"(?:[^"\\]|\\.)*"'  # strings hold no sizes
    r"|[A-Za-z_]\w*"
    r"|\d+\.\d+(?:[eE][-+]?\d+)?|\d+[eE][-+]?\d+"
    r"|\d+"
    r"|\s+|."
)
DEF = re.compile(r"def \w+\(")


@dataclass(frozen=True)
class Line:
    """A statement.

    Args:
        code: on one line, without its indent; "" if there is none.
        comment: after it, or alone.
        rows: as it stood.
    """

    indent: int
    code: str
    comment: str
    rows: tuple[str, ...]

    def laid_out(self) -> list[str]:
        """The statement broken anew."""
        code, note = self.code, self.comment
        if DEF.match(code):
            opening = code.index("(")
            closing = code.rindex(")", 0, code.rindex("->"))
            inside = top_level(code[opening + 1 : closing])
            return statement(code[: opening + 1], inside, code[closing:], self.indent)
        opening = last_bracket(code)
        inside_text = code[opening + 1 : -1]
        if opening < 0 or inside_text.rstrip().endswith(","):
            return statement(code, (), "", self.indent, note)
        return statement(code[: opening + 1], top_level(inside_text), code[-1], self.indent, note)


def logical_lines(text: str) -> list[Line]:
    """The lines of a text."""
    rows = text.splitlines()
    found: list[Line] = []
    start = 0
    for stop, comments in _ends(text):
        block = rows[start:stop]
        code = _joined([row[: comments[start + i]] if start + i in comments else row for i, row in enumerate(block)])
        last = stop - 1
        comment = rows[last][comments[last] :].removeprefix("# ") if last in comments else ""
        indent = (len(block[0]) - len(block[0].lstrip())) // len(TAB)
        found.append(Line(indent, code, comment, tuple(block)))
        start = stop
    return found


def _ends(text: str) -> Iterator[tuple[int, dict[int, int]]]:
    """Where each logical line ends (the row after it), and where the comments in it begin, by row."""
    comments: dict[int, int] = {}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comments[token.start[0] - 1] = token.start[1]
        elif token.type == tokenize.NEWLINE or (token.type == tokenize.NL and _ends_line(token)):
            yield token.start[0], comments
            comments = {}


def _ends_line(token: tokenize.TokenInfo) -> bool:
    """True for the end of a row that holds a comment or nothing; false inside of brackets."""
    before = token.line[: token.start[1]].strip()
    return not before or before.startswith("#")


def _joined(rows: Iterable[str]) -> str:
    out = ""
    for row in (row.strip() for row in rows):
        if out and row[:1] in ")]}" and row:
            out = out.removesuffix(",") + row
        else:
            out += row if not out or out[-1] in "([{" else f" {row}"
    return out


def tokens(text: str) -> list[str]:
    """Words, numbers, strings, single characters and the space between them."""
    return TOKEN.findall(text)


def is_number(token: str) -> bool:
    return token[:1].isdigit()


def shape_of(lines: Sequence[Line]) -> tuple[str, ...]:
    """What a text is but for its numbers and its comments after statements."""
    return tuple(
        "".join("0" if is_number(token) else token for token in tokens(line.code)) or line.comment for line in lines
    )
