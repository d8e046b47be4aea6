"""Views backwards: what a tensor becomes when one of its views is written.

Enters: a view step (operator, arguments, which output), the viewed tensor before, the view's new value. Leaves: the
viewed tensor with the new value in place, as functional operators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload

from weft.capture.builder import Builder, Context, name_of
from weft.errors import CaptureError
from weft.ir.graph import Ref
from weft.ops.arguments import bound
from weft.ops.rules.views import RESHAPES, order_of

aten = torch.ops.aten


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
    undo = UNDO.get(name_of(step.target))
    found = None if undo is None else undo(Written(step, builder, base, value))
    if found is None:
        raise CaptureError(
            f"a tensor is changed in place through the view {step.target}",
            place=context.place,
            remedy="compute a new tensor instead (torch.where, torch.cat), or .clone() before changing it",
        )
    target, args = found
    return value if target is None else builder.emit(target, args, context=context)[0]


@dataclass(frozen=True)
class Written:
    """A view that was written: the step, the viewed tensor before, the view's new value."""

    step: Step
    builder: Builder
    base: str
    value: str

    def given(self, *names: str) -> tuple[Any, ...]:
        """Arguments of the view by name."""
        values = bound(self.step.target, (None, *self.step.args), self.step.kwargs)
        return tuple(values[name] for name in names)

    def put(self, target: OpOverload, *where: Any) -> Undone:
        """The new value, put into the viewed tensor by an operator that is told where."""
        return target, (Ref(self.base), Ref(self.value), *where)


Undone = tuple[OpOverload | None, tuple[Any, ...]] | None
"""Operator and arguments that give the viewed tensor; no operator if it is the value itself; None: impossible."""


def same_order(view: Written) -> Undone:
    """Views whose elements stand in the same order."""
    old, new = view.builder.fakes[view.base], view.builder.fakes[view.value]
    if old.shape == new.shape:
        return None, ()
    if old.numel() != new.numel():
        return None  # an expanded tensor: several elements over one memory
    return aten.reshape.default, (Ref(view.value), list(old.shape))


def reordered(view: Written) -> Undone:
    """Views that permute dims: the inverse permutation, found by trying."""
    step = view.step
    order = order_of(lambda x: step.target(x, *step.args, **step.kwargs), view.builder.fakes[view.base].dim())
    return aten.permute.default, (Ref(view.value), [order.index(dim) for dim in range(len(order))])


def scattered(target: OpOverload, *names: str) -> Callable[[Written], Undone]:
    """Views that an operator writes back, told where by the same arguments."""
    return lambda view: view.put(target, *view.given(*names))


def unbound(view: Written) -> Undone:
    return view.put(aten.select_scatter.default, *view.given("dim"), view.step.index)


def narrowed(view: Written) -> Undone:
    dim, start, length = view.given("dim", "start", "length")
    return view.put(aten.slice_scatter.default, dim, start, start + length)


def piece(view: Written) -> Undone:
    """One output of a split: where it lies in the split dim."""
    step = view.step
    assert step.index is not None
    with view.builder.mode:
        pieces = step.target(view.builder.fakes[view.base], *step.args, **step.kwargs)
    (dim,) = view.given("dim")
    start = sum((other.shape[dim] for other in pieces[: step.index]), 0)
    end = start + pieces[step.index].shape[dim]
    return view.put(aten.slice_scatter.default, dim, start, end)


SAME_ORDER = (
    *RESHAPES.split(),
    "expand",
    "expand_as",
    "contiguous",
    "alias",
    "detach",
    "to",
    "type_as",
)
REORDERED = ("transpose", "swapaxes", "swapdims", "t", "numpy_T", "permute", "movedim", "moveaxis", "mT")
UNDO: Mapping[str, Callable[[Written], Undone]] = {
    **dict.fromkeys(SAME_ORDER, same_order),
    **dict.fromkeys(REORDERED, reordered),
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "tensor_split"), piece),
    "select": scattered(aten.select_scatter.default, "dim", "index"),
    "unbind": unbound,
    "slice": scattered(aten.slice_scatter.default, "dim", "start", "end", "step"),
    "narrow": narrowed,
    "diagonal": scattered(aten.diagonal_scatter.default, "offset", "dim1", "dim2"),
}
