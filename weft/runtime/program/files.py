"""Files of a program, in memory: by name, wherever they come from.

    program.py ...   the text, one file per distinct program
    parts.json       what differs by rank: tables by coordinates on the grid, or by rank
    meta.json        which rank runs which file, inputs, versions, and the hash of all of the above
    constants.pt     tensors baked into the program, if there are any
    pipeline.json    of a program in pieces, which has a folder of the above for each piece

In: a directory, or a mapping of contents. Out: `ProgramFiles`, which reads each table once, and tells whether something
was edited. Promised: files of a directory are called by their paths in tracebacks; others by their program's hash.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

META, PARTS, CONSTANTS, PIPELINE = "meta.json", "parts.json", "constants.pt", "pipeline.json"
GENERATED = "<weft "
"""How the names of files begin that are in no directory."""
NOT_RUN = ("key", "made_from", "spans", "hashes")
"""Of what is written about a pipeline: where it came from, and estimates."""


class ProgramFiles(dict[str, bytes]):
    """The files of a program, whole or in pieces.

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

    @property
    def in_pieces(self) -> bool:
        return PIPELINE in self

    @cached_property
    def about(self) -> dict[str, Any]:
        """What is written about the program."""
        return self._read(PIPELINE if self.in_pieces else META)

    @cached_property
    def parts(self) -> dict[str, Any]:
        """The tables."""
        return self._read(PARTS)

    @cached_property
    def folders(self) -> dict[str, ProgramFiles]:
        """The files of each piece, at each size of micro-batches, by folder; of a whole program itself."""
        if not self.in_pieces:
            return {"": self}
        names = [one["folder"] for size in self.about["sizes"] for one in size["pieces"]]
        return {name: self._under(name) for name in names}

    @property
    def devices(self) -> int:
        """How many ranks it is for."""
        return int(self.about["devices"])

    def path(self, name: str) -> str:
        """What a file is called in tracebacks."""
        return f"{self.where or GENERATED + self.about['hash'][:12] + '>'}/{name}"

    def _read(self, name: str) -> dict[str, Any]:
        if name not in self:
            raise FileNotFoundError(f"there is no {name}")
        found: dict[str, Any] = json.loads(self[name])
        return found

    def _under(self, folder: str) -> ProgramFiles:
        start = f"{folder}/"
        found = {name.removeprefix(start): content for name, content in self.items() if name.startswith(start)}
        return ProgramFiles(found, f"{self.where}/{folder}" if self.where else "")


Source = str | Path | Mapping[str, bytes]
"""Where a program is: a directory, or its files."""


def files_of(source: Source) -> ProgramFiles:
    """The files of a program; those that are missing are left out."""
    if isinstance(source, ProgramFiles):
        return source
    if isinstance(source, Mapping):
        return ProgramFiles(source)
    folder = Path(source)

    def read(*names: str) -> dict[str, bytes]:
        return {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}

    head = ProgramFiles(read(PIPELINE) or read(META), str(folder))
    return ProgramFiles(read(*head, *_listed(head.about)), str(folder))


def _listed(about: Mapping[str, Any]) -> list[str]:
    """The files of a program but for the one that tells of them."""
    named = {**dict.fromkeys(about.get("hashes", ())), **dict.fromkeys(about.get("files", ()))}
    if "files" in about:
        named.update(dict.fromkeys((PARTS, CONSTANTS)))
    return list(named)


def changes(source: Source) -> dict[str, str]:
    """The files that are not as they were written: `edited` or `missing`, by name."""
    files = files_of(source)
    hashes: dict[str, str] = files.about.get("hashes", {})
    names = [name for name in _listed(files.about) if name != CONSTANTS or name in hashes or name in files]
    found = {name: files[name] for name in names if name in files}
    missing = dict.fromkeys((name for name in names if name not in found), "missing")
    if not files.in_pieces and not missing and content_hash(found) == files.about["hash"]:
        return {}

    def as_written(name: str) -> bool:
        # the table of events is a file like others
        now = description_hash(files.about) if name == PIPELINE else file_hash(found[name])
        return hashes.get(name) == now

    return {**{name: "edited" for name in found if not as_written(name)}, **missing}


def file_hash(content: bytes) -> str:
    """The hash of one file."""
    return hashlib.sha256(content).hexdigest()


def content_hash(files: Mapping[str, bytes]) -> str:
    """One hash of files and their names."""
    found = hashlib.sha256()
    for name in sorted(files):
        found.update(name.encode() + b"\0" + hashlib.sha256(files[name]).digest())
    return found.hexdigest()


def description_hash(told: Mapping[str, Any]) -> str:
    """A hash of what runs of all that is written about a pipeline: not of where it came from."""
    runs = {key: value for key, value in told.items() if key not in NOT_RUN}
    return hashlib.sha256(json.dumps(runs, sort_keys=True).encode()).hexdigest()
