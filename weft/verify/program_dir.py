"""verify_program(): does a program, as it lies in a directory, give the same numbers as one device?

In: a model file and a directory that a program, whole or in pieces, was emitted to, perhaps edited since. Out: a
Result, and what became of the program: as emitted, edited (which files), or stale (made from another model, or by
another weft or torch).
Promised: what runs is the code in the directory; nothing there is changed. A program that does not fit the model is
refused with the first thing that does not; a stale one that fits is verified against the model as it is now.
"""

from __future__ import annotations

import pickle
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from torch import nn

from weft.compile.cache import Found, origin, read_program
from weft.compile.model_file import Subject
from weft.compile.optimizer import check_on_parts
from weft.compile.subject import capture_subject, in_precision, make_subject
from weft.errors import PlanError, RunError, WeftError
from weft.ir.graph import Graph
from weft.ir.schedule import Event, Pipeline, Schedule, Segment
from weft.order import Span, check_schedule
from weft.runtime.jobs.devices import Device
from weft.runtime.program.batch import dtype_name
from weft.runtime.program.files import CONSTANTS, PARTS, PieceFiles
from weft.runtime.program.load import cut_parameters, load_classes, load_constants, tupled
from weft.runtime.program.module import ParallelModule
from weft.runtime.weights.precision import Precision
from weft.verify.compare import Result
from weft.verify.judged import Say, judge
from weft.verify.processes import make_pool
from weft.verify.summary import summarize_pieces

ANEW = "move the directory away and write the program anew: weft show FILE --plan P --out DIR"


@dataclass(frozen=True)
class ProgramDirectory(Found):
    """A program in a directory.

    Args:
        stale: what it was made from that is not so now, in words.
    """

    stale: tuple[str, ...] = ()

    def __str__(self) -> str:
        words = ["as emitted"] if not self.edited else []
        if self.edited:
            words.append(f"edited ({', '.join(self.edited)})")
        words += [f"stale: made from {', '.join(self.stale)}"] if self.stale else []
        return f"the program in {self.directory} is {'; '.join(words)}"

    def as_json(self) -> dict[str, Any]:
        return {"directory": str(self.directory), "edited": list(self.edited), "stale": list(self.stale)}


def verify_program(  # noqa: PLR0913 - public: each argument is a choice of the user's
    model_or_file: nn.Module | str | Path,
    example: Any = None,
    *,
    program: str | Path,
    devices: int | None = None,
    seed: int = 0,
    tolerance: float = 1e-9,
    processes: bool = False,
    device: Device | None = None,
    backend: str | None = None,
    timeout: float | None = None,
    precision: Precision | str | None = None,
    say: Say = lambda text: None,
    tell: Say = lambda text: None,
) -> Result:
    """Compare the program in a directory, as it lies there, with the eager module on one device, in float64.

    Args:
        program: the directory.
        devices: refused if the program is for another number.
        tell: is told, before anything runs, what became of the program since it was emitted.
        model_or_file, example, seed, tolerance, processes, device, backend, timeout, precision, say: as of `verify`.
    """
    found = open_directory(program)
    files = found.files
    if devices is not None and devices != files.devices:
        raise PlanError(
            f"the program is for {files.devices} devices, {devices} were asked for",
            place=str(found.directory),
            remedy="leave out --devices, or emit a program for that many: weft show FILE --plan P --out DIR",
        )
    say("loading the model")
    subject = in_precision(make_subject(model_or_file, example), precision)
    say("capturing the model")
    graph = capture_subject(subject)
    found = compare_origin(found, graph)
    tell(str(found))
    # whatever is wrong with the text is told with its own line
    with own_lines(found):
        classes = load_classes(files)
    check_program_fits(found, classes, graph, subject)
    check_on_parts(subject, cut_parameters(files))
    with (
        own_lines(found),
        make_pool(files.devices, processes=processes, device=device, backend=backend, timeout=timeout) as pool,
    ):
        result = judge(files, graph, subject, seed=seed, tolerance=tolerance, say=say, pool=pool)
        summary: dict[str, Any] = {"operators": len(graph.ops)}
        if not files.is_whole:
            summary = summarize_pieces(*order_of(files.about), spans_in(files.about), graph)
        return replace(result, summary={**summary, "program": found.as_json()})


def open_directory(directory: str | Path) -> ProgramDirectory:
    """What lies there, without running any of it. A missing or broken file is told by name."""
    folder = Path(directory)
    if not folder.is_dir():
        raise RunError(f"there is no directory {folder}", remedy="weft show FILE --plan P --out DIR writes a program")
    found = read_program(
        folder, "give the directory that weft show --out or weft train wrote; if this is one, write it anew"
    )
    files = found.complete(ANEW)
    assert files.devices >= 1, f"{folder} is for {files.devices} devices"
    for one in files.pieces.values():
        _read_tables(one)
    if not files.is_whole:
        # the events may be edited too: they are proven before they run
        check_schedule(*order_of(files.about))
    return ProgramDirectory(folder, files, found.edited)


def _read_tables(piece: PieceFiles) -> None:
    """Refuse tables and constants that cannot be read."""
    at = PARTS
    try:
        _ = [piece.parts[key] for key in ("here", "stored", "moves")]
        at = CONSTANTS
        load_constants(piece, "cpu")
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise RunError(
            f"{at} cannot be read: {type(error).__name__}: {str(error).splitlines()[0]}",
            place=piece.program.path(piece.name(at)),
            remedy=ANEW,
        ) from None


