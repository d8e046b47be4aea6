"""Rule of scaled-dot-product attention, with or without dropout.

In: an op and the tensors it reads and makes. Out: `b* h q d, b* h k d, b* h k v [, mask] -> b* h q v`, keys `k` and
their width `d` frozen. With grouped queries the heads of keys and values are `g` and those of the queries `(g r)`.
Queries may be cut even if attention is causal: the local call knows which global rows it has. Dropout is drawn by
element of the attention weights, so it does not depend on the cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.ir.graph import Op, Tensor
from weft.ir.ranges import whole
from weft.ops.arguments import arguments, operand
from weft.ops.build import build, fixed, named, product_dim
from weft.ops.exchange import call, own_call
from weft.ops.rule import Call, CellView, Dim, Dims, Rule, dim
from weft.runtime.random import Draw

Reads = tuple[Tensor, ...]


@dataclass(frozen=True)
class _Shapes:
    """Whole shapes of an attention, and whether several query heads share one head of keys."""

    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    mask: tuple[int, ...] | None
    out: tuple[int, ...]
    grouped: bool

    @property
    def head_sizes(self) -> Mapping[str, int]:
        return {"g": self.key[-3], "r": self.query[-3] // self.key[-3]} if self.grouped else {}

    @property
    def weights(self) -> tuple[int, ...]:
        """Shape of the attention weights."""
        lead = tuple(max(q, k) for q, k in zip(self.query[:-2], self.key[:-2], strict=True))
        return (*lead[:-1], self.query[-3], *self._square) if self.grouped else (*lead, *self._square)

    @property
    def _square(self) -> tuple[int, int]:
        return self.query[-2], self.key[-2]


def attention(op: Op, reads: Reads, makes: Reads) -> Rule:
    """The rule of `scaled_dot_product_attention`."""
    args = arguments(op)
    order = [operand(args[name]) for name in ("query", "key", "value", "attn_mask")]
    sizes = [None if i is None else reads[i].sizes for i in order]
    query, key, value, mask = sizes
    assert query is not None and key is not None and value is not None
    grouped = bool(args["enable_gqa"]) and query[-3] != key[-3]
    shapes = _Shapes(query, key, value, mask, makes[0].sizes, grouped)
    held = dict(zip(order, _operands(shapes), strict=True))
    return build(
        [held[i] for i in range(len(reads))],
        [(*_lead(shapes), named("q", query[-2]), named("v", value[-1]))],
        reads,
        makes,
        sizes=shapes.head_sizes,
        frozen=["k"],
        linear=[[i] for i in order[2:3] if i is not None],
        local=lambda op, cell: _local(op, cell, args, shapes),
    )


def _lead(shapes: _Shapes) -> Dims:
    """Batch dims and heads of the output."""
    lead = shapes.out[:-2]
    dims: list[Dim] = [named(f"b{i}", size) for i, size in enumerate(lead[:-1])]
    if lead:
        dims.append(product_dim("g", "r", sizes=shapes.head_sizes) if shapes.grouped else named("h", lead[-1]))
    return tuple(dims)


def _operands(shapes: _Shapes) -> list[Dims]:
    """Dims of query, key, value and mask."""
    lead = _lead(shapes)
    shared = (*lead[:-1], product_dim("g", sizes=shapes.head_sizes)) if shapes.grouped else lead
    rows, columns = named("q", shapes.query[-2]), named("k", shapes.key[-2])
    return [
        (*_fit(lead, shapes.query[:-2]), rows, fixed(shapes.query[-1])),
        (*_fit(shared, shapes.key[:-2]), columns, fixed(shapes.key[-1])),
        (*_fit(shared, shapes.value[:-2]), columns, named("v", shapes.value[-1])),
        () if shapes.mask is None else _fit((*lead, rows, columns), shapes.mask),
    ]


def _fit(dims: Sequence[Dim], sizes: Sequence[int]) -> Dims:
    """Dims of an operand that broadcasts from the right."""
    kept = dims[len(dims) - len(sizes) :]
    return tuple(dim() if size == 1 else one for one, size in zip(kept, sizes, strict=True))


def _local(op: Op, cell: CellView, args: Mapping[str, Any], shapes: _Shapes) -> Call:
    drawn = op.draw is not None and args["dropout_p"] > 0
    rows = cell.outputs[0][-2] if "q" in cell.cut and args["is_causal"] else None
    if not drawn and rows is None:
        return own_call(op)
    tensors = [args[name] for name in ("query", "key", "value", "attn_mask")]
    options: dict[str, Any] = {"is_causal": args["is_causal"], "scale": args["scale"], "enable_gqa": shapes.grouped}
    if rows is not None:
        options["rows"] = rows
    if drawn:
        assert op.draw is not None
        lead = [((0, 1),) if size == 1 else at for size, at in zip(shapes.weights, cell.outputs[0][:-2], strict=False)]
        at = (*lead, cell.outputs[0][-2], whole(shapes.key[-2]))
        options |= {"dropout_p": args["dropout_p"], "draw": Draw(op.draw, shapes.weights, at)}
    return call("weft.attention", *tensors, **options)
