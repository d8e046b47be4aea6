"""Calls that a Graph holds in another form.

Enters: a call as it was traced. Leaves: calls that say the same and may be cut.

- Embedding bags: `aten.embedding_bag` gives four tensors, three of them for its own backward; `weft.embedding_bag`
  gives the bags alone. torch flattens ids of shape (bags, length) and makes offsets for them; here they get their shape
  back, so that the bags may be cut with the ids.
- Attention with fewer key heads than query heads (`enable_gqa`): the same call on keys and values whose heads are
  repeated for the query heads that share them. Then the heads may be cut finer than the key heads.
- Running statistics: `aten.batch_norm` and `aten.instance_norm` are declared pure and yet move theirs. The same call
  without them, and what they become: mean and unbiased variance of the batch (of each sample, averaged, for instance
  norm), moved by the momentum, without gradient.
- What a mask selects: `labels.masked_select(mask)` has as many elements as the mask has trues, which only the run
  knows: no op can make it, and a note of what is selected stands for it. One reader can do without: a ctc loss, for
  which all targets were laid end to end. It gets them as rows, those that the mask leaves out moved to the end of each,
  where nobody reads them; that its lengths are the mask's is checked in every step. Every other reader is refused.
- In-place operators whose functional twin torch lacks (`fill_diagonal_`), or has under other arguments: operators that
  make the same values.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from weft.capture.builder import Builder, Call, Context
from weft.capture.functional import Handle, read
from weft.capture.tracing.expect import Expectation
from weft.errors import CaptureError
from weft.ir.graph import Op, Ref
from weft.runtime.operators.embedding import embedding_bag

aten = torch.ops.aten
HEADS = -3
"""The dim of the heads."""
TRAINS = {"batch_norm": "training", "instance_norm": "use_input_stats"}
"""The argument by which each norm is told to use and keep the statistics of its input."""


def is_bag(call: Call, node: fx.Node) -> bool:
    """Whether this is an embedding bag of which only the first result is used, with a dense gradient."""
    if call.name not in ("embedding_bag", "_embedding_bag") or call.values["sparse"]:
        return False
    return all(user.args[1] == 0 or not user.users for user in node.users)


def emit_bag(call: Call, builder: Builder) -> str:
    """The bags' working name."""
    values = call.values
    ids, offsets, weights = values["indices"], values["offsets"], values["per_sample_weights"]
    folded = _unflattened(ids, offsets, builder)
    if folded is not None:
        shape = list(builder.fakes[folded.name].shape)
        weights = None if weights is None else _shaped(weights, shape, builder, call.context)
        ids, offsets = folded, None
    padding = values.get("padding_idx")
    if padding is not None and padding < 0:
        # the older overload says -1 where there is none
        padding = None if call.name == "_embedding_bag" else padding + builder.fakes[call.args[0].name].shape[0]
    options = {
        "mode": values["mode"],
        "padding_idx": padding,
        "scale_grad_by_freq": bool(values["scale_grad_by_freq"]),
        "include_last_offset": bool(values["include_last_offset"]),
    }
    return builder.emit_runtime(
        "weft.embedding_bag", embedding_bag, (values["weight"], ids, offsets, weights), options, call.context
    )


def _unflattened(ids: Ref, offsets: Ref, builder: Builder) -> Ref | None:
    """The ids before they were flattened, if the offsets are those of its rows."""
    flat, made = _maker(ids, builder), _maker(offsets, builder)
    if flat is None or made is None or flat.kind not in ("reshape", "view") or made.target != "aten.arange.start_step":
        return None
    (source,) = flat.inputs
    shape, (bags,) = builder.tensors[source].shape, builder.tensors[offsets.name].shape
    if len(shape) != 2 or made.args[0] != 0 or made.args[2:3] != shape[1:] or bags != shape[0]:
        return None
    return Ref(source)


def _shaped(weights: Ref, shape: list[Any], builder: Builder, context: Context) -> Ref:
    """Weights in the shape of the ids."""
    made = _maker(weights, builder)
    if made is not None and made.kind in ("reshape", "view"):
        source = made.inputs[0]
        if list(builder.fakes[source].shape) == shape:
            return Ref(source)
    return builder.ref(aten.reshape.default, weights, shape, context=context)


def _maker(ref: Ref, builder: Builder) -> Op | None:
    return next((op for op in reversed(builder.ops) if ref.name in op.outputs), None)


def with_repeated_heads(call: Call, builder: Builder) -> Call:
    """The call that is made instead."""
    if call.name != "scaled_dot_product_attention" or not call.kwargs.get("enable_gqa"):
        return call
    values = dict(call.values)
    heads = builder.fakes[values["query"].name].shape[HEADS]
    for name in ("key", "value"):
        shared = builder.fakes[values[name].name].shape[HEADS]
        if shared != heads:
            times = int(heads) // int(shared)
            values[name] = builder.ref(
                aten.repeat_interleave.self_int, values[name], times, HEADS, context=call.context
            )
    rest = {name: value for name, value in call.kwargs.items() if name not in ("query", "key", "value", "enable_gqa")}
    return replace(call, args=(values["query"], values["key"], values["value"], *call.args[3:]), kwargs=rest)