def order_of(told: Mapping[str, Any]) -> tuple[Pipeline, Schedule]:
    """The Pipeline and the Schedule of what is written about a program in pieces."""
    names = [field.name for field in fields(Segment)]
    segments = [Segment(**{name: tupled(one[name]) for name in names}) for one in told["sizes"][0]["pieces"]]
    events = {
        int(device): tuple(Event(phase, piece, int(micro)) for phase, piece, micro in row)
        for device, row in told["events"].items()
    }
    return Pipeline(tuple(segments), len(told["size_of"])), Schedule(events)


def spans_in(told: Mapping[str, Any]) -> dict[str, Span]:
    """How long the phases of each piece take, as was estimated when it was made."""
    return {name: Span(*times) for name, times in (told.get("spans") or {}).items()}


def compare_origin(found: ProgramDirectory, graph: Graph) -> ProgramDirectory:
    """What the program was made from that is not so now."""
    made, now = found.files.about.get("made_from") or {}, origin(graph)
    words = {"graph": "another state of the model", "weft": "another weft", "torch": f"torch {made.get('torch')}"}
    # a program emitted by hand says nothing of its origin: whether it fits is seen all the same
    return replace(found, stale=tuple(words[key] for key in words if key in made and made[key] != now[key]))


def check_program_fits(
    found: ProgramDirectory, classes: Sequence[type[ParallelModule]], graph: Graph, subject: Subject
) -> None:
    """Refuse a program whose parameters, buffers or inputs are not the model's."""
    model = subject.model
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    known = {name: tuple(tensor.shape) for name, tensor in tensors}
    stored = {name: part.shape for cls in classes for name, part in cls.stored_parts().items()}
    held = {each for one in graph.parameters for each in one.names}
    held |= {each for one in graph.buffers for each in one.names}
    wrong = [f"it stores {name}, which the model has not" for name in stored if name not in known]
    dtypes = {each: graph.tensors[one.tensor].dtype for one in graph.parameters for each in one.names if one.used}
    wrong += [
        f"it computes with {name} in {dtype_name(part.dtype)}, the model in {dtype_name(dtypes[name])} (--precision)"
        for cls in classes
        for name, part in cls.stored_parts().items()
        if name in dtypes and part.dtype != dtypes[name]
    ]
    wrong += [
        f"it stores {name} as {list(shape)}, the model has {list(known[name])}"
        for name, shape in stored.items()
        if name in known and known[name] != shape
    ]
    tied = {each for cls in classes for part in cls.stored_parts().values() for each in part.tied}
    wrong += [f"the model has {name}, which it does not store" for name in known if name in held - tied - set(stored)]
    batch = found.files.about["batch"]["tensors"]
    inputs = [row[0] for row in batch]
    if inputs != [one.index for one in graph.inputs]:
        wrong.append(
            f"it takes {len(inputs)} tensors of a batch, the example has {len(graph.inputs)}, or in other places"
        )
    for _, where, shape, dtype in batch:
        one = next((graph.tensors[one.tensor] for one in graph.inputs if one.where == where), None)
        if one is not None and not (fits(shape, one.sizes) and dtype_name(one.dtype) == dtype):
            given = f"{list(one.sizes)} of {dtype_name(one.dtype)}"
            wrong.append(f"it takes {where} as {list(shape)} of {dtype}, the example has {given}")
    if wrong:
        raise PlanError(
            f"the program was made from another model or example: {wrong[0]}",
            place=str(found.directory),
            remedy="give the model file that it was made from, or write it anew: weft show FILE --plan P --out DIR",
        )


def fits(shape: Sequence[int | str], sizes: Sequence[int]) -> bool:
    """True if a batch of these sizes has the shape, as far as it is fixed."""
    same = (isinstance(dim, str) or dim == size for dim, size in zip(shape, sizes, strict=False))
    return len(shape) == len(sizes) and all(same)


@contextmanager
def own_lines(found: ProgramDirectory) -> Iterator[None]:
    """Turns whatever the code in a program's directory raises into an error with the line there."""
    try:
        yield
    except RunError as error:
        place = _place(found, error)
        if not place and not found.edited:
            raise
        remedy = f"look at what was edited in {found.directory}" if found.edited else error.remedy
        raise RunError(error.message, place=place or error.place, remedy=remedy) from error
    except WeftError:
        raise
    except Exception as error:
        raise RunError(
            f"the program cannot be loaded: {type(error).__name__}: {getattr(error, 'msg', None) or error}",
            place=_place(found, error) or str(found.directory),
            remedy=f"mend it, or {ANEW}" if found.edited else ANEW,
        ) from error


def _place(program: ProgramDirectory, error: Exception) -> str:
    """The innermost line of the program on the way to the error, here or in another process."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}  {(error.text or '').strip()}".rstrip()
    text = "".join(traceback.format_exception(error))
    folder, given = re.escape(str(program.directory.resolve())), re.escape(str(program.directory))
    found = re.findall(rf'File "((?:{folder}|{given})/[^"]+)", line (\d+)', text)
    if not found:
        return ""
    file, line = found[-1]
    lines = Path(file).read_text(encoding="utf-8").splitlines()
    return f"{file}:{line}  {lines[int(line) - 1].strip() if int(line) <= len(lines) else ''}".rstrip()
