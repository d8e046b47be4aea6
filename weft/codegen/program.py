"""One file: imports, tables, the class with its forward and its methods.

In: a Program and a team of ranks that run the same text. Out: the text of the file.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from weft.codegen.names import legal
from weft.codegen.sheet import Sheet
from weft.codegen.statements.body import say_all, write_body
from weft.codegen.statements.frame import Frame
from weft.codegen.statements.layers import Folder
from weft.codegen.statements.reads import INPUT, Stack
from weft.codegen.stored import buffer_entries, folded, parameter_entries, table_lines
from weft.codegen.text import TAB, WIDTH, literal, statement
from weft.ir.program import Program, Step, Sync


def class_name(program: Program) -> str:
    """The generated class bears the model's name."""
    name = legal(program.graph.name or "Model")
    return name if name not in ("ParallelModule", "Container", "Tensor", "Part") else f"{name}Program"


def file_text(sheet: Sheet, title: str) -> str:
    """The whole file."""
    sheet.body = write_body
    program = sheet.program
    forward = _forward(sheet)
    parameters, layers = folded(parameter_entries(sheet))
    buffers, more = folded(buffer_entries(sheet))
    sheet.need("weft.runtime.program.module", {"ParallelModule", "Part"})
    grid = dict(sheet.spreads.grid)
    options = ["ParallelModule", "grid=GRID", "parameters=PARAMETERS"]
    options += ["buffers=BUFFERS"] if buffers else []
    options += ["layers=LAYERS"] if layers or more else []
    tables = [f"GRID = {literal(grid)}" if grid else "GRID: dict[str, int] = {}"]
    tables += [f"LAYERS = {literal({**more, **layers})}"] if layers or more else []
    tables += table_lines("PARAMETERS", parameters)
    tables += table_lines("BUFFERS", buffers) if buffers else []
    lines = statement(f"class {class_name(program)}(", options, "):", 0)
    for i, method in enumerate([forward, *sheet.methods]):
        lines += ([""] if i else []) + method
    tables = [*sheet.definitions.values(), *([""] if sheet.definitions else []), *tables]
    body = "\n".join([*tables, "", "", *lines])
    return f'"""{title}"""\n\n{_imports(sheet, body)}\n\n{sheet.sources.commented(body)}\n'


def _imports(sheet: Sheet, body: str) -> str:
    lines = []
    if not free_of(body, "torch"):
        lines.append("import torch")
    if not free_of(body, "F"):
        lines.append("import torch.nn.functional as F")
    lines.append("from torch import Tensor")
    found = [(module.startswith("weft."), _import(module, names)) for module, names in sorted(sheet.imports.items())]
    theirs, own = ([line for is_own, rows in found if is_own is wanted for line in rows] for wanted in (False, True))
    return "\n".join([*lines, *theirs, "", *own])


def _import(module: str, names: set[str]) -> list[str]:
    words = sorted(names, key=_order)
    line = f"from {module} import {', '.join(words)}"
    return [line] if len(line) <= WIDTH else [f"from {module} import (", *(f"{TAB}{one}," for one in words), ")"]


def _order(name: str) -> tuple[int, str]:
    """Classes before functions, as import sorters have it."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2), name


def _forward(sheet: Sheet) -> list[str]:
    program = sheet.program
    inputs = [INPUT + one.tensor for one in program.graph.inputs]
    kept = sorted(program.ends)
    plain = [step for step in program.steps if not isinstance(step, Sync)]
    # a trace tells ops apart that one layer's text says for all
    steps: Sequence[Step | Stack] = plain if sheet.traced else Folder(sheet).fold(plain)
    frame = Frame(sheet, steps, inputs, kept)
    arguments = [f"{frame.env[name]}: Tensor" for name in inputs]
    say_all(frame, steps)
    lines = frame.lines()
    for buffer, value in program.updates.items():
        name = next(one.names[0] for one in program.graph.buffers if one.tensor == buffer)
        lines.append(f'        self.update("{name}", {frame.read(value)})')
    lines += _ending(sheet, frame)
    several = "tuple[Tensor, ...]" if program.roots or program.given else "dict[str, Tensor]"
    kind = "Tensor" if len(program.outputs) == 1 else several
    return [*statement("def forward(", ["self", *arguments], f") -> {kind}:", 1), *lines]


def _ending(sheet: Sheet, frame: Frame) -> list[str]:
    """The last statement: the loss tied to all that was done, or the outputs."""
    program = sheet.program
    loss = program.graph.loss
    if program.roots or program.given:
        return statement("return self.outputs(", [frame.read(value) for value in program.outputs.values()], ")", 2)
    roots: list[str] = []
    if program.loss is not None:
        root = frame.read(program.loss) if program.loss in frame.env else ""
        slots = frame.slots(program.loss) if root else 0
        roots = [f"*{root}"] if slots > 1 else [root] if slots else []
    if loss is not None and len(program.outputs) == 1 and loss in program.outputs:
        value = frame.read(program.outputs[loss])
        if program.loss is None:
            return [f"        return {value}"]
        return [f"        return self.finish({', '.join([value, *roots])})"]
    words = {name: frame.read(value) for name, value in program.outputs.items()}
    if program.loss is not None and loss is not None and loss in words:
        words[loss] = f"self.finish({', '.join([words[loss], *roots])})"
    pairs = [f"{literal(name)}: {text}" for name, text in words.items()]
    return statement("return {", pairs, "}", 2)


def free_of(text: str, name: str) -> bool:
    """True if a text does not mention a name."""
    return re.search(rf"\b{re.escape(name)}\b", text) is None
