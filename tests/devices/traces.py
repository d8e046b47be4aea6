"""What ranks do that take a trace: functions that a process can find."""

from __future__ import annotations

from typing import Any

from torch.autograd import profiler

from tests.devices.bodies import on_device
from tests.train.eager import adamw
from weft.runtime.links.processes import ProcessTransport
from weft.runtime.links.transport import Transport
from weft.runtime.program.lines import WITHIN
from weft.train.opened import open_rank

Range = tuple[str, tuple[str, ...]]
"""Its name, and those of the ranges around it, from the outermost."""


def trained(transport: ProcessTransport, given: tuple[Any, Any, Any, bool]) -> list[list[Range]]:
    """The ranges of a step without a profiler before it and one after it, and of one with it."""
    files, model, batch, devices = given
    used: Transport = on_device(transport) if devices else transport
    parallel = open_rank(files, used, model)
    optimizer = adamw(parallel)
    parallel.train_step(batch, optimizer)
    program = parallel.program.modules[0]
    before = set(vars(program))
    with profiler.profile() as found:
        parallel.train_step(batch, optimizer)
    # nothing is left but what recomputation may ask for
    left = set(vars(program)) - before - {WITHIN}
    assert left <= {"within"}, left
    parallel.train_step(batch, optimizer)
    if devices:
        used.close()  # type: ignore[attr-defined]
    return [ranges(found)]


def ranges(found: profiler.profile) -> list[Range]:
    """Those of programs, and what else there is."""
    told = list[Range]()
    for event in found.function_events or []:
        around, parent = list[str](), event.cpu_parent
        while parent is not None:
            around.insert(0, parent.name)
            parent = parent.cpu_parent
        told.append((event.name, tuple(around)))
    return told
