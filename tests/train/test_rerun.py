"""What forward reads in ways that nobody listed: its Python runs again now and then, and has to make the same calls."""

from __future__ import annotations

import abc
import ctypes
import functools
import multiprocessing
from collections.abc import Callable
from threading import get_ident
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from weft.errors import RunError
from weft.runtime.checks import rarely

X = torch.randn(4, 6)
Change = Callable[[Any], Any]


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.setup()

    def setup(self) -> None:
        pass

    def scale(self) -> Any:
        return 1.0

    def forward(self, x: Tensor) -> Tensor:
        return (self.down(torch.relu(self.up(x))) * self.scale()).square().mean()


class Plain:
    factor = 2.0


class Other:
    factor = 3.0


class Swapped(Base):
    """The class of an object is another one."""

    def setup(self) -> None:
        self.holder = Plain()

    def scale(self) -> float:
        return self.holder.factor


class Shared(Base):
    """Memory that processes share."""

    def setup(self) -> None:
        self.value = multiprocessing.Value("d", 2.0)

    def scale(self) -> float:
        return float(self.value.value)


class InC(Base):
    def setup(self) -> None:
        self.value = ctypes.c_double(2.0)

    def scale(self) -> float:
        return self.value.value


class Deep(Base):
    """Further down than is looked."""

    def setup(self) -> None:
        self.table = {"a": [{"a": [{"a": [{"a": [2.0]}]}]}]}

    def scale(self) -> float:
        return float(self.table["a"][0]["a"][0]["a"][0]["a"][0])  # type: ignore[index,arg-type]


@functools.singledispatch
def factor_of(kind: object) -> float:
    return 2.0


class Registered(Base):
    def scale(self) -> float:
        return factor_of(1)


class Doubling(abc.ABC):  # noqa: B024 - others are registered
    pass


class Abstract(Base):
    def scale(self) -> float:
        return 2.0 if isinstance(1, Doubling) else 1.0


def swap(model: Swapped) -> None:
    model.holder.__class__ = Other  # type: ignore[assignment]


def set_shared(model: Shared) -> None:
    model.value.value = 3.0


def set_in_c(model: InC) -> None:
    model.value.value = 3.0


def set_deep(model: Deep) -> None:
    model.table["a"][0]["a"][0]["a"][0]["a"][0] = 3.0  # type: ignore[index,call-overload]


def register(model: Registered) -> None:
    factor_of.register(int, lambda kind: 3.0)


def register_class(model: Abstract) -> None:
    Doubling.register(int)


CHANGES = [
    (Swapped, swap),
    (Shared, set_shared),
    (InC, set_in_c),
    (Deep, set_deep),
    (Registered, register),
    (Abstract, register_class),
]


def trained(model: nn.Module, plan: str = "dp=2") -> nn.Module:
    return weft.parallelize(model, (X,), plan, emulate=True, cache=None)


@pytest.mark.parametrize(("kind", "change"), CHANGES)
def test_a_change_is_refused_in_the_next_look(kind: type[Base], change: Change) -> None:
    model = kind()
    parallel = trained(model)
    parallel(X).backward()
    change(model)
    with pytest.raises(RunError, match=r"forward does something else at \S*test_rerun.py:\d+"):
        for _ in range(2):
            parallel(X).backward()


def test_a_change_before_the_first_call_is_refused() -> None:
    model = InC()
    parallel = trained(model)
    set_in_c(model)
    with pytest.raises(RunError, match="something else"):
        parallel(X)


def test_a_change_back_is_no_change() -> None:
    model = InC()
    parallel = trained(model)
    model.value.value = 3.0
    with pytest.raises(RunError, match="something else"):
        parallel(X)
    model.value.value = 2.0
    parallel(X)


@pytest.mark.parametrize("plan", ["dp=2", "pp=2,microbatches=2"])
def test_evaluation_is_looked_at_too(plan: str) -> None:
    model = InC()
    parallel = trained(model, plan)
    parallel.eval()
    parallel(X)
    set_in_c(model)
    with pytest.raises(RunError, match="something else"):
        for _ in range(2):
            parallel(X)


def test_the_original_may_be_used_for_something_else() -> None:
    """Its modes, hooks and frozen parameters are its own, and its memory may be given back."""
    model = Base()
    eager = Base()
    parallel = trained(model)
    found: list[Tensor] = []
    model.eval()
    model.up.register_forward_hook(lambda module, args, out: found.append(out * 2))
    model(X)
    model.requires_grad_(False)
    for one in model.parameters():
        one.data = torch.empty(0)
    for _ in range(4):
        torch.testing.assert_close(parallel(X), eager(X))
    assert len(found) == 1 and type(found[0]) is Tensor


class Counting(Base):
    """It reports, which is no one else's matter."""

    told: int = 0

    def scale(self) -> float:
        print("forward")
        return 1.0


class Drawing(Base):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(x, 0.5, self.training))


@torch.jit.script
def scripted(x: Tensor, most: int) -> Tensor:
    found = torch.abs(x) / most
    return torch.where(found < most, torch.sign(x), torch.log(found))


class Scripted(Base):
    """A function of TorchScript, as some families of transformers have one."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * scripted(torch.arange(x.shape[1]), 3).to(x.dtype))


@pytest.mark.parametrize("kind", [Counting, Drawing, Scripted])
def test_nothing_is_changed(kind: type[Base]) -> None:
    model = kind()
    before = [(id(one), one.clone()) for one in (*model.parameters(), *model.buffers())]
    state = torch.get_rng_state()
    parallel = trained(model)
    for _ in range(4):
        parallel(X)
    assert torch.equal(state, torch.get_rng_state())
    for (number, value), one in zip(before, (*model.parameters(), *model.buffers()), strict=True):
        assert id(one) == number and torch.equal(one, value)


def test_it_takes_a_small_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, looked = [0.0], list[int]()
    monkeypatch.setattr(rarely, "perf_counter", lambda: now[0])
    calls = [0]

    def check() -> str:
        looked.append(calls[0])
        now[0] += 0.02
        return ""

    ask = rarely.Rarely(check, get_ident())
    for call in range(1, 40_001):
        calls[0] = call
        now[0] += 0.002
        assert ask() == ""
    assert looked[:7] == [1, 2, 4, 8, 16, 32, 64]
    assert 0.02 * len(looked[7:]) <= 2 * rarely.SHARE * now[0]
    assert len(looked[7:]) >= 3
