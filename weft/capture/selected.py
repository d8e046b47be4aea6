"""What a mask selects, where a program can do without it.

`labels.masked_select(mask)` has as many elements as the mask has trues, which only the run knows: no op can make it.
Enters: such a selection, as a note of what is selected, and the call that reads it. Leaves: the call with what it needs
instead. One reader can do without: a ctc loss, for which all targets were laid end to end. It gets them as rows, those
that the mask leaves out moved to the end of each, where nobody reads them; that its lengths are the mask's is checked
in every step. Every other reader is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from weft.capture.builder import Builder, Context
from weft.capture.draws import bound, name_of
from weft.capture.expect import Expectation
from weft.capture.functional import Handle, read
from weft.errors import CaptureError
from weft.ir.graph import Ref

aten = torch.ops.aten


@dataclass(frozen=True)
class Selected:
    """`source.masked_select(mask)`, not made."""

    source: Handle
    mask: Handle
    place: str


def selection(target: OpOverload, args: tuple[Any, ...], builder: Builder, context: Context) -> Selected | None:
    """The note of a selection from rows by a mask of their shape; None for another call."""
    if name_of(target) != "masked_select" or len(args) != 2:
        return None
    shapes = [builder.fakes[read(handle, builder, context)].shape for handle in args]
    return Selected(args[0], args[1], context.place) if len(shapes[0]) == 2 and shapes[0] == shapes[1] else None


def refuse_selected(target: OpOverload, args: Any, kwargs: Any) -> None:
    """A call that reads what was not made is refused, unless it can do without."""
    found = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Selected)]
    if found and str(target) != "aten.ctc_loss.Tensor":
        raise CaptureError(
            f"the shape that aten.masked_select returns depends on the values in a tensor, and {target} reads it",
            place=found[0].place,
            remedy="keep the shape and mask instead (torch.where, masked_fill, multiplication by the mask)",
        )


def targets_as_rows(
    target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], builder: Builder, context: Context
) -> tuple[dict[str, Any], Expectation]:
    """The arguments of a ctc loss with its targets in rows, and what is expected of its lengths."""
    values = bound(target, args, kwargs)
    selected: Selected = values["targets"]
    source, mask = (Ref(read(handle, builder, context)) for handle in (selected.source, selected.mask))
    lengths = Ref(read(values["target_lengths"], builder, context))

    def emit(operator: OpOverload, *given: Any, **named: Any) -> Ref:
        return Ref(builder.emit(operator, given, named, context=context)[0])

    order = emit(aten.argsort.stable, mask, stable=True, dim=1, descending=True)
    rows = emit(aten.gather.default, source, 1, order)
    counted = emit(aten.eq.Tensor, emit(aten.sum.dim_IntList, mask, [1]), lengths)
    agreed = emit(aten.all.default, counted)
    return values | {"targets": rows}, Expectation(agreed.name, True, context.place)
