"""Gradients that are zero in exact arithmetic: no optimizer may blow their rounding up into a difference."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import weft
from weft.commands.verify import show_result
from weft.errors import ModelFileError
from weft.verify.compare import Sample, compare, count_silenced, noise_in


class Attention(nn.Module):
    """The bias of the key shifts every score of a row alike: its gradient vanishes."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x)).square().sum() * 1000


class Normed(nn.Module):
    """The bias before batch norm is subtracted again, but its value shows in the running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.norm(self.up(x)))).square().sum() * 1000


@pytest.mark.parametrize(("made", "shape"), [(Attention, (4, 6, 8)), (Normed, (32, 8))])
def test_rounding_is_not_a_difference(made, shape, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    result = weft.verify(made(), (torch.randn(shape),), plan="dp=2")
    assert result.equal and result.largest_difference < 1e-13, str(result)
    assert result.silenced == 8 and result.as_json()["gradients_taken_as_zero"] == 8
    show_result(result, title="net")
    assert "taken as zero in the updates: 8 elements of gradients that are rounding only" in capsys.readouterr().out


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_what_counts_as_rounding() -> None:
    noise = noise_in({"w": f64(1.0, 1e-3, 1e-12, 0.0), "big": f64(1e6, 1e-5, 1.0), "plain": f64(1e5, -1e5)})
    assert set(noise) == {"w", "big"}
    # the RMS of all is about 3e5: `w` is judged at that scale
    assert noise["w"].where.tolist() == [False, False, True, True]
    assert noise["big"].where.tolist() == [False, True, False]


def test_what_is_larger_on_the_other_side_stays() -> None:
    found = noise_in({"w": f64(1.0, 0.0, 1e-16)})["w"]
    assert found.silence(f64(1.0, 1e-15, 0.5)).tolist() == [1.0, 0.0, 0.5]


def test_the_count_is_of_elements_on_either_side_in_any_step() -> None:
    def sample(*steps: torch.Tensor) -> Sample:
        return Sample((f64(1.0),) * 2, tuple({"w": step} for step in steps), {"w": f64(1.0)})

    ours = sample(f64(1.0, 1e-16, 0.0, 0.0), f64(1.0, 0.0, 1e-16, 0.0))
    theirs = sample(f64(1.0, 0.0, 0.0, 0.0), f64(1.0, 1e-17, 0.0, 0.0))
    assert count_silenced(ours, theirs) == 2
    assert [found.value for found in compare(ours, theirs)][2] == 0.0


class Narrow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        if x.dtype != torch.float32:
            raise RuntimeError(f"Expected Float32, got {x.dtype}")
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def test_a_forward_that_float64_alone_breaks_is_told_as_such() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Narrow.apply(self.up(x)).square().mean()

    with pytest.raises(
        ModelFileError, match="fails in float64, in which verify runs it: RuntimeError: Expected Float32"
    ):
        weft.verify(Net(), (torch.randn(4, 4),), plan="dp=2")
