"""Tensors that outlast a forward: buffers that it rebinds to each other, and memory that the module does not own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
