"""Stored tensors and changes of layout as statements.

In: Uses and Reshards. Out: calls of `self.comm`, in words where the moves follow the axes, by a key of the tables where
they do not; nothing where a tensor is used as it is stored.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.codegen.statements.frame import Frame
from weft.codegen.statements.reads import INPUT
from weft.codegen.text import literal
from weft.ir.program import Move as Change
from weft.ir.program import Reshard, Use
from weft.runtime.layout.cuts import axes_text
from weft.runtime.layout.moves import Move

Words = tuple[Move, ...]


def say_use(frame: Frame, step: Use) -> None:
    """Bring a stored tensor to where it is used."""
    sheet, value = frame.sheet, frame.program.values[step.value]
    if not sheet.takes_part(step.moves, value.layout):
        return
    source = frame.env.get(INPUT + value.tensor)
    if sheet.used_as_stored(step.value):
        if source is not None:
            frame.same(step.value, source)
        elif value.tensor in frame.program.updates:
            # what runs again in backward must see the content from before the update
            frame.say(frame.name(step.value), frame.home(value.tensor), sheet.shape(step.value))
        return
    sync = sheet.syncs.get(step.value)
    shown = _moved(frame, step, source) if sync is None else _used(frame, step, sync)
    _say_made(frame, step.value, shown)


def _say_made(frame: Frame, value: str, shown: str) -> None:
    """What a value becomes, named if the rank holds something of it."""
    slots = frame.slots(value)
    made = frame.name(value, parts=slots > 1) if slots else ""
    frame.say(made, shown, frame.sheet.shape(value) if slots else "")


def _moved(frame: Frame, step: Use, source: str | None) -> str:
    """An input, a buffer, a constant or a frozen parameter: no gradient comes back."""
    tensor = frame.program.values[step.value].tensor
    text = source if source is not None else frame.home(tensor)
    words = frame.sheet.words.all(step.moves, frame.program.stored[tensor])
    if words is not None and frame.slots(step.value) == 1:
        return _without_gradient(frame, text, words)
    return f"self.comm.move({text}, {literal(frame.sheet.move_key(step.value, step.moves, None, tensor, None))})"


def _used(frame: Frame, step: Use, sync: Sequence[Change]) -> str:
    """A trained parameter in a layout of its own, and how its gradient is reduced to its owner."""
    sheet, tensor = frame.sheet, frame.program.values[step.value].tensor
    value = frame.program.values[step.value]
    words, back = sheet.words.all(step.moves, frame.program.stored[tensor]), sheet.words.all(sync, value.grad)
    home = frame.home(tensor)
    if words is not None and back is not None and frame.slots(step.value) == 1:
        return f"self.comm.use({home}, {sheet.need_moves(words)}, sync={sheet.need_moves(back)})"
    if home == "None":
        home = literal(frame.program.graph.parameter_tensors[tensor].names[0])
    return f"self.comm.use_parts({home}, {literal(sheet.move_key(step.value, step.moves, sync, tensor, None))})"


def say_reshard(frame: Frame, step: Reshard) -> None:
    """A change of layout and its backward."""
    sheet, values = frame.sheet, frame.program.values
    ends = values[step.source].layout, values[step.target].layout
    if not sheet.takes_part((*step.forward, *(step.backward or ())), *ends):
        return
    words = sheet.words.all(step.forward, ends[0])
    back = None if step.backward is None else sheet.words.all(step.backward, values[step.target].grad)
    single = frame.slots(step.source) == 1 and frame.slots(step.target) == 1
    text = frame.env.get(step.source, "None")
    if single and words is not None and (step.backward is None or back is not None):
        shown = _reshard_text(frame, text, words, back)
    else:
        tensor = values[step.target].tensor
        key = sheet.move_key(step.target, step.forward, step.backward, tensor, step.source)
        shown = f"self.comm.move({text}, {literal(key)})"
    _say_made(frame, step.target, shown)


def _reshard_text(frame: Frame, text: str, words: Words, back: Words | None) -> str:
    if back is None:
        return _without_gradient(frame, text, words)
    if len(words) == 1 and words[0].kind == "all_reduce" and not back:
        return f"self.comm.all_reduce({text}, over={axes_text(words[0].axes)})"
    if not words and len(back) == 1 and back[0].kind == "all_reduce":
        return f"self.comm.sum_grad({text}, over={axes_text(back[0].axes)})"
    return f"self.comm.reshard({text}, {frame.sheet.need_moves(words)}, {frame.sheet.need_moves(back)})"


def _without_gradient(frame: Frame, text: str, words: Words) -> str:
    if len(words) == 1 and words[0].kind == "slice_to":
        return f"self.comm.slice({text}, {words[0].cut_dim}, over={frame.sheet.need_cut(words[0].cut)})"
    if len(words) == 1 and words[0].kind == "all_reduce":
        return f"self.comm.all_reduce({text}, over={axes_text(words[0].axes)}, grad=False)"
    return f"self.comm.reshard({text}, {frame.sheet.need_moves(words)}, None)"
