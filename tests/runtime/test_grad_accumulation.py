"""Weight gradients over several backwards, added up by the products that make them, at once or when they are asked
for."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.runtime.test_gathered import Split, batch, kept, made
from tests.runtime.test_mail import Starting
from weft.runtime.links.emulator import run_ranks
from weft.runtime.links.transport import Transport
from weft.runtime.program.module import ParallelModule, Part
from weft.runtime.weights.grad_accumulation import Queue, accumulating, add_queued
from weft.runtime.weights.grad_sync import GradSync
from weft.runtime.weights.products import addmm, linear, matmul

NUM_RANKS = 2
PARTS = {
    "a.weight": Part((8, 8), dtype=torch.float64, sync="dp", reads=3),
    "a.bias": Part((8,), dtype=torch.float64, sync="dp", reads=3),
    "c.weight": Part((8, 8), dtype=torch.float64, sync="dp", reads=2),
    "c.bias": Part((8,), dtype=torch.float64, sync="dp"),
    "scale": Part((8,), dtype=torch.float64, sync="dp"),
}


class Mixed(ParallelModule, grid={"dp": NUM_RANKS}, parameters=PARTS):
    """A linear used three times, an addmm, a product by a parameter, and something that is no product."""

    def forward(self, x: Tensor, recompute: bool = False) -> Tensor:
        x = self.recompute(self.block, x) if recompute else self.block(x)
        share = (self.model.scale * x).square().mean() / NUM_RANKS
        return self.finish(self.comm.all_reduce(share, over="dp"), share)

    def block(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(linear(x, self.model.a.weight, self.model.a.bias))
        x = addmm(self.model.c.bias, x, self.model.c.weight)
        return matmul(x, self.model.c.weight)


def state() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(part.shape, generator=generator, dtype=torch.float64) * 0.3 for name, part in PARTS.items()
    }


def mixed(transport: Transport) -> Mixed:
    module = Mixed(transport, state())
    module.grad_sync = GradSync(module, bucket=256)
    return module


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in module.named_parameters() if parameter.grad is not None}


def queued(module: ParallelModule, *inputs: Any) -> Queue:
    """Forward and backward; what waits."""
    queue = Queue()
    module.hold_gradients(accumulating(module, queue))
    with accumulating(module, queue):
        loss = module(*inputs)
    loss.backward()
    return queue


@pytest.mark.parametrize("recompute", [False, True])
def test_queued_gradients_have_the_same_bits(recompute: bool) -> None:
    def body(transport: Transport) -> None:
        module, x = mixed(transport), batch().chunk(NUM_RANKS)[transport.rank]
        module(x, recompute).backward()
        plain = gradients(module)
        module.zero_grad()
        queue = queued(module, x, recompute)
        assert len(queue) == 9 and gradients(module) == {}
        add_queued(queue)
        module.complete_gradients()
        found = gradients(module)
        assert plain.keys() == found.keys() == PARTS.keys()
        for name, gradient in found.items():
            # of a weight of several products the sum has a rounding less
            torch.testing.assert_close(gradient, plain[name], rtol=1e-13, atol=1e-14)
        assert torch.equal(found["c.bias"], plain["c.bias"])

    run_ranks(NUM_RANKS, body)


class Attending(Mixed, grid={"dp": NUM_RANKS}, parameters=PARTS):
    """A recomputed product of two activations that come from outside of it."""

    def forward(self, x: Tensor, recompute: bool = False) -> Tensor:
        queries, keys = linear(x, self.model.a.weight), torch.tanh(matmul(x, self.model.c.weight))
        x = self.recompute(self.block, queries, keys) if recompute else self.block(queries, keys)
        share = x.square().mean() / NUM_RANKS
        return self.finish(self.comm.all_reduce(share, over="dp"), share)

    def block(self, queries: Tensor, keys: Tensor) -> Tensor:
        return matmul(queries.t(), keys)


def test_what_a_recomputed_region_reads_is_no_weight() -> None:
    def body(transport: Transport) -> None:
        module, x = Attending(transport, state()), batch().chunk(NUM_RANKS)[transport.rank]
        module(x).backward()
        plain = gradients(module)
        module.zero_grad()
        queue = queued(module, x, True)
        assert len(queue) == 2
        add_queued(queue)
        module.complete_gradients()
        found = gradients(module)
        assert plain.keys() == found.keys()
        assert [name for name in plain if not torch.equal(plain[name], found[name])] == []

    run_ranks(NUM_RANKS, body)


class Squared(ParallelModule, grid={"dp": 1}, parameters={"a": Part((8, 8), dtype=torch.float64)}):
    """A recomputed product of two tensors neither of which is a weight."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = linear(x, self.model.a)
        loss = self.recompute(self.block, hidden, torch.tanh(hidden).T).sum()
        return self.finish(loss, loss)

    def block(self, x: Tensor, y: Tensor) -> Tensor:
        return matmul(x, y)


