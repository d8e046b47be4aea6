"""Deferred weight gradients: the same bits as undivided backward, later."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from tests.runtime.test_gathered import Split, batch, kept, made
from weft.runtime.deferred import Deferred
from weft.runtime.emulator import run_ranks
from weft.runtime.grad_sync import BucketSync
from weft.runtime.module import ParallelModule, Part
from weft.runtime.stand_ins import put_stand_ins
from weft.runtime.transport import Transport

put_stand_ins(globals())  # as in a loaded program

NUM_RANKS = 2
PARTS = {
    "a.weight": Part((8, 8), dtype=torch.float64, reads=3, sync="dp"),
    "a.bias": Part((8,), dtype=torch.float64, reads=3, sync="dp"),
    "c.weight": Part((8, 8), dtype=torch.float64, reads=2, sync="dp"),
    "c.bias": Part((8,), dtype=torch.float64, sync="dp"),
    "scale": Part((8,), dtype=torch.float64, sync="dp"),
}


class Mixed(ParallelModule, grid={"dp": NUM_RANKS}, parameters=PARTS):
    """A linear used three times, an addmm, a product by a parameter, and something that is no product."""

    def forward(self, x: Tensor, recompute: bool = False) -> Tensor:
        x = self.recompute(self.block, x) if recompute else self.block(x)
        share = (self.scale * x).square().mean() / NUM_RANKS
        return self.finish(self.comm.all_reduce(share, over="dp"), share)

    def block(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(F.linear(x, self.a.weight, self.a.bias))
        x = torch.addmm(self.c.bias, x, self.c.weight)
        return x @ self.c.weight


def state() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(part.shape, generator=generator, dtype=torch.float64) * 0.3 for name, part in PARTS.items()
    }


def mixed(transport: Transport) -> Mixed:
    return Mixed(transport, state(), grad_sync=BucketSync(bucket=256))


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in module.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("recompute", [False, True])
def test_a_parallel_module_gets_the_same_bits(recompute: bool) -> None:
    def body(transport: Transport) -> None:
        module, x = mixed(transport), batch().chunk(NUM_RANKS)[transport.rank]
        for _ in range(3):
            module(x, recompute).backward()
        plain = gradients(module)
        module.zero_grad()
        for _ in range(3):
            queue = Deferred(module)
            with queue:
                module(x, recompute).backward()
            assert queue.num_waiting == 9
            queue.run()
            assert queue.num_waiting == 0
        found = gradients(module)
        assert plain.keys() == found.keys() == PARTS.keys()
        assert [name for name in plain if not torch.equal(plain[name], found[name])] == []

    run_ranks(NUM_RANKS, body)


class Attending(Mixed, grid={"dp": NUM_RANKS}, parameters=PARTS):
    """A recomputed product of two activations that come from outside of it."""

    def forward(self, x: Tensor, recompute: bool = False) -> Tensor:
        queries, keys = F.linear(x, self.a.weight), torch.tanh(x @ self.c.weight)
        x = self.recompute(self.block, queries, keys) if recompute else self.block(queries, keys)
        share = x.square().mean() / NUM_RANKS
        return self.finish(self.comm.all_reduce(share, over="dp"), share)

    def block(self, queries: Tensor, keys: Tensor) -> Tensor:
        return torch.matmul(queries.t(), keys)


def test_what_a_recomputed_region_reads_is_no_weight() -> None:
    def body(transport: Transport) -> None:
        module, x = Attending(transport, state(), grad_sync=BucketSync()), batch().chunk(NUM_RANKS)[transport.rank]
        module(x).backward()
        plain = gradients(module)
        module.zero_grad()
        queue = Deferred(module)
        with queue:
            module(x, recompute=True).backward()
        assert queue.num_waiting == 2
        queue.run()
        found = gradients(module)
        assert plain.keys() == found.keys()
        assert [name for name in plain if not torch.equal(plain[name], found[name])] == []

    run_ranks(NUM_RANKS, body)


class Squared(ParallelModule, grid={"dp": 1}, parameters={"a": Part((8, 8), dtype=torch.float64)}):
    """A recomputed product of two tensors neither of which is a weight."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.linear(x, self.a)
        loss = self.recompute(self.block, hidden, torch.tanh(hidden).T).sum()
        return self.finish(loss, loss)

    def block(self, x: Tensor, y: Tensor) -> Tensor:
        return x @ y


