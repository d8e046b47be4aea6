"""Code tokens of weft/: the size that budgets hold (`budgets.py`), by package and in all.

    python -m tests.house.tokens [--against REV]

Counted are names, operators, numbers and strings. Docstrings, other strings that stand alone, comments and imports are
not: nobody should save on them. An f-string is one token, on every version of Python. With `--against` the table says
what a revision of git had and what this checkout has; the revision is not checked out for it. Tests are counted apart.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import tarfile
import token
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.house.parsed import parsed

ROOT = Path(__file__).parents[2]
TOP = "(top)"
"""The package of modules that lie in weft/ itself."""
COUNTED = {token.NAME, token.OP, token.NUMBER, token.STRING}
# From Python 3.12 on an f-string is several tokens (and from 3.14 on a t-string), before that it is one.
_STARTS, _ENDS = (
    {getattr(token, f"{kind}_{which}") for kind in ("FSTRING", "TSTRING") if hasattr(token, f"{kind}_{which}")}
    for which in ("START", "END")
)

Sources = Mapping[str, str]
"""Text by path from the root, `weft/...`."""


@dataclass(frozen=True)
class Size:
    """Of a package."""

    tokens: int = 0
    lines: int = 0
    files: int = 0

    def __add__(self, other: Size) -> Size:
        return Size(self.tokens + other.tokens, self.lines + other.lines, self.files + other.files)


def count(text: str) -> int:
    """Code tokens of a module."""
    apart = _not_code(parsed(text))
    return sum(line not in apart for line in _token_lines(text))


def package_of(path: str) -> str:
    parts = Path(path).parts
    return parts[1] if len(parts) > 2 else TOP


def sizes(sources: Sources) -> dict[str, Size]:
    """By package, the largest first."""
    found: dict[str, Size] = {}
    for path, text in sources.items():
        package = package_of(path)
        found[package] = found.get(package, Size()) + Size(count(text), text.count("\n"), 1)
    return dict(sorted(found.items(), key=lambda item: -item[1].tokens))


def total(found: Mapping[str, Size]) -> Size:
    return sum(found.values(), Size())


def here(folder: str = "weft") -> Sources:
    """The modules of this checkout."""
    paths = sorted((ROOT / folder).rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def at(revision: str, folder: str = "weft") -> Sources:
    """The modules of a revision of git."""
    command = ["git", "-C", str(ROOT), "archive", "--format=tar", revision, folder]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        raise SystemExit(f"git cannot read {revision}: {done.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as files:
        return {
            item.name: content.read().decode("utf-8")
            for item in files
            if item.name.endswith(".py") and (content := files.extractfile(item)) is not None
        }


def table(now: Mapping[str, Size], before: Mapping[str, Size] | None = None) -> str:
    """Tokens, lines and files by package and in all, in Markdown; with `before`, both and the change of tokens."""
    rows = [*sorted({*now, *(before or {})}, key=lambda name: -now.get(name, Size()).tokens), "all"]
    now = {**now, "all": total(now)}
    if before is None:
        head = ["package", "tokens", "lines", "files"]
        lines = [[name, *_cells(now[name])] for name in rows]
    else:
        before = {**before, "all": total(before)}
        head = ["package", "tokens before", "after", "change", "lines before", "after", "files before", "after"]
        lines = [[name, *_change(before.get(name, Size()), now.get(name, Size()))] for name in rows]
    marks = ["---", *("---:" for _ in head[1:])]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, marks, *lines))


def _cells(size: Size) -> list[str]:
    return [f"{size.tokens:,}", f"{size.lines:,}", f"{size.files:,}"]


def _change(before: Size, after: Size) -> list[str]:
    tokens, lines, files = (f"{number:,}" for number in (after.tokens, after.lines, after.files))
    was = _cells(before)
    return [was[0], tokens, f"{after.tokens - before.tokens:+,}", was[1], lines, was[2], files]


def _not_code(tree: ast.AST) -> set[int]:
    """Numbers of the lines that hold an import, or a string that is a statement by itself."""
    found: set[int] = set()
    for node in ast.walk(tree):
        text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        if text or isinstance(node, ast.Import | ast.ImportFrom):
            assert isinstance(node, ast.stmt)
            found.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return found


def _token_lines(text: str) -> Iterator[int]:
    """The number of the line on which each counted token starts."""
    for one in _whole_strings(tokenize.generate_tokens(io.StringIO(text).readline)):
        if one.type in COUNTED or one.type in _STARTS:
            yield one.start[0]


def _whole_strings(tokens: Iterable[tokenize.TokenInfo]) -> Iterator[tokenize.TokenInfo]:
    """All tokens, of an f-string only the one that starts it."""
    depth = 0
    for one in tokens:
        depth -= one.type in _ENDS
        if not depth:
            yield one
        depth += one.type in _STARTS


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.house.tokens", description="code tokens of weft/, by package"
    )
    parser.add_argument("--against", metavar="REV", help="a revision of git to compare with")
    options = parser.parse_args()
    for folder in ("weft", "tests"):
        before = None if options.against is None else sizes(at(options.against, folder))
        print(f"{folder}:\n\n{table(sizes(here(folder)), before)}\n")


if __name__ == "__main__":
    main()
