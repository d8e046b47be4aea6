"""Rule of scaled-dot-product attention, with or without dropout.

In: an op and the tensors it reads and makes. Out: `b* h q d, b* h k d, b* h k v [, mask] -> b* h q v`, keys `k` and
their width `d` frozen. With grouped queries the heads of keys and values are `g` and those of the queries `(g r)`.
Queries may be cut even if attention is causal: the local call knows which global rows it has. Dropout is drawn by
element of the attention weights, so it does not depend on the cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weft.ir.graph import Op
from weft.ir.ranges import whole
from weft.ops.arguments import call, call_with, operand
from weft.ops.build import OpView, RuleOf, named, product_dim
from weft.ops.rule import Call, CellView, Dim, Dims, Rule, dim, fixed
from weft.runtime.random import Draw

_OPERANDS = ("query", "key", "value", "attn_mask")


def attention(it: OpView) -> Rule:
    """The rule of `scaled_dot_product_attention`."""
    query, key, value = (it.shapes[it.where(name)] for name in _OPERANDS[:3])
    grouped = bool(it.args["enable_gqa"]) and query[-3] != key[-3]
    sizes = {"g": key[-3], "r": query[-3] // key[-3]} if grouped else {}
    lead, shared = _heads(it.result[:-2], sizes)
    rows, columns, width = named("q", query[-2]), named("k", key[-2]), named("v", value[-1])
    dims = {
        "query": (*lead, rows, fixed(query[-1])),
        "key": (*shared, columns, fixed(key[-1])),
        "value": (*shared, columns, width),
        "attn_mask": (*lead, rows, columns),
    }
    held = {i: _fit(dims[name], it.shapes[i]) for name in _OPERANDS if (i := operand(it.args[name])) is not None}
    return it.rule(
        [held[i] for i in range(len(it.reads))],
        [(*lead, rows, width)],
        sizes=sizes,
        frozen=["k"],
        linear=[[it.where("value")]],
        local=lambda op, cell: _local(it, op, cell, grouped),
    )


def _heads(lead: Sequence[int], sizes: dict[str, int]) -> tuple[Dims, Dims]:
    """Batch dims and heads of the output, and those of keys and values."""
    batch = tuple(named(f"b{i}", size) for i, size in enumerate(lead[:-1]))
    if sizes:
        return (*batch, product_dim("g", "r", sizes=sizes)), (*batch, product_dim("g", sizes=sizes))
    both = (*batch, *(named("h", size) for size in lead[-1:]))
    return both, both


def _fit(dims: Sequence[Dim], sizes: Sequence[int]) -> Dims:
    """Dims of an operand that broadcasts from the right."""
    kept = dims[len(dims) - len(sizes) :]
    return tuple(dim() if size == 1 else one for one, size in zip(kept, sizes, strict=True))


def _local(it: OpView, op: Op, cell: CellView, grouped: bool) -> Call:
    args = it.args
    drawn = op.draw is not None and args["dropout_p"] > 0
    rows = cell.outputs[0][-2] if "q" in cell.cut and args["is_causal"] else None
    if not drawn and rows is None:
        return call_with(op)
    options: dict[str, Any] = {"is_causal": args["is_causal"], "scale": args["scale"], "enable_gqa": grouped}
    if rows is not None:
        options["rows"] = rows
    if drawn:
        assert op.draw is not None
        weights = _weights(it, grouped)
        lead = [((0, 1),) if size == 1 else at for size, at in zip(weights, cell.outputs[0][:-2], strict=False)]
        at = (*lead, cell.outputs[0][-2], whole(weights[-1]))
        options |= {"dropout_p": args["dropout_p"], "draw": Draw(op.draw, weights, at)}
    return call("weft.attention", *(args[name] for name in _OPERANDS), **options)


def _weights(it: OpView, grouped: bool) -> tuple[int, ...]:
    """The whole shape of the attention weights."""
    query, key = (it.shapes[it.where(name)] for name in _OPERANDS[:2])
    lead = [max(q, k) for q, k in zip(query[:-2], key[:-2], strict=True)]
    if grouped:
        lead[-1] = query[-3]
    return (*lead, query[-2], key[-2])


RULES: Mapping[str, RuleOf] = {"aten.scaled_dot_product_attention": attention}
"""Rules by operator."""