def test_what_a_recomputed_product_reads_is_no_weight() -> None:
    def body(transport: Transport) -> None:
        module = Squared(transport, {"a": torch.eye(8, dtype=torch.float64)}, grad_sync=BucketSync())
        module(batch()).backward()
        plain = gradients(module)
        module.zero_grad()
        queue = Deferred(module)
        with queue:
            module(batch()).backward()
        assert queue.num_waiting == 1
        queue.run()
        assert torch.equal(gradients(module)["a"], plain["a"])

    run_ranks(1, body)


def test_several_batches_before_the_weights() -> None:
    def body(transport: Transport) -> None:
        module, x = mixed(transport), batch().chunk(NUM_RANKS)[transport.rank]
        (module(x) + 0).backward()
        module(x * 2).backward()
        plain = gradients(module)
        module.zero_grad()
        queue = Deferred(module)
        with queue:
            module(x).backward()
            module(x * 2).backward()
        assert gradients(module) == {}
        queue.run()
        for name, gradient in gradients(module).items():
            assert torch.allclose(gradient, plain[name], rtol=1e-14, atol=1e-15)

    run_ranks(NUM_RANKS, body)


def test_a_parameter_that_was_given_up_is_no_weight() -> None:
    """Its memory is free: whatever stands there next would be taken for it."""

    def body(transport: Transport) -> None:
        module, other = mixed(transport), mixed(transport)
        given_up = {name: module.part(name) for name in ("a.weight", "c.weight")}
        module.adopt("a.weight", other.part("a.weight"))
        module.borrow("c.weight", other.part("c.weight"))
        assert not any(module.is_weight(one) for one in given_up.values())
        assert all(module.is_weight(module.part(name)) for name in PARTS)

    run_ranks(NUM_RANKS, body)


def test_weights_gathered_for_their_use() -> None:
    def body(transport: Transport) -> tuple[dict[str, Tensor], list[bool]]:
        module = made(transport, Split)
        queue = Deferred(module)
        with queue:
            loss = module(batch().chunk(NUM_RANKS)[transport.rank])
        gone = [one.expired() for one in module.seen]
        loss.backward()
        assert queue.num_waiting == 3
        queue.run()
        return gradients(module), gone

    found = run_ranks(NUM_RANKS, body)
    for name, whole in kept().items():
        # what is put off goes home by itself
        torch.testing.assert_close(torch.cat([one[name] for one, _ in found]), whole, rtol=1e-13, atol=1e-15)
    assert all(gone == [True] * 3 for _, gone in found)


def test_a_weight_behind_a_reshard() -> None:
    """A non-leaf: its gradient goes on through what made it."""

    class Moved(ParallelModule, grid={"dp": 2}, parameters={"w": Part((4, 4), dtype=torch.float64)}):
        def forward(self, x: Tensor) -> Tensor:
            weight = self.comm.sum_grad(self.w, over="dp")
            share = F.linear(x, weight).square().sum() / 2
            return self.finish(self.comm.all_reduce(share, over="dp"), share)

        def is_weight(self, tensor: Tensor) -> bool:
            return tensor.requires_grad and tensor.shape == (4, 4)

    def body(transport: Transport) -> None:
        module = Moved(transport, {"w": torch.eye(4, dtype=torch.float64)})
        x = batch()[:, :4] * (transport.rank + 1)
        module(x).backward()
        plain = module.w.grad.clone()
        module.zero_grad()
        queue = Deferred(module)
        with queue:
            module(x).backward()
        assert queue.num_waiting == 1
        queue.run()
        assert plain.abs().max() > 0 and torch.equal(module.w.grad, plain)

    run_ranks(2, body)


def test_a_plain_module() -> None:
    """GPT-2's Conv1D calls addmm; hooks of parameters fire."""
    config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=8, bos_token_id=0)
    torch.manual_seed(0)
    module = transformers.GPT2LMHeadModel(config).double().eval()
    ids = torch.arange(16).reshape(2, 8)
    module(ids, labels=ids).loss.backward()
    plain = gradients(module)
    module.zero_grad()
    fired = []
    weight = module.transformer.h[0].mlp.c_fc.weight
    weight.register_post_accumulate_grad_hook(lambda parameter: fired.append(parameter is weight))
    queue = Deferred()
    with queue:
        loss = module(ids, labels=ids).loss
    loss.backward()
    assert weight.grad is None and not fired and queue.num_waiting > 0
    queue.run()
    found = gradients(module)
    assert fired == [True] and plain.keys() == found.keys()
    assert [name for name in plain if not torch.equal(plain[name], found[name])] == []
