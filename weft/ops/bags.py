"""Rule of embedding bags.

In: a `weft.embedding_bag` op (see `weft/runtime/bags.py`) and the tensors it reads. Out: its rule. `v` are the rows of
the table, `h` its columns, `b` the bags, `l` the ids of a bag where they have a dim. Columns and bags are cut freely;
rows leave addends of a sum or mean, and a maximum that the cells agree upon. With offsets a bag may begin anywhere, so
every cell sees all ids.
"""

from __future__ import annotations

from typing import Any

from weft.ir.graph import Op, Tensor
from weft.ir.ranges import Ranges
from weft.ops.arguments import numbered, operand
from weft.ops.build import build, fixed, named
from weft.ops.exchange import call, groups, with_exchange
from weft.ops.rule import Call, CellView, Dims, Exchange, Rule

TARGET = "weft.embedding_bag"
SUM, MEAN, MAX = 0, 1, 2


def embedding_bag_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """`v+ h, b l+ -> b h`, or `v+ h, n^, n^ -> b h` with offsets."""
    args, options = _arguments(op)
    mode, by_offsets = options["mode"], args[2] is not None
    num_rows, num_bags = reads[0].sizes[0], makes[0].sizes[0]
    table = (named("v", num_rows), named("h", makes[0].sizes[1]))
    bags = named("b", num_bags)
    held: Dims = tuple(map(fixed, reads[1].sizes)) if by_offsets else (bags, named("l", reads[1].sizes[1]))
    inputs: list[Dims] = [table, held]
    if by_offsets:
        inputs.append((fixed(reads[2].sizes[0]),))
    weights = operand(args[3])
    if weights is not None:
        inputs.append(held)
    length = None if by_offsets else reads[1].sizes[1]
    # what is counted over a bag, or over all ids, must be seen whole
    counts_bag = mode == MAX or (mode == MEAN and options["padding_idx"] is not None)
    frozen = ["l"] if counts_bag else []
    if options["scale_grad_by_freq"]:
        # torch's kernel divides by the count of another row: only all ids with all rows give its numbers
        frozen = ["v", "b", "l"]
    sums = [] if mode == MAX else ["v", "l"]

    def local(op: Op, cell: CellView) -> Call:
        if not cell.cut & {"v", "l"} and not (by_offsets and "b" in cell.cut):
            return call(TARGET, *args, **options)
        plain = {name: options[name] for name in ("mode", "padding_idx")}
        told: dict[str, Any] = {"num_rows": num_rows, "num_bags": num_bags, "length": length}
        told["rows"] = _ranges(cell, "v")
        if by_offsets:
            told["bags"] = _ranges(cell, "b")
        else:
            told["num_bags"] = cell.output_shape()[0]
        return call("weft.embedding_bag_part", *args, **plain, **told, comms=groups(cell, ["v"] if mode == MAX else []))

    rule = build(
        inputs,
        [(bags, table[1])],
        reads,
        makes,
        summed=[name for name in sums if name not in frozen],
        frozen=frozen,
        linear=[] if mode == MAX else [[0], *([] if weights is None else [[weights]])],
        local=local,
        source="algorithm",
    )
    exchange = Exchange(forward=("all_reduce", "all_reduce"))
    return with_exchange(rule, {"v": exchange}) if mode == MAX else rule


def _ranges(cell: CellView, name: str) -> Ranges | None:
    return cell.names.get(name) if name in cell.cut else None


def _arguments(op: Op) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The four operands (None where there is none), and the options with their defaults."""
    args, kwargs = numbered(op)
    defaults = {"mode": SUM, "padding_idx": None, "scale_grad_by_freq": False, "include_last_offset": False}
    return (*args, *(None,) * (4 - len(args))), defaults | dict(kwargs)
