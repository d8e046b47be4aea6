"""Rules of what mixture-of-experts layers are made of: grouped products, counts of tokens by expert.

In: an op and its shapes. Out: its rule. A grouped product may be cut along everything: along rows each cell finds the
groups of its own rows, along groups each cell multiplies the rows of the matrices it holds and leaves an addend. How
many rows a group has is known in the run only, so where groups end is told to every cell.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.ir.graph import Op
from weft.ops.arguments import call, operand
from weft.ops.build import OpView, RuleOf, fixed_dims, named, numbered_dims
from weft.ops.rule import Call, CellView, Rule, fixed, names_of


def grouped_mm(it: OpView) -> Rule:
    """`m k+, g+ k+ n, ends -> m n`: rows sorted by group times a matrix for each group."""
    values = list(it.args.values())
    x, weight, ends = map(operand, values[:3])
    if x is None or weight is None or ends is None or len(it.shapes[x]) != 2 or len(it.shapes[weight]) != 3:
        shapes = " and ".join(map(str, it.shapes[:2]))
        remedy = "multiply rows (2-d) by a matrix for each group (3-d), or use torch.bmm"
        raise it.error(f"{it.op.target} of shapes {shapes} has no rule", remedy)
    if it.args.get("bias") is not None:
        raise it.error(f"{it.op.target} with a bias has no rule", "add the bias to its result")
    (num_rows, width), (num_groups, _, out_width) = it.shapes[x], it.shapes[weight]
    rows, k, n = named("m", num_rows), named("k", width), named("n", out_width)
    dims = {x: (rows, k), weight: (named("g", num_groups), k, n), ends: (fixed(num_groups),)}
    dtype = it.makes[0].dtype if it.makes[0].dtype != it.reads[x].dtype else None

    def local(op: Op, cell: CellView) -> Call:
        told = {argument: cell.names[name] for argument, name in (("rows", "m"), ("groups", "g")) if name in cell.cut}
        return call("weft.grouped_mm", *values[:3], **told, **{} if dtype is None else {"dtype": dtype})

    inputs = [dims[i] for i in range(len(it.reads))]
    return it.rule(inputs, [(rows, n)], summed=("k", "g"), linear=[[x], [weight]], local=local)


def histc(it: OpView) -> Rule:
    """Counts of elements between given bounds add up; bounds taken from the elements themselves need all of them."""
    source = numbered_dims(it.shape)
    marks: dict[str, Any] = {"summed" if it.args["min"] < it.args["max"] else "frozen": names_of(source)}
    return it.rule([source], fixed_dims(*it.makes), **marks)


RULES: Mapping[str, RuleOf] = {
    "aten._grouped_mm": grouped_mm,
    "transformers.grouped_mm_fallback": grouped_mm,
    "aten.histc": histc,
}
"""Rules by operator."""