def test_what_a_recomputed_product_reads_is_no_weight() -> None:
    def body(transport: Transport) -> None:
        module = Squared(transport, {"a": torch.eye(8, dtype=torch.float64)})
        module(batch()).backward()
        plain = gradients(module)
        module.zero_grad()
        queue = queued(module, batch())
        assert len(queue) == 1
        add_queued(queue)
        module.complete_gradients()
        assert torch.equal(gradients(module)["a"], plain["a"])

    run_ranks(1, body)


def test_weights_gathered_for_their_use() -> None:
    def body(transport: Transport) -> tuple[dict[str, Tensor], list[bool]]:
        module = made(transport, Split)
        queue = Queue()
        module.hold_gradients(accumulating(module, queue))
        with accumulating(module, queue):
            loss = module(batch().chunk(NUM_RANKS)[transport.rank])
        gone = [one.expired() for one in module.seen]
        loss.backward()
        assert len(queue) == 3
        add_queued(queue)
        module.complete_gradients()
        return gradients(module), gone

    found = run_ranks(NUM_RANKS, body)
    for name, whole in kept().items():
        # what is put off is reduced by itself
        torch.testing.assert_close(torch.cat([one[name] for one, _ in found]), whole, rtol=1e-13, atol=1e-15)
    assert all(gone == [True] * 3 for _, gone in found)


SCALES = (1.0, 2.0, -0.5)


def plainly(module: Mixed, x: Tensor, *, recompute: bool) -> dict[str, Tensor]:
    """What autograd gives for the same batches, one after the other."""
    for scale in SCALES:
        module(x * scale, recompute).backward()
    found = gradients(module)
    module.zero_grad()
    return found


def added(module: Mixed, x: Tensor, *, recompute: bool, queue: Queue | None) -> dict[str, Tensor]:
    module.hold_gradients(nullcontext())
    for scale in SCALES:
        with accumulating(module, queue):
            loss = module(x * scale, recompute)
        module.rerun_mode = accumulating(module, queue)
        loss.backward()
        if queue is not None:
            assert queue
            assert scale != SCALES[0] or "a.weight" not in module.sinks
            add_queued(queue)
            assert not queue
    module.complete_gradients()
    return gradients(module)


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_the_sum_is_autograds(recompute: bool, waits: bool) -> None:
    def body(transport: Transport) -> None:
        module, x = mixed(transport), batch().chunk(NUM_RANKS)[transport.rank]
        plain = plainly(module, x, recompute=recompute)
        found = added(module, x, recompute=recompute, queue=Queue() if waits else None)
        assert plain.keys() == found.keys() == PARTS.keys()
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, plain[name], rtol=1e-13, atol=1e-14)

    run_ranks(NUM_RANKS, body)


def test_sums_stay_where_they_are() -> None:
    """No second tensor per weight and backward."""

    def body(transport: Transport) -> None:
        module, x = mixed(transport), batch().chunk(NUM_RANKS)[transport.rank]
        module.hold_gradients(nullcontext())
        places = set()
        for scale in SCALES:
            with accumulating(module):
                module(x * scale).backward()
            total = module.sinks["a.weight"].total
            assert total is not None
            places.add(total.data_ptr())
        assert len(places) == 1

    run_ranks(NUM_RANKS, body)


def test_a_hook_of_the_users_is_called() -> None:
    def body(transport: Transport) -> None:
        module, x = mixed(transport), batch().chunk(NUM_RANKS)[transport.rank]
        plain, calls = plainly(module, x, recompute=False), []
        handle = module.model.a.weight.register_hook(lambda gradient: calls.append(gradient.shape))
        found = added(module, x, recompute=False, queue=None)
        handle.remove()
        assert len(calls) == len(SCALES)
        torch.testing.assert_close(found["a.weight"], plain["a.weight"], rtol=1e-13, atol=1e-14)

    run_ranks(NUM_RANKS, body)


def test_a_weight_of_several_products_is_summed_once() -> None:
    """They arrive one by one, in every step: a sum that starts after the first would have to be followed by another."""

    def body(transport: Transport) -> None:
        starting: Any = Starting(transport)
        module, x = mixed(starting), batch().chunk(NUM_RANKS)[transport.rank]
        plain = mixed(transport)
        for _ in range(3):
            module(x).backward()
            plain(x).backward()
            assert len(starting.sums) == len(module.grad_sync.buckets)
            starting.sums.clear()
            found, expected = gradients(module), gradients(plain)
            assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
            module.zero_grad()
            plain.zero_grad()

    run_ranks(NUM_RANKS, body)
