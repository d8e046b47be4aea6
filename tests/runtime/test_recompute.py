"""Recomputation and loops over chunks: the same numbers, less memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.runtime.scripting import F64, box, close, randn
from weft.runtime.links.emulator import run_ranks
from weft.runtime.links.transport import Transport
from weft.runtime.program.module import Given, ParallelModule, Part
from weft.runtime.random import Stream, dropout


class Memory(TorchDispatchMode):
    """Counts the bytes of all storages that operators of this thread made and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in known and key not in self.live:
                    self.live[key] = storage.nbytes()
                    weakref.finalize(storage, self.live.pop, key, None)
        self.peak = max(self.peak, sum(self.live.values()))
        return out


X, W = randn(64, 8), randn(64, 8, seed=1)


class Chain(ParallelModule, grid={}, parameters={"w": Part((64, 8), dtype=F64)}):
    """Several large values in a row."""

    @staticmethod
    def values(x: Tensor) -> Tensor:
        v = [x.sin()]
        for _ in range(4):
            v.append(v[-1].sin())
        return v[-1] * v[0]

    def forward(self, x: Tensor) -> Tensor:
        loss = self.values(x * self.w).square().sum()
        return self.finish(loss, loss)


def chunked(num: int, *, recompute: bool, param: bool = False, add: bool = False) -> type[Chain]:
    """The chain in chunks of rows; with `param` the parameter is taken inside; with `add` partial sums are given."""
    rows = 64 // num
    at = tuple(box((i * rows, i * rows + rows), (0, 8)) for i in range(num))

    class Chunked(Chain, grid={}, parameters={"w": Part((64, 8), dtype=F64)}):
        def forward(self, x: Tensor) -> Tensor:
            reads = (x, self.w) if param else (x * self.w,)
            gives = [Given() if add else Given(at, (64, 8))]
            found = self.chunks(num, self.chunk, *reads, gives=gives, recompute=recompute)
            loss = found if add else found.square().sum()
            return self.finish(loss, loss)

        def chunk(self, chunk: int, *reads: Tensor) -> Tensor:
            first, *others = (self.take(one, at[chunk]) for one in reads)
            found = self.values(first * others[0] if others else first)
            return found.square().sum() if add else found

    return Chunked


def measure(cls: type[ParallelModule], x: Tensor = X, state: dict[str, Tensor] | None = None) -> tuple[Any, Any, int]:
    """The loss, the gradients, and the peak of what operators made."""

    def body(transport: Transport) -> tuple[Tensor, dict[str, Tensor], int]:
        module = cls(transport, state or {"w": W})
        with Memory() as memory:
            loss = module(x)
            loss.backward()
        return loss.detach(), {name: one.grad for name, one in module.trained()}, memory.peak

    return run_ranks(1, body, timeout=20)[0]


def same(found: tuple[Any, Any, int], want: tuple[Any, Any, int]) -> None:
    close(found[0], want[0])
    close(found[1]["w"], want[1]["w"])


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("param", [False, True])
@pytest.mark.parametrize("add", [False, True])
def test_loop_equals_plain(recompute: bool, param: bool, add: bool) -> None:
    leaf = W.clone().requires_grad_()
    Chain.values(X * leaf).square().sum().backward()
    found = measure(chunked(4, recompute=recompute, param=param, add=add))
    close(found[1]["w"], leaf.grad)
    same(found, measure(Chain))


def test_recomputed_chunks_save_memory() -> None:
    """Ten values of one size live at once uncut; by eight chunks the chain adds about an eighth of that."""
    whole, chunks = measure(Chain)[2], measure(chunked(8, recompute=False))[2]
    recomputed = measure(chunked(8, recompute=True))[2]
    unit = X.nbytes
    assert whole > 6 * unit and chunks > 6 * unit
    # input, output, their gradients, and the square of the head stay whole
    assert recomputed < 5.5 * unit, recomputed / unit


def test_chunks_of_a_parameter_make_no_whole_gradients() -> None:
    recomputed = measure(chunked(8, recompute=True, param=True, add=True))[2]
    assert recomputed < 2.5 * X.nbytes, recomputed / X.nbytes


