"""Stored split, used whole: nothing gathered outlives its use, and the bits are those of weights that stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from weft.runtime.layout.moves import all_gather, reduce_scatter
from weft.runtime.links.emulator import run_ranks
from weft.runtime.links.transport import RankFailed, Transport
from weft.runtime.program.module import Given, ParallelModule, Part
from weft.runtime.weights import prefetch
from weft.runtime.weights import products as F
from weft.runtime.weights.grad_sync import GradSync

NUM_RANKS = 2
STORED = Part((8, 8), {0: "dp"}, torch.float64, use=[all_gather(0, "dp")], sync=None)
LAYERS = {f"layers.{i}.weight": STORED for i in range(3)}


class Split(ParallelModule, grid={"dp": NUM_RANKS}, parameters=LAYERS):
    """Three layers, the middle one used by two operators, one of them through its transpose."""

    seen: list[StorageWeakRef]

    def forward(self, x: Tensor) -> Tensor:
        self.seen = []
        for i in (0, 1, 2):
            x = self.layer(x, i)
        share = x.square().mean() / NUM_RANKS
        loss = self.comm.all_reduce(share, over="dp")
        return self.finish(loss, share)

    def layer(self, x: Tensor, i: int) -> Tensor:
        weight = self.comm.use(self.layers[i].weight, [all_gather(0, "dp")], sync=[reduce_scatter(0, "dp")])
        self.seen.append(StorageWeakRef(weight.untyped_storage()))
        x = torch.tanh(F.linear(x, weight))
        return x @ (weight * weight) if i == 1 else x


class Counting:
    """A transport that counts what it gathers."""

    def __init__(self, transport: Transport) -> None:
        self.__dict__.update(inner=transport, kinds=[])

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        if name in ("all_gather", "all_to_all", "all_reduce", "start_all_gather", "start_reduce_scatter"):
            self.kinds.append((name, self.inner.doing.what))
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.inner, name, value)


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(8, 8, generator=generator, dtype=torch.float64) for name in LAYERS}


def batch() -> Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def made(transport: Transport, cls: type[ParallelModule] = Split) -> ParallelModule:
    rows = slice(4 * transport.rank, 4 * transport.rank + 4)
    state = {name: weight[rows].clone() for name, weight in weights().items()}
    return cls(transport, state)


def kept() -> dict[str, Tensor]:
    """The gradients where every rank keeps whole weights."""
    found: dict[str, Tensor] = {}
    for rows in batch().chunk(NUM_RANKS):
        whole = {name: weight.requires_grad_() for name, weight in weights().items()}
        x = rows
        for i in range(3):
            weight = whole[f"layers.{i}.weight"]
            x = torch.tanh(F.linear(x, weight))
            x = x @ (weight * weight) if i == 1 else x
        (x.square().mean() / NUM_RANKS).backward()
        for name, weight in whole.items():
            found[name] = weight.grad if name not in found else found[name] + weight.grad
    return found


def test_the_bits_of_weights_that_stay() -> None:
    def body(transport: Transport) -> dict[str, Tensor]:
        module = made(transport)
        module(batch().chunk(NUM_RANKS)[transport.rank]).backward()
        return {name: parameter.grad for name, parameter in module.named_parameters()}

    found = run_ranks(NUM_RANKS, body)
    for name, whole in kept().items():
        assert torch.equal(torch.cat([one[name] for one in found]), whole)


def test_nothing_gathered_lives_after_forward_or_after_backward() -> None:
    def body(transport: Transport) -> tuple[list[bool], list[bool]]:
        module = made(transport)
        loss = module(batch().chunk(NUM_RANKS)[transport.rank])
        after_forward = [one.expired() for one in module.seen]
        loss.backward()
        return after_forward, [one.expired() for one in module.seen]

    for found in run_ranks(NUM_RANKS, body):
        assert found == ([True] * 3, [True] * 3)


def test_one_gather_for_each_use_in_backward() -> None:
    def body(transport: Transport) -> list[str]:
        counting = Counting(transport)
        module = made(counting)  # type: ignore[arg-type]
        loss = module(batch().chunk(NUM_RANKS)[transport.rank])
        counting.kinds.clear()
        loss.backward()
        return [what for _, what in counting.kinds if what.startswith("use of")]

    # the first weight is only needed for the gradient of the batch, which nobody wants
    for found in run_ranks(NUM_RANKS, body):
        assert found == ["use of layers.2.weight", "use of layers.1.weight"]


def test_a_rank_that_stores_all_of_a_weight_gathers_with_the_others() -> None:
    part = Part((1, 4), {0: "dp"}, torch.float64, sync=None)

    class Uneven(ParallelModule, grid={"dp": 2}, parameters={"w": part}):
        def forward(self, x: Tensor) -> Tensor:
            weight = self.comm.use(self.w, [all_gather(0, "dp", of=1)], sync=[reduce_scatter(0, "dp")])
            share = F.linear(x, weight).square().sum() * weight.sum()
            return self.finish(self.comm.all_reduce(share, over="dp"), share)

    def body(transport: Transport) -> Tensor:
        index = Uneven(transport).stored["w"]
        weight = torch.ones(sum(b - a for a, b in index[0]), 4, dtype=torch.float64)
        module = Uneven(transport, {"w": weight})
        module(torch.ones(2, 4, dtype=torch.float64)).backward()
        return module.w.grad

    weight = torch.ones(1, 4, dtype=torch.float64, requires_grad=True)
    (2 * F.linear(torch.ones(2, 4, dtype=torch.float64), weight).square().sum() * weight.sum()).backward()
    found = run_ranks(2, body)
    assert sorted(len(one) for one in found) == [0, 1] and torch.equal(torch.cat(found), weight.grad)


def test_a_weight_changed_before_backward_is_an_error() -> None:
    def body(transport: Transport) -> None:
        module = made(transport)
        loss = module(batch().chunk(NUM_RANKS)[transport.rank])
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(1.0)
        loss.backward()

    with pytest.raises(RankFailed, match="changed in place"):
        run_ranks(NUM_RANKS, body)


def test_no_hooks_without_uses() -> None:
    class Plain(ParallelModule, grid={"dp": 2}, parameters={"w": Part((4, 4), dtype=torch.float64, sync="dp")}):
        def forward(self, x: Tensor) -> Tensor:
            loss = self.comm.all_reduce(F.linear(x, self.w).sum(), over="dp")
            assert self.tape.gathered._hooks is None
            return self.finish(loss, loss)

    run_ranks(2, lambda transport: Plain(transport)(torch.ones(2, 4, dtype=torch.float64)))


class Again(Split, grid={"dp": NUM_RANKS}, parameters=LAYERS):
    """The same layers, each recomputed; the first one in two chunks of rows, each with one half of its weight."""

    alive: list[int]

    def forward(self, x: Tensor) -> Tensor:
        self.seen, self.alive = [], []
        rows = (((0, 2), (0, 8)), ((2, 3), (0, 8)))
        gives = [Given(tuple(tuple((one,) for one in row) for row in rows), (3, 8))]
        for i in (0, 1, 2):
            weight = self.comm.use(self.layers[i].weight, [all_gather(0, "dp")], sync=[reduce_scatter(0, "dp")])
            if i:
                x = self.recompute(self.again, x, weight, i == 1)
            else:
                x = self.chunks(2, self.chunk, x, weight, gives=gives, recompute=True)
        share = x.square().mean() / NUM_RANKS
        loss = self.comm.all_reduce(share, over="dp")
        return self.finish(loss, share)

    def again(self, x: Tensor, weight: Tensor, twice: bool) -> Tensor:
        self.look(weight)
        x = torch.tanh(F.linear(x, weight))
        return x @ (weight * weight) if twice else x

    def chunk(self, chunk: int, x: Tensor, weight: Tensor) -> Tensor:
        self.look(weight)
        x = x[2 * chunk : 2 * chunk + 2]
        halves = [self.take(weight, (((start, start + 4),), ((0, 8),))) for start in (0, 4)]
        return torch.tanh(torch.cat([F.linear(x, half) for half in halves], 1))

    def look(self, weight: Tensor) -> None:
        self.seen.append(StorageWeakRef(weight.untyped_storage()))
        self.alive.append(len({one.cdata for one in self.seen if not one.expired()}))


def test_what_is_recomputed_has_the_bits_of_weights_that_stay() -> None:
    def body(transport: Transport) -> dict[str, Tensor]:
        module = made(transport, Again)
        module(batch().chunk(NUM_RANKS)[transport.rank]).backward()
        return {name: parameter.grad for name, parameter in module.named_parameters()}

    found = run_ranks(NUM_RANKS, body)
    for name, whole in kept().items():
        torch.testing.assert_close(torch.cat([one[name] for one in found]), whole, rtol=1e-13, atol=1e-15)


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets hold one weight each."""
    monkeypatch.setattr(prefetch, "AHEAD", 1)


