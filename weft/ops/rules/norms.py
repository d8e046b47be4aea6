"""Rules of normalisations: layer, root-mean-square, group, batch and instance norm.

In: an op and the tensors it reads and makes. Out: its rule. Dims that statistics run over are cut by an algorithm that
sums the statistics over the cells; all other dims are cut freely. A batch norm in training mode never touches its
running statistics: their update is an op of its own in the Graph.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from weft.ir.graph import Ref
from weft.ir.ranges import count as length
from weft.ops.arguments import call, call_with, integers
from weft.ops.build import OpView, RuleOf, numbered_dims, rules_of, talking, when_cut
from weft.ops.rule import Call, CellView, Local, Rule, dim, names_of
from weft.runtime.operators.algorithms import Exchange

_EXCHANGE = Exchange(gradient="partial", forward=("all_reduce", "all_reduce"), backward=("all_reduce",))
_ROOT_EXCHANGE = Exchange(gradient="partial", forward=("all_reduce",), backward=("all_reduce",))


def _per_row(centred: bool) -> RuleOf:
    """Layer norm and root-mean-square norm, with or without their statistics as outputs."""

    def rule(it: OpView) -> Rule:
        args, shape = it.args, integers(it.args["normalized_shape"])
        names = [f"n{i}" for i in range(len(shape))]
        along = " ".join(f"{name}!" for name in names)
        target = ("weft.native_" if len(it.makes) > 1 else "weft.") + ("layer_norm" if centred else "rms_norm")
        operands = (Ref("0"), args["weight"], *((args["bias"],) if centred else ()))
        made = call(target, *operands, num_dims=len(shape), count=math.prod(shape), eps=args["eps"])
        inputs = ", ".join([f"b* {along}", *[along] * (len(it.operands) - 1)])
        outputs = ", ".join([f"b* {along}", *["b*" + " 1" * len(shape)] * (len(it.makes) - 1)])
        exchange = _EXCHANGE if centred else _ROOT_EXCHANGE
        return it.text(f"{inputs} -> {outputs}", exchange=exchange, local=when_cut(names, made))

    return rule


def group_norm(it: OpView) -> Rule:
    """Groups are cut freely, channels inside a group and spatial dims by the algorithm."""
    args, num_groups = it.args, int(it.args["num_groups"])
    names = ["c", *(f"s{i}" for i in range(len(it.shape) - 2))]
    count = math.prod(it.shape[1:]) // num_groups

    def here(cell: CellView) -> int:
        return length(cell.names["g"]) if "g" in cell.names else num_groups

    def made(cell: CellView) -> Call:
        tensors = (Ref("0"), args["weight"], args["bias"])
        return call("weft.group_norm", *tensors, groups=here(cell), count=count, eps=args["eps"])

    local = when_cut(names, made, empty=True, own=lambda op, cell: call_with(op, num_groups=here(cell)))
    text = "n (g c!) s*!, (g c), (g c) -> n (g c) s*"
    return it.text(text, sizes={"g": num_groups}, exchange=_EXCHANGE, local=local)


def _on_batch(it: OpView, names: Sequence[str], count: int, own_statistics: bool) -> Local:
    """Batch norm that talks along names, and takes empty parts, of which any norm is empty; else the op's own call,
    told no running statistics where it does not read them."""
    made = call("weft.batch_norm", Ref("0"), it.args["weight"], it.args["bias"], count=count, eps=it.args["eps"])
    told = dict.fromkeys(("running_mean", "running_var")) if own_statistics else {}
    return when_cut(names, made, empty=True, own=lambda op, cell: call_with(op, **told))


def batch_norm(it: OpView) -> Rule:
    """Channels are cut freely; batch and spatial dims freely in eval mode, by the algorithm in training mode."""
    training = bool(it.args["training"])
    names = ["n", *(f"s{i}" for i in range(len(it.shape) - 2))] if training else []
    count = math.prod(it.shape) // max(it.shape[1], 1)
    text = "n! c s*!, c, c, c, c -> n c s*" if training else "n c s*, c, c, c, c -> n c s*"
    return it.text(text, exchange=_EXCHANGE, local=_on_batch(it, names, count, training))


def instance_norm(it: OpView) -> Rule:
    """Batch and channels are cut freely."""
    own = bool(it.args["use_input_stats"])
    return it.text(f"n c s*{'^' * own}, c, c, c, c -> n c s*", local=_on_batch(it, (), 1, own))


def weight_norm(it: OpView) -> Rule:
    """The kept dim is cut freely, the dims that lengths are taken over by the algorithm."""
    dims = numbered_dims(it.shape)
    at = int(it.args["dim"])
    if at < 0:
        raise it.error("no rule for one length of all elements, which is what dim=-1 means to torch")
    names = names_of(one for i, one in enumerate(dims) if i != at)
    lengths = tuple(one if i == at else dim() for i, one in enumerate(dims))
    made = call("weft.weight_norm", it.args["v"], it.args["g"], dim=at)
    return it.rule([dims, lengths], [dims], linear=[[1]], **talking(names, _ROOT_EXCHANGE, made, empty=True))


RULES: Mapping[str, RuleOf] = {
    **rules_of(_per_row(centred=True), "layer_norm native_layer_norm"),
    **rules_of(_per_row(centred=False), "rms_norm _fused_rms_norm"),
    "aten.group_norm": group_norm,
    "aten.batch_norm": batch_norm,
    "aten.instance_norm": instance_norm,
    "aten._weight_norm": weight_norm,
}
"""Rules by operator."""
