"""Rules of normalisations: layer, root-mean-square, group, batch and instance norm.

In: an op and the tensors it reads and makes. Out: its rule. Dims that statistics run over are cut by an algorithm that
sums the statistics over the cells; all other dims are cut freely. A batch norm in training mode never touches its
running statistics: their update is an op of its own in the Graph.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from weft.ir.graph import Op, Ref, Tensor
from weft.ir.ranges import count as length
from weft.ops.arguments import arguments, call_with, integers, operand
from weft.ops.build import build, named, numbered_dims, product_dim
from weft.ops.exchange import call, groups, is_empty, names_of, own_call, told_when_cut, with_exchange
from weft.ops.rule import Call, CellView, Dims, Exchange, Group, Rule, RuleOf, dim

Reads = tuple[Tensor, ...]

_EXCHANGE = Exchange(gradient="partial", forward=("all_reduce", "all_reduce"), backward=("all_reduce",))
_ALONE = {"running_mean": None, "running_var": None}
_ROOT_EXCHANGE = Exchange(gradient="partial", forward=("all_reduce",), backward=("all_reduce",))


def _operand_dims(reads: Reads, first: Dims, held: Mapping[int | None, Dims]) -> list[Dims]:
    return [first, *(held[i] for i in range(1, len(reads)))]


def _per_row(centred: bool) -> RuleOf:
    """Layer norm and root-mean-square norm, with or without their statistics as outputs."""

    def rule(op: Op, reads: Reads, makes: Reads) -> Rule:
        args = arguments(op)
        shape = integers(args["normalized_shape"])
        sizes = reads[0].sizes
        lead = numbered_dims(sizes[: len(sizes) - len(shape)], "b")
        along = numbered_dims(shape, "n")
        held = {operand(args[name]): along for name in ("weight", "bias") if name in args}
        statistic = (*lead, *(dim(),) * len(shape))
        names = names_of(along)
        target = ("weft.native_" if len(makes) > 1 else "weft.") + ("layer_norm" if centred else "rms_norm")

        def told(op: Op, cell: CellView, comms: tuple[Group, ...]) -> Call:
            operands = (Ref("0"), args["weight"], *((args["bias"],) if centred else ()))
            options = {"num_dims": len(shape), "count": math.prod(shape), "eps": args["eps"], "comms": comms}
            return call(target, *operands, **options)

        rule = build(
            _operand_dims(reads, (*lead, *along), held),
            [(*lead, *along), *[statistic] * (len(makes) - 1)],
            reads,
            makes,
            local=told_when_cut(names, told),
        )
        return with_exchange(rule, dict.fromkeys(names, _EXCHANGE if centred else _ROOT_EXCHANGE))

    return rule


def group_norm(op: Op, reads: Reads, makes: Reads) -> Rule:
    """Groups are cut freely, channels inside a group and spatial dims by the algorithm."""
    args = arguments(op)
    sizes = reads[0].sizes
    num_groups = int(args["num_groups"])
    inner = {"g": num_groups, "c": sizes[1] // num_groups}
    channels = product_dim("g", "c", sizes=inner)
    dims = (named("n", sizes[0]), channels, *numbered_dims(sizes[2:], "s"))
    held: dict[int | None, Dims] = {operand(args[name]): (channels,) for name in ("weight", "bias")}
    names = ("c", *names_of(dims[2:]))
    count = inner["c"] * math.prod(sizes[2:])

    def local(op: Op, cell: CellView) -> Call:
        here = length(cell.names["g"]) if "g" in cell.names else num_groups
        comms = groups(cell, names)
        if comms or is_empty(cell):
            tensors = (Ref("0"), args["weight"], args["bias"])
            return call("weft.group_norm", *tensors, groups=here, count=count, eps=args["eps"], comms=comms)
        return call_with(op, {"num_groups": here})

    rule = build(_operand_dims(reads, dims, held), [dims], reads, makes, sizes=inner, local=local)
    return with_exchange(rule, dict.fromkeys(names, _EXCHANGE))


def batch_norm(op: Op, reads: Reads, makes: Reads) -> Rule:
    """Channels are cut freely; batch and spatial dims freely in eval mode, by the algorithm in training mode."""
    args = arguments(op)
    sizes = reads[0].sizes
    dims = (named("n", sizes[0]), named("c", sizes[1]), *numbered_dims(sizes[2:], "s"))
    held = _channel_operands(args, dims[1:2])
    names = names_of((dims[0], *dims[2:]))
    training = bool(args["training"])
    count = math.prod(sizes) // max(sizes[1], 1)

    def local(op: Op, cell: CellView) -> Call:
        comms = groups(cell, names) if training else ()
        if comms or is_empty(cell):
            return _on_batch(args, count, comms)
        return call_with(op, _ALONE) if training else own_call(op)

    rule = build(_operand_dims(reads, dims, held), [dims], reads, makes, local=local)
    return with_exchange(rule, dict.fromkeys(names, _EXCHANGE)) if training else rule


def instance_norm(op: Op, reads: Reads, makes: Reads) -> Rule:
    """Batch and channels are cut freely."""
    args = arguments(op)
    sizes = reads[0].sizes
    dims = (named("n", sizes[0]), named("c", sizes[1]), *numbered_dims(sizes[2:], "s"))
    held = _channel_operands(args, dims[1:2])

    def local(op: Op, cell: CellView) -> Call:
        if is_empty(cell):
            return _on_batch(args, 1, ())
        return call_with(op, _ALONE) if args["use_input_stats"] else own_call(op)

    frozen = names_of(dims[2:]) if args["use_input_stats"] else ()
    return build(_operand_dims(reads, dims, held), [dims], reads, makes, frozen=frozen, local=local)


def _on_batch(args: Mapping[str, Any], count: int, comms: tuple[Group, ...]) -> Call:
    """Batch norm that takes empty parts, of which any norm is empty."""
    return call("weft.batch_norm", Ref("0"), args["weight"], args["bias"], count=count, eps=args["eps"], comms=comms)


def _channel_operands(args: Mapping[str, Any], channels: Dims) -> dict[int | None, Dims]:
    return {operand(args[name]): channels for name in ("weight", "bias", "running_mean", "running_var")}


def weight_norm(op: Op, reads: Reads, makes: Reads) -> Rule:
    """The kept dim is cut freely, the dims that lengths are taken over by the algorithm."""
    args = arguments(op)
    at = int(args["dim"])
    dims = numbered_dims(reads[0].sizes)
    at = at + len(dims) if at < 0 else at
    names = names_of(tuple(one for i, one in enumerate(dims) if i != at))
    lengths = tuple(one if i == at else dim() for i, one in enumerate(dims))

    def local(op: Op, cell: CellView) -> Call:
        comms = groups(cell, names)
        if comms or is_empty(cell):
            return call("weft.weight_norm", args["v"], args["g"], dim=at, comms=comms)
        return own_call(op)

    rule = build([dims, lengths], [dims], reads, makes, linear=[[1]], local=local)
    return with_exchange(rule, dict.fromkeys(names, _ROOT_EXCHANGE))


def norm_rules() -> Mapping[str, RuleOf]:
    """Rules by operator."""
    return {
        "aten.layer_norm": _per_row(centred=True),
        "aten.native_layer_norm": _per_row(centred=True),
        "aten.rms_norm": _per_row(centred=False),
        "aten._fused_rms_norm": _per_row(centred=False),
        "aten.group_norm": group_norm,
        "aten.batch_norm": batch_norm,
        "aten.instance_norm": instance_norm,
        "aten._weight_norm": weight_norm,
    }
