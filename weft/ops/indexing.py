"""Operators that read or write at positions given by a tensor: index, gather, scatter and their kin.

In: an op and its shapes. Out: its rule. An indexed dim may not be cut, because any position may be asked for; the
dims of the index itself may, where each position is read once. Where positions are written by adding, the index's
dims are summed: every part adds its own rows into zeros, and the tensor written to goes into one part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from weft.errors import RuleError
from weft.ir.graph import Op, Tensor
from weft.ops.arguments import arguments, call_with, operand, positive
from weft.ops.build import aligned, broadcast, build, fixed, named, numbered_dims
from weft.ops.pieces import replaced
from weft.ops.rule import Call, CellView, Dim, Dims, Rule, RuleOf, dim


@dataclass(frozen=True)
class _Indexing:
    """How index tensors meet the dims of the tensor they index."""

    operands: tuple[int, ...]
    """Positions of the index tensors among the op's inputs."""
    indexed: tuple[int, ...]
    """The dims they index."""
    shape: tuple[int, ...]
    """What the index tensors broadcast to."""
    at: int
    """Where the index's dims stand in the result."""


def _indexing(op: Op, reads: Sequence[Tensor]) -> _Indexing:
    indices = arguments(op)["indices"]
    pairs = [(i, operand(value)) for i, value in enumerate(indices) if value is not None]
    operands = tuple(position for _, position in pairs if position is not None)
    for position in operands:
        if reads[position].dtype in (torch.bool, torch.uint8):
            raise RuleError(
                f"{op.target} with a mask: how much it selects is not known before the run",
                place=op.place,
                remedy="use torch.where, or keep the op copied: plan.trans(op, copy(...))",
            )
    indexed = tuple(i for i, _ in pairs)
    shape = broadcast([reads[position].sizes for position in operands])
    together = indexed == tuple(range(indexed[0], indexed[-1] + 1)) if indexed else True
    return _Indexing(operands, indexed, shape, indexed[0] if together and indexed else 0)


def _parts(how: _Indexing, sizes: Sequence[int]) -> tuple[Dims, Dims, Dims]:
    """Dims of the indexed tensor, of the index, and of what is read or written (in that layout)."""
    kept = [i for i in range(len(sizes)) if i not in how.indexed]
    order: list[Dim] = []
    before = sum(1 for i in kept if i < how.at)
    names = iter(range(len(kept) + len(how.shape)))
    lead = [named(f"d{next(names)}", sizes[i]) for i in kept[:before]]
    index = tuple(named(f"d{next(names)}", size) for size in how.shape)
    trail = [named(f"d{next(names)}", sizes[i]) for i in kept[before:]]
    order.extend((*lead, *trail))
    remaining = iter(order)
    source = tuple(fixed(size) if i in how.indexed else next(remaining) for i, size in enumerate(sizes))
    return source, index, (*lead, *index, *trail)


def _index_operands(how: _Indexing, index: Dims, reads: Sequence[Tensor]) -> list[Dims]:
    found = [aligned(index, how.shape, reads[position].sizes) for position in how.operands]
    return [dims for dims in found if dims is not None]


def index_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """x[i, j, :]"""
    how = _indexing(op, reads)
    source, index, target = _parts(how, reads[0].sizes)
    return build([source, *_index_operands(how, index, reads)], [target], reads, makes, linear=[[0]], source="view")


def index_put_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """x[i, j, :] = values, or += values."""
    masked = _masked_put(op, reads, makes)
    if masked is not None:
        return masked
    how = _indexing(op, reads)
    source, index, written = _parts(how, reads[0].sizes)
    shape = _written_shape(how, reads[0].sizes)
    values = aligned(written, shape, reads[-1].sizes)
    if values is None:
        raise RuleError(f"{op.target}: {reads[-1].sizes} does not broadcast to {shape}", place=op.place)
    names = {name for one in index for name in one.names}
    adds = bool(arguments(op)["accumulate"])
    return build(
        [source, *_index_operands(how, index, reads), values],
        [source],
        reads,
        makes,
        summed=names if adds else (),
        frozen=() if adds else names,
        added=(0,) if adds else (),
        linear=[[0, len(reads) - 1]],
        source="view",
    )


