"""Bodies: the steps of one function, each said by its writer. Nothing is decided here: the text says what they say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weft.codegen.sheet import Layer, Sheet
from weft.codegen.statements.calling import say_compute
from weft.codegen.statements.frame import Frame
from weft.codegen.statements.looping import say_chunks, say_recompute, say_stack, say_take
from weft.codegen.statements.moving import say_reshard, say_use
from weft.codegen.statements.reads import Stack
from weft.ir.program import Chunks, Compute, Recompute, Reshard, Step, Take, Use


def say_all(frame: Frame, steps: Sequence[Step | Stack]) -> None:
    """Say every step, in order. Gives and Syncs have nothing to say: the loop and the head of the file do."""
    for frame.now, step in enumerate(steps):
        match step:
            case Use():
                say_use(frame, step)
            case Compute():
                say_compute(frame, step)
            case Reshard():
                say_reshard(frame, step)
            case Take():
                say_take(frame, step)
            case Chunks():
                say_chunks(frame, step)
                frame.end_source()
            case Recompute():
                say_recompute(frame, step)
                frame.end_source()
            case Stack():
                say_stack(frame, step)
                frame.end_source()


def write_body(
    sheet: Sheet,
    steps: Sequence[Step],
    arguments: Sequence[str],
    returned: Sequence[str],
    *,
    layer: Layer | None,
    chunked: bool,
) -> tuple[list[str], list[str], Mapping[str, str]]:
    """Lines of a method's body, what it takes beside values, and the names of its arguments."""
    frame = Frame(sheet, steps, arguments, returned, layer=layer, chunked=chunked)
    given = dict(frame.env)
    say_all(frame, steps)
    extra = [layer.variable] if layer is not None and frame.needs_layer else []
    extra += ["draw"] if frame.needs_draw else []
    frame.give_back([frame.read(name) for name in returned])
    return frame.lines(), extra, given
