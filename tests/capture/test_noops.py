"""Products with one and sums with zero are left out of the graph where they give their operand, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from weft.capture import capture


class Net(nn.Module):
    def __init__(self, change: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.a, self.b, self.change = nn.Linear(3, 3, dtype=dtype), nn.Linear(3, 3, dtype=dtype), change

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.change(self.a(x)))


def detached(y: Tensor) -> Tensor:
    with torch.no_grad():
        return y * 1.0


LEFT_OUT: list[Callable[[Tensor], Tensor]] = [
    lambda y: y * 1.0,
    lambda y: 1 * y,
    lambda y: y / 1,
    lambda y: y * 1 / 1.0,
]
KEPT: list[Callable[[Tensor], Tensor]] = [
    lambda y: y + 0,
    lambda y: y * 1.5,
    detached,
    lambda y: torch.add(y, 1.0, alpha=0),
    lambda y: y.div(1.0, rounding_mode="floor"),
]


@pytest.mark.parametrize("at", range(len(LEFT_OUT)))
def test_left_out(at: int) -> None:
    graph = capture(Net(LEFT_OUT[at]), torch.zeros(2, 3))
    assert [op.kind for op in graph.ops] == ["linear", "linear"]


@pytest.mark.parametrize("at", range(len(KEPT)))
def test_kept(at: int) -> None:
    assert len(capture(Net(KEPT[at]), torch.zeros(2, 3)).ops) > 2


def test_of_integers_and_complex_numbers() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.words(x + 0)

    assert [op.kind for op in capture(Words(), torch.zeros(2, dtype=torch.int64)).ops] == ["embedding"]
    kinds = capture(Net(lambda y: y * 1.0, torch.complex64), torch.zeros(2, 3, dtype=torch.complex64)).ops
    assert len(kinds) == 3


def test_a_result_is_a_tensor_of_its_own() -> None:
    class Returned(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = x * 2
            return y, y * 1.0

    assert len(capture(Returned(), torch.zeros(2)).ops) == 2
