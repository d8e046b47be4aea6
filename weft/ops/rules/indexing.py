"""Operators that read or write at positions given by a tensor: index, gather, scatter, take and their kin.

In: an op and its shapes. Out: its rule. An indexed dim may not be cut, because any position may be asked for; the
dims of the index itself may, where each position is read once. Where positions are written by adding, the index's
dims are summed: every part adds its own rows into zeros, and the tensor written to goes into one part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from weft.ops.arguments import call_with, operand, positive
from weft.ops.build import (
    OpView,
    RuleOf,
    aligned,
    broadcast,
    broadcasting,
    fixed_dims,
    named,
    numbered_dims,
    replaced,
    row,
    rules_of,
)
from weft.ops.rule import Dim, Dims, Rule, dim, fixed, names_of


@dataclass(frozen=True)
class _Indexing:
    """How index tensors meet the dims of the tensor they index."""

    source: Dims
    """Dims of the indexed tensor."""
    operands: list[Dims]
    """Dims of the index tensors."""
    index: Dims
    """Dims of what these broadcast to."""
    taken: Dims
    """Dims of what is read or written."""
    shape: tuple[int, ...]
    """The shape of that."""


def _indexing(it: OpView) -> _Indexing:
    pairs = [
        (i, it.reads[position])
        for i, value in enumerate(it.args["indices"])
        if (position := operand(value)) is not None
    ]
    if any(tensor.dtype in (torch.bool, torch.uint8) for _, tensor in pairs):
        raise it.error(
            f"{it.op.target} with a mask: how much it selects is not known before the run",
            "use torch.where, or keep the op copied: plan.trans(op, copy(...))",
        )
    sizes, indexed, tensors = it.shape, [i for i, _ in pairs], [tensor for _, tensor in pairs]
    shape = broadcast([tensor.sizes for tensor in tensors])
    # the dims of the index stand where the indexed dims were, or in front if these lay apart
    together = bool(indexed) and indexed == list(range(indexed[0], indexed[-1] + 1))
    kept = [i for i in range(len(sizes)) if i not in indexed]
    before = sum(1 for i in kept if together and i < indexed[0])
    taken_shape = (*(sizes[i] for i in kept[:before]), *shape, *(sizes[i] for i in kept[before:]))
    taken = numbered_dims(taken_shape)
    index = taken[before : before + len(shape)]
    rest = iter((*taken[:before], *taken[before + len(shape) :]))
    source = tuple(fixed(size) if i in indexed else next(rest) for i, size in enumerate(sizes))
    return _Indexing(source, broadcasting(index, shape, tensors), index, taken, taken_shape)


def _written(names: Iterable[str], adds: bool) -> dict[str, Any]:
    """What is written may be cut along the index where it is added: the tensor written to goes into one part."""
    return {"summed": names, "added": (0,)} if adds else {"frozen": names}


def index_rule(it: OpView) -> Rule:
    """x[i, j, :]"""
    how = _indexing(it)
    return it.rule([how.source, *how.operands], [how.taken], linear=[[0]], source="view")


def index_put_rule(it: OpView) -> Rule:
    """x[i, j, :] = values, or += values."""
    masked = _masked_put(it)
    if masked is not None:
        return masked
    how, last = _indexing(it), len(it.reads) - 1
    values = aligned(how.taken, how.shape, it.shapes[last])
    if values is None:
        raise it.error(f"{it.op.target}: {it.shapes[last]} does not broadcast to {how.shape}")
    marks = _written(names_of(how.index), bool(it.args["accumulate"]))
    inputs = [how.source, *how.operands, values]
    return it.rule(inputs, [how.source], linear=[[0, last]], source="view", **marks)


def _masked_put(it: OpView) -> Rule | None:
    """x[:, mask] = value, the same wherever the mask holds: every dim may be cut. None where it is something else."""
    indices, sizes = it.args["indices"], it.shape
    before = next((i for i, value in enumerate(indices) if value is not None), 0)
    mask = it.reads[1]
    if len(it.reads) != 3 or mask.dtype != torch.bool or len(indices) != before + 1:
        return None
    dims = numbered_dims(sizes)
    after = before + len(mask.sizes)
    # one value for all selected elements: a leading dim, where there is one, has size 1
    shape = (*sizes[:before], 1, *sizes[after:])
    values = aligned((*dims[:before], dim(), *dims[after:]), shape, it.shapes[2])
    if values is None:
        return None
    return it.rule([dims, dims[before:after], values], [dims], linear=[[0, 2]], source="view")


def _where(it: OpView) -> int:
    return positive(it.args["dim"], len(it.shape))


def gather_rule(it: OpView) -> Rule:
    """Other dims may be cut where the index is as long as the tensor."""
    shorter = {i for i, (size, taken) in enumerate(zip(it.shape, it.result, strict=True)) if size != taken}
    at = _where(it)
    source, target = numbered_dims(it.shape, whole={*shorter, at}), numbered_dims(it.result, whole=shorter - {at})
    return it.rule([source, target], [target], linear=[[0]], source="view")


def take_along_rule(it: OpView) -> Rule:
    """take_along_dim: a gather whose operands broadcast."""
    if it.args["dim"] is None:
        raise it.error(f"{it.op.target} without a dim has no rule", "name the dim")
    at, shape = _where(it), it.result
    target = numbered_dims(shape)
    own = (*shape[:at], it.shape[at], *shape[at + 1 :])
    (source,) = broadcasting(numbered_dims(own, whole=(at,)), own, it.reads[:1])
    return it.rule([source, *broadcasting(target, shape, it.reads[1:])], [target], linear=[[0]], source="view")


def scatter_rule(it: OpView) -> Rule:
    """scatter, scatter_add, scatter_reduce: `x` written at the places that `index` names along one dim."""
    at, shape, sources = _where(it), it.result, it.shapes[2:]
    how = it.args.get("reduce")
    adds = it.kind == "scatter_add" or how == "add" or (how == "sum" and bool(it.args["include_self"]))
    target: list[Dim] = list(numbered_dims(shape))
    index: list[Dim] = list(target)
    values: list[list[Dim]] = [list(target) for _ in sources]
    for i, size in enumerate(it.shapes[1]):
        agree = all(other[i] == size for other in sources)
        if i != at and size == shape[i] and agree:
            continue
        target[i] = fixed(shape[i])
        index[i] = named("n", size) if i == at and agree else fixed(size)
        for dims, other in zip(values, sources, strict=True):
            dims[i] = index[i] if other[i] == size else fixed(other[i])
    inputs = [tuple(dims) for dims in (target, index, *values)]
    linear = [[0, 2]] if sources and (adds or it.op.target == "aten.scatter.src") else []
    return it.rule(inputs, [tuple(target)], linear=linear, source="view", **_written("n", adds))


def index_select_rule(it: OpView) -> Rule:
    """Rows of one dim."""
    at, target = _where(it), numbered_dims(it.result)
    if not target:
        return it.rule([(), *fixed_dims(it.reads[1])], [()], linear=[[0]], source="view")
    index = (target[at],) if it.shapes[1] else ()
    return it.rule([replaced(target, at, fixed(it.shape[at])), index], [target], linear=[[0]], source="view")


def index_write_rule(it: OpView) -> Rule:
    """index_add, index_copy, index_fill: rows of one dim written."""
    at = _where(it)
    target = numbered_dims(it.result, whole=(at,))
    written = named("n", it.shapes[1][0]) if it.shapes[1] else fixed(1)
    index = (written,) if it.shapes[1] else ()
    values = [replaced(target, at, written) if shape else () for shape in it.shapes[2:]]
    marks = _written("n", it.kind == "index_add")
    return it.rule([target, index, *values], [target], linear=[[0, 2]] if values else [], source="view", **marks)


def index_reduce_rule(it: OpView) -> Rule:
    """Rows of one dim multiplied, averaged or compared: that dim stays whole, on both sides."""
    at = _where(it)
    target = numbered_dims(it.result, whole=(at,))
    values = replaced(target, at, fixed(it.shapes[2][at])) if it.shapes[2] else ()
    return it.rule([target, *fixed_dims(it.reads[1]), values], [target])


def put_rule(it: OpView) -> Rule:
    """Elements by their position in the flattened tensor: what is written may be cut where it is added."""
    source, index, values = fixed_dims(*it.reads)
    if it.shapes[1] == it.shapes[2]:
        index = values = numbered_dims(it.shapes[1], "n")
    marks = _written(names_of(index), bool(it.args["accumulate"]))
    return it.rule([source, index, values], [source], linear=[[0, 2]], **marks)


def one_hot_rule(it: OpView) -> Rule:
    """Left to itself a part would count its own classes."""
    return it.text("d* -> d* _", local=lambda op, cell: call_with(op, num_classes=it.result[-1]))


def lookup_rule(it: OpView) -> Rule:
    """bucketize, isin: each element is looked up in a second tensor, which stays whole."""
    made = numbered_dims(it.result)
    first, *others = fixed_dims(*it.reads)
    return it.rule([made if it.shape == it.result else first, *others], [made])


def searchsorted_rule(it: OpView) -> Rule:
    """Each element is looked up in a sorted row, which stays whole: one for all, or one for each row of elements."""
    order, asked, by = (operand(it.args[name]) for name in ("sorted_sequence", "self", "sorter"))
    assert order is not None
    made, shape = numbered_dims(it.result), it.shapes[order]
    sorted_ = (*(made[:-1] if len(shape) > 1 else ()), fixed(shape[-1]))
    dims = {order: sorted_, by: sorted_, asked: made}
    return it.rule([dims[i] for i in range(len(it.reads))], [made])


RULES: Mapping[str, RuleOf] = {
    **rules_of(index_rule, "index _unsafe_index"),
    **rules_of(index_put_rule, "index_put _unsafe_index_put"),
    "aten.gather": gather_rule,
    "aten.take_along_dim": take_along_rule,
    **rules_of(scatter_rule, "scatter scatter_add scatter_reduce"),
    "aten.index_select": index_select_rule,
    **rules_of(index_write_rule, "index_add index_copy index_fill"),
    "aten.index_reduce": index_reduce_rule,
    "aten.take": row("_*, d* -> d*", (0,)),
    "aten.put": put_rule,
    "aten.one_hot": one_hot_rule,
    **rules_of(lookup_rule, "bucketize isin"),
    "aten.searchsorted": searchsorted_rule,
}
"""Rules by operator."""
