"""Tensors that forward keeps for its next call: functions of sizes and constants are captured, all else refused."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

import weft
from tests.capture.compare import assert_same
from weft.errors import CaptureError

X = torch.randn(4, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
KEPT: dict[str, Tensor] = {}


def table(length: int) -> Tensor:
    return (torch.arange(length, dtype=torch.float64)[:, None] / torch.arange(1, 9, dtype=torch.float64)).cos()


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)
        self.prepare()
        self.double()

    def prepare(self) -> None:
        self.kept: Any = None

    def factor(self, x: Tensor) -> Any:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x * self.factor(x)))).square().mean()


class Attribute(Base):
    def factor(self, x: Tensor) -> Any:
        if self.kept is None or self.kept.shape[0] < x.shape[1]:
            self.kept = table(x.shape[1])
        return self.kept[: x.shape[1]]


class Rotary(Base):
    """As GPT-NeoX has it: beside the tables their length; they are made from a buffer."""

    def prepare(self) -> None:
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, 8, 2).float() / 8), persistent=False)
        self.length: int | None = None
        self.cached: tuple[Tensor, Tensor] | None = None

    def factor(self, x: Tensor) -> Any:
        if x.shape[1] != self.length:
            self.length = x.shape[1]
            angles = torch.outer(torch.arange(x.shape[1], device=x.device).type_as(self.inv_freq), self.inv_freq)
            both = torch.cat((angles, angles), -1).to(x)
            self.cached = both.cos(), both.sin()
        assert self.cached is not None
        return self.cached[0] + self.cached[1]


class Sinusoidal(Base):
    """As fairseq has it: written in place, and moved to a dtype in every call."""

    def factor(self, x: Tensor) -> Any:
        if self.kept is None or x.shape[1] > self.kept.size(0):
            self.kept = torch.zeros(x.shape[1], 8)
            self.kept[:, 0::2] = torch.arange(x.shape[1])[:, None] * torch.exp(torch.arange(4) * -0.5)
            self.kept[:, 1::2] = self.kept[:, 0::2].cos()
        self.kept = self.kept.to(x)
        return self.kept[: x.shape[1]].detach()


class Mask(Base):
    """A mask that grows, in a buffer that forward registers."""

    def prepare(self) -> None:
        self.register_buffer("mask", None, persistent=False)

    def factor(self, x: Tensor) -> Any:
        if self.mask is None or self.mask.shape[0] < x.shape[1]:
            self.register_buffer("mask", torch.ones(x.shape[1], 8, dtype=x.dtype).tril(), persistent=False)
        return self.mask[: x.shape[1]]


class Property(Base):
    @functools.cached_property
    def all(self) -> Tensor:
        return table(64)

    def factor(self, x: Tensor) -> Any:
        return self.all[: x.shape[1]]


class Drops(Attribute):
    """The other mode makes other calls."""

    def factor(self, x: Tensor) -> Any:
        return nn.functional.dropout(super().factor(x), 0.5, self.training)


class Store:
    def __init__(self) -> None:
        self.kept: dict[int, Tensor] = {}


class Dict(Base):
    def prepare(self) -> None:
        self.kept, self.store = {}, Store()

    def factor(self, x: Tensor) -> Any:
        for held in (self.kept, self.store.kept):
            if x.shape[1] not in held:
                held[x.shape[1]] = table(x.shape[1])
        return self.kept[x.shape[1]] + self.store.kept[x.shape[1]]


class Method(Base):
    @functools.lru_cache  # noqa: B019 - a habit
    def table(self, length: int) -> Tensor:
        return table(length)

    def factor(self, x: Tensor) -> Any:
        return self.table(x.shape[1])


def fakes(module: nn.Module) -> list[str]:
    held = {**vars(module), **module._buffers, **vars(getattr(module, "store", Store()))}
    return [name for name, one in held.items() if any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves(one))]


@pytest.mark.parametrize("kind", [Attribute, Rotary, Sinusoidal, Mask, Property, Dict, Method, Drops])
def test_a_cache_of_constants_is_captured(kind: type[Base]) -> None:
    module = kind()
    module(X)
    fresh = kind()
    assert_same(fresh, X)
    assert_same(module, X)
    assert not fakes(fresh) and not fresh._non_persistent_buffers_set - set(fresh._buffers)
    assert torch.isfinite(fresh(X)), "eager runs on real tensors"


@pytest.mark.parametrize("plan", ["tp=2", "pp=2,microbatches=2"])
def test_plans_are_verified(plan: str) -> None:
    assert weft.verify(Rotary(), (X,), plan=plan).equal


@pytest.mark.parametrize("kind", [Attribute, Rotary, Mask])
def test_lengths_that_change_train_as_in_eager(kind: type[Base]) -> None:
    module = kind()
    eager = copy.deepcopy(module)
    parallel = weft.parallelize(module, (weft.dynamic(X.clone(), 1),), "dp=2", emulate=True, cache=None)
    optimizers = [torch.optim.SGD(one.parameters(), 0.1) for one in (eager, parallel)]
    for length in (6, 9, 4, 12):
        x = torch.randn(4, length, 8, dtype=torch.float64)
        for one, optimizer in zip((eager, parallel), optimizers, strict=True):
            one.train()(x).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.allclose(parallel.eval()(x), eager.eval()(x), rtol=1e-12)
        module(x)  # the original, whose caches fill meanwhile
    for name, weight in eager.state_dict().items():
        assert torch.allclose(parallel.state_dict()[name], weight, rtol=1e-12)


def from_an_input(self: Base, x: Tensor) -> Any:
    if self.kept is None:
        self.kept = x.detach().mean()
    return self.kept


def from_a_parameter(self: Base, x: Tensor) -> Any:
    if self.kept is None:
        self.kept = self.a.weight.detach().mean() * table(6)
    return self.kept


def from_a_draw(self: Base, x: Tensor) -> Any:
    if self.kept is None:
        self.kept = torch.rand(8).double()
    return self.kept


def from_a_buffer_that_moves(self: Base, x: Tensor) -> Any:
    if not hasattr(self, "seen"):
        raise AssertionError
    if self.kept is None:
        self.kept = self.seen * 2
    self.seen.mul_(0.5)
    return self.kept


def written_with_an_input(self: Base, x: Tensor) -> Any:
    if self.kept is None:
        held = torch.zeros(6, 8, dtype=x.dtype)
        held[0].copy_(x[0, 0].detach())
        self.kept = held * 2
    return self.kept


def another_at_first(self: Base, x: Tensor) -> Any:
    if self.kept is None:
        self.kept = table(x.shape[1])
        return self.kept * 2
    return self.kept


def of_the_mode(self: Base, x: Tensor) -> Any:
    if self.kept is None:
        self.kept = table(x.shape[1]) * (2 if self.training else 1)
    return self.kept


def of_the_rows(self: Base, x: Tensor) -> Any:
    if self.kept is None:
        self.kept = torch.full((8,), 1.0 / x.shape[0], dtype=x.dtype)
    return self.kept


def counts(self: Base, x: Tensor) -> Any:
    self.kept = torch.ones(()) if self.kept is None else self.kept + 1
    return 1.0


def collects(self: Base, x: Tensor) -> Any:
    self.kept = [*(self.kept or ()), torch.ones(2)]
    return 1.0


def around(self: Base, x: Tensor) -> Any:
    if "mean" not in KEPT:
        KEPT["mean"] = self.a.weight.detach().mean()
    return KEPT["mean"]


@functools.lru_cache
def mean(module: Base) -> Tensor:
    return module.a.weight.detach().mean()


def in_a_function(self: Base, x: Tensor) -> Any:
    return mean(self)


MADE, ELSE = "made from an input, a parameter", "that call.* does something else"
REFUSED: list[tuple[Callable[..., Any], str, str]] = [
    (from_an_input, f"attribute kept.*{MADE}", "self.kept = x.detach().mean()"),
    (from_a_parameter, f"attribute kept.*{MADE}", "self.kept = self.a.weight.detach()"),
    (from_a_draw, f"attribute kept.*{MADE}", "self.kept = torch.rand(8)"),
    (from_a_buffer_that_moves, f"attribute kept.*{MADE}", "self.kept = self.seen * 2"),
    (written_with_an_input, f"attribute kept.*{MADE}", "self.kept = held * 2"),
    (another_at_first, ELSE, "x * self.factor(x)"),
    (of_the_mode, f"{ELSE}", "x * self.factor(x)"),
    (of_the_rows, f"{ELSE}", "x * self.factor(x)"),
    (counts, "attribute kept: it is another one after every call", "self.kept + 1"),
    (collects, "attribute kept: it is another one after every call", "self.kept = [*"),
    (around, f"cache KEPT.*{MADE}", 'KEPT["mean"] = '),
    (in_a_function, f"cache mean.*{MADE}", "mean("),
]


@pytest.mark.parametrize(("habit", "words", "line"), REFUSED, ids=[one[0].__name__ for one in REFUSED])
def test_other_state_is_refused(habit: Callable[..., Any], words: str, line: str) -> None:
    module = type("Habit", (Base,), {"factor": habit, "__module__": __name__})()
    module.register_buffer("seen", torch.ones(8, dtype=torch.float64))
    with pytest.raises(CaptureError, match=words) as caught:
        weft.capture(module, (X,))
    assert line in caught.value.place and "before it is read" in caught.value.remedy
    assert module.kept is None and not KEPT and mean.cache_info().currsize == 0


class Stale(Base):
    def factor(self, x: Tensor) -> Any:
        if self.kept is None:
            self.kept = torch.full((8,), float(x.shape[0]), dtype=x.dtype) + torch.ones(x.shape[1], 8).sum()
        return self.kept


def test_a_cache_that_another_length_would_need_anew_is_refused() -> None:
    with pytest.raises(CaptureError, match="that call, in another size, does something else"):
        weft.capture(Stale(), (weft.dynamic(X.clone(), 1),))


def test_a_dict_by_dynamic_lengths_is_refused() -> None:
    with pytest.raises(CaptureError, match="marked dynamic is looked up in a dict") as caught:
        weft.capture(Dict(), (weft.dynamic(X.clone(), 1),))
    assert "a slice of it" in caught.value.remedy