def test_nothing_gathered_lives_between_the_two_runs_of_what_is_recomputed(one_by_one: None) -> None:
    def body(transport: Transport) -> tuple[list[bool], int, list[bool], list[str]]:
        counting = Counting(transport)
        module = made(counting, Again)  # type: ignore[arg-type]
        loss = module(batch().chunk(NUM_RANKS)[transport.rank])
        after_forward = [one.expired() for one in module.seen]
        counting.kinds.clear()
        module.alive.clear()
        loss.backward()
        gathers = [what for _, what in counting.kinds if what.startswith("use of")]
        return after_forward, max(module.alive), [one.expired() for one in module.seen], gathers

    for forward, alive, backward, gathers in run_ranks(NUM_RANKS, body):
        assert all(forward) and alive == 1 and all(backward)
        # also for chunks one gather only
        assert gathers == [f"use of layers.{i}.weight" for i in (2, 1, 0)]


@pytest.mark.parametrize("cls", [Split, Again])
def test_each_gradient_goes_home_when_it_is_complete_in_the_first_backward_too(
    cls: type[Split], one_by_one: None
) -> None:
    def body(transport: Transport) -> list[list[str]]:
        counting = Counting(transport)
        module = cls(counting, made(transport).state_dict())  # type: ignore[arg-type]
        module.grad_sync = GradSync(module, bucket=1)
        found = []
        for _ in range(2):
            loss = module(batch().chunk(NUM_RANKS)[transport.rank])
            counting.kinds.clear()
            loss.backward()
            found.append([what for _, what in counting.kinds])
        return found

    use, home = "use of layers.{}.weight", "gradient sync of layers.{}.weight"
    # each weight is gathered while the one before is used; the first is needed again only to run its layer again
    again = {2: (2, 1), 1: (0,) if cls is Again else (), 0: ()}
    order = [what for i in (2, 1, 0) for what in (*map(use.format, again[i]), home.format(i))]
    for found in run_ranks(NUM_RANKS, body):
        assert found == [order, order]
