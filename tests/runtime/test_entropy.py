"""Cross entropy in one tensor: torch's own numbers, and an error where the memory was needed twice."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from weft.runtime.operators.losses import MEAN, SUM, entropy


def operands(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(size, 5, dtype=dtype, generator=generator).requires_grad_() for size in (12, 7))
    target = torch.randint(7, (12,), generator=generator)
    target[::4] = -100
    return x, weight, target


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("reduction", [MEAN, SUM])
def test_same_loss_and_gradients(reduction: str, reuse: bool) -> None:
    x, weight, target = operands()
    expected = F.cross_entropy(x @ weight.t(), target, reduction=reduction)
    found = entropy(x @ weight.t(), target, reduction=reduction, reuse=reuse)
    assert torch.equal(found, expected)
    for one, other in zip(
        torch.autograd.grad(3 * found, (x, weight)), torch.autograd.grad(3 * expected, (x, weight)), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-15)


def test_scores_are_written_over_only_if_told() -> None:
    x, weight, target = operands()
    scores = (x @ weight.t()).detach()
    before = scores.clone()
    entropy(scores, target)
    assert torch.equal(scores, before)
    entropy(scores, target, reuse=True)
    assert torch.equal(scores, before.log_softmax(1))


def test_a_second_backward_adds_up_if_the_graph_was_retained() -> None:
    x, weight, target = operands()
    (expected,) = torch.autograd.grad(F.cross_entropy(x @ weight.t(), target), (x,))
    loss = entropy(x @ weight.t(), target)
    loss.backward(retain_graph=True)
    loss.backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 2 * expected, rtol=1e-13, atol=1e-15)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_scores_that_backward_needs_are_not_lost_in_silence() -> None:
    x, weight, target = operands()
    loss = entropy((x @ weight.t()).exp(), target, reuse=True)
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_torchs_own(dtype: torch.dtype) -> None:
    x, weight, target = operands(dtype)
    expected = F.cross_entropy(x @ weight.t(), target)
    assert torch.equal(entropy(x @ weight.t(), target, reuse=True), expected)


def test_no_row_counts() -> None:
    x, weight, target = operands()
    nothing = torch.full_like(target, -100)
    assert entropy(x @ weight.t(), nothing).isnan()
    assert entropy(x @ weight.t(), nothing, reduction=SUM) == 0
