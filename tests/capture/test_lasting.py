"""What outlasts a forward: buffers that it rebinds to each other, memory that the module does not own, properties of
tensors, hooks."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import weight_norm

import weft
from tests.capture.compare import assert_same
from weft.capture import capture
from weft.errors import CaptureError

X = torch.randn(4, 6, dtype=torch.float64)
TOTAL = torch.zeros(6)
TABLE = [torch.zeros(6)]


def counter() -> Callable[[], Tensor]:
    count = torch.zeros(())

    def tick() -> Tensor:
        count.add_(1)
        return count.clone()

    return tick


TICK = counter()


class Holds(nn.Module):
    """One forward for each way to change memory that the module does not own."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.linear, self.what = nn.Linear(6, 6), what
        self.rows, self.state = {"row": torch.zeros(4, 6)}, SimpleNamespace(sum=torch.zeros(6))
        self.norms, self.teachers = [nn.BatchNorm1d(6)], [copy.deepcopy(self.linear)]
        self.register_buffer("mean", torch.ones(6))
        self.means = [self.mean]

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, self.what)(self.linear(x)).square().mean()

    def of_global(self, y: Tensor) -> Tensor:
        with torch.no_grad():
            TOTAL.add_(y.mean())
        return y + TOTAL

    def of_list(self, y: Tensor) -> Tensor:
        TABLE[0].mul_(0.9).add_(1.0)
        return y + TABLE[0]

    def of_dict(self, y: Tensor) -> Tensor:
        self.rows["row"][1:] = y.detach()[:-1]
        return y + self.rows["row"]

    def of_object(self, y: Tensor) -> Tensor:
        torch.add(self.state.sum, 1.0, out=self.state.sum)
        return y + self.state.sum

    def of_closure(self, y: Tensor) -> Tensor:
        return y * TICK()

    def through_data(self, y: Tensor) -> Tensor:
        TABLE[0].data.copy_(y[0])
        return y + TABLE[0]

    def statistics(self, y: Tensor) -> Tensor:
        return self.norms[0](y)

    def teacher(self, y: Tensor) -> Tensor:
        with torch.no_grad():
            for one, other in zip(self.teachers[0].parameters(), self.linear.parameters(), strict=True):
                one.lerp_(other, 0.2)
        return y - self.teachers[0](y)

    def by_other_name(self, y: Tensor) -> Tensor:
        self.means[0].mul_(0.9)
        return y * self.mean


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("of_global", "TOTAL.add_(y.mean())"),
        ("of_list", "TABLE[0].mul_(0.9)"),
        ("of_dict", 'self.rows["row"][1:] = '),
        ("of_object", "torch.add("),
        ("of_closure", "count.add_(1)"),
        ("through_data", "TABLE[0].data.copy_(y[0])"),
        ("statistics", "self.norms[0](y)"),
        ("teacher", "one.lerp_(other, 0.2)"),
        ("by_other_name", "self.means[0].mul_(0.9)"),
    ],
)
def test_memory_that_the_module_does_not_own_stays(what: str, line: str) -> None:
    module = Holds(what)
    held = [TOTAL, *TABLE, module.mean, module.state.sum, *module.rows.values()]
    held += [*module.norms[0].buffers(), *module.teachers[0].parameters()]
    before = [one.detach().clone() for one in held]
    with pytest.raises(CaptureError, match="no buffer of the module is changed in place") as caught:
        capture(module, X.float())
    assert line in caught.value.place and "register_buffer" in caught.value.remedy
    assert all(map(torch.equal, held, before))


def test_a_flag_of_a_tensor_elsewhere_may_be_set() -> None:
    class Freezes(Holds):
        def forward(self, x: Tensor) -> Tensor:
            for one in self.teachers[0].parameters():
                one.requires_grad_(False)
            y = self.linear(x)
            return torch.add(y, self.teachers[0](x), out=torch.empty(4, 6)).square().mean()

    module = Freezes("")
    module.teachers[0].requires_grad_(False)
    with torch.no_grad():
        capture(module.requires_grad_(False), X.float())


