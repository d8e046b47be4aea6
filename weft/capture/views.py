"""Views backwards: what a tensor becomes when one of its views is written.

Enters: a view step (operator, arguments, which output), the viewed tensor before, the view's new value. Leaves: the
viewed tensor with the new value in place, as functional operators.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload

from weft.capture.builder import Builder, Context
from weft.capture.draws import bound, name_of
from weft.errors import CaptureError
from weft.ir.graph import Ref

aten = torch.ops.aten

SAME_ORDER = frozenset(
    "view reshape _unsafe_view flatten unflatten squeeze unsqueeze view_as reshape_as ravel contiguous alias to "
    "detach lift_fresh _to_copy type_as float double expand expand_as _reshape_alias".split()
)
"""Views whose elements stand in the same order: undone by a view of the first shape."""


@dataclass(frozen=True)
class Step:
    """One view: the operator with its arguments (without the viewed tensor, the first) and which output it is."""

    target: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    index: int | None

    def apply(self, builder: Builder, base: str, context: Context) -> str:
        names = builder.emit(self.target, (Ref(base), *self.args), self.kwargs, context=context)
        return names[self.index or 0]

    @property
    def keeps_gradient(self) -> bool:
        return name_of(self.target) != "detach"


def put_back(step: Step, builder: Builder, base: str, value: str, context: Context) -> str:
    """The viewed tensor `base` after its view was set to `value`."""
    name = name_of(step.target)
    values = bound(step.target, (None, *step.args), step.kwargs)
    old, new = builder.fakes[base], builder.fakes[value]

    def emit(target: OpOverload, *args: Any) -> str:
        return builder.emit(target, args, context=context)[0]

    if name in SAME_ORDER and old.numel() == new.numel():
        if old.shape == new.shape:
            return value
        return emit(aten.reshape.default, Ref(value), list(old.shape))
    if name in ("transpose", "swapaxes", "swapdims"):
        first, second = [v for key, v in values.items() if key != "self"][:2]
        return emit(aten.transpose.int, Ref(value), first, second)
    if name in ("t", "numpy_T"):
        return emit(aten.permute.default, Ref(value), list(reversed(range(old.dim()))))
    if name in ("permute", "movedim"):
        return emit(aten.permute.default, Ref(value), inverse_order(step, old))
    if name == "select":
        return emit(aten.select_scatter.default, Ref(base), Ref(value), values["dim"], values["index"])
    if name == "unbind":
        return emit(aten.select_scatter.default, Ref(base), Ref(value), values["dim"], step.index)
    if name == "slice":
        bounds = [values[key] for key in ("dim", "start", "end", "step")]
        return emit(aten.slice_scatter.default, Ref(base), Ref(value), *bounds)
    if name == "narrow":
        start = values["start"]
        return emit(aten.slice_scatter.default, Ref(base), Ref(value), values["dim"], start, start + values["length"])
    if name in ("split", "split_with_sizes", "chunk", "tensor_split"):
        start, end = piece_bounds(step, builder, base)
        return emit(aten.slice_scatter.default, Ref(base), Ref(value), values["dim"], start, end)
    if name == "diagonal":
        bounds = [values[key] for key in ("offset", "dim1", "dim2")]
        return emit(aten.diagonal_scatter.default, Ref(base), Ref(value), *bounds)
    raise CaptureError(
        f"a tensor is changed in place through the view {step.target}",
        place=context.place,
        remedy="compute a new tensor instead (torch.where, torch.cat), or .clone() before changing it",
    )


def inverse_order(step: Step, old: torch.Tensor) -> list[int]:
    """The permutation that undoes a permute or movedim."""
    marks = torch.empty(tuple(range(2, 2 + old.dim())), device="meta")
    order = [size - 2 for size in step.target(marks, *step.args, **step.kwargs).shape]
    return [order.index(dim) for dim in range(old.dim())]


def piece_bounds(step: Step, builder: Builder, base: str) -> tuple[Any, Any]:
    """Where one output of a split lies in the split dim."""
    assert step.index is not None
    with builder.mode:
        pieces = step.target(builder.fakes[base], *step.args, **step.kwargs)
    dim = bound(step.target, (None, *step.args), step.kwargs)["dim"]
    start = sum((piece.shape[dim] for piece in pieces[: step.index]), 0)
    return start, start + pieces[step.index].shape[dim]
