"""Rules of losses that weigh a whole row at once: margins, triplets, cosine embedding, ctc.

In: an op and the tensors it reads and makes. Out: its rule. Each row `n` has a loss of its own, which needs all of the
row's features or classes; rows may be cut. A reduced loss is then a sum of addends, a mean one over the whole count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from weft.errors import RuleError
from weft.ir.graph import Op, Ref, Tensor
from weft.ops.arguments import arguments, call_with, operand
from weft.ops.build import broadcast, build, fixed, named
from weft.ops.exchange import call, is_empty, own_call
from weft.ops.rule import Call, CellView, Dims, Rule, RuleOf

Reads = tuple[Tensor, ...]

NONE, MEAN, SUM = 0, 1, 2
"""ATen's numbers for `reduction`."""
_DISTANCES = ("triplet_margin_loss",)


def row_loss(op: Op, reads: Reads, makes: Reads) -> Rule:
    """Operands of several dims have rows first, those of one dim hold a number per row; class weights stay whole."""
    args = arguments(op)
    weight = operand(args.get("weight"))
    own = [tensor.sizes for i, tensor in enumerate(reads) if i != weight]
    rows = max(map(len, own)) > 1
    first = max(sizes[0] for sizes in own if sizes) if rows else 1
    n = named("n", first)
    # distances are taken along the last dim, and every other index has a loss of its own
    count = math.prod(broadcast(own)[:-1]) if op.kind in _DISTANCES else first

    def dims(position: int, tensor: Tensor) -> Dims:
        if not rows or position == weight or not tensor.sizes or tensor.sizes[0] != first:
            return tuple(map(fixed, tensor.sizes))
        return (n, *map(fixed, tensor.sizes[1:]))

    reduction = int(args["reduction"])

    def local(op: Op, cell: CellView) -> Call:
        if reduction != MEAN or "n" not in cell.cut:
            return own_call(op)
        summed = call_with(op, {"reduction": SUM})
        return call("weft.loss_part", op.target, *summed.args, **dict(summed.kwargs), count=count)

    out: Dims = (n, *map(fixed, makes[0].sizes[1:])) if makes[0].sizes else ()
    summed = n.names if reduction != NONE else ()
    inputs = [dims(i, tensor) for i, tensor in enumerate(reads)]
    return build(inputs, [out], reads, makes, summed=summed, local=local)


def ctc_loss(op: Op, reads: Reads, makes: Reads) -> Rule:
    """`t n c, n s, n, n -> n`: alignments run over all steps and classes. Targets laid end to end tie rows together."""
    args = arguments(op)
    scores = reads[0].sizes
    if len(scores) != 3 or len(reads[1].sizes) != 2:
        raise RuleError(
            f"{op.target} with targets laid end to end has no rule",
            place=op.place,
            remedy="give targets of two dims, one row for each sequence, or keep the op copied",
        )
    n = named("n", scores[1])
    lengths = [(n,) for _ in reads[2:]]
    reduction = int(args["reduction"])

    def local(op: Op, cell: CellView) -> Call:
        if "n" not in cell.cut:
            return own_call(op)
        own = [i for start, stop in cell.inputs[0][1] for i in range(start, stop)]
        sizes = [
            value if isinstance(value, Ref) else tuple(value[i] for i in own)
            for value in (args["input_lengths"], args["target_lengths"])
        ]
        if reduction != MEAN and not is_empty(cell):
            return call_with(op, {"input_lengths": sizes[0], "target_lengths": sizes[1]})
        options = {"blank": args["blank"], "zero_infinity": args["zero_infinity"]}
        return call("weft.ctc_part", Ref("0"), Ref("1"), *sizes, reduction=reduction, count=scores[1], **options)

    return build(
        [(fixed(scores[0]), n, fixed(scores[2])), (n, fixed(reads[1].sizes[1])), *lengths],
        [(n,) if reduction == NONE else ()],
        reads,
        makes,
        summed=n.names if reduction != NONE else (),
        local=local,
    )


_ROWS = (
    "aten.cosine_embedding_loss",
    "aten.multi_margin_loss",
    "aten.multilabel_margin_loss",
    "aten.triplet_margin_loss",
)


def row_loss_rules() -> Mapping[str, RuleOf]:
    """Rules by operator."""
    return {**dict.fromkeys(_ROWS, row_loss), "aten.ctc_loss": ctc_loss}
