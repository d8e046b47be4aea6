"""torch's encoder in evaluation packs sequences that are padded at their ends, and gives zeros there."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft

CLOSE: Any = {"rtol": 1e-10, "atol": 1e-12}
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


class Pools(nn.Module):
    """Takes the mean over all positions, padded ones too."""

    def __init__(self, frozen: bool, norm: bool = False) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8) if norm else None)
        self.head, self.frozen = nn.Linear(8, 3), frozen
        if norm:
            nn.init.ones_(self.encoder.norm.bias)
        if frozen:
            self.encoder.requires_grad_(False).eval()

    def train(self, mode: bool = True) -> Pools:
        super().train(mode)
        self.encoder.train(mode and not self.frozen)
        return self

    def forward(self, x: Tensor, padding: Tensor) -> Any:
        h = self.encoder(x, src_key_padding_mask=padding)
        return {"loss": self.head(h.mean(1)).square().mean(), "h": h}


def batch(*lengths: int, at_start: bool = False) -> tuple[Tensor, Tensor]:
    padding = torch.arange(5) >= torch.tensor(lengths)[:, None]
    x = torch.randn(4, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(lengths)))
    return x, padding.flip(1) if at_start else padding


def model(*, frozen: bool, norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return Pools(frozen, norm).double()


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "dp=2,zero=3"])
def test_a_frozen_encoder_in_training(plan: str) -> None:
    eager = model(frozen=True)
    parallel: Any = weft.parallelize(copy.deepcopy(eager), batch(5, 3, 4, 1), plan, emulate=True, cache=None)
    for given in (batch(5, 3, 4, 1), batch(2, 2, 5, 4), batch(5, 3, 4, 1, at_start=True), batch(5, 5, 5, 5)):
        found, wanted = parallel(*given), eager(*given)
        torch.testing.assert_close(dict(found), dict(wanted), **CLOSE)
    assert not eager(*batch(5, 3, 4, 1))["h"][3, 1:].any()


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "pp=2,microbatches=2"])
def test_evaluation_with_and_without_gradients(plan: str) -> None:
    eager = model(frozen=False, norm=True)
    given = batch(5, 3, 4, 1)
    parallel: Any = weft.parallelize(copy.deepcopy(eager), given, plan, emulate=True, cache=None)
    eager.eval(), parallel.eval()
    with torch.no_grad():
        torch.testing.assert_close(dict(parallel(*given)), dict(eager(*given)), **CLOSE)
    if "pp" not in plan:
        torch.testing.assert_close(dict(parallel(*given)), dict(eager(*given)), **CLOSE)
