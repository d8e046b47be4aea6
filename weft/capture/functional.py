"""In-place operators become functional twins; views of what they change are made anew when read.

Enters: reads and writes of traced tensors. Leaves: Ops that write each tensor once. A `Cell` is one memory of the
traced program with a version; a `Handle` is a traced tensor: the cell's own, or a view of another handle. Writing a
handle makes the twin's result its value and carries it up the views into the cell; other handles of the cell
are then out of date and replay their views when next read.

Refused, because autograd would not follow: in-place changes without gradient of a tensor that needs one; and changes of
inputs, parameters and tensor attributes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch._ops import OpOverload

from weft.capture.builder import Builder, Call, Context, name_of
from weft.capture.views import Step, put_back
from weft.errors import CaptureError
from weft.ir.graph import Ref

aten = torch.ops.aten

TWINS = {
    "aten.bernoulli_.float": aten.bernoulli.p,
    "aten.normal_.default": aten.normal_functional.default,
    "aten.transpose_.default": aten.transpose.int,
}
"""Twins that go by another name."""
RESHAPING = frozenset(["unsqueeze_", "squeeze_", "transpose_", "t_", "swapaxes_", "swapdims_", "detach_"])
"""In-place operators that change how a tensor is seen, not its values."""

FOREIGN = "foreign"
"""Memory that was there before forward and that the module does not own: of a global, in a list, in a closure."""
FIXED = {
    "input": "work on a copy: x = x.clone()",
    "attribute": "make it a buffer (register_buffer), or compute a new tensor",
    "parameter": "only buffers may change in forward: if it is not trained (a moving average of another), make it a "
    "buffer (register_buffer); else change it outside forward, after the optimizer's step",
    FOREIGN: "make it a buffer of the module (register_buffer), and a module that holds it a submodule, and read it as "
    "an attribute there; or compute a new tensor",
}
"""Memory that forward may not change, with the remedy."""


@dataclass(eq=False)
class Cell:
    """A memory: what it belongs to (op, input, parameter, buffer, constant, attribute, or foreign) and how often it
    changed."""

    kind: str
    label: str = ""
    version: int = 0


@dataclass(eq=False)
class Handle:
    """A traced tensor: its current working name, true for one version of its cell."""

    cell: Cell
    name: str
    version: int
    storage: int
    parent: Handle | None = None
    step: Step | None = None


def read(handle: Handle, builder: Builder, context: Context) -> str:
    """The working name of the handle's present value."""
    if handle.version != handle.cell.version:
        assert handle.parent is not None and handle.step is not None, "a cell's own handle is never out of date"
        handle.name = handle.step.apply(builder, read(handle.parent, builder, context), context)
        handle.version = handle.cell.version
    return handle.name


def write(handle: Handle, value: str, builder: Builder, context: Context) -> None:
    """Make `value` the handle's value, and put it into all that the handle is a view of."""
    check_writable(handle, builder, context)
    _write(handle, value, builder, context)


def _write(handle: Handle, value: str, builder: Builder, context: Context) -> None:
    if handle.parent is None:
        handle.cell.version += 1
    else:
        assert handle.step is not None
        base = read(handle.parent, builder, context)
        _write(handle.parent, put_back(handle.step, builder, base, value, context), builder, context)
    handle.name, handle.version = value, handle.cell.version


def check_writable(handle: Handle, builder: Builder, context: Context) -> None:
    """Refuse changes that would reach outside the graph, or past autograd."""
    cell, root, follows = handle.cell, handle, context.grad
    while root.parent is not None:
        follows = follows and (root.step is None or root.step.keeps_gradient)
        root = root.parent
    if cell.kind in FIXED:
        raise fixed(cell.kind, cell.label, context.place)
    if builder.needs_grad(read(root, builder, context)) and not follows:
        raise CaptureError(
            "a tensor that needs a gradient is changed in place unseen by autograd (no_grad, detach, .data)",
            place=context.place,
            remedy="compute a new tensor instead of changing this one",
        )


def fixed(kind: str, label: str, place: str) -> CaptureError:
    """The refusal of a change of memory that is `FIXED`."""
    what = f"the {kind} {label}" if kind != FOREIGN else "a tensor that is no buffer of the module"
    lost = "" if kind != FOREIGN else ": the change would be lost"
    return CaptureError(f"{what} is changed in place{lost}", place=place, remedy=FIXED[kind])


def twin_of(target: OpOverload, context: Context) -> OpOverload:
    """The operator that returns what `target` would write into its first argument or into `out`."""
    special = TWINS.get(str(target))
    if special is not None:
        return special
    # `|=` is __ior__, whose twin is __or__
    name = re.sub(r"^__i(\w+)__$", r"__\1__", name_of(target)) if target.namespace == "aten" else ""
    packet = getattr(aten, name if name.startswith("__") else name.removesuffix("_"), None) if name else None
    for overload in [] if packet is None else packet.overloads():
        candidate: OpOverload = getattr(packet, overload)
        if signature(candidate) == signature(target) and not candidate._schema.is_mutable:
            return candidate
    raise unwritable(target, context)


def unwritable(target: OpOverload, context: Context) -> CaptureError:
    """The refusal of an operator whose writing no other operator can express."""
    return CaptureError(
        f"{target} writes into its argument and has no functional twin",
        place=context.place,
        remedy="use the operator that returns a new tensor",
    )


def signature(target: OpOverload) -> list[tuple[str, str]]:
    """Names and types of an operator's arguments, without `out`; the first is `self` here and `input` there."""
    arguments = [argument for argument in target._schema.arguments if argument.name != "out"]
    return [(argument.name if i else "", str(argument.type)) for i, argument in enumerate(arguments)]


def result_of(call: Call, builder: Builder, draw: int | None = None) -> str:
    """The new value that the in-place operator gives its first argument."""
    context = call.context
    old = builder.fakes[call.args[0].name]
    if call.name == "copy_" or str(call.target) == "aten.fill_.Tensor":
        value: Ref = call.args[1]
    elif call.name == "zero_":
        value = builder.ref(aten.fill.Scalar, call.args[0], 0, context=context)
    else:
        given = tuple(call.values.values()) if str(call.target) in TWINS else call.args
        positional = sum(not argument.kwarg_only for argument in call.target._schema.arguments)
        twin = twin_of(call.target, context)
        value = Ref(builder.emit(twin, given[:positional], call.kwargs, context=context, draw=draw)[0])
    if builder.fakes[value.name].dtype != old.dtype:
        value = builder.ref(aten.to.dtype, value, old.dtype, context=context)
    if builder.fakes[value.name].shape != old.shape:
        value = builder.ref(aten.expand.default, value, list(old.shape), context=context)
    return value.name
