"""Which operators draw random numbers, as an eager run would.

Promised: one draw of the Graph is one primitive draw of an eager run on the CPU, in the same order. So operators that
draw nothing for their arguments (dropout in evaluation, or with p of 0 or 1) have no number, and those that
draw more than once are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch._ops import OpOverload

from weft.errors import CaptureError

DROPOUT = frozenset({"dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout", "native_dropout"})
RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
ATTENTION = frozenset({"scaled_dot_product_attention"})
UNTAGGED = frozenset({"random", "binomial", "_sample_dirichlet"})
"""Random operators that torch does not mark as such."""


def name_of(target: OpOverload) -> str:
    """`dropout` of `aten.dropout.default`, `add_` of `aten.add_.Tensor`; `my::op` of a library of the user's."""
    library, name, _ = str(target).split(".")
    return name if library == "aten" else f"{library}::{name}"


def bound(target: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by the names of the schema, defaults filled in."""
    found: dict[str, Any] = {}
    for position, argument in enumerate(target._schema.arguments):
        if position < len(args) and not argument.kwarg_only:
            found[argument.name] = args[position]
        elif argument.name in kwargs:
            found[argument.name] = kwargs[argument.name]
        else:
            found[argument.name] = argument.default_value if argument.has_default_value() else None
    return found


def drops_nothing(target: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, is_empty: bool) -> bool:
    """A dropout that returns its input."""
    name = name_of(target).removesuffix("_")
    if name not in DROPOUT or name == "native_dropout":
        return False
    values = bound(target, args, kwargs)
    return not values["train"] or bool(values["p"] == 0) or is_empty


def is_random(target: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], place: str) -> bool:
    """Whether the call draws random numbers."""
    name = name_of(target).removesuffix("_")
    values = bound(target, args, kwargs)
    refuse_undrawable(target, values, place)
    if name in DROPOUT:
        return bool(values["train"]) and 0 < values["p"] < 1
    if name in ATTENTION:
        return bool(0 < values["dropout_p"] < 1)
    if name in RECURRENT:
        return False
    if name == "rrelu":
        return bool(values["training"])
    return torch.Tag.nondeterministic_seeded in target.tags


def refuse_undrawable(target: OpOverload, values: Mapping[str, Any], place: str) -> None:
    """Random operators whose numbers cannot be made a function of seed, step and element."""
    name = name_of(target).removesuffix("_")
    if name in UNTAGGED:
        raise CaptureError(
            f"{target} draws random numbers in a way that cannot be repeated elsewhere",
            place=place,
            remedy="torch.randint, torch.rand, torch.randn or torch.bernoulli",
        )
    if values.get("generator") is not None:
        raise CaptureError(
            f"{target} draws from a generator of its own",
            place=place,
            remedy="leave out generator=; the seed of the run gives repeatable numbers",
        )
    several = values.get("dropout") and values.get("train") and values.get("num_layers", 1) > 1
    if name in RECURRENT and several:
        raise CaptureError(
            f"{target} with dropout between its layers draws several times inside one operator",
            place=place,
            remedy="one nn.LSTM or nn.GRU per layer with nn.Dropout between them, or dropout=0",
        )
