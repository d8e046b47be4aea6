"""Kinds of initial values that can be made element by element.

In: an operator of a recorded construction. Out: what it does to an element: draws it, sets it to a constant, or
computes it from the elements at the same place of its operands. Everything else (an orthogonal matrix, a norm, a
permutation) is of no kind: its elements depend on each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.runtime.random import Stream, as_coarse, as_exponential, as_gaussian, uniform_at
from weft.runtime.start.record import At, Entry
from weft.runtime.start.recording import WHOLE_FUNCTIONS


@dataclass(frozen=True)
class Numbers:
    """The random numbers of one draw, at some positions of what is drawn."""

    stream: Stream
    position: Tensor

    def uniform(self, lane: int = 0) -> Tensor:
        """Float64 in [0, 1)."""
        return uniform_at(self.stream, 0, self.position.clone(), lane=lane)


Given = Mapping[str, Any]
"""Arguments of a call by name."""


def _uniform(numbers: Numbers, given: Given) -> Tensor:
    low, high = float(given.get("from", 0.0)), float(given.get("to", 1.0))
    return as_coarse(numbers.uniform()) * (high - low) + low


def _normal(numbers: Numbers, given: Given) -> Tensor:
    std, mean = float(given.get("std", 1.0)), float(given.get("mean", 0.0))
    return as_gaussian(numbers.uniform(), numbers.uniform(1)) * std + mean


def _exponential(numbers: Numbers, given: Given) -> Tensor:
    return as_exponential(numbers.uniform(), float(given["lambd"]))


def _truncated(numbers: Numbers, given: Given) -> Tensor:
    """As `nn.init.trunc_normal_` does it: the inverse of the cumulative distribution, between the bounds."""
    mean, std, low, high = (given[name] for name in ("mean", "std", "a", "b"))
    lower, upper = (math.erf((bound - mean) / std / math.sqrt(2.0)) for bound in (low, high))
    return (
        torch.erfinv(numbers.uniform() * (upper - lower) + lower)
        .mul_(std * math.sqrt(2.0))
        .add_(mean)
        .clamp_(low, high)
    )


DRAWS: dict[str, Callable[[Numbers, Given], Tensor]] = {
    "aten::uniform_": _uniform,
    "aten::rand": _uniform,
    "aten::rand_like": _uniform,
    "aten::normal_": _normal,
    "aten::randn": _normal,
    "aten::randn_like": _normal,
    "aten::normal.float_float": _normal,
    "aten::log_normal_": lambda numbers, given: _normal(numbers, given).exp_(),
    "aten::exponential_": _exponential,
    "aten::bernoulli_.float": lambda numbers, given: (numbers.uniform() < given["p"]).double(),
    "_no_grad_trunc_normal_": _truncated,
}
CONSTANTS: dict[str, Callable[[Given], Any]] = {
    **dict.fromkeys(("aten::zero_", "aten::zeros", "aten::zeros_like", "aten::new_zeros"), lambda given: 0),
    **dict.fromkeys(("aten::ones", "aten::ones_like", "aten::new_ones"), lambda given: 1),
    **dict.fromkeys(("aten::full", "aten::full_like", "aten::new_full"), lambda given: given["fill_value"]),
    "aten::fill_.Scalar": lambda given: given["value"],
}
PLACEWISE = frozenset(
    {"aten::copy_", "aten::_to_copy", "aten::fill_.Tensor"}
    | {f"aten::masked_fill{end}.{kind}" for end in ("", "_") for kind in ("Scalar", "Tensor")}
)
"""Operators that work place by place and are not marked as such in torch."""


def given_to(entry: Entry) -> dict[str, Any]:
    """The arguments by name, defaults too."""
    function = entry.function
    if not isinstance(function, torch._ops.OpOverload):
        return dict(zip(WHOLE_FUNCTIONS[function.__name__], entry.args, strict=False)) | entry.kwargs
    found = {}
    for position, argument in enumerate(function._schema.arguments):
        if position < len(entry.args):
            found[argument.name] = entry.args[position]
        elif argument.name in entry.kwargs or argument.has_default_value():
            found[argument.name] = entry.kwargs.get(argument.name, argument.default_value)
    return found


def is_placewise(entry: Entry) -> bool:
    """True if an element of the result depends on those at its place alone."""
    function = entry.function
    if not isinstance(function, torch._ops.OpOverload) or entry.draws or len(function._schema.returns) != 1:
        return False
    listed = any(isinstance(one, tuple | list) for one in (*entry.args, *entry.kwargs.values()))
    return not listed and (torch.Tag.pointwise in function.tags or entry.name in PLACEWISE)


def is_of_a_kind(entry: Entry) -> bool:
    """True if what it makes can be made element by element."""
    return (entry.name in DRAWS if entry.draws else entry.name in CONSTANTS) or is_placewise(entry)


def written_at(entry: Entry, storage: int) -> At | None:
    """The tensor in the storage that the entry makes or writes to; None if there are several."""
    found = [one for one in entry.makes if one is not None and one.storage == storage]
    if not found and storage in entry.writes:
        first = entry.args[0] if entry.args else None
        found = [first] if isinstance(first, At) and first.storage == storage else []
    return found[0] if len(found) == 1 else None
