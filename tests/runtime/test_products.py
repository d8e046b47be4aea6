"""Weight gradients that products write themselves: those of autograd, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from weft.runtime.weights import products
from weft.runtime.weights.products import Direct, Target, Write

IDS = torch.tensor([[0, 2, 3], [2, 0, 1]])


@dataclass
class Kept:
    """Memory for the gradient of one parameter."""

    total: Tensor | None = None

    def target(self, weight: Tensor) -> Target | None:
        def write(make: Write) -> None:
            self.total = make(torch.full_like(weight, 7.0))

        return write


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


@pytest.mark.parametrize("options", [{}, {"padding_idx": 0}, {"padding_idx": 2}])
def test_tables(options: dict[str, int]) -> None:
    plain, ours, wrote = gradients(lambda x, weight: products.embedding(x, weight, **options), IDS, torch.randn(5, 4))
    assert torch.equal(plain, ours)
    assert wrote == (not options)


@pytest.mark.parametrize("padding", [0, 2])
def test_tables_by_position(padding: int) -> None:
    plain, ours, _ = gradients(lambda x, weight: products.embedding(x, weight, padding), IDS, torch.randn(5, 4))
    assert torch.equal(plain, ours)


@pytest.mark.parametrize(("out", "inner"), [(6, 4), (0, 4), (6, 0)])
@pytest.mark.parametrize("rows", [(3,), (2, 3), (0,), ()])
def test_products_of_parts_that_may_be_empty(out: int, inner: int, rows: tuple[int, ...]) -> None:
    plain, ours, wrote = gradients(products.linear, torch.randn(*rows, inner), torch.randn(out, inner))
    assert torch.equal(plain, ours) and wrote


@dataclass(frozen=True)
class Several:
    """Memory for the gradients of parameters that may be written, by identity."""

    free: tuple[Tensor, ...]
    totals: dict[int, Tensor]

    def target(self, weight: Tensor) -> Target | None:
        def write(make: Write) -> None:
            if id(weight) in self.totals:
                make(self.totals[id(weight)], add=True)
            else:
                self.totals[id(weight)] = make(torch.full_like(weight, 7.0))

        return write if any(one is weight for one in self.free) else None


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("product", ["linear", "addmm"])
def test_biases_are_written_beside_their_weights(product: str, watched: bool) -> None:
    x, weight, bias = torch.randn(3, 4), nn.Parameter(torch.randn(5, 4)), nn.Parameter(torch.randn(5))
    if product == "addmm":
        weight = nn.Parameter(weight.detach().t().contiguous())

    def run() -> None:
        first, second = (
            products.linear(one, weight, bias) if product == "linear" else products.addmm(bias, one, weight)
            for one in (x, 2 * x)
        )
        (first.square() + second).sum().backward()

    run()
    plain = [weight.grad, bias.grad]
    weight.grad = bias.grad = None
    slots = Several((weight,) if watched else (weight, bias), {})
    with Direct(slots, torch.zeros((), requires_grad=True)):
        run()
    found = [slots.totals[id(weight)], bias.grad if watched else slots.totals[id(bias)]]
    torch.testing.assert_close(found, plain)
    assert weight.grad is None and (bias.grad is None) == (not watched)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize(
    ("product", "x", "weight"),
    [("mm", (3, 4), (4, 5)), ("matmul", (2, 3, 4), (4, 5)), ("matmul", (4,), (4, 5)), ("bmm", (2, 3, 4), (2, 4, 5))],
)
def test_products_with_their_weight_on_the_right(
    product: str, x: tuple[int, ...], weight: tuple[int, ...], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, dtype=dtype, generator=generator) for shape in (x, weight)]
    inputs = [values[0].clone().requires_grad_() for _ in range(2)]
    weights = [nn.Parameter(values[1].clone()) for _ in range(2)]
    kept = Kept()
    plain = getattr(torch, product)(inputs[0], weights[0])
    with Direct(kept, torch.zeros((), requires_grad=True)):
        ours = getattr(products, product)(inputs[1], weights[1])
    assert torch.equal(plain, ours)
    for result in (plain, ours):
        result.abs().square().sum().backward()
    written = dtype == torch.float64 and len(x) > 1
    assert (kept.total is not None) == written
    assert torch.equal(weights[0].grad, kept.total if written else weights[1].grad)
    assert torch.equal(inputs[0].grad, inputs[1].grad)


def test_a_mode_of_others_sees_the_product_itself() -> None:
    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    weight, kept = nn.Parameter(torch.randn(5, 4)), Kept()
    with Direct(kept, torch.zeros((), requires_grad=True)), Mode():
        products.linear(torch.randn(3, 4), weight).sum().backward()
    assert nn.functional.linear in seen
    assert kept.total is None and weight.grad is not None


@pytest.mark.parametrize("product", [products.linear, products.mm])
def test_a_weight_that_backward_does_not_need_may_change(product: Any) -> None:
    weight, x = nn.Parameter(torch.randn(3, 3)), torch.randn(2, 3)
    with Direct(Kept(), torch.zeros((), requires_grad=True)):
        found = product(x, weight)
    with torch.no_grad():
        weight.add_(1)
    found.sum().backward()
