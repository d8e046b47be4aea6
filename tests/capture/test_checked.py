"""Functions of torch that look at values before they compute: the same numbers, and the same complaints in the run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import weft
from tests.capture.compare import assert_same
from tests.graph_interpreter import run_graph
from weft.capture import capture

X = torch.randn(4, 6, dtype=torch.float64)
COUNTS, WEIGHTS = torch.tensor([1, 2, 1, 3, 1, 2]), torch.rand(6, dtype=torch.float64)


class Computes(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 6)
        self.function = function
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.b(F.gelu(self.a(x)))).pow(2).mean()


def variances(y: Tensor) -> Tensor:
    """Some are below eps."""
    return F.relu(y) * 1e-1


CHECKED: dict[str, Callable[[Tensor], Tensor]] = {
    "cov": torch.cov,
    "of observations": lambda y: y.t().cov(correction=0),
    "of one variable": lambda y: torch.cov(y[0]),
    "counted": lambda y: torch.cov(y, fweights=COUNTS),
    "weighted": lambda y: torch.cov(y, fweights=COUNTS, aweights=WEIGHTS),
    "uncorrected": lambda y: torch.cov(y, aweights=WEIGHTS, correction=0),
    "corrcoef": torch.corrcoef,
    "corrcoef of one": lambda y: torch.corrcoef(y[0]) + y.sum(),
    "nll": lambda y: F.gaussian_nll_loss(y, y.detach() + 1, variances(y), eps=1e-3),
    "nll of rows": lambda y: F.gaussian_nll_loss(y, y.detach() + 1, F.softplus(y[:, 0]), full=True, reduction="sum"),
    "nll of columns": lambda y: F.gaussian_nll_loss(y, y.detach() + 1, F.softplus(y[:1]), reduction="none"),
    "nll of a number": lambda y: F.gaussian_nll_loss(y, y.detach() + 1, 0.5),
}


@pytest.mark.parametrize("name", CHECKED)
def test_same_numbers(name: str) -> None:
    assert_same(Computes(CHECKED[name]), X)


def test_a_negative_variance_raises_in_the_run() -> None:
    module = Computes(lambda y: F.gaussian_nll_loss(y, y.detach(), y))
    with pytest.raises(RuntimeError, match="is False in this step"):
        run_graph(capture(module, X), module, X)


class Masked(nn.Module):
    def __init__(self, mask: str, **options: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)
        self.mask, self.options = mask, options

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        mask = {
            "floats": nn.Transformer.generate_square_subsequent_mask(n, dtype=x.dtype),
            "flags": torch.ones(n, n, dtype=torch.bool).triu(1),
            "band": torch.full((n, n), float("-inf"), dtype=x.dtype).triu(2),
        }[self.mask]
        return self.encoder(x, mask=mask, **self.options).pow(2).mean()


@pytest.mark.parametrize("mask", ["floats", "flags", "band"])
def test_a_transformer_with_a_mask_made_in_forward(mask: str) -> None:
    assert_same(Masked(mask).double(), torch.randn(4, 5, 16, dtype=torch.float64), tolerance=1e-11)


@pytest.mark.parametrize("plan", ["dp=2", "tp=2"])
def test_a_masked_transformer_is_cut(plan: str) -> None:
    assert weft.verify(Masked("floats"), torch.randn(4, 5, 16), plan=plan)
