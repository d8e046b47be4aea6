"""Operators that count positions over a whole tensor: take, put, masked_scatter, index_reduce.

In: an op and its shapes. Out: its rule. What is looked up stays whole, what asks may be cut. A masked scatter gives
its masked elements numbers over the whole tensor, so cells tell each other where theirs lie.
"""

from __future__ import annotations

from collections.abc import Mapping

from weft.ir.graph import Op, Ref, Tensor
from weft.ops.arguments import arguments, positive
from weft.ops.build import aligned, broadcast, build, fixed, numbered_dims
from weft.ops.exchange import call, names_of, told_when_cut, with_exchange
from weft.ops.pieces import replaced
from weft.ops.rule import Call, CellView, Exchange, Group, Rule, RuleOf


def take_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """Elements by their position in the flattened tensor."""
    target = numbered_dims(makes[0].sizes)
    return build([tuple(map(fixed, reads[0].sizes)), target], [target], reads, makes, linear=[[0]])


def put_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """What is written may be cut where it is added."""
    adds = bool(arguments(op)["accumulate"])
    source = tuple(map(fixed, reads[0].sizes))
    same = reads[1].sizes == reads[2].sizes
    written = numbered_dims(reads[1].sizes, "n") if same else tuple(map(fixed, reads[1].sizes))
    values = written if same else tuple(map(fixed, reads[2].sizes))
    names = names_of(written)
    return build(
        [source, written, values],
        [source],
        reads,
        makes,
        summed=names if adds else (),
        frozen=() if adds else names,
        added=(0,) if adds else (),
        linear=[[0, 2]],
    )


def index_reduce_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """Rows of one dim multiplied, averaged or compared: that dim stays whole, on both sides."""
    shape = makes[0].sizes
    at = positive(arguments(op)["dim"], len(shape))
    target = replaced(numbered_dims(shape), at, fixed(shape[at])) if shape else ()
    index = tuple(map(fixed, reads[1].sizes))
    values = replaced(target, at, fixed(reads[2].sizes[at])) if reads[2].sizes else ()
    return build([target, index, values], [target], reads, makes)


def masked_scatter_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """The n-th masked element takes the n-th of the source, which stays whole."""
    shape = makes[0].sizes
    dims = numbered_dims(shape)
    assert broadcast([tensor.sizes for tensor in reads[:2]]) == shape, f"{op.name}: operands do not broadcast"
    inputs = [aligned(dims, shape, tensor.sizes) or () for tensor in reads[:2]]
    names = names_of(dims)

    def told(op: Op, cell: CellView, comms: tuple[Group, ...]) -> Call:
        refs = [Ref(str(i)) for i in range(3)]
        return call("weft.masked_scatter", *refs, shape=shape, at=cell.outputs[0], comms=comms)

    source = tuple(map(fixed, reads[2].sizes))
    rule = build([*inputs, source], [dims], reads, makes, linear=[[0, 2]], local=told_when_cut(names, told))
    return with_exchange(rule, dict.fromkeys(names, Exchange(forward=("all_gather",))))


def position_rules() -> Mapping[str, RuleOf]:
    """Rules by operator."""
    return {
        "aten.take": take_rule,
        "aten.put": put_rule,
        "aten.index_reduce": index_reduce_rule,
        "aten.masked_scatter": masked_scatter_rule,
    }