def test_regions_save_memory() -> None:
    def stacked(wrap: Callable[[ParallelModule, Tensor], Tensor]) -> type[Chain]:
        class Stacked(Chain, grid={}, parameters={"w": Part((64, 8), dtype=F64)}):
            def forward(self, x: Tensor) -> Tensor:
                y = x * self.w
                for _ in range(6):
                    y = wrap(self, y)
                loss = y.square().sum()
                return self.finish(loss, loss)

        return Stacked

    found = measure(stacked(lambda module, y: module.recompute(module.values, y)))
    want = measure(stacked(lambda module, y: module.values(y)))
    same(found, want)
    assert found[2] < 0.6 * want[2], (found[2], want[2])


def test_region_in_region_with_odd_results() -> None:
    """Several results, one of them unused, one of integers; a region inside a region."""

    class Nested(Chain, grid={}, parameters={"w": Part((64, 8), dtype=F64)}):
        def forward(self, x: Tensor) -> Tensor:
            y, ids, _ = self.recompute(self.outer, x * self.w, plain=(1,))
            assert not ids.requires_grad
            loss = (y * ids.unsqueeze(1)).square().sum()
            return self.finish(loss, loss)

        def outer(self, h: Tensor) -> tuple[Tensor, ...]:
            y, first = self.recompute(self.inside, h)
            return y, y.argmax(1), first.cos()

        def inside(self, h: Tensor) -> tuple[Tensor, Tensor]:
            return self.values(h), h.sin()

    leaf = W.clone().requires_grad_()
    y = Chain.values(X * leaf)
    (y * y.argmax(1).unsqueeze(1)).square().sum().backward()
    close(measure(Nested)[1]["w"], leaf.grad)


def test_zeros_taken_and_several_intervals_given() -> None:
    """Chunks may get zeros in place of a part, and place what they make in several intervals."""
    at = ((((0, 2), (6, 8)), ((0, 3),)), (((2, 6),), ((0, 3),)))
    bias = (box((0, 1), (0, 3)), None)
    v, b = randn(8, 3), randn(1, 3, seed=2)

    def odd(recompute: bool) -> type[ParallelModule]:
        parts = {"v": Part((8, 3), dtype=F64), "b": Part((1, 3), dtype=F64)}

        class Odd(ParallelModule, grid={}, parameters=parts):
            def forward(self, x: Tensor) -> Tensor:
                gives = [Given(at, (8, 3))]
                found = self.chunks(2, self.chunk, self.v, self.b, gives=gives, recompute=recompute)
                loss = found.square().sum()
                return self.finish(loss, loss)

            def chunk(self, chunk: int, v: Tensor, b: Tensor) -> Tensor:
                t = self.take(v, at[chunk])
                return t * t + self.take(b, bias[chunk], (1, 3))

        return Odd

    leaf, other = v.clone().requires_grad_(), b.clone().requires_grad_()
    mask = torch.tensor([1, 1, 0, 0, 0, 0, 1, 1], dtype=F64).unsqueeze(1)
    (leaf * leaf + mask * other).square().sum().backward()
    for recompute in (False, True):
        _, found, _ = measure(odd(recompute), state={"v": v, "b": b})
        close(found["v"], leaf.grad)
        close(found["b"], other.grad)


@pytest.mark.parametrize("nested", [False, True])
def test_collectives_inside_regions_and_loops(nested: bool) -> None:
    """Column, then row linear, in a region and in recomputed chunks: rank 1 comes through backward too."""
    x, w1, w2 = randn(4, 6), randn(8, 6, seed=1), randn(6, 8, seed=2)
    parts = {"w1": Part((8, 6), {0: "tp"}, dtype=F64), "w2": Part((6, 8), {1: "tp"}, dtype=F64)}
    at = (box((0, 2), (0, 6)), box((2, 4), (0, 6)))

    class Blocks(ParallelModule, grid={"tp": 2}, parameters=parts):
        def forward(self, x: Tensor) -> Tensor:
            z = self.recompute(self.block, x) + x
            found = self.chunks(2, self.chunk, z, gives=[Given(at, (4, 6))], recompute=True)
            loss = found.square().sum()
            return self.finish(loss, loss)

        def chunk(self, chunk: int, z: Tensor) -> Tensor:
            part = self.take(z, at[chunk])
            return self.recompute(self.block, part) if nested else self.block(part)

        def block(self, z: Tensor) -> Tensor:
            z = self.comm.sum_grad(z, over="tp")
            hidden = torch.nn.functional.gelu(torch.nn.functional.linear(z, self.w1))
            return self.comm.all_reduce(torch.nn.functional.linear(hidden, self.w2), over="tp")

    def body(transport: Transport) -> dict[str, Tensor]:
        rows = slice(4 * transport.rank, 4 * transport.rank + 4)
        module = Blocks(transport, {"w1": w1[rows].clone(), "w2": w2[:, rows].clone()})
        module(x).backward()
        return {name: one.grad for name, one in module.trained()}

    a, b = w1.clone().requires_grad_(), w2.clone().requires_grad_()

    def block(z: Tensor) -> Tensor:
        return torch.nn.functional.linear(torch.nn.functional.gelu(torch.nn.functional.linear(z, a)), b)

    block(block(x) + x).square().sum().backward()
    for rank, found in enumerate(run_ranks(2, body, timeout=20)):
        close(found["w1"], a.grad[4 * rank : 4 * rank + 4])
        close(found["w2"], b.grad[:, 4 * rank : 4 * rank + 4])