def _masked_put(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule | None:
    """x[:, mask] = value, the same wherever the mask holds: every dim may be cut. None where it is something else."""
    indices = arguments(op)["indices"]
    before = next((i for i, value in enumerate(indices) if value is not None), 0)
    mask, sizes = reads[1], reads[0].sizes
    if len(reads) != 3 or mask.dtype != torch.bool or len(indices) != before + 1:
        return None
    dims = numbered_dims(sizes)
    after = before + len(mask.sizes)
    # one value for all selected elements: a leading dim, where there is one, has size 1
    shape = (*sizes[:before], 1, *sizes[after:])
    values = aligned((*dims[:before], dim(), *dims[after:]), shape, reads[2].sizes)
    if values is None:
        return None
    return build([dims, dims[before:after], values], [dims], reads, makes, linear=[[0, 2]], source="view")


def _written_shape(how: _Indexing, sizes: Sequence[int]) -> tuple[int, ...]:
    kept = [i for i in range(len(sizes)) if i not in how.indexed]
    before = sum(1 for i in kept if i < how.at)
    return (*(sizes[i] for i in kept[:before]), *how.shape, *(sizes[i] for i in kept[before:]))


def _where(op: Op, reads: Sequence[Tensor]) -> int:
    return positive(arguments(op)["dim"], len(reads[0].sizes))


def gather_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """Other dims may be cut where the index is as long as the tensor."""
    at = _where(op, reads)
    target = list(numbered_dims(makes[0].sizes))
    source = list(target)
    for i, (size, taken) in enumerate(zip(reads[0].sizes, makes[0].sizes, strict=True)):
        if i == at:
            source[i] = fixed(size)
        elif size != taken:
            source[i], target[i] = fixed(size), fixed(taken)
    return build([tuple(source), tuple(target)], [tuple(target)], reads, makes, linear=[[0]], source="view")


def take_along_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """take_along_dim: a gather whose operands broadcast."""
    if arguments(op)["dim"] is None:
        raise RuleError(f"{op.target} without a dim has no rule", place=op.place, remedy="name the dim")
    at = _where(op, reads)
    shape = makes[0].sizes
    target = numbered_dims(shape)
    index = aligned(target, shape, reads[1].sizes)
    own = list(shape)
    own[at] = reads[0].sizes[at]
    source = aligned(replaced(target, at, fixed(own[at])), own, reads[0].sizes)
    assert source is not None and index is not None
    return build([source, index], [target], reads, makes, linear=[[0]], source="view")


def scatter_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """scatter, scatter_add, scatter_reduce: `x` written at the places that `index` names along one dim."""
    at = _where(op, reads)
    shape, index_shape = makes[0].sizes, reads[1].sizes
    sources = [tensor.sizes for tensor in reads[2:]]
    values_by_name = arguments(op)
    adds = op.kind == "scatter_add" or values_by_name.get("reduce") == "add"
    adds = adds or (values_by_name.get("reduce") == "sum" and bool(values_by_name["include_self"]))
    target: list[Dim] = list(numbered_dims(shape))
    index: list[Dim] = list(target)
    values: list[list[Dim]] = [list(target) for _ in sources]
    for i, size in enumerate(index_shape):
        agree = all(other[i] == size for other in sources)
        if i != at and size == shape[i] and agree:
            continue
        target[i] = fixed(shape[i])
        index[i] = named("n", size) if i == at and agree else fixed(size)
        for dims, other in zip(values, sources, strict=True):
            dims[i] = index[i] if other[i] == size else fixed(other[i])
    inputs = [tuple(dims) for dims in (target, index, *values)]
    linear = [[0, 2]] if sources and (adds or op.target == "aten.scatter.src") else []
    return build(
        inputs,
        [tuple(target)],
        reads,
        makes,
        summed=("n",) if adds else (),
        frozen=() if adds else ("n",),
        added=(0,) if adds else (),
        linear=linear,
        source="view",
    )


def index_select_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """Rows of one dim."""
    at = _where(op, reads)
    target = numbered_dims(makes[0].sizes)
    if not target:
        return build([(), tuple(map(fixed, reads[1].sizes))], [()], reads, makes, linear=[[0]], source="view")
    index = (target[at],) if reads[1].sizes else ()
    source = replaced(target, at, fixed(reads[0].sizes[at]))
    return build([source, index], [target], reads, makes, linear=[[0]], source="view")


def index_write_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """index_add, index_copy, index_fill: rows of one dim written."""
    at = _where(op, reads)
    shape = makes[0].sizes
    adds = op.kind == "index_add"
    target = replaced(numbered_dims(shape), at, fixed(shape[at])) if shape else ()
    row = named("n", reads[1].sizes[0]) if reads[1].sizes else fixed(1)
    inputs: list[Dims] = [target, (row,) if reads[1].sizes else ()]
    linear: list[list[int]] = []
    for tensor in reads[2:]:
        inputs.append(replaced(target, at, row) if tensor.sizes else ())
        linear = [[0, 2]]
    return build(
        inputs,
        [target],
        reads,
        makes,
        summed=("n",) if adds else (),
        frozen=() if adds else ("n",),
        added=(0,) if adds else (),
        linear=linear,
        source="view",
    )


def one_hot_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """A new last dim, one index per class, which nobody may cut."""
    source = numbered_dims(reads[0].sizes)
    return build([source], [(*source, fixed(makes[0].sizes[-1]))], reads, makes, local=_local_one_hot)


def _local_one_hot(op: Op, cell: CellView) -> Call:
    # left to itself a part would count its own classes
    return call_with(op, {"num_classes": cell.whole_outputs[0][-1]})


def lookup_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """bucketize, isin: each element is looked up in a second tensor, which stays whole."""
    inputs = [
        numbered_dims(tensor.sizes) if tensor.sizes == makes[0].sizes and i == 0 else tuple(map(fixed, tensor.sizes))
        for i, tensor in enumerate(reads)
    ]
    return build(inputs, [numbered_dims(makes[0].sizes)], reads, makes)


def searchsorted_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """Each element is looked up in a sorted row, which stays whole: one for all, or one for each row of elements."""
    values = arguments(op)
    order, asked, by = (operand(values[name]) for name in ("sorted_sequence", "self", "sorter"))
    made = numbered_dims(makes[0].sizes)
    assert order is not None
    rows = made[:-1] if len(reads[order].sizes) > 1 else ()
    row = (*rows, fixed(reads[order].sizes[-1]))
    dims = {order: row, by: row, asked: made}
    return build([dims[i] for i in range(len(reads))], [made], reads, makes)


INDEXING: Mapping[str, RuleOf] = {
    "aten.index": index_rule,
    "aten._unsafe_index": index_rule,
    "aten.index_put": index_put_rule,
    "aten._unsafe_index_put": index_put_rule,
    "aten.gather": gather_rule,
    "aten.take_along_dim": take_along_rule,
    **dict.fromkeys(("aten.scatter", "aten.scatter_add", "aten.scatter_reduce"), scatter_rule),
    "aten.index_select": index_select_rule,
    **dict.fromkeys(("aten.index_add", "aten.index_copy", "aten.index_fill"), index_write_rule),
    "aten.one_hot": one_hot_rule,
    **dict.fromkeys(("aten.bucketize", "aten.isin"), lookup_rule),
    "aten.searchsorted": searchsorted_rule,
}
"""Computed rules, by family."""
