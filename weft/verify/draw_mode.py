"""DrawMode: makes an eager model draw from a Stream, so that it can be compared with any plan.

In: a Stream; entered around one forward. While it is on, the n-th random draw that reaches the dispatcher takes the
numbers of draw n, element by element of the whole tensor, and the global generator is not touched. A random
operator that it does not know raises: nothing is drawn from elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from weft.runtime import random, sampling
from weft.runtime.random import Stream

Given = dict[str, Any]
"""Arguments of an operator by their names in its schema."""


class DrawMode(TorchDispatchMode):
    """Replaces every random draw by the numbers of a Stream, counting draws from zero."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self.stream = stream
        self.num_draws = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        # an in-place operator draws as its twin does
        name = func._schema.name.removeprefix("aten::").removesuffix("_")
        given = _given(func, args, kwargs)
        if _draws_nothing(name, given):
            return func(*args, **kwargs)
        if name not in DRAWN or not given.keys() >= set(DRAWN[name][1]) or func._overloadname.endswith("out"):
            raise RuntimeError(f"{func}: a random operator that cannot be drawn from a stream")
        if given.get("generator") is not None:
            raise RuntimeError(f"{func}: draws from a generator of its own, not from the stream")
        function, wanted = DRAWN[name]
        values = [given[one] for one in wanted]
        made = function(self, *values) if name in OTHERS else function(*values, **_made(name, given, self))
        return given["self"].copy_(made) if func._schema.name.endswith("_") else made

    def draw(self, shape: Sequence[int]) -> dict[str, Any]:
        """The next draw, as arguments of a function in `random`."""
        number = self.num_draws
        self.num_draws += 1
        return {"draw": random.whole_draw(number, tuple(shape)), "stream": self.stream}


def _given(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Given:
    """All arguments; overloads that lack a bound begin at 0, and one without `p` has it in its operand."""
    declared = func._schema.arguments
    # a dtype by default is a number there
    given = {one.name: one.default_value for one in declared if one.has_default_value() and one.name != "dtype"}
    given |= dict(zip((one.name for one in declared), args, strict=False)) | dict(kwargs)
    return {"low": 0, "from": 0, "p": given.get("self"), **given}


def _draws_nothing(name: str, given: Given) -> bool:
    """True for operators that carry the tag, but with these arguments draw nothing."""
    if "dropout_p" in given:
        return float(given["dropout_p"]) == 0.0
    if name == "rrelu_with_noise":
        return not given["training"]
    if name == "native_dropout":
        return given["train"] is False or not 0 < given["p"] < 1 or given["input"].numel() == 0
    return False


def _made(name: str, given: Given, mode: DrawMode) -> dict[str, Any]:
    """The draw, dtype and device of numbers: of the shape that is asked for, or as the tensors they are made from."""
    tensors = [given[one] for one in ("self", "mean", "std") if isinstance(given.get(one), Tensor)]
    shape: Sequence[int] = torch.broadcast_shapes(*(one.shape for one in tensors))
    dtype = torch.int64 if name in ("randint", "randperm") else torch.get_default_dtype()
    device = None
    if tensors:
        dtype, device = tensors[0].dtype, tensors[0].device
    else:
        shape = (given["n"],) if name == "randperm" else given["size"]
    return {**mode.draw(shape), "dtype": given.get("dtype") or dtype, "device": given.get("device") or device}


def _multinomial(mode: DrawMode, p: Tensor, num_samples: int, replacement: bool) -> Tensor:
    shape = (*p.shape[:-1], num_samples) if replacement else p.shape
    return sampling.multinomial(p, num_samples, replacement, **mode.draw(shape))


def _native_dropout(mode: DrawMode, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    return random.native_dropout(x, p, train, **mode.draw(x.shape))


def _rrelu(mode: DrawMode, x: Tensor, noise: Tensor, lower: float, upper: float) -> Tensor:
    slope = random.uniform(**mode.draw(x.shape), device=x.device) * (upper - lower) + lower
    noise.copy_(torch.where(x <= 0, slope.to(x.dtype), 1))
    return x * noise


def _dirichlet(mode: DrawMode, concentration: Tensor) -> Tensor:
    return sampling.dirichlet(concentration, **mode.draw(concentration.shape))


OTHERS: Mapping[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "_sample_dirichlet": (_dirichlet, ("self",)),
    "multinomial": (_multinomial, ("self", "num_samples", "replacement")),
    "native_dropout": (_native_dropout, ("input", "p", "train")),
    "rrelu_with_noise": (_rrelu, ("self", "noise", "lower", "upper")),
}
"""Operators that make more than numbers of a shape: they are given the mode."""

DRAWN: Mapping[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "bernoulli": (random.bernoulli, ("p",)),
    "uniform": (random.rand, ("from", "to")),
    **dict.fromkeys(("rand", "rand_like"), (random.rand, ())),
    **dict.fromkeys(("randn", "randn_like"), (random.randn, ())),
    **dict.fromkeys(("normal", "normal_functional"), (random.randn, ("mean", "std"))),
    "exponential": (random.exponential, ("lambd",)),
    "cauchy": (sampling.cauchy, ("median", "sigma")),
    "log_normal": (sampling.log_normal, ("mean", "std")),
    "geometric": (sampling.geometric, ("p",)),
    "_standard_gamma": (sampling.gamma, ("self",)),
    "poisson": (sampling.poisson, ("self",)),
    "random": (random.randint, ("from", "to")),
    **dict.fromkeys(("randint", "randint_like"), (random.randint, ("low", "high"))),
    "randperm": (random.randperm, ()),
    **OTHERS,
}
"""What makes the numbers of an operator, and which of its arguments it takes."""