class Rebinds(nn.Module):
    """One forward for each way to give buffers each other's tensors."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.linear, self.what = nn.Linear(6, 6), what
        for at, name in enumerate(("now", "last", "older"), 1):
            self.register_buffer(name, torch.full((6,), float(at)))
        self.register_buffer("weight", torch.zeros(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) * self.last.clone()
        getattr(self, self.what)(y.detach().mean(0))
        return (y - self.now + self.older + F.linear(y, self.weight)).square().mean()

    def swap(self, mean: Tensor) -> None:
        self.now, self.last = self.last, self.now

    def rotate(self, mean: Tensor) -> None:
        self.now, self.last, self.older = self.last, self.older, self.now

    def delay(self, mean: Tensor) -> None:
        self.older = self.last
        self.last = self.now
        self.now = mean

    def swap_and_change(self, mean: Tensor) -> None:
        self.now.mul_(0.5)
        self.now, self.last = self.last, self.now
        self.now.add_(mean)

    def both(self, mean: Tensor) -> None:
        self.now = self.last = mean

    def follows(self, mean: Tensor) -> None:
        self.weight = self.linear.weight.detach()

    def follows_buffer(self, mean: Tensor) -> None:
        self.last = self.now.view(6)

    def both_and_change(self, mean: Tensor) -> None:
        self.now.mul_(0.5)
        self.now = self.last = mean + self.now


@pytest.mark.parametrize("what", ["swap", "rotate", "delay", "swap_and_change", "both"])
def test_buffers_change_places(what: str) -> None:
    assert_same(Rebinds(what).double(), X)
    assert what == "both" or weft.verify(Rebinds(what), (X.float(),), plan="dp=2").equal


@pytest.mark.parametrize(
    ("what", "other"),
    [("follows", "parameter linear.weight"), ("follows_buffer", "buffer now"), ("both_and_change", "buffer")],
)
def test_a_buffer_that_would_follow_another_tensor(what: str, other: str) -> None:
    with pytest.raises(CaptureError, match=f"shares memory with the {other}") as caught:
        capture(Rebinds(what), X.float())
    assert "= self." in caught.value.place and ".clone()" in caught.value.remedy


def test_one_tensor_under_two_names() -> None:
    class Twice(Rebinds):
        def one(self, mean: Tensor) -> None:
            self.last = self.last * 0.9

        def both(self, mean: Tensor) -> None:
            self.last = self.older = self.last * 0.9

    module = Twice("one")
    module.older = module.last
    with pytest.raises(CaptureError, match="last and older are one tensor") as caught:
        capture(module, X.float())
    assert "self.last = self.last * 0.9" in caught.value.place and "clone" in caught.value.remedy
    module.what = "both"
    assert_same(module.double(), X)


class Asks(nn.Module):
    """What is asked of tensors that is no value of theirs."""

    def __init__(self, ask: Callable[[nn.Module, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.ask = nn.Linear(6, 6), ask
        self.register_buffer("mean", torch.ones(6))
        self.linear.weight.gain = self.mean.gain = 5.0

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return (self.linear(x) * self.mean + other).square().mean() * (2.0 if self.ask(self, x, other) else 1.0)


@pytest.mark.parametrize(
    ("ask", "what"),
    [
        (lambda net, x, _: getattr(net.linear.weight, "gain", 0), "attribute gain of the parameter linear.weight"),
        (lambda net, x, _: hasattr(net.mean, "gain"), "attribute gain of the buffer mean"),
        (lambda net, x, _: x.gain, "attribute gain of the input x"),
        (lambda net, x, _: net.linear.weight.grad is None, "asks for a gradient"),
        (lambda net, x, _: net.linear.weight._version, "asks how often"),
        (lambda net, x, _: x.is_leaf, "asks whether a tensor is a leaf"),
        (lambda net, x, _: x.data_ptr() == net.mean.data_ptr(), "asks where a tensor lies"),
    ],
)
def test_what_is_asked_of_tensors(ask: Any, what: str) -> None:
    x = X.float()
    x.gain = 3.0
    with pytest.raises(CaptureError, match=what) as caught:
        capture(Asks(ask), (x, X.float()))
    assert "test_lasting.py" in caught.value.place and caught.value.remedy


def test_what_is_not_attached_is_not_there() -> None:
    module = Asks(lambda net, x, other: hasattr(net.linear.bias, "gain") or hasattr(x, "gain")).double()
    assert_same(module, (X, X + 1))


def test_one_tensor_for_two_inputs() -> None:
    assert_same(Asks(lambda net, x, other: other is None or net is None).double(), (X, X))
    with pytest.raises(CaptureError, match="whether two names are one object") as caught:
        capture(Asks(lambda net, x, other: x is other), (X.float(),) * 2)
    assert "x is other" in caught.value.place


class Collector:
    def __init__(self) -> None:
        self.last, self.all = None, []

    def append(self, _module: nn.Module, _given: Any, result: Tensor) -> None:
        self.all.append(result)

    def __call__(self, _module: nn.Module, _given: Any, result: Tensor) -> None:
        self.last = result


@pytest.mark.parametrize(
    "make",
    [
        lambda found, one: lambda module, given, result: found.__setitem__("a", result),
        lambda found, one: lambda module, given, result: found.setdefault("n", []).append(1),
        lambda found, one: one.append,
        lambda found, one: one,
    ],
    ids=["dict", "list", "method", "object"],
)
@pytest.mark.filterwarnings("ignore:the hook")
def test_hooks_that_collect(make: Any) -> None:
    module, found, collector = Asks(lambda *_: True), {}, Collector()
    handle = module.linear.register_forward_hook(make(found, collector))
    with pytest.raises(CaptureError, match="the hook") as caught:
        capture(module, (X.float(),) * 2)
    assert "handle.remove()" in caught.value.remedy
    assert (found, collector.last, collector.all) == ({}, None, [])
    handle.remove()
    capture(module, (X.float(),) * 2)


def test_hooks_that_compute() -> None:
    module = Asks(lambda *_: True).double()
    module.linear.register_forward_hook(lambda module, given, result: result * 2)
    with pytest.warns(UserWarning, match=r"of the module linear \(Linear\) becomes a part of the program"):
        assert_same(module, (X, X))
    with warnings.catch_warnings(record=True) as told:
        capture(weight_norm(nn.Linear(6, 6)), X.float())
    assert not [one for one in told if "hook" in str(one.message)]
    handle = register_module_forward_hook(lambda module, given, result: None)
    try:
        with pytest.raises(CaptureError, match="of all modules"):
            capture(nn.Linear(6, 6), X.float())
    finally:
        handle.remove()


def test_submodules_stay_where_they_are() -> None:
    class Exchanges(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            self[0], self[1] = self[1], self[0]
            return super().forward(x)

    module = Exchanges(nn.Linear(6, 6), nn.Tanh())
    with pytest.raises(CaptureError, match="exchanges submodules of Exchanges") as caught:
        capture(module, X.float())
    assert "self[0], self[1] =" in caught.value.place
    assert isinstance(module[0], nn.Linear)


def test_copies_of_modules() -> None:
    class Copies(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + F.linear(x, copy.deepcopy(self.weight))

    with pytest.raises(CaptureError, match="deepcopy") as caught:
        capture(Copies(6, 6), X.float())
    assert "copy.deepcopy(self.weight)" in caught.value.place


ARRAY = np.linspace(0, 1, 6)


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    @staticmethod
    @functools.cache
    def table(size: int) -> Tensor:
        return torch.arange(size).double().sin()

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * torch.from_numpy(ARRAY) + self.table(6)).square().mean()


def test_tables_of_arrays_and_static_caches() -> None:
    assert_same(Tables().double(), X)
    assert Tables.table.cache_info().currsize == 1
