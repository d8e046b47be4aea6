"""Weight gradients that products write themselves: those of autograd, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from weft.runtime.direct import Direct, Write

IDS = torch.tensor([[0, 2, 3], [2, 0, 1]])


@dataclass
class Kept:
    """Memory for the gradient of one parameter."""

    total: Tensor | None = None

    def has_slot(self, parameter: Tensor) -> bool:
        return True

    def write(self, parameter: Tensor, make: Write) -> None:
        self.total = make(torch.full_like(parameter, 7.0))


def gradients(run: Callable[[Tensor, nn.Parameter], Tensor], x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, bool]:
    """By autograd, by products that write, and whether they did."""
    kept, plain, ours = Kept(), nn.Parameter(weight.clone()), nn.Parameter(weight.clone())
    with Direct(kept, torch.zeros((), requires_grad=True)):
        directly = run(x, ours)
    for result in (run(x, plain), directly):
        (result * torch.arange(result.numel(), dtype=result.dtype).view_as(result)).sum().backward()
    found = ours.grad if kept.total is None else kept.total
    assert plain.grad is not None and found is not None
    return plain.grad, found, kept.total is not None


@pytest.mark.parametrize("options", [{}, {"padding_idx": 0}, {"padding_idx": 2}, {"scale_grad_by_freq": True}])
def test_tables(options: dict[str, int]) -> None:
    plain, ours, wrote = gradients(lambda x, weight: functional.embedding(x, weight, **options), IDS, torch.randn(5, 4))
    assert torch.equal(plain, ours)
    assert wrote == (not options)


@pytest.mark.parametrize("padding", [0, 2])
def test_tables_by_position(padding: int) -> None:
    plain, ours, _ = gradients(lambda x, weight: functional.embedding(x, weight, padding), IDS, torch.randn(5, 4))
    assert torch.equal(plain, ours)


@pytest.mark.parametrize(("out", "inner"), [(6, 4), (0, 4), (6, 0)])
@pytest.mark.parametrize("rows", [(3,), (2, 3), (0,), ()])
def test_products_of_parts_that_may_be_empty(out: int, inner: int, rows: tuple[int, ...]) -> None:
    plain, ours, wrote = gradients(functional.linear, torch.randn(*rows, inner), torch.randn(out, inner))
    assert torch.equal(plain, ours) and wrote
