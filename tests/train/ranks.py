"""Ranks as threads, each with its own module and optimizer, as processes have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from weft.compile.model_file import Subject
from weft.compile.programs import Programs
from weft.runtime.program.files import files_of
from weft.train.opened import open_rank
from weft.verify.ranks import emulate


def on_ranks(
    model: nn.Module, example: Any, plan: str, body: Callable[[Any], Any], *, outputs: str = "loss"
) -> list[Any]:
    """What `body(module)` gives on each rank."""
    programs = Programs(lambda module: Subject(model, example), plan, None, cache=None, outputs=outputs)
    files = programs.training(model)
    return emulate(files_of(files).devices, lambda transport: body(open_rank(files, transport, model)))
