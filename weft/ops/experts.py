"""Rules of what mixture-of-experts layers are made of: grouped products, counts of tokens by expert.

In: an op and its shapes. Out: its rule. A grouped product may be cut along everything: along rows each cell finds the
groups of its own rows, along groups each cell multiplies the rows of the matrices it holds and leaves an addend. How
many rows a group has is known in the run only, so where groups end is told to every cell.
"""

from __future__ import annotations

from collections.abc import Mapping

from weft.errors import RuleError
from weft.ir.graph import Op, Tensor
from weft.ops.arguments import arguments, operand
from weft.ops.build import build, fixed, named, numbered_dims
from weft.ops.exchange import call, names_of
from weft.ops.rule import Call, CellView, Rule, RuleOf


def grouped_mm(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """`m k+, g+ k+ n, ends -> m n`: rows sorted by group times a matrix for each group."""
    args = arguments(op)
    values = list(args.values())
    x, weight, ends = map(operand, values[:3])
    if x is None or weight is None or ends is None or len(reads[x].sizes) != 2 or len(reads[weight].sizes) != 3:
        shapes = " and ".join(str(tensor.sizes) for tensor in reads[:2])
        raise RuleError(
            f"{op.target} of shapes {shapes} has no rule",
            place=op.place,
            remedy="multiply rows (2-d) by a matrix for each group (3-d), or use torch.bmm",
        )
    if args.get("bias") is not None:
        raise RuleError(f"{op.target} with a bias has no rule", place=op.place, remedy="add the bias to its result")
    (num_rows, width), (num_groups, _, out_width) = reads[x].sizes, reads[weight].sizes
    rows, k, n = named("m", num_rows), named("k", width), named("n", out_width)
    dims = {x: (rows, k), weight: (named("g", num_groups), k, n), ends: (fixed(num_groups),)}
    dtype = makes[0].dtype if makes[0].dtype != reads[x].dtype else None

    def local(op: Op, cell: CellView) -> Call:
        return call(
            "weft.grouped_mm",
            *values[:3],
            **{"rows": cell.names["m"]} if "m" in cell.cut else {},
            **{"groups": cell.names["g"]} if "g" in cell.cut else {},
            **{"dtype": dtype} if dtype is not None else {},
        )

    return build(
        [dims[i] for i in range(len(reads))],
        [(rows, n)],
        reads,
        makes,
        summed=("k", "g"),
        linear=[[x], [weight]],
        local=local,
    )


def histc(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """Counts of elements between given bounds add up; bounds taken from the elements themselves need all of them."""
    args = arguments(op)
    source = numbered_dims(reads[0].sizes)
    bounded = args["min"] < args["max"]
    return build(
        [source],
        [tuple(map(fixed, makes[0].sizes))],
        reads,
        makes,
        summed=names_of(source) if bounded else (),
        frozen=() if bounded else names_of(source),
    )


GROUPED: Mapping[str, RuleOf] = {"aten._grouped_mm": grouped_mm, "transformers.grouped_mm_fallback": grouped_mm}
"""Products that cells compute with a function of the runtime, by family."""
COUNTS: Mapping[str, RuleOf] = {"aten.histc": histc}
"""Computed rules, by family."""
