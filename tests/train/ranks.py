"""Ranks as threads, each with its own module and optimizer, as processes have them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import nn

from weft.capture.example import split_example
from weft.compile.model_file import Subject
from weft.compile.programs import Programs, Wanted
from weft.runtime.program.files import files_of
from weft.runtime.program.surface import surface_of
from weft.train.opened import open_rank
from weft.verify.ranks import emulate


def on_ranks(
    model: nn.Module, example: Any, plan: str, body: Callable[[Any], Any], *, outputs: str = "loss"
) -> list[Any]:
    """What `body(module)` gives on each rank."""
    programs = Programs(lambda module: Subject(model, example), plan, None, cache=None, outputs=outputs)
    files, lock, made = programs.training(model), threading.Lock(), dict[str, Any]()
    surface = surface_of(model, lambda: model, split_example(example))

    def make(wanted: Wanted) -> Any:
        with lock:
            if repr(wanted) not in made:
                made[repr(wanted)] = programs(wanted)
            return made[repr(wanted)]

    return emulate(
        files_of(files).devices,
        lambda transport: body(open_rank(files, transport, model, surface=surface, make_files=make)),
    )
