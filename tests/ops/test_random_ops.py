"""Random operators cut by their rules: the same numbers however they are cut, and as the eager model draws them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ops.cells import STREAM, cut, prove_cells, whole_case
from weft.runtime.drawmode import DrawMode


def floats(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, dtype=torch.float64)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


LENDING = (
    "aten.randint_like.default",
    "aten.randint_like.low_dtype",
    "aten.bernoulli.p",
    "aten.uniform.default",
    "aten.normal_functional.default",
    "aten.exponential.default",
)


def prove_drawn(target: str, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
    """Whole by the local call, against the eager operator under DrawMode; then cut in every way."""
    name, overload = target.split(".")[1:]
    operator = getattr(getattr(torch.ops.aten, name), overload)
    # where the operand only lends its shape, torch gives it a gradient of zeros or none at all
    fixed = (0,) if target in LENDING else ()
    it = whole_case(target, args, kwargs, draw=0, fixed=fixed)
    leaves = [value.clone().requires_grad_(value.is_floating_point() and not fixed) for value in it.values]
    left = iter(leaves)
    bound = [next(left) if isinstance(arg, torch.Tensor) else arg for arg in args]
    with DrawMode(STREAM) as mode:
        results = operator(*bound, **(kwargs or {}))
    assert mode.num_draws == 1
    results = results if isinstance(results, tuple) else (results,)
    for result, expected in zip(results, it.results, strict=True):
        assert torch.equal(result, expected)
    if results[0].requires_grad:
        for grad, expected in zip(torch.autograd.grad(results[0], leaves, it.cotangents[0]), it.gradients, strict=True):
            torch.testing.assert_close(grad, expected, rtol=1e-13, atol=1e-13)
    prove_cells(it)
    assert len(it.rule.cuttable) == len(it.results[0].shape)


@pytest.mark.parametrize(
    ("target", "args"),
    [
        ("aten.dropout.default", (0.3, True)),
        ("aten.native_dropout.default", (0.3, True)),
        ("aten.feature_dropout.default", (0.3, True)),
        ("aten.alpha_dropout.default", (0.3, True)),
        ("aten.feature_alpha_dropout.default", (0.3, True)),
        ("aten.rrelu.default", (0.1, 0.4, True)),
    ],
)
def test_dropout(target: str, args: tuple[Any, ...]) -> None:
    prove_drawn(target, (floats(3, 4, 5), *args))


@pytest.mark.parametrize(
    ("target", "args", "kwargs"),
    [
        ("aten.rand.default", ((3, 5),), {"dtype": torch.float64}),
        ("aten.rand.default", ((3, 5),), {}),
        ("aten.randn.default", ((3, 5),), {}),
        ("aten.randint.default", (7, (3, 5)), {}),
        ("aten.randint.low", (2, 7, (3, 5)), {}),
        ("aten.randperm.default", (9,), {}),
        ("aten.normal.float_float", (1.0, 2.0, (3, 5)), {}),
        ("aten.rand_like.default", (floats(3, 5),), {}),
        ("aten.randn_like.default", (floats(3, 5),), {}),
        ("aten.randint_like.default", (floats(3, 5), 4), {}),
        ("aten.randint_like.low_dtype", (floats(3, 5), 4, 8), {}),
        ("aten.bernoulli.default", (floats(3, 5).sigmoid(),), {}),
        ("aten.bernoulli.p", (floats(3, 5), 0.3), {}),
        ("aten.uniform.default", (floats(3, 5), 1.0, 4.0), {}),
        ("aten.normal_functional.default", (floats(3, 5), 1.0, 4.0), {}),
        ("aten.normal.Tensor_Tensor", (floats(3, 5), floats(5).exp()), {}),
        ("aten.exponential.default", (floats(3, 5), 2.0), {}),
    ],
)
def test_numbers(target: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    prove_drawn(target, args, kwargs)


def test_without_a_draw_dropout_is_itself_and_numbers_are_not_cut() -> None:
    it = prove_cells(whole_case("aten.dropout.default", (floats(4, 6), 0.5, False)))
    assert torch.equal(it.results[0], it.values[0])
    assert not whole_case("aten.rand.default", ((3, 5),)).rule.cuttable


MASKS = {
    "none": None,
    "bool": lambda: torch.rand(4, 5) < 0.7,
    "float": lambda: floats(2, 1, 4, 5),
    "heads": lambda: floats(4, 4, 5),
    "columns": lambda: floats(1, 1, 1, 5),
}


def attention_inputs(heads: int = 4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return floats(2, 4, 4, 3), floats(2, heads, 5, 3), floats(2, heads, 5, 6)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_attention(mask: str, p: float) -> None:
    made = MASKS[mask]
    args = (*attention_inputs(), made() if made else None, p)
    if p:
        prove_attention(args, {})
    else:
        it = prove_cells(whole_case("aten.scaled_dot_product_attention.default", args))
        assert set(it.rule.cuttable) == {"b0", "h", "q", "v"}


@pytest.mark.parametrize("heads", [4, 2, 1])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_causal_attention_with_grouped_heads(heads: int, p: float) -> None:
    args = (*attention_inputs(heads), None, p, True)
    kwargs = {"scale": 0.4, "enable_gqa": True}
    if p:
        prove_attention(args, kwargs)
    else:
        it = prove_cells(whole_case("aten.scaled_dot_product_attention.default", args, kwargs))
        assert {"g", "r", "h"} & set(it.rule.cuttable)


def test_attention_of_few_dims() -> None:
    args = (floats(3, 4, 2), floats(3, 5, 2), floats(3, 5, 2), None, 0.2)
    prove_attention(args, {})
    prove_cells(whole_case("aten.scaled_dot_product_attention.default", (floats(4, 2), floats(5, 2), floats(5, 2))))


def prove_attention(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    it = whole_case("aten.scaled_dot_product_attention.default", args, kwargs, draw=0)
    leaves = [value.clone().requires_grad_(value.is_floating_point()) for value in it.values]
    left = iter(leaves)
    bound = [next(left) if isinstance(arg, torch.Tensor) else arg for arg in args]
    with DrawMode(STREAM) as mode:
        out = torch.ops.aten.scaled_dot_product_attention.default(*bound, **kwargs)
    assert mode.num_draws == 1
    torch.testing.assert_close(out, it.results[0], rtol=1e-13, atol=1e-13)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    expected = [grad for grad in it.gradients if grad is not None]
    for grad, other in zip(torch.autograd.grad(out, wanted, it.cotangents[0]), expected, strict=True):
        torch.testing.assert_close(grad, other, rtol=1e-12, atol=1e-12)
    prove_cells(it)


def test_two_draws_differ() -> None:
    first = whole_case("aten.dropout.default", (torch.ones(8, 8), 0.5, True), draw=0)
    second = whole_case("aten.dropout.default", (torch.ones(8, 8), 0.5, True), draw=1)
    assert not torch.equal(first.results[0], second.results[0])
    cut(second, [("d0", (1, 1))])