def test_random_functions_repeat_in_recomputation() -> None:
    """Dropout inside a region: the second run draws the same numbers, another step draws others."""
    seen: list[Tensor] = []

    class Drops(Chain, grid={}, parameters={"w": Part((64, 8), dtype=F64)}):
        def forward(self, x: Tensor) -> Tensor:
            found = self.recompute(self.drop, x * self.w)
            seen.append(found.detach())
            loss = found.square().sum()
            return self.finish(loss, loss)

        def drop(self, h: Tensor) -> Tensor:
            return dropout(h, 0.5, True, **self.draw(0, (64, 8)))

    def body(transport: Transport) -> Tensor:
        module = Drops(transport, {"w": W})
        for number in (0, 0, 1):
            module.zero_grad()
            module.stream = Stream(7, number, 0)
            module(X).backward()
            if number == 0:
                first = module.w.grad.clone()
        return first

    (gradient,) = run_ranks(1, body)
    first, again, other = seen
    assert torch.equal(first, again) and not torch.equal(first, other)
    close(gradient, 2 * first * X * 2 * (first != 0))
    assert 0 < int((first == 0).sum()) < first.numel()


def test_two_leaves_whose_gradients_share_memory() -> None:
    """torch hands both views of one gradient; loops add to each of them several times."""
    a, b = randn(2, 2), randn(2, 2, seed=1)

    class Views(ParallelModule, grid={}, parameters={name: Part((2, 2), dtype=F64) for name in "ab"}):
        def forward(self, x: Tensor) -> Tensor:
            found = self.chunks(3, self.chunk, self.a, self.b, gives=[Given()], recompute=True)
            loss = found.sum()
            return self.finish(loss, loss)

        def chunk(self, chunk: int, a: Tensor, b: Tensor) -> Tensor:
            return (a.view(4) + b.view(4)) * 2

    _, found, _ = measure(Views, state={"a": a, "b": b})
    assert all(found[name].tolist() == [[6.0, 6.0]] * 2 for name in "ab")
    assert found["a"].data_ptr() != found["b"].data_ptr()


def test_buffers_are_updated_once_and_runs_repeat() -> None:
    """A buffer's new content leaves the region; thirty steps give the same bits."""
    parts, buffers = {"w": Part((64, 8), dtype=F64)}, {"count": Part((8,), dtype=F64)}

    class Counts(ParallelModule, grid={}, parameters=parts, buffers=buffers):
        def forward(self, x: Tensor) -> Tensor:
            h, new = self.recompute(self.inside, x, self.count, plain=(1,))
            self.update("count", new)
            loss = h.square().sum()
            return self.finish(loss, loss)

        def inside(self, x: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
            h = x * self.w
            return h, (count + h.mean(0)).detach()

    def body(transport: Transport) -> list[Tensor]:
        module = Counts(transport, {"w": W, "count": torch.ones(8, dtype=F64)})
        module(X).backward()
        return [module.part("count"), module.w.grad]

    first = run_ranks(1, body)[0]
    close(first[0], 1 + (X * W).mean(0))
    for _ in range(30):
        assert all(torch.equal(a, b) for a, b in zip(first, run_ranks(1, body)[0], strict=True))
