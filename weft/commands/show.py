"""`weft show FILE --plan P`: what a plan makes of a model.

In: the options. Out: a table by module, or for a plan in pieces by stage, or its time table, or the bytes of each rank;
or the generated code, the Program as text, or JSON, and then nothing else on stdout. With `--out` the program's files
are written; a program that somebody edited is not overwritten unasked.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Collection, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.syntax import Syntax

from weft.commands import pieces
from weft.commands.console import fitted, plain_console, wide_console
from weft.commands.memory import memory_of, show_memory
from weft.commands.modules import SOME, Row, axis_sizes, module_rows, show_bytes
from weft.compile import Compiled, cache, compile_subject
from weft.compile.model_file import load_model_file
from weft.compile.pieces import InPieces
from weft.compile.subject import in_precision
from weft.cost.links import load as load_links
from weft.errors import PlanError, RunError, WeftError
from weft.ir.program import Program
from weft.ir.show_program import show_program

HEADS = ("module", "ops", "cut", "devices", "collectives", "sends")


def run(options: argparse.Namespace) -> int:
    """The command."""
    if options.force and options.out is None:
        raise WeftError("--force says to overwrite, and nothing is written", remedy="add --out DIR")
    if options.measure and not options.memory:
        raise WeftError("--measure says how to find out about memory, which is not asked for", remedy="add --memory")
    if options.json and (options.code or options.program or options.schedule):
        raise WeftError("--json tells code, program and schedule too", remedy="leave out all others, or --json")
    # what the user's code prints is not what was asked for
    with redirect_stdout(sys.stderr), Console(stderr=True).status("loading the model") as status:
        subject = in_precision(load_model_file(options.file, hollow=0), options.precision)
        compiled = compile_subject(
            subject,
            options.plan,
            options.devices,
            links=None if options.links is None else load_links(options.links),
            say=status.update,
        )
        memory = memory_of(compiled, subject, measures=options.measure, say=status.update) if options.memory else None
    if options.out is not None:
        write(Path(options.out), compiled.files, force=options.force)
        plain_console(stderr=True).print(f"written to {options.out}")
    title, made, program = f"{options.file} under {options.plan}", compiled.pieces, compiled.program
    assert made is not None, "nothing was looked up in a cache"
    if options.schedule and program is not None:
        raise PlanError(
            "--schedule draws stages or micro-batches, and this plan has none",
            place=str(options.plan),
            remedy="pp=2,microbatches=4",
        )
    if options.json:
        shown = as_json(compiled, made, options) if memory is None else memory.as_json()
        asked = {"file": str(options.file), "plan": str(options.plan), "devices": compiled.devices}
        print(json.dumps({**asked, **shown}))
    elif memory is not None:
        show_memory(memory, title)
    elif options.code:
        show_code(compiled.files)
    elif options.program:
        print(program_text(made))
    elif program is not None:
        show_table(compiled, program, title)
    else:
        (pieces.show_schedule if options.schedule else pieces.show_pieces)(made, title)
    return 0


def program_text(made: InPieces) -> str:
    """The Program, or that of each piece."""
    if made.program is not None:
        return show_program(made.program)
    parts = made.sizes[0].parts
    return "\n\n".join(f"# {part.piece.segment.name}\n{show_program(part.program)}" for part in parts)


def code_of(files: Mapping[str, bytes]) -> dict[str, str]:
    """The files of the program that are Python."""
    return {name: content.decode() for name, content in files.items() if name.endswith(".py")}


def show_code(files: Mapping[str, bytes]) -> None:
    """The text itself; with colors in a terminal."""
    console = Console(soft_wrap=True)
    texts = code_of(files)
    for number, (name, text) in enumerate(texts.items()):
        head = f"# {name}\n" if len(texts) > 1 else ""
        if console.is_terminal:
            console.print(Syntax(head + text, "python", background_color="default"))
        else:
            sys.stdout.write("\n\n" * bool(number) + head + text)


def as_json(compiled: Compiled, made: InPieces, options: argparse.Namespace) -> dict[str, Any]:
    """All that there is to show, as plain values."""
    if compiled.program is None:
        found = pieces.as_json(made)
    else:
        found = {
            "axes": axis_sizes(compiled.program),
            "modules": [row.as_json() for row in module_rows(compiled.program)],
            "proven": str(compiled.report),
        }
    return {**found, "program": program_text(made), "code": code_of(compiled.files), "out": options.out}


def show_table(compiled: Compiled, program: Program, title: str) -> None:
    """The plan by module, for people."""
    console = wide_console()
    axes = ", ".join(f"{name}={size}" for name, size in axis_sizes(program).items())
    devices = "1 device" if compiled.devices == 1 else f"{compiled.devices} devices"
    console.print(f"{title}: {devices}{', cut by ' if axes else ''}{axes}", soft_wrap=True)
    rows = module_rows(program)
    lines = []
    for row in rows:
        cells = (row.module + (f"  x{row.layers}" if row.layers > 1 else ""), str(row.operators), _cuts(row))
        sent = ", ".join(f"{count} {kind}" for kind, count in row.collectives.items())
        lines.append((*cells, ", ".join(row.devices), sent, show_bytes(row.moved)))
    total = sum(row.moved for row in rows)
    console.print(fitted(console, HEADS, lines, right=("ops", "sends"), optional=("ops", "devices")))
    console.print(f"collectives, sends: of a device in a step; it sends {show_bytes(total) or 'nothing'} in all")
    if any("inside" in row.collectives for row in rows):
        console.print("inside: operators whose parts talk to each other; their bytes are not counted")
    console.print(f"proven: {compiled.report}", soft_wrap=True)


def _cuts(row: Row) -> str:
    """`dp: b 2; tp: n 2 of 3 in 4`, the most telling names only."""
    return "; ".join(
        f"{axis}: {', '.join(names[:SOME])}{', ...' if len(names) > SOME else ''}" for axis, names in row.cuts.items()
    )


def write(directory: Path, files: Mapping[str, bytes], *, force: bool) -> None:
    """Write a program's files, over an older program if nobody has edited it, and never over something else."""
    file = next((one for one in (directory, *directory.parents) if one.exists() and not one.is_dir()), None)
    if file is not None:
        raise RunError(f"{file} is a file", place=f"--out {directory}", remedy="give a directory")
    if directory.is_dir() and any(directory.iterdir()):
        found = cache.read_program(directory, "give a directory that is empty or not there")
        edited = [name for name, what in found.edited.items() if what == "edited"]
        if edited and not force:
            raise RunError(
                f"the program in {directory} was edited: {', '.join(edited)}",
                place=str(directory),
                remedy="give another --out DIR, or --force to overwrite it",
            )
        _remove(directory, set(found.files) - set(files))
    directory.mkdir(parents=True, exist_ok=True)
    cache.write_files(directory, files)


def _remove(directory: Path, names: Collection[str]) -> None:
    """Remove files of an older program, and folders that have nothing else in them."""
    for name in names:
        (directory / name).unlink(missing_ok=True)
    for folder in {(directory / name).parent for name in names} - {directory}:
        if folder.is_dir() and not any(one for one in folder.rglob("*") if one.is_file() and one.suffix != ".pyc"):
            shutil.rmtree(folder)
