"""Program -> the files of one piece, and what is written about them.

In: a Program. Out: its files by name, and an entry for the description of the program that it is a piece of
(`pipeline.py`). A pure function of the Program: the same Program gives the same bytes.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch

from weft.codegen.moves import MoveWords
from weft.codegen.program import class_name, file_text
from weft.codegen.sheet import Sheet, input_names
from weft.codegen.spread import Spreads, main_grid, teams
from weft.codegen.tables import Tables, tables_text
from weft.ir.program import Program
from weft.lower.shared_heads import with_shared_heads
from weft.lower.transfer import Transfers
from weft.ops.book import RuleBook
from weft.runtime.program.files import CONSTANTS, PARTS


def emit_piece(
    program: Program, *, title: str = "", inputs: Mapping[str, str] | None = None, traced: bool = False
) -> tuple[dict[str, bytes], dict[str, Any]]:
    """The files by name; their class, and which file each rank runs.

    Args:
        inputs: what arguments of forward are to be called, by input tensor; after the tensor if not given.
        traced: every op tells the module's `trace` what it made, and no layer is folded into another's text.
    """
    program = with_shared_heads(program)
    called = input_names(program, inputs)
    grid = main_grid(program)
    spreads = Spreads(grid, program.devices)
    tables = Tables(grid, spreads.places)
    book, words = RuleBook(program.graph), MoveWords(spreads, Transfers())
    groups = teams(program)
    texts: dict[str, bytes] = {}
    ranks = [0] * program.devices
    for number, team in enumerate(groups):
        name = "program.py" if len(groups) == 1 else f"program_{number}.py"
        sheet = Sheet(program, team, spreads, tables, book, words, called, traced=traced)
        texts[name] = file_text(sheet, title or _title(program, team)).encode()
        for rank in team:
            ranks[rank] = number
    parts = {
        PARTS: tables_text(
            {section: dict(sorted(found.items())) for section, found in tables.sections.items()}
        ).encode()
    }
    if program.graph.constants:
        parts[CONSTANTS] = _saved(program)
    return {**texts, **parts}, {"class": class_name(program), "files": list(texts), "ranks": ranks}


def _title(program: Program, team: tuple[int, ...]) -> str:
    where = "" if len(team) == program.devices else f", for {len(team)} of them"
    devices = "one device" if program.devices == 1 else f"{program.devices} devices"
    return f"{class_name(program)} for {devices}{where}. Made by weft; edit freely, then verify it again."


def _saved(program: Program) -> bytes:
    buffer = io.BytesIO()
    torch.save({name: tensor.detach().clone() for name, tensor in program.graph.constants.items()}, buffer)
    return buffer.getvalue()
