"""All operators whose cut takes more than a local call on each part: what `table.py` looks into first.

In: the registry. Out: the registry with the built-in algorithms in it: for each operator (target without overload) the
function that computes its rule: statistics and softmax, distances, norms, losses, embedding, grouped products.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from weft.ir.graph import Op, Tensor
from weft.ops.arguments import arguments, call_with, operand
from weft.ops.bags import TARGET as BAG
from weft.ops.bags import embedding_bag_rule
from weft.ops.build import build, fixed, named, numbered_dims
from weft.ops.distances import distance_rules
from weft.ops.exchange import call, names_of
from weft.ops.experts import GROUPED
from weft.ops.losses import loss_rules
from weft.ops.norms import norm_rules
from weft.ops.positions import position_rules
from weft.ops.rule import Call, CellView, Rule, RuleOf
from weft.ops.statistics import statistics_rules
from weft.runtime.algorithms import REGISTRY, Algorithm


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


def expect_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """`weft.expect`: the value as it comes, and truth values that every cell sees."""
    dims = numbered_dims(reads[0].sizes)
    others = [tuple(map(fixed, tensor.sizes)) for tensor in reads[1:]]
    return build([dims, *others], [dims], reads, makes, linear=[[0]])


def _builtin() -> Iterator[Algorithm]:
    """All algorithms of this room."""
    rooms: dict[str, Mapping[str, RuleOf]] = {
        "statistics": statistics_rules(),
        "distances": distance_rules(),
        "positions": position_rules(),
        "norms": norm_rules(),
        "losses": loss_rules(),
        "vocabulary": {"aten.embedding": embedding, BAG: embedding_bag_rule},
        "experts": GROUPED,
        "expect": {"weft.expect": expect_rule},
    }
    for name, rules in rooms.items():
        yield from (Algorithm(operator, name, rule) for operator, rule in rules.items())


for _algorithm in _builtin():
    REGISTRY.add(_algorithm)


def algorithm_rules() -> Mapping[str, RuleOf]:
    """Rules of the built-in algorithms by operator, the target without its overload."""
    return REGISTRY.builtin()
