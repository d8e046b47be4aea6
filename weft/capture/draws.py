"""Which operators draw random numbers, as an eager run would.

Promised: one draw of the Graph is one primitive draw of an eager run on the CPU, in the same order. So operators that
draw nothing for their arguments (dropout in evaluation, or with p of 0 or 1) have no number, and those that
draw more than once are refused.
"""

from __future__ import annotations

import torch

from weft.capture.builder import Call
from weft.errors import CaptureError

DROPOUT = frozenset({"dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout", "native_dropout"})
RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
ATTENTION = frozenset({"scaled_dot_product_attention"})
UNREPEATED = frozenset({"binomial", "_sample_dirichlet"})
"""Random operators that take another number of draws for each element."""


def drops_nothing(call: Call, *, is_empty: bool) -> bool:
    """A dropout that returns its input."""
    name = call.name.removesuffix("_")
    if name not in DROPOUT or name == "native_dropout":
        return False
    return not call.values["train"] or bool(call.values["p"] == 0) or is_empty


def is_random(call: Call) -> bool:
    """Whether the call draws random numbers."""
    name, values = call.name.removesuffix("_"), call.values
    refuse_undrawable(call)
    if name in DROPOUT:
        return bool(values["train"]) and 0 < values["p"] < 1
    if name in ATTENTION:
        return bool(0 < values["dropout_p"] < 1)
    if name in RECURRENT:
        return False
    if name == "rrelu":
        return bool(values["training"])
    return torch.Tag.nondeterministic_seeded in call.target.tags


def refuse_undrawable(call: Call) -> None:
    """Random operators whose numbers cannot be made a function of seed, step and element."""
    name, values, place = call.name.removesuffix("_"), call.values, call.context.place
    if name == "random" and call.values.get("to") is None:
        raise CaptureError(
            f"{call.target} without an upper bound draws from all numbers of its dtype",
            place=place,
            remedy="say the bounds: x.random_(low, high), or torch.randint",
        )
    if name in UNREPEATED:
        raise CaptureError(
            f"{call.target} draws random numbers in a way that cannot be repeated elsewhere",
            place=place,
            remedy="torch.randint, torch.rand, torch.randn or torch.bernoulli",
        )
    if values.get("generator") is not None:
        raise CaptureError(
            f"{call.target} draws from a generator of its own",
            place=place,
            remedy="leave out generator=; the seed of the run gives repeatable numbers",
        )
    several = values.get("dropout") and values.get("train") and values.get("num_layers", 1) > 1
    if name in RECURRENT and several:
        raise CaptureError(
            f"{call.target} with dropout between its layers draws several times inside one operator",
            place=place,
            remedy="one nn.LSTM or nn.GRU per layer with nn.Dropout between them, or dropout=0",
        )
