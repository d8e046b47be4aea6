"""Functions that change what lies outside of them: refused with the line, and all is as it was."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import weft
from weft.errors import CaptureError

NUMBERS = {"n": 0}
LOG: list[float] = []


class Counts(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Counts.calls += 1
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class CountsBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        NUMBERS["n"] += 1
        return grad * -min(1.0, NUMBERS["n"] / 5)


class CountsSkipped(CountsBack):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if grad.isfinite().all():
            return grad
        LOG.append(0.0)
        return torch.zeros_like(grad)


class Leaves(torch.autograd.Function):
    held: ClassVar[dict[str, Tensor]] = {}

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Leaves.held["x"] = x.detach().abs().mean()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class SetsUpOnce(torch.autograd.Function):
    is_ready = False
    tables: ClassVar[dict[int, Tensor]] = {}

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        SetsUpOnce.is_ready = True
        if x.shape[-1] not in SetsUpOnce.tables:
            SetsUpOnce.tables[x.shape[-1]] = torch.arange(x.shape[-1])
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class Applies(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.function = [function]

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.function[0].apply(self.a(x))
        return made.square().mean()


@pytest.mark.parametrize(
    ("function", "name", "line"),
    [
        (Counts, "Counts.calls", "Counts.calls += 1"),
        (CountsBack, "NUMBERS", 'NUMBERS["n"] += 1'),
        (CountsSkipped, "LOG", "LOG.append(0.0)"),
        (Leaves, "Leaves.held", 'Leaves.held["x"] = x'),
    ],
)
def test_refuses_functions_that_keep_something(function: Any, name: str, line: str) -> None:
    def state() -> Any:
        return Counts.calls, dict(NUMBERS), list(LOG), dict(Leaves.held)

    before = state()
    for _ in range(2):
        with pytest.raises(CaptureError, match=rf"{function.__name__} changes \S*{name}, outside of itself") as caught:
            weft.capture(Applies(function), torch.randn(6, 4))
        assert line in caught.value.place
        assert state() == before


def test_functions_may_set_up_and_cache() -> None:
    assert weft.verify(Applies(SetsUpOnce), torch.randn(6, 4), plan="dp=2").equal


class Recomputes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Any, x: Tensor) -> Tensor:
        made: Tensor = (run[0] if isinstance(run, list) else run)(x)
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad


@pytest.mark.parametrize(
    ("given", "what"), [(lambda module: module.half, "GivesObjects.half"), (lambda module: [module.linear], "a Linear")]
)
def test_refuses_functions_that_are_given_objects(given: Any, what: str) -> None:
    class GivesObjects(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def half(self, x: Tensor) -> Tensor:
            return x / 2

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = Recomputes.apply(given(self), self.linear(x))
            return made.sum()

    with pytest.raises(CaptureError, match=f"Recomputes is given .*{what}") as caught:
        weft.parallelize(GivesObjects(), torch.randn(4, 6), "dp=2", emulate=True)
    assert "Recomputes.apply(given(self)" in caught.value.place and "use_reentrant=False" in caught.value.remedy
