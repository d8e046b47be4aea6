"""Weights that the optimizer updates in parts and that stay as they are used, on a program written by hand."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from weft.runtime.layout.moves import all_gather, reduce_scatter
from weft.runtime.links.emulator import run_ranks
from weft.runtime.links.transport import Transport
from weft.runtime.program.module import ParallelModule, Part
from weft.runtime.weights import products as F

SHAPE = (6, 4)
KEEPS = ((), ("weight",), ("weight", "gradient"))


def layer(ranks: int, keeps: tuple[str, ...], dim: int = 0) -> type[ParallelModule]:
    part = Part(SHAPE, {dim: "dp"}, dtype=torch.float64, use=[all_gather(dim, "dp")], sync=None, keeps=keeps)

    class Layer(ParallelModule, grid={"dp": ranks}, parameters={"weight": part}):
        def forward(self, x: Tensor) -> Tensor:
            weight = self.comm.use(self.weight, [all_gather(dim, "dp")], sync=[reduce_scatter(dim, "dp")])
            share = F.linear(F.linear(x, weight), weight.t()).square().sum()
            return self.finish(self.comm.all_reduce(share, over="dp"), share)

    return Layer


def whole() -> Tensor:
    return torch.arange(24, dtype=torch.float64).reshape(SHAPE) / 10


def batch(rank: int) -> Tensor:
    return torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4) * (rank + 1)


def make(transport: Transport, keeps: tuple[str, ...], dim: int = 0) -> ParallelModule:
    part = whole().chunk(transport.num_ranks, dim)[transport.rank]
    return layer(transport.num_ranks, keeps, dim)(transport, {"weight": part.clone()})


def train(transport: Transport, keeps: tuple[str, ...], update: Callable[[Any], None], dim: int = 0) -> Tensor:
    module = make(transport, keeps, dim)
    for _ in range(3):
        module.zero_grad()
        module(batch(transport.rank)).backward()
        update(module.weight)
    return module.weight.detach().clone()


def by_sgd(weight: Any) -> None:
    torch.optim.SGD([weight], lr=0.01).step()


def by_data(weight: Any) -> None:
    weight.data.add_(weight.grad, alpha=-0.01)


def eager(ranks: int) -> Tensor:
    weight = whole().requires_grad_()
    for _ in range(3):
        loss = sum(F.linear(F.linear(batch(rank), weight), weight.t()).square().sum() for rank in range(ranks))
        (gradient,) = torch.autograd.grad(loss, [weight])  # type: ignore[arg-type]
        weight = (weight - 0.01 * gradient).detach().requires_grad_()
    return weight.detach()


@pytest.mark.parametrize("update", [by_sgd, by_data])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("keeps", KEEPS)
def test_updates_are_seen_however_they_are_made(keeps: tuple[str, ...], dim: int, update: Any) -> None:
    found = run_ranks(2, lambda transport: train(transport, keeps, update, dim))
    torch.testing.assert_close(torch.cat(found, dim), eager(2), rtol=1e-12, atol=1e-12)


def test_a_part_lies_in_its_whole() -> None:
    def body(transport: Transport) -> tuple[int, bool]:
        module = make(transport, ("weight",))
        parameter = module.weight
        module(batch(transport.rank)).backward()
        return parameter.untyped_storage().nbytes(), parameter is next(module.parameters())

    assert run_ranks(3, body) == [(24 * 8, True)] * 3


@pytest.mark.parametrize("keeps", KEEPS)
def test_two_forwards_then_one_backward(keeps: tuple[str, ...]) -> None:
    def body(transport: Transport) -> Tensor:
        module = make(transport, keeps)
        for _ in range(2):
            module.zero_grad()
            (module(batch(transport.rank)) + module(2 * batch(transport.rank))).backward()
        return module.weight.grad.clone()  # type: ignore[no-any-return]

    weight = whole().requires_grad_()
    losses = [
        F.linear(F.linear(factor * batch(rank), weight), weight.t()).square().sum()
        for rank in range(2)
        for factor in (1, 2)
    ]
    torch.stack(losses).sum().backward()
    found = torch.cat(run_ranks(2, body))
    torch.testing.assert_close(found, weight.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("keeps", KEEPS)
def test_a_backward_after_the_update_is_refused(keeps: tuple[str, ...]) -> None:
    def body(transport: Transport) -> str:
        module = make(transport, keeps)
        loss = module(batch(transport.rank))
        with torch.no_grad():
            module.weight.add_(1)
        with pytest.raises(RuntimeError, match="weight was changed in place after the forward") as error:
            loss.backward()
        return str(error.value)

    assert all("before optimizer.step()" in text for text in run_ranks(2, body))


@pytest.mark.parametrize("keeps", KEEPS)
def test_whole_gradients_of_micro_batches_go_home_once_if_asked(keeps: tuple[str, ...]) -> None:
    def body(transport: Transport) -> tuple[int, Tensor]:
        module = make(transport, keeps)
        sent: list[str] = []
        plain = transport.all_to_all

        def counted(*args: Any) -> Any:
            sent.extend(args[3] for tensors in args[0].values() for _ in tensors)
            return plain(*args)

        for step in range(2):
            if step:
                transport.all_to_all = counted  # type: ignore[method-assign]
            module.zero_grad()
            module.hold_gradients(torch.enable_grad())
            for number in range(3):
                module(batch(transport.rank) * (number + 1)).backward()
            module.complete_gradients()
        return sent.count("reduce_scatter"), module.weight.grad.clone()

    weight = whole().requires_grad_()
    for rank in range(2):
        for number in range(3):
            F.linear(F.linear(batch(rank) * (number + 1), weight), weight.t()).square().sum().backward()
    found = run_ranks(2, body)
    assert weight.grad is not None
    torch.testing.assert_close(torch.cat([part for _, part in found]), weight.grad, rtol=1e-12, atol=1e-12)
    assert [count for count, _ in found] == [1 if "gradient" in keeps else 3] * 2


@pytest.mark.parametrize("keeps", KEEPS)
def test_a_step_leaves_nothing_behind(keeps: tuple[str, ...]) -> None:
    def body(transport: Transport) -> Any:
        loss = make(transport, keeps)(batch(transport.rank))
        tape = weakref.ref(loss.grad_fn.next_functions[0][0].tape)
        loss.backward()
        return tape

    tapes = run_ranks(2, body)
    gc.collect()
    assert [tape() for tape in tapes] == [None, None]
