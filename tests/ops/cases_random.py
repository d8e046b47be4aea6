"""Arguments with which the rules of random operators are proven: target -> forms, each with the number of a draw."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tests.ops.cases import Form, r, special

LENDING = tuple(
    f"aten.{name}"
    for name in (
        "randint_like.default",
        "randint_like.low_dtype",
        "bernoulli.p",
        "uniform.default",
        "normal_functional.default",
        "exponential.default",
        "cauchy.default",
        "log_normal.default",
        "geometric.default",
        "multinomial.default",
    )
)
"""Operators whose operand has no gradient, or one of zeros."""
MASKS = {
    "none": lambda: None,
    "bool": lambda: torch.rand(4, 5) < 0.7,
    "float": lambda: r(2, 1, 4, 5),
    "heads": lambda: r(4, 4, 5),
    "columns": lambda: r(1, 1, 1, 5),
    "rows": lambda: r(2, 4, 4, 1),
}


def drawn(target: str, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> Form:
    """A form with a draw."""
    return special(args, kwargs, fixed=(0,) if target in LENDING else (), draw=0)


def numbers() -> dict[str, list[Form]]:
    x, p = r(3, 5), r(3, 5).sigmoid()
    kind = {"dtype": torch.float64}
    plain: dict[str, list[tuple[Any, ...]]] = {
        "dropout.default": [(r(3, 4, 5), 0.3, True)],
        "native_dropout.default": [(r(3, 4, 5), 0.3, True)],
        "feature_dropout.default": [(r(3, 4, 5), 0.3, True)],
        "alpha_dropout.default": [(r(3, 4, 5), 0.3, True)],
        "feature_alpha_dropout.default": [(r(3, 4, 5), 0.3, True)],
        "rrelu.default": [(r(3, 4, 5), 0.1, 0.4, True)],
        "rand.default": [((3, 5),), ((3, 5), kind)],
        "randn.default": [((3, 5),)],
        "randint.default": [(7, (3, 5))],
        "randint.low": [(2, 7, (3, 5))],
        "randperm.default": [(9,)],
        "normal.float_float": [(1.0, 2.0, (3, 5))],
        "normal.Tensor_Tensor": [(x, r(5).exp())],
        "normal.Tensor_float": [(x, 0.5)],
        "rand_like.default": [(x,)],
        "randn_like.default": [(x,)],
        "randint_like.default": [(x, 4)],
        "randint_like.low_dtype": [(x, 4, 8)],
        "bernoulli.default": [(p,)],
        "bernoulli.p": [(x, 0.3)],
        "uniform.default": [(x, 1.0, 4.0)],
        "normal_functional.default": [(x, 1.0, 4.0)],
        "exponential.default": [(x, 2.0)],
        "cauchy.default": [(x, 0.5, 2.0)],
        "log_normal.default": [(x, 0.5, 0.3)],
        "geometric.default": [(x, 0.3)],
        "poisson.default": [(r(3, 5).exp() * 4,)],
        "_standard_gamma.default": [(r(3, 5).exp(),)],
        "_sample_dirichlet.default": [(r(4, 3, 5).exp(),)],
        "multinomial.default": [(p, 3), (p, 6, True), (p[0], 2)],
    }
    found: dict[str, list[Form]] = {}
    for name, calls in plain.items():
        for args in calls:
            kwargs = args[-1] if isinstance(args[-1], dict) else {}
            given = args[:-1] if kwargs else args
            found.setdefault(f"aten.{name}", []).append(drawn(f"aten.{name}", given, kwargs))
    return found


def attention() -> list[Form]:
    found = []

    def both(args: tuple[Any, ...], *rest: Any, **kwargs: Any) -> None:
        mask, *more = rest
        found.append(special((*args, mask, 0.0, *more), kwargs))
        found.append(special((*args, mask, 0.3, *more), kwargs, draw=0))

    def inputs(heads: int = 4) -> tuple[torch.Tensor, ...]:
        return r(2, 4, 4, 3), r(2, heads, 5, 3), r(2, heads, 5, 6)

    for mask in MASKS.values():
        both(inputs(), mask())
    for heads in (4, 2, 1):
        both(inputs(heads), None, True, scale=0.4, enable_gqa=True)
    both(inputs(2), MASKS["float"](), False, enable_gqa=True)
    both((r(3, 4, 2), r(3, 5, 2), r(3, 5, 2)), None)
    both((r(4, 2), r(5, 2), r(5, 2)), None)
    both((r(2, 3, 4, 2), r(1, 3, 5, 2), r(1, 3, 5, 2)), None)
    return found


def random_cases() -> dict[str, list[Form]]:
    """Every target here that is proven by name."""
    return {**numbers(), "aten.scaled_dot_product_attention.default": attention()}
