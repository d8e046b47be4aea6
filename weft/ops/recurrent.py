"""Recurrent layers and cells: sequences of a batch are independent, so the batch may be cut.

In: an op and its shapes. Out: its rule. Steps follow one another, and every step needs the whole hidden state and all
gates, so nothing else may be cut. Dropout between layers never comes here: capture takes such a layer apart.
"""

from __future__ import annotations

from collections.abc import Mapping

from weft.errors import RuleError
from weft.ir.graph import Op, Tensor
from weft.ops.arguments import arguments, operand, operands_in
from weft.ops.build import build, fixed, named
from weft.ops.rule import Dims, Rule, RuleOf
from weft.ops.windows import local_window


def layer_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """lstm, gru, rnn: `s b i` (or `b s i`), states `l b h`, weights whole."""
    args = arguments(op)
    if "batch_sizes" in args:
        raise RuleError(
            f"{op.target} of packed sequences: how many rows each step has is not known before the run",
            place=op.place,
            remedy="give padded sequences, or keep the op copied: plan.trans(op, copy(...))",
        )
    states = frozenset(operands_in(args["hx"]))
    source = operand(args["input"])
    first = bool(args["batch_first"])

    def dims(tensor: Tensor, at: int) -> Dims:
        found = list(map(fixed, tensor.sizes))
        if len(found) == 3:  # fewer: one sequence without a batch
            found[at] = named("b", tensor.sizes[at])
        return tuple(found)

    inputs = [
        dims(tensor, 0 if first else 1) if i == source else dims(tensor, 1) if i in states else _whole(tensor)
        for i, tensor in enumerate(reads)
    ]
    outputs = [dims(tensor, 0 if first and i == 0 else 1) for i, tensor in enumerate(makes)]
    return build(inputs, outputs, reads, makes, local=local_window)


def cell_rule(op: Op, reads: tuple[Tensor, ...], makes: tuple[Tensor, ...]) -> Rule:
    """lstm_cell, gru_cell, rnn_tanh_cell: one step of rows `b`."""
    args = arguments(op)
    rows = {operand(args["input"]), *operands_in(args["hx"])}

    def dims(tensor: Tensor) -> Dims:
        return (named("b", tensor.sizes[0]), *map(fixed, tensor.sizes[1:])) if len(tensor.sizes) > 1 else _whole(tensor)

    inputs = [dims(tensor) if i in rows else _whole(tensor) for i, tensor in enumerate(reads)]
    return build(inputs, [dims(tensor) for tensor in makes], reads, makes, local=local_window)


def _whole(tensor: Tensor) -> Dims:
    return tuple(map(fixed, tensor.sizes))


LAYERS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
CELLS = ("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")

RECURRENT: Mapping[str, RuleOf] = {
    **{f"aten.{name}": layer_rule for name in LAYERS},
    **{f"aten.{name}": cell_rule for name in CELLS},
}
"""Computed rules, by family."""
