"""All operators whose cut takes more than a local call on each part: the table that `table.py` looks into.

In: nothing. Out: for each operator (target without overload) the function that computes its rule: statistics and
softmax, norms, losses, embedding.
"""

from __future__ import annotations

from collections.abc import Mapping

from weft.ir.graph import Op, Tensor
from weft.ops.arguments import arguments, call_with, operand
from weft.ops.build import build, named, numbered_dims
from weft.ops.exchange import call, names_of
from weft.ops.losses import loss_rules
from weft.ops.norms import norm_rules
from weft.ops.rule import Call, CellView, Rule, RuleOf
from weft.ops.statistics import statistics_rules


def embedding(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """`v+ h, b* -> b* h`: with the vocabulary cut each cell looks up the rows it holds, and leaves an addend."""
    args = arguments(op)
    table, ids = operand(args["weight"]), operand(args["indices"])
    assert table is not None and ids is not None
    rows = reads[table].sizes[0]
    weight = (named("v", rows), named("h", reads[table].sizes[1]))
    batch = numbered_dims(reads[ids].sizes, "b")
    by_count = bool(args["scale_grad_by_freq"])

    def local(op: Op, cell: CellView) -> Call:
        if "v" not in cell.cut:
            # gradients of parts are summed and stored dense
            return call_with(op, {"sparse": False}) if args["sparse"] else call_with(op, {})
        return call(
            "weft.embedding_part",
            args["weight"],
            args["indices"],
            ranges=cell.names["v"],
            num_rows=rows,
            padding_idx=int(args["padding_idx"]),
            scale_grad_by_freq=by_count,
        )

    return build(
        [weight if i == table else batch for i in range(2)],
        [(*batch, weight[1])],
        reads,
        makes,
        summed=["v"],
        # counting how often a row is used needs all ids
        frozen=names_of(batch) if by_count else (),
        linear=[[table]],
        local=local,
    )


def algorithm_rules() -> Mapping[str, RuleOf]:
    """Rules by operator, the target without its overload."""
    return {**statistics_rules(), **norm_rules(), **loss_rules(), "aten.embedding": embedding}
