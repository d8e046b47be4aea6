"""Documents as programs: what a page shows is run, block by block, in a folder of its own, and compared with the page.

In: a Markdown file. Out: an AssertionError that names the block if something on the page is not so. The conventions:

- A `python` or `yaml` block whose first line is `# name.py`, or `# name.yaml`, is that file; any other `python` block
  runs at once.
- A `bash` block is a list of commands, one a line; `# exit code 1` behind one says how it ends, if not with 0.
- torchrun starts processes from nothing, which takes a minute on a busy machine: unless asked for, its script runs in
  this process, on emulated devices; what `python` runs does so too.
- A `text` block right behind one of these is what it prints, or the error that it ends in. Lines must appear in this
  order, `...` leaves some out, measured numbers may differ.
"""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch.distributed

import weft
from weft.cli import main
from weft.errors import WeftError

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# ([\w./-]+\.(?:py|yaml))\n")
CODE = re.compile(r"# exit code (\d+)$")
COMPARED = re.compile(r"^(loss|gradients|weights) [\d.]+e[+-]\d+ .*")
"""A row of verify's table: in which tensor two sides lie farthest apart is a matter of rounding."""
MEASURED = re.compile(r"(?<=rank )\d+(?= failed|: )|\d+(\.\d+)?e[+-]?\d+|\d+\.\d+|[\d,]+(?= steps/s| tokens/s| ms)")
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
STARTED = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone"],
    "sed": ["sed"],
}
"""Commands that are run as they stand, and what they are here."""

Read = Callable[[], str]
"""Gives what was printed since the last call."""


@dataclass(frozen=True)
class Block:
    """One fenced block, with the output that the page shows for it."""

    language: str
    text: str
    place: str
    shown: str | None

    @property
    def file(self) -> str | None:
        """The name of the file that it is."""
        found = FILE.match(self.text)
        return None if found is None or self.language == "bash" else found.group(1)

    @property
    def starts_many(self) -> bool:
        return self.language == "bash" and self.text.startswith("torchrun ")


def blocks(path: Path) -> Iterator[Block]:
    """All blocks that can be run."""
    page = path.read_text(encoding="utf-8")
    found = list(FENCE.finditer(page))
    for number, match in enumerate(found):
        if match.group(1) not in ("python", "bash") and not (match.group(1) == "yaml" and FILE.match(match.group(2))):
            continue
        after = found[number + 1] if number + 1 < len(found) else None
        follows = after is not None and after.group(1) == "text" and not page[match.end() : after.start()].strip()
        line = page.count("\n", 0, match.start()) + 1
        shown = after.group(2) if after is not None and follows else None
        yield Block(match.group(1), match.group(2), f"{path.name}:{line}", shown)


def run(path: Path, folder: Path, read: Read, *, long: bool = False) -> None:
    """Run a page in a folder that has the project's examples."""
    (folder / "examples").symlink_to(ROOT / "examples")
    for block in blocks(path):
        if block.file is not None:
            (folder / block.file).write_text(block.text, encoding="utf-8")
            continue
        read()
        printed = (
            run_python(block, folder, read) if block.language == "python" else run_commands(block, folder, read, long)
        )
        if block.shown is not None:
            compare(block, printed)


def run_python(block: Block, folder: Path, read: Read) -> str:
    """What a block prints; if it ends in an error of ours, and the page shows one, that."""
    # from a file, so that capture finds the source lines
    path = folder / "block.py"
    path.write_text(block.text, encoding="utf-8")
    try:
        exec(compile(block.text, str(path), "exec"), {"__name__": "__main__"})
    except WeftError as error:
        assert block.shown is not None, f"{block.place} ends in an error:\n{traceback.format_exc()}"
        return f"{read()}\n{type(error).__name__}: {error}"
    return read()


def run_commands(block: Block, folder: Path, read: Read, long: bool) -> str:
    """What the commands print, one after the other."""
    if block.starts_many and not long:
        run_emulated(folder / block.text.split()[-1])
        return read()
    return "\n".join(run_command(line, block.place, folder, read) for line in block.text.splitlines() if line)


def run_emulated(script: Path) -> None:
    """Run a script for torchrun in this process, all ranks as its threads."""
    # what `weft` gives on first use is not set there: once patched, it is deleted again
    with (
        patch.object(weft, "parallelize", partial(weft.parallelize, emulate=True)),
        patch.object(torch.distributed, "get_rank", lambda: 0),
    ):
        runpy.run_path(str(script))


def run_command(line: str, place: str, folder: Path, read: Read) -> str:
    """What one command prints, if it ends as it should."""
    expected = CODE.search(line)
    name, *rest = shlex.split(line, comments=True)
    if name in ("make", "pip"):
        assert name == "pip" or set(rest) <= TARGETS, f"{place}: no such target: {line}"
        return ""
    if name == "python":
        runpy.run_path(str(folder / rest[0]))
        code, printed = 0, read()
    elif name == "weft":
        code, printed = main(rest), read()
    else:
        assert name in STARTED, f"{place}: a command that no test runs: {line}"
        code, printed = start([*STARTED[name], *rest], folder)
    assert code == (0 if expected is None else int(expected.group(1))), f"{place}: {line}\n{printed}"
    return printed


def start(argv: list[str], folder: Path) -> tuple[int, str]:
    done = subprocess.run(
        argv,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    return done.returncode, done.stdout + done.stderr


def compare(block: Block, printed: str) -> None:
    """Every line that the page shows was printed, in this order."""
    assert block.shown is not None
    left = iter(plain(printed))
    for line in plain(block.shown):
        assert line == "..." or line in left, f"{block.place} shows a line that was not printed: {line}\n{printed}"


def plain(text: str) -> list[str]:
    """Lines without what differs from run to run: measured numbers, and how wide a table is."""
    lines = [" ".join(line.replace("─", "").split()) for line in text.splitlines()]
    return [MEASURED.sub("#", COMPARED.sub(r"\1 #", line)) for line in lines if line]
