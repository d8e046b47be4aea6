"""Rules of random operators: any cut draws the same numbers.

In: an op and the tensors it reads and makes. Out: its rule; every dim may be cut, for the local call asks for its own
elements of the whole draw (`Op.draw`). An op without a draw number (dropout in eval mode) makes its own call; one that
would then take numbers from a generator may not be cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from weft.ir.graph import Op, Ref
from weft.ir.ranges import whole
from weft.ops.arguments import call, call_with
from weft.ops.build import OpView, RuleOf, broadcasting, numbered_dims, rules_of
from weft.ops.rule import Call, CellView, Local, Rule
from weft.runtime.random import Draw


def _drawing(it: OpView, made: Callable[[CellView, Draw], Call]) -> Local:
    """The call that takes a cell's share of the draw; the op's own if it draws nothing."""

    def local(op: Op, cell: CellView) -> Call:
        if op.draw is None:
            return call_with(op)
        return made(cell, Draw(op.draw, it.result, cell.outputs[0]))

    return local


def _dropout(target: str, *options: str, per_channel: bool = False, is_linear: bool = False) -> RuleOf:
    """Operators that change their operand by random numbers of its own shape, or one per row and channel."""

    def rule(it: OpView) -> Rule:
        dims = numbered_dims(it.shape)

        def made(cell: CellView, draw: Draw) -> Call:
            if per_channel:
                ones = len(draw.shape) - 2
                draw = Draw(draw.number, (*draw.shape[:2], *(1,) * ones), (*draw.at[:2], *(((0, 1),),) * ones))
            return call(target, Ref("0"), *(it.args[name] for name in options), draw=draw)

        linear = [[0]] if is_linear and len(it.makes) == 1 else []
        return it.rule([dims], [dims] * len(it.makes), linear=linear, local=_drawing(it, made))

    return rule


def _numbers(target: str, numbers: Callable[[Mapping[str, Any]], tuple[Any, ...]] = lambda args: ()) -> RuleOf:
    """Operators that make random numbers; tensors among their operands broadcast to the output.

    `numbers` gives the positional arguments of the runtime function, from the op's arguments.
    """

    def rule(it: OpView) -> Rule:
        if it.op.target == "aten.randint_like.Tensor":
            raise it.error("randint_like cannot draw below a bound that is a tensor", "give a number")
        dims = numbered_dims(it.result)
        # without a device the numbers are made where the operand lies
        device = it.args.get("device") or (Ref("0") if it.reads else None)

        def made(cell: CellView, draw: Draw) -> Call:
            return call(target, *numbers(it.args), draw=draw, dtype=it.makes[0].dtype, device=device)

        return _if_drawn(it, it.rule(broadcasting(dims, it.result, it.reads), [dims], local=_drawing(it, made)))

    return rule


def _multinomial(it: OpView) -> Rule:
    """Rows of weights, of each of which some indices are drawn."""
    replacement = bool(it.args["replacement"])
    count = it.result[-1] if replacement else it.shape[-1]

    def made(cell: CellView, draw: Draw) -> Call:
        draw = Draw(draw.number, (*it.shape[:-1], count), (*cell.inputs[0][:-1], whole(count)))
        return call("weft.multinomial", Ref("0"), int(it.args["num_samples"]), replacement, draw=draw)

    return _if_drawn(it, it.text("d* _ -> d* _", local=_drawing(it, made)))


def _dirichlet(it: OpView) -> Rule:
    """Rows of concentrations, for each of which a row is drawn that adds up to 1."""

    def made(cell: CellView, draw: Draw) -> Call:
        return call("weft.dirichlet", Ref("0"), draw=draw)

    return _if_drawn(it, it.text("d* _ -> d* _", local=_drawing(it, made)))


def _if_drawn(it: OpView, rule: Rule) -> Rule:
    """The rule, of which nothing may be cut if its numbers come from a generator."""
    return rule if it.op.draw is not None else replace(rule, frozen=frozenset(rule.sizes))


def _normal(args: Mapping[str, Any]) -> tuple[Any, ...]:
    return args["mean"], args["std"]


RULES: Mapping[str, RuleOf] = {
    "aten.dropout": _dropout("weft.dropout", "p", "train", is_linear=True),
    "aten.native_dropout": _dropout("weft.native_dropout", "p", "train", is_linear=True),
    "aten.feature_dropout": _dropout("weft.dropout", "p", "train", per_channel=True, is_linear=True),
    "aten.alpha_dropout": _dropout("weft.alpha_dropout", "p", "train"),
    "aten.feature_alpha_dropout": _dropout("weft.alpha_dropout", "p", "train", per_channel=True),
    "aten.rrelu": _dropout("weft.rrelu", "lower", "upper", "training"),
    "aten.bernoulli": _numbers("weft.bernoulli", lambda args: (args.get("p", args["self"]),)),
    **rules_of(_numbers("weft.rand"), "rand rand_like"),
    "aten.uniform": _numbers("weft.rand", lambda args: (args["from"], args["to"])),
    **rules_of(_numbers("weft.randn"), "randn randn_like"),
    **rules_of(_numbers("weft.randn", _normal), "normal normal_functional"),
    **rules_of(
        _numbers("weft.randint", lambda args: (int(args.get("low", 0)), int(args["high"]))), "randint randint_like"
    ),
    "aten.randperm": _numbers("weft.randperm"),
    "aten.exponential": _numbers("weft.exponential", lambda args: (args["lambd"],)),
    "aten.cauchy": _numbers("weft.cauchy", lambda args: (args["median"], args["sigma"])),
    "aten.log_normal": _numbers("weft.log_normal", _normal),
    "aten.geometric": _numbers("weft.geometric", lambda args: (args["p"],)),
    "aten.poisson": _numbers("weft.poisson", lambda args: (args["self"],)),
    "aten._standard_gamma": _numbers("weft.gamma", lambda args: (args["self"],)),
    "aten.multinomial": _multinomial,
    "aten._sample_dirichlet": _dirichlet,
}
"""Rules by operator."""
