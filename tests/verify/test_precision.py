"""Under Float64Mode nothing is rounded to a lower float dtype."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from weft.ops.precision import Float64Mode, widen_dtype
from weft.verify import verify
from weft.verify.precision import precision_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_casts_do_not_round(dtype: torch.dtype) -> None:
    x = torch.tensor([1 / 3], dtype=torch.float64)
    with Float64Mode():
        assert x.to(dtype).dtype == torch.float64
        assert torch.equal(x.to(dtype), x)
        assert torch.equal(x.float() * 3, x * 3)
        assert torch.equal(x.sum(dtype=dtype), x.sum())
        assert torch.equal(torch.nn.functional.softmax(x, -1, dtype=dtype), torch.ones(1, dtype=torch.float64))


def test_factories_make_float64() -> None:
    with Float64Mode():
        assert torch.full((1,), 0.1).item() == 0.1
        assert torch.full((1,), 0.1, dtype=torch.float32).item() == 0.1
        assert torch.arange(0.0, 1.0, 0.1)[1].item() == 0.1
        assert torch.linspace(0, 1, 4).dtype == torch.float64
        assert torch.zeros(2).dtype == torch.float64
        assert torch.empty(2, dtype=torch.bfloat16).dtype == torch.float64


def test_integers_and_bools_stay() -> None:
    with Float64Mode():
        assert torch.arange(3).dtype == torch.int64
        assert torch.full((1,), 3).dtype == torch.int64
        assert (torch.arange(3) > 1).dtype == torch.bool
        assert (torch.arange(3) / 2).dtype == torch.float64
    assert widen_dtype(torch.int8) == torch.int8


def test_literals_keep_their_rounded_value() -> None:
    with Float64Mode():
        made = torch.tensor(0.1)
    assert made.dtype == torch.float64
    assert made.item() == torch.tensor(0.1, dtype=torch.float32).item()


def test_lower_operands_are_widened_but_not_written_ones() -> None:
    wide, narrow = torch.eye(2, dtype=torch.float64), torch.ones(2, 2)
    with Float64Mode():
        assert (wide @ narrow).dtype == torch.float64
        narrow.add_(wide)
    assert torch.equal(narrow, torch.tensor([[2.0, 1.0], [1.0, 2.0]]))


def test_complex_is_widened() -> None:
    x = torch.randn(2, 4, dtype=torch.float64)
    with Float64Mode():
        turned = torch.view_as_complex(x.float().reshape(2, 2, 2)) * torch.polar(torch.ones(2), torch.ones(2))
    assert turned.dtype == torch.complex128


def test_gradients_are_float64() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(3, 2).double()
    x = torch.randn(4, 3, dtype=torch.float64)
    layer(x).square().mean().backward()
    expected = layer.weight.grad
    layer.zero_grad()
    with Float64Mode():
        layer(x.half()).float().square().mean().backward()
    assert layer.weight.grad is not None and layer.weight.grad.dtype == torch.float64
    assert torch.equal(layer.weight.grad, expected)


def test_autocast_has_no_effect() -> None:
    x = torch.randn(3, 3, dtype=torch.float64)
    with Float64Mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(x @ x, torch.mm(x, x))
        assert (x @ x).dtype == torch.float64


def test_finfo_answers_for_the_models_own_dtype() -> None:
    with precision_of(torch.float32):
        assert torch.finfo(torch.float64).eps == torch.finfo(torch.float32).eps
        assert torch.finfo(torch.bfloat16).bits == 16
    assert torch.finfo(torch.float64).bits == 64


class Scaled(torch.nn.Module):
    """Writes a number that float32 rounds, in the dtype of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return (y * torch.tensor(5.3, dtype=y.dtype)).exp().sum()


def test_numbers_written_in_the_models_dtype_are_rounded_as_it_does() -> None:
    result = verify(Scaled(), (torch.randn(4, 6),), plan="dp=2")
    assert result.equal, result.differences