def updates_statistics(call: Call) -> bool:
    """Whether this call moves running statistics."""
    trains = TRAINS.get(call.name)
    return trains is not None and bool(call.values[trains]) and call.values["running_mean"] is not None


def update_statistics(call: Call, builder: Builder) -> tuple[str, tuple[str, str]]:
    """The normalised tensor, and (running mean, running variance) after the call."""
    mean, variance = call.values["running_mean"], call.values["running_var"]
    values = call.values | {"running_mean": None, "running_var": None}
    output = builder.ref(call.target, *values.values(), context=call.context)
    quiet = replace(call.context, grad=False)
    x = values["input"]
    stored = builder.fakes[mean.name].dtype
    if builder.fakes[x.name].dtype != stored:
        x = builder.ref(aten.to.dtype, x, stored, context=quiet)
    per_sample = call.name == "instance_norm"
    dims = [dim for dim in range(builder.fakes[x.name].dim()) if dim > 1 or (dim == 0 and not per_sample)]
    momentum = values["momentum"]
    moved = []
    batch_mean = builder.ref(aten.mean.dim, x, dims, context=quiet)
    batch_variance = builder.ref(aten.var.correction, x, dims, correction=1, context=quiet)
    for old, found in ((mean, batch_mean), (variance, batch_variance)):
        new = builder.ref(aten.mean.dim, found, [0], context=quiet) if per_sample else found
        moved.append(builder.ref(aten.lerp.Scalar, old, new, momentum, context=quiet).name)
    return output.name, (moved[0], moved[1])


@dataclass(frozen=True)
class Selected:
    """`source.masked_select(mask)`, not made."""

    source: Handle
    mask: Handle
    place: str


def selection(call: Call, builder: Builder) -> Selected | None:
    """The note of a selection from rows by a mask of their shape; None for another call."""
    if call.name != "masked_select" or len(call.args) != 2:
        return None
    shapes = [builder.fakes[read(handle, builder, call.context)].shape for handle in call.args]
    return Selected(*call.args, call.context.place) if len(shapes[0]) == 2 and shapes[0] == shapes[1] else None


def refuse_selected(call: Call) -> None:
    """A call that reads what was not made is refused, unless it can do without."""
    found = [leaf for leaf in pytree.tree_leaves((call.args, call.kwargs)) if isinstance(leaf, Selected)]
    if found and str(call.target) != "aten.ctc_loss.Tensor":
        raise CaptureError(
            f"the shape that aten.masked_select returns depends on the values in a tensor, and {call.target} reads it",
            place=found[0].place,
            remedy="keep the shape and mask instead (torch.where, masked_fill, multiplication by the mask)",
        )


def targets_as_rows(call: Call, builder: Builder) -> tuple[dict[str, Any], Expectation]:
    """The arguments of a ctc loss with its targets in rows, and what is expected of its lengths."""
    context = call.context
    selected: Selected = call.values["targets"]
    source, mask, lengths = (
        Ref(read(handle, builder, context))
        for handle in (selected.source, selected.mask, call.values["target_lengths"])
    )
    emit = partial(builder.ref, context=context)
    order = emit(aten.argsort.stable, mask, stable=True, dim=1, descending=True)
    rows = emit(aten.gather.default, source, 1, order)
    counted = emit(aten.eq.Tensor, emit(aten.sum.dim_IntList, mask, [1]), lengths)
    agreed = emit(aten.all.default, counted)
    return call.values | {"targets": rows}, Expectation(agreed.name, True, context.place)


def composed(call: Call, builder: Builder, draw: int | None) -> str | None:
    """What an in-place operator without a functional twin makes of its first argument, by others that mean the same;
    None for all others."""
    emit, values = partial(builder.ref, context=call.context), call.values
    match call.name:
        case "fill_diagonal_":
            return emit(aten.masked_fill.Scalar, call.args[0], on_diagonal(call, builder), values["fill_value"]).name
        case "polygamma_":
            return emit(aten.polygamma.default, values["n"], call.args[0]).name
        case "random_":
            bounds = values.get("from", 0), values["to"]
            return emit(aten.randint_like.low_dtype, call.args[0], *bounds, draw=draw).name
    return None


def on_diagonal(call: Call, builder: Builder) -> Ref:
    """True where all indices are the same; where a matrix is to `wrap`, again after each square of it and one row."""
    emit, old = partial(builder.ref, context=call.context), builder.fakes[call.args[0].name]
    places = [
        emit(
            aten.reshape.default,
            emit(aten.arange.default, size, device=old.device),
            [size, *[1] * (old.dim() - 1 - dim)],
        )
        for dim, size in enumerate(old.shape)
    ]
    if call.values["wrap"] and old.dim() == 2:
        places[0] = emit(aten.remainder.Scalar, places[0], old.shape[1] + 1)
    first, *masks = [emit(aten.eq.Tensor, one, other) for one, other in itertools.pairwise(places)]
    return reduce(partial(emit, aten.logical_and.default), masks, first)
