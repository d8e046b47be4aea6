"""Products with one and sums with zero: they compute nothing, and a reader of a program would look for their reason.

Enters: ops under working names. Leaves: the same ops without those whose result is their operand, bit for bit, with the
same dtype, shape and gradient. A sum of floats with zero stays: it makes 0.0 of -0.0.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from weft.ir.graph import Op, Ref, Tensor, with_refs

NEUTRAL = {
    **dict.fromkeys(("aten.mul.Tensor", "aten.mul.Scalar", "aten.div.Tensor", "aten.div.Scalar"), 1),
    **dict.fromkeys(("aten.add.Tensor", "aten.add.Scalar", "aten.sub.Tensor", "aten.sub.Scalar"), 0),
}
"""The number with which each of these gives its first operand."""


def without_noops(ops: Sequence[Op], tensors: Mapping[str, Tensor], wanted: Collection[str]) -> list[Op]:
    """The ops that compute something. `wanted`: results, which stay tensors of their own."""
    stands_for: dict[str, str] = {}

    def source(ref: Ref) -> Ref:
        return Ref(stands_for.get(ref.name, ref.name))

    kept = []
    for op in ops:
        changed = op if stands_for.keys().isdisjoint(op.inputs) else with_refs(op, source)
        if op.outputs[0] not in wanted and _is_noop(changed, tensors):
            stands_for[op.outputs[0]] = changed.inputs[0]
        else:
            kept.append(changed)
    return kept


def _is_noop(op: Op, tensors: Mapping[str, Tensor]) -> bool:
    neutral = NEUTRAL.get(op.target)
    if neutral is None or op.kwargs or len(op.args) != 2 or not isinstance(op.args[0], Ref):
        return False
    number, before, after = op.args[1], tensors[op.args[0].name], tensors[op.outputs[0]]
    if isinstance(number, bool) or not isinstance(number, int | float) or number != neutral:
        return False
    if before.dtype.is_complex or (neutral == 0 and before.dtype.is_floating_point):
        return False
    return (before.shape, before.dtype, before.needs_grad) == (after.shape, after.dtype, after.needs_grad)
