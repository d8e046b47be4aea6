"""Files of a program, in memory: by name, wherever they come from.

    program.json     batches, pieces, crossings, events, where it came from, and the hashes of all files
    program.py ...   the text of a piece, one file per distinct program
    parts.json       of a piece: what differs by rank: tables by coordinates on the grid, or by rank
    constants.pt     of a piece: tensors baked into it, if there are any

The files of the only piece of a program without stages stand beside `program.json`; otherwise each piece has a folder.

In: a directory, or a mapping of contents. Out: `ProgramFiles`, which reads each table once, and tells whether something
was edited. Promised: files of a directory are called by their paths in tracebacks; others by their program's hash.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

PROGRAM, PARTS, CONSTANTS = "program.json", "parts.json", "constants.pt"
GENERATED = "<weft "
"""How the names of files begin that are in no directory."""
NOT_RUN = ("key", "made_from", "spans", "hash")
"""Of what is written about a program: where it came from, and estimates."""


class ProgramFiles(dict[str, bytes]):
    """The files of a program.

    Args:
        where: the directory that they are from; "" if they are from none.
    """

    def __init__(self, content: Mapping[str, bytes], where: str = "") -> None:
        super().__init__(content)
        self.where = where
        self.classes: dict[str, Any] = {}
        """The classes that were loaded, by file."""

    def __reduce__(self) -> tuple[type[ProgramFiles], tuple[dict[str, bytes], str]]:
        return ProgramFiles, (dict(self), self.where)

    @cached_property
    def about(self) -> dict[str, Any]:
        """What is written about the program."""
        if PROGRAM not in self:
            raise FileNotFoundError(f"there is no {PROGRAM}")
        found: dict[str, Any] = json.loads(self[PROGRAM])
        return found

    @property
    def is_whole(self) -> bool:
        """True if it is one piece that runs all of the batch when it is called, in no order of events."""
        return not self.about["events"]

    @cached_property
    def pieces(self) -> dict[str, PieceFiles]:
        """The files of each piece, at each size of micro-batches, by folder."""
        return {one["folder"]: PieceFiles(self, one) for size in self.about["sizes"] for one in size["pieces"]}

    @property
    def devices(self) -> int:
        """How many ranks it is for."""
        return int(self.about["devices"])

    def path(self, name: str) -> str:
        """What a file is called in tracebacks."""
        return f"{self.where or GENERATED + self.about['hash'][:12] + '>'}/{name}"


@dataclass(frozen=True)
class PieceFiles:
    """The files of one piece.

    Args:
        about: what is written about it.
    """

    program: ProgramFiles
    about: Mapping[str, Any]

    def name(self, file: str) -> str:
        """Of one of its files, among those of the program."""
        return f"{self.about['folder']}/{file}" if self.about["folder"] else file

    @property
    def texts(self) -> list[str]:
        """The names of its files of text."""
        return [self.name(file) for file in self.about["files"]]

    def text_of(self, rank: int) -> str:
        """The one that a rank of the piece runs."""
        number: int = self.about["ranks"][rank]
        return self.texts[number]

    @cached_property
    def parts(self) -> dict[str, Any]:
        """The tables."""
        found: dict[str, Any] = json.loads(self.program[self.name(PARTS)])
        return found


Source = str | Path | Mapping[str, bytes]
"""Where a program is: a directory, or its files."""


def files_of(source: Source) -> ProgramFiles:
    """The files of a program; those that are missing are left out."""
    if isinstance(source, ProgramFiles):
        return source
    if isinstance(source, Mapping):
        return ProgramFiles(source)
    folder = Path(source)

    def read(*names: str) -> ProgramFiles:
        found = {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}
        return ProgramFiles(found, str(folder))

    pieces = read(PROGRAM).pieces.values()
    return read(PROGRAM, *(name for one in pieces for name in (*one.texts, one.name(PARTS), one.name(CONSTANTS))))


def changes(source: Source) -> dict[str, str]:
    """The files that are not as they were written: `edited` or `missing`, by name."""
    files = files_of(source)
    hashes: dict[str, str] = {**files.about["hashes"], PROGRAM: files.about["hash"]}

    def hash_now(name: str) -> str:
        # the table of events is a file like others
        return description_hash(files.about) if name == PROGRAM else file_hash(files[name])

    edited = {name: "edited" for name in files if hash_now(name) != hashes.get(name)}
    return {**edited, **{name: "missing" for name in hashes if name not in files}}


def file_hash(content: bytes) -> str:
    """The hash of one file."""
    return hashlib.sha256(content).hexdigest()


def description_hash(about: Mapping[str, Any]) -> str:
    """A hash of what runs of a program, from what is written about it: not of where it came from."""
    runs = {key: value for key, value in about.items() if key not in NOT_RUN}
    return file_hash(json.dumps(runs, sort_keys=True).encode())


def with_description(files: Mapping[str, bytes], about: Mapping[str, Any]) -> dict[str, bytes]:
    """The files of a program's pieces, and what is written about them, with the hashes of all."""
    hashes = {name: file_hash(content) for name, content in files.items()}
    told = {**about, "hashes": hashes}
    told["hash"] = description_hash(told)
    return {**files, PROGRAM: (json.dumps(told, indent=1) + "\n").encode()}
