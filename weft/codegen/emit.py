"""Program -> files: the entry point of code generation.

In: a Program. Out: its files by name, and their hash among them. A pure function of the Program: the same
Program gives the same bytes.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Mapping
from typing import Any

import torch

from weft.codegen.form import form_of
from weft.codegen.moves import MoveWords
from weft.codegen.program import class_name, file_text
from weft.codegen.sheet import Sheet, input_names
from weft.codegen.spread import Spreads, Team, main_grid, teams
from weft.codegen.tables import Tables, tables_text
from weft.ir.program import Program
from weft.lower.shared_heads import with_shared_heads
from weft.lower.transfer import Transfers
from weft.ops.book import RuleBook
from weft.runtime.program.files import CONSTANTS, META, PARTS, content_hash, file_hash


def generate(
    program: Program,
    *,
    title: str = "",
    about: dict[str, Any] | None = None,
    inputs: Mapping[str, str] | None = None,
    traced: bool = False,
) -> dict[str, bytes]:
    """The files by name.

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
        for rank in team.ranks:
            ranks[rank] = number
    parts = {
        PARTS: tables_text(
            {section: dict(sorted(found.items())) for section, found in tables.sections.items()}
        ).encode()
    }
    if program.graph.constants:
        parts[CONSTANTS] = _saved(program)
    meta = {
        "batch": form_of(program.graph).to_json(),
        "class": class_name(program),
        "devices": program.devices,
        "files": list(texts),
        "hash": content_hash({**texts, **parts}),
        "hashes": {name: file_hash(content) for name, content in {**texts, **parts}.items()},
        "inputs": [
            {"name": called[one.tensor], "where": one.where, "index": one.index} for one in program.graph.inputs
        ],
        "ranks": 0 if len(groups) == 1 else ranks,
        "versions": {"python": ".".join(map(str, sys.version_info[:2])), "torch": torch.__version__.split("+")[0]},
        **(about or {}),
    }
    return {**texts, **parts, META: (json.dumps(meta, indent=1) + "\n").encode()}


def _title(program: Program, team: Team) -> str:
    where = "" if len(team.ranks) == program.devices else f", for {len(team.ranks)} of them"
    devices = "one device" if program.devices == 1 else f"{program.devices} devices"
    return f"{class_name(program)} for {devices}{where}. Made by weft; edit freely, then verify it again."


def _saved(program: Program) -> bytes:
    buffer = io.BytesIO()
    torch.save({name: tensor.detach().clone() for name, tensor in program.graph.constants.items()}, buffer)
    return buffer.getvalue()
