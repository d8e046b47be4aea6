"""Rules of embeddings and embedding bags: lookups in a table whose rows may be cut.

In: an `aten.embedding` or `weft.embedding_bag` op and the tensors it reads. Out: its rule. `v` are the rows of the
table, `h` its columns; ids have dims `b0 b1 ...`, or bags `b` of ids `l`. With the rows cut each cell looks up those it
holds and leaves an addend; of a bag's maximum the cells agree upon the complete one. With offsets a bag may begin
anywhere, so every cell sees all ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.ir.graph import Op
from weft.ir.ranges import Ranges
from weft.ops.arguments import call, call_with, numbered, operand
from weft.ops.build import OpView, RuleOf, fixed_dims, groups, named, numbered_dims
from weft.ops.rule import Call, CellView, Dims, Rule, names_of
from weft.runtime.operators.algorithms import Exchange

BAG = "weft.embedding_bag"
SUM, MEAN, MAX = 0, 1, 2
"""How torch numbers the modes of a bag."""


def embedding_rule(it: OpView) -> Rule:
    """`v+ h, b* -> b* h`."""
    args, table, ids = it.args, it.where("weight"), it.where("indices")
    rows, width = it.shapes[table]
    batch, columns = numbered_dims(it.shapes[ids], "b"), named("h", width)
    by_count = bool(args["scale_grad_by_freq"])

    def local(op: Op, cell: CellView) -> Call:
        if "v" not in cell.cut:
            # gradients of parts are summed and stored dense
            return call_with(op, sparse=False) if args["sparse"] else call_with(op)
        return call(
            "weft.embedding_part",
            args["weight"],
            args["indices"],
            ranges=cell.names["v"],
            num_rows=rows,
            padding_idx=int(args["padding_idx"]),
            scale_grad_by_freq=by_count,
        )

    held = {table: (named("v", rows), columns), ids: batch}
    return it.rule(
        [held[i] for i in range(2)],
        [(*batch, columns)],
        summed=["v"],
        # counting how often a row is used needs all ids
        frozen=names_of(batch) if by_count else (),
        linear=[[table]],
        local=local,
    )


def embedding_bag_rule(it: OpView) -> Rule:
    """`v+ h, b l+ -> b h`, or `v+ h, n^, n^ -> b h` with offsets."""
    args, options = _bag_arguments(it.op)
    mode, by_offsets = options["mode"], args[2] is not None
    num_rows, num_bags = it.shape[0], it.result[0]
    table, bags = (named("v", num_rows), named("h", it.result[1])), named("b", num_bags)
    length = None if by_offsets else it.shapes[1][1]
    ids: Dims = fixed_dims(it.reads[1])[0] if length is None else (bags, named("l", length))
    offsets = fixed_dims(it.reads[2]) if by_offsets else []
    weights = operand(args[3])
    # what is counted over a bag, or over all ids, must be seen whole
    frozen = ["l"] if mode == MAX or (mode == MEAN and options["padding_idx"] is not None) else []
    if options["scale_grad_by_freq"]:
        # torch's kernel divides by the count of another row: only all ids with all rows give its numbers
        frozen = ["v", "b", "l"]
    linear = [[0], *([] if weights is None else [[weights]])]

    def local(op: Op, cell: CellView) -> Call:
        if not cell.cut & {"v", "l"} and not (by_offsets and "b" in cell.cut):
            return call(BAG, *args, **options)
        plain = {name: options[name] for name in ("mode", "padding_idx")}
        told: dict[str, Any] = {"num_rows": num_rows, "num_bags": num_bags, "length": length}
        told["rows"] = _ranges(cell, "v")
        if by_offsets:
            told["bags"] = _ranges(cell, "b")
        else:
            told["num_bags"] = cell.output_shape()[0]
        return call("weft.embedding_bag_part", *args, **plain, **told, comms=groups(cell, ["v"] if mode == MAX else []))

    return it.rule(
        [table, ids, *offsets, *([] if weights is None else [ids])],
        [(bags, table[1])],
        summed=[] if mode == MAX else {"v", "l"}.difference(frozen),
        frozen=frozen,
        algorithms={"v": Exchange(forward=("all_reduce", "all_reduce"))} if mode == MAX else {},
        linear=[] if mode == MAX else linear,
        local=local,
        source="algorithm",
    )


def _ranges(cell: CellView, name: str) -> Ranges | None:
    return cell.names.get(name) if name in cell.cut else None


def _bag_arguments(op: Op) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The four operands (None where there is none), and the options with their defaults."""
    args, kwargs = numbered(op)
    defaults = {"mode": SUM, "padding_idx": None, "scale_grad_by_freq": False, "include_last_offset": False}
    return (*args, *(None,) * (4 - len(args))), defaults | dict(kwargs)


RULES: Mapping[str, RuleOf] = {"aten.embedding": embedding_rule, BAG: embedding_bag_rule}
"""Rules by operator."""
