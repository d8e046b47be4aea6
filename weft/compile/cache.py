"""The cache of emitted programs: a directory each, named by a hash of all that it was made from.

In: a Graph, a Plan, the emitted files. Out: a directory `NAME-PLAN-KEY` that holds them; `program.json` among them
tells the key and the hashes of the files. Promised: what is found under a key was made from the same graph, plan, rules
of the user's, torch and weft, sources included (of a program in pieces: at every size of micro-batches); a program that
somebody has edited, or that is incomplete, is recognised as such and neither replaced nor used without a word; a
directory appears whole or not at all, whatever else is writing there.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from weft.errors import RunError
from weft.ir.graph import Graph
from weft.ir.show import show_graph
from weft.ops.registered import told_by_user
from weft.plan.lines import ScheduleLine, StageLine, StoreLine, TransLine
from weft.plan.plan import Plan
from weft.plan.primitives import RecomputeMark
from weft.runtime.program.files import PROGRAM, ProgramFiles, changes, files_of

DEFAULT = Path(".weft")
"""Where programs are kept unless the user says otherwise: in the working directory."""


ANEW = "move the directory away, and the program is made anew"
DESCRIBED = {"batch": dict, "size_of": list, "sizes": list, "events": dict, "ties": list, "loans": list}
"""What is written about every program, by kind."""
OLD = ("meta.json", "pipeline.json")
"""Files that described programs before."""


@dataclass(frozen=True)
class Found:
    """A program in a directory.

    Args:
        edited: what became of files that are not as they were emitted, by name: `edited` or `missing`.
    """

    directory: Path
    files: ProgramFiles
    edited: Mapping[str, str]

    def complete(self, remedy: str = ANEW) -> ProgramFiles:
        """All of its files, as they were left."""
        missing = [name for name, what in self.edited.items() if what == "missing"]
        if missing:
            raise RunError(
                f"the program in {self.directory} lacks {', '.join(missing)}", place=str(self.directory), remedy=remedy
            )
        return self.files


def read_program(directory: Path, remedy: str = ANEW) -> Found:
    """The program in a directory, of which nothing is run; refuses what is none."""
    try:
        files = files_of(directory)
        for key, kind in DESCRIBED.items():
            if not isinstance(files.about[key], kind):
                raise TypeError(f"{key!r} is no {kind.__name__}")
        for one in files.pieces.values():
            _ = files.devices, one.about["class"], one.about["ranks"]
        return Found(directory, files, changes(files))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if any((directory / name).is_file() for name in OLD):
            raise RunError(
                f"{directory} is a program of an older version of weft", place=str(directory), remedy=ANEW
            ) from None
        raise RunError(
            f"{directory} is no program of weft's: its {PROGRAM} cannot be read ({type(error).__name__}: {error})",
            place=str(directory),
            remedy=remedy,
        ) from None


def program_key(graph: Graph, plan: Plan, more: str = "", others: Sequence[Plan] = ()) -> str:
    """A hash of all that the emitted text depends on; `others`: plans that it is made from too."""
    digest = hashlib.sha256()
    for text in (*_ingredients(graph, plan), *(program_key(one.graph, one) for one in others), more):
        digest.update(f"{len(text)}:{text}".encode())
    return digest.hexdigest()


def _ingredients(graph: Graph, plan: Plan) -> Iterator[str]:
    yield f"torch {torch.__version__}, weft {source_hash()}"
    yield from _told_of(graph)
    yield from told_by_user(graph)
    yield f"{plan.devices}"
    for line in plan.lines:
        # a function that orders a step is no content: what it makes is told apart from the plan
        yield f"order by {line.text}" if isinstance(line, ScheduleLine) and callable(line.schedule) else repr(line)


def _told_of(graph: Graph) -> Iterator[str]:
    yield show_graph(graph)
    yield f"{graph.in_spec} {graph.out_spec} {graph.leaves} {graph.asks} {graph.reads}"
    for name, value in graph.constants.items():
        yield f"{name} {value.dtype} {tuple(value.shape)} {tensor_hash(value)}"


def graph_key(graph: Graph) -> str:
    """A hash of all that a program knows of its model; source lines are part of it, weights are not."""
    return hashlib.sha256("\0".join(_told_of(graph)).encode()).hexdigest()


def origin(graph: Graph) -> dict[str, str]:
    """What a program was made from and by, for its description: compared when the program is used again."""
    return {"graph": graph_key(graph), "weft": source_hash(), "torch": torch.__version__}


def tensor_hash(tensor: Tensor) -> str:
    """A hash of a tensor's content."""
    plain = tensor.detach().cpu().contiguous().reshape(-1)
    content = plain.view(torch.uint8) if plain.numel() else plain
    return hashlib.sha256(content.numpy().tobytes()).hexdigest()


@cache
def source_hash() -> str:
    """A hash of weft's own sources, its version among them."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def directory_of(folder: Path, plan: Plan, key: str) -> Path:
    """Where the program with this key belongs: `GPT-dp2-tp2-0123456789abcdef`."""
    name = "-".join((plan.graph.name or "program", *_gist(plan), key[:16]))
    return folder / re.sub(r"[^A-Za-z0-9_.]+", "-", name)


def _gist(plan: Plan) -> list[str]:
    """What a plan does, in words for a file name: its axes, stages, micro-batches, how parameters are stored."""
    trans = [one for line in plan.lines if isinstance(line, TransLine) for one in line.transforms]
    axes = {one.axis: one.size for one in trans if not isinstance(one, RecomputeMark) and one.axis}
    stages = sum(isinstance(line, StageLine) for line in plan.lines)
    stores = [line for line in plan.lines if isinstance(line, StoreLine)]
    words = [f"{axis}{size}" for axis, size in axes.items()]
    words += [f"pp{stages}"] if stages else []
    words += [f"mb{plan.microbatches}"] if plan.microbatches > 1 else []
    words += ["spread"] if any(line.devices is not None for line in stores) else []
    parts = {3 if line.state is None else 2 if line.reduced else 1 for line in stores if line.devices is None}
    words += [f"zero{stage}" for stage in sorted(parts)]
    return words + (["recompute"] if any(isinstance(one, RecomputeMark) for one in trans) else [])


def look_up(directory: Path, key: str) -> Found | None:
    """The program made under this key, if there is one."""
    if not directory.exists():
        return None
    found = read_program(directory)
    if found.files.about.get("key") != key:
        raise RunError(
            f"the program in {directory} was made from another model, plan or version of weft",
            place=str(directory),
            remedy="move it away or delete it, and it is made anew",
        )
    return found


def write(directory: Path, key: str, files: Mapping[str, bytes]) -> Found:
    """Store a program. If another process has stored it meanwhile, that one stays."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        write_files(fresh, files)
        fresh.chmod(0o777 & ~_umask())
        _rename(fresh, directory)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    found = look_up(directory, key)
    assert found is not None, f"{directory} is gone right after it was written"
    return found


def write_files(directory: Path, files: Mapping[str, bytes]) -> None:
    """The files of a program, into a directory that is there."""
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)


def _rename(fresh: Path, directory: Path) -> None:
    try:
        fresh.rename(directory)
    except OSError:
        # a directory of that name stands there already, with content: somebody was quicker
        if not directory.is_dir():
            raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
