"""Embedding bags as ops with one result.

Enters: a call of `aten.embedding_bag`, which gives four tensors, three of them for its own backward. Leaves: a call of
`weft.embedding_bag`, which gives the bags alone. torch flattens ids of shape (bags, length) and makes offsets for them;
here they get their shape back, so that the bags may be cut with the ids.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from weft.capture.builder import Builder, Context
from weft.capture.draws import bound, name_of
from weft.ir.graph import Op, Ref
from weft.runtime.embedding import embedding_bag


def is_bag(target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], node: fx.Node) -> bool:
    """Whether this is an embedding bag of which only the first result is used, with a dense gradient."""
    if name_of(target) not in ("embedding_bag", "_embedding_bag") or bound(target, args, kwargs)["sparse"]:
        return False
    return all(user.args[1] == 0 or not user.users for user in node.users)


def emit_bag(
    target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], builder: Builder, context: Context
) -> str:
    """The bags' working name."""
    values = bound(target, args, kwargs)
    ids, offsets, weights = values["indices"], values["offsets"], values["per_sample_weights"]
    folded = _unflattened(ids, offsets, builder)
    if folded is not None:
        shape = list(builder.fakes[folded.name].shape)
        weights = None if weights is None else _shaped(weights, shape, builder, context)
        ids, offsets = folded, None
    padding = values.get("padding_idx")
    if padding is not None and padding < 0:
        # the older overload says -1 where there is none
        padding = None if name_of(target) == "_embedding_bag" else padding + builder.fakes[args[0].name].shape[0]
    options = {
        "mode": values["mode"],
        "padding_idx": padding,
        "scale_grad_by_freq": bool(values["scale_grad_by_freq"]),
        "include_last_offset": bool(values["include_last_offset"]),
    }
    return builder.emit_runtime(
        "weft.embedding_bag", embedding_bag, (values["weight"], ids, offsets, weights), options, context
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
    return Ref(builder.emit(torch.ops.aten.reshape.default, (weights, shape), context=context)[0])


def _maker(ref: Ref, builder: Builder) -> Op | None:
    return next((op for op in reversed(builder.ops) if ref.name in op.outputs), None)
