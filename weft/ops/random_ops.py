"""Rules of random operators: any cut draws the same numbers.

In: an op and the tensors it reads and makes. Out: its rule; every dim may be cut, for the local call asks for its own
elements of the whole draw (`Op.draw`). An op without a draw number (dropout in eval mode) makes its own call; one that
would then take numbers from a generator may not be cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from weft.errors import RuleError
from weft.ir.graph import Op, Ref, Tensor
from weft.ir.ranges import whole
from weft.ops.arguments import arguments
from weft.ops.attention import attention
from weft.ops.build import aligned, build, fixed, named, numbered_dims
from weft.ops.exchange import call, own_call
from weft.ops.rule import Call, CellView, Rule, RuleOf
from weft.runtime.random import Draw

Reads = tuple[Tensor, ...]
Numbers = Callable[[Mapping[str, Any]], tuple[Any, ...]]
"""Positional arguments of the runtime function, from the op's arguments."""

_X = Ref("0")


def _drawn(op: Op, cell: CellView) -> Draw:
    assert op.draw is not None
    return Draw(op.draw, cell.whole_outputs[0], cell.outputs[0])


def _dropout(target: str, flag: str = "train", *, per_channel: bool = False, is_linear: bool = True) -> RuleOf:
    """Operators that change their operand by random numbers of its own shape, or one per row and channel."""

    def rule(op: Op, reads: Reads, makes: Reads) -> Rule:
        args = arguments(op)
        dims = numbered_dims(reads[0].sizes)

        def local(op: Op, cell: CellView) -> Call:
            if op.draw is None:
                return own_call(op)
            draw = _drawn(op, cell)
            if per_channel:
                ones = len(draw.shape) - 2
                draw = Draw(draw.number, (*draw.shape[:2], *(1,) * ones), (*draw.at[:2], *(((0, 1),),) * ones))
            return call(target, _X, args["p"], args[flag], draw=draw)

        linear = [[0]] if is_linear and len(makes) == 1 else []
        return build([dims], [dims] * len(makes), reads, makes, linear=linear, local=local)

    return rule


def _rrelu(op: Op, reads: Reads, makes: Reads) -> Rule:
    args = arguments(op)
    dims = numbered_dims(reads[0].sizes)

    def local(op: Op, cell: CellView) -> Call:
        if op.draw is None:
            return own_call(op)
        return call("weft.rrelu", _X, args["lower"], args["upper"], args["training"], draw=_drawn(op, cell))

    return build([dims], [dims], reads, makes, local=local)


def _numbers(target: str, numbers: Numbers) -> RuleOf:
    """Operators that make random numbers; tensors among their operands broadcast to the output."""

    def rule(op: Op, reads: Reads, makes: Reads) -> Rule:
        args = arguments(op)
        if op.target == "aten.randint_like.Tensor":
            raise RuleError(
                "randint_like cannot draw below a bound that is a tensor", place=op.place, remedy="give a number"
            )
        dims = numbered_dims(makes[0].sizes)
        inputs = [aligned(dims, makes[0].sizes, tensor.sizes) for tensor in reads]
        assert all(found is not None for found in inputs), f"{op.name}: operands do not broadcast"
        # without a device the numbers are made where the operand lies
        device = args.get("device") or (_X if reads else None)

        def local(op: Op, cell: CellView) -> Call:
            if op.draw is None:
                return own_call(op)
            return call(target, *numbers(args), draw=_drawn(op, cell), dtype=makes[0].dtype, device=device)

        rule = build([found for found in inputs if found is not None], [dims], reads, makes, local=local)
        return rule if op.draw is not None else replace(rule, frozen=frozenset(rule.sizes))

    return rule


def _multinomial(op: Op, reads: Reads, makes: Reads) -> Rule:
    """Rows of weights, of each of which some indices are drawn."""
    args = arguments(op)
    lead = tuple(named(f"d{i}", size) for i, size in enumerate(reads[0].sizes[:-1]))
    weights, drawn = (fixed(tensor.sizes[-1]) for tensor in (reads[0], makes[0]))
    count = makes[0].sizes[-1] if args["replacement"] else reads[0].sizes[-1]

    def local(op: Op, cell: CellView) -> Call:
        if op.draw is None:
            return own_call(op)
        shape, at = (*reads[0].sizes[:-1], count), (*cell.inputs[0][:-1], whole(count))
        draw = Draw(op.draw, shape, at)
        return call("weft.multinomial", _X, int(args["num_samples"]), bool(args["replacement"]), draw=draw)

    rule = build([(*lead, weights)], [(*lead, drawn)], reads, makes, local=local)
    return rule if op.draw is not None else replace(rule, frozen=frozenset(rule.sizes))


def _bernoulli(args: Mapping[str, Any]) -> tuple[Any, ...]:
    return (args.get("p", args["self"]),)


def _normal(args: Mapping[str, Any]) -> tuple[Any, ...]:
    return args["mean"], args["std"]


def _between(args: Mapping[str, Any]) -> tuple[Any, ...]:
    return int(args.get("low", 0)), int(args["high"])


def _nothing(args: Mapping[str, Any]) -> tuple[Any, ...]:
    return ()


def random_rules() -> Mapping[str, RuleOf]:
    """Rules by operator, the target without its overload."""
    return {
        "aten.dropout": _dropout("weft.dropout"),
        "aten.native_dropout": _dropout("weft.native_dropout"),
        "aten.feature_dropout": _dropout("weft.dropout", per_channel=True),
        "aten.alpha_dropout": _dropout("weft.alpha_dropout", is_linear=False),
        "aten.feature_alpha_dropout": _dropout("weft.alpha_dropout", per_channel=True, is_linear=False),
        "aten.rrelu": _rrelu,
        "aten.bernoulli": _numbers("weft.bernoulli", _bernoulli),
        "aten.rand": _numbers("weft.rand", _nothing),
        "aten.rand_like": _numbers("weft.rand", _nothing),
        "aten.uniform": _numbers("weft.rand", lambda args: (args["from"], args["to"])),
        "aten.randn": _numbers("weft.randn", _nothing),
        "aten.randn_like": _numbers("weft.randn", _nothing),
        "aten.normal": _numbers("weft.randn", _normal),
        "aten.normal_functional": _numbers("weft.randn", _normal),
        "aten.randint": _numbers("weft.randint", _between),
        "aten.randint_like": _numbers("weft.randint", _between),
        "aten.randperm": _numbers("weft.randperm", _nothing),
        "aten.exponential": _numbers("weft.exponential", lambda args: (args["lambd"],)),
        "aten.cauchy": _numbers("weft.cauchy", lambda args: (args["median"], args["sigma"])),
        "aten.log_normal": _numbers("weft.log_normal", _normal),
        "aten.geometric": _numbers("weft.geometric", lambda args: (args["p"],)),
        "aten.poisson": _numbers("weft.poisson", lambda args: (args["self"],)),
        "aten.multinomial": _multinomial,
        "aten.scaled_dot_product_attention": attention,
    }
