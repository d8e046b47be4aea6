"""Convolutions with weights that are computed anew in each forward, in stages and in parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, weight_norm
from torch.nn.utils import spectral_norm as hooked_spectral_norm

import weft

KINDS: Mapping[str, Callable[[nn.Module], nn.Module]] = {
    "weight_norm": weight_norm,
    "weight_norm of one length": lambda module: weight_norm(module, dim=None),
    "parametrised weight_norm": parametrizations.weight_norm,
    "parametrised, of one length": lambda module: parametrizations.weight_norm(module, dim=None),
    "spectral_norm": hooked_spectral_norm,
    "parametrised spectral_norm": parametrizations.spectral_norm,
}


class Wave(nn.Module):
    """Gated dilated convolutions with a sum of what skips ahead, as in WaveNet."""

    def __init__(self, norm: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.gates = nn.ModuleList(norm(nn.Conv1d(4, 8, 2, dilation=2**at)) for at in range(3))
        self.onward = nn.ModuleList(norm(nn.Conv1d(4, 4, 1)) for _ in range(3))
        self.end = norm(nn.Conv1d(4, 4, 1))

    def forward(self, x: Tensor) -> Tensor:
        skipped, target = torch.zeros_like(x), x
        for at, (gate, onward) in enumerate(zip(self.gates, self.onward, strict=True)):
            left, right = gate(nn.functional.pad(x, (2**at, 0))).chunk(2, 1)
            x = onward(torch.tanh(left) * torch.sigmoid(right))
            skipped, x = skipped + x, x + target
        return (self.end(torch.relu(skipped)) - target).square().mean()


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize(("kind", "plan"), [*((kind, "pp=2") for kind in KINDS), ("weight_norm of one length", "tp=2")])
def test_weights_that_are_computed(kind: str, plan: str) -> None:
    torch.manual_seed(0)
    assert weft.verify(Wave(KINDS[kind]), (torch.randn(4, 4, 8),), plan=plan).equal
