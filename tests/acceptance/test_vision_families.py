"""Families of transformers beyond text, and modules of torch.nn: equal to one device, or refused with a reason."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import nn

from tests.acceptance import other_families, plain_modules, vision_families
from weft.capture import capture
from weft.codegen import generate
from weft.compile.model_file import Subject
from weft.errors import CaptureError, PlanError
from weft.ir.graph import Graph
from weft.lower import lower
from weft.lower.check import check
from weft.plan.load import load_plan
from weft.verify.compare import Sample, compare
from weft.verify.generated import run_generated
from weft.verify.reference import run_reference

FAMILIES: dict[str, Callable[[], Subject]] = {
    **vision_families.FAMILIES,
    **other_families.FAMILIES,
    **{f"nn-{name}": made for name, made in plain_modules.FAMILIES.items()},
}
ALWAYS = ("convnext", "wav2vec2-classifier", "nn-encoder-layer", "nn-conv3d", "nn-grid-sample", "nn-weight-norm")
"""Depthwise convolutions and drop path, a waveform, attention, a batch norm, two sides, a weight made in forward."""
WHOLE = ("nn-lstm", "nn-lstm-two-ways", "nn-gru", "nn-rnn")
"""Nothing of them is tensor parallel."""


@cache
def prepared(name: str) -> tuple[Subject, Graph, Sample]:
    torch.manual_seed(1)
    subject = FAMILIES[name]()
    subject.model.train()
    return subject, capture(subject.model, subject.example), run_reference(subject, seed=7, wide=True)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        pytest.param(name, recipe, marks=() if name in ALWAYS else pytest.mark.full)
        for name, recipe in itertools.product(FAMILIES, ("dp=2", "tp=2"))
        if (name, recipe) not in itertools.product(WHOLE, ["tp=2"])
    ],
)
def test_family(name: str, recipe: str) -> None:
    subject, graph, reference = prepared(name)
    program = lower(load_plan(recipe, graph))
    check(program)
    ours = run_generated(generate(program), program.graph, subject, seed=7, wide=True, reference=reference)
    assert not ours.disagreements
    worst = max(compare(ours, reference), key=lambda found: found.value)
    assert worst.value < 1e-9, worst


def test_nothing_to_cut_is_told() -> None:
    with pytest.raises(PlanError, match="no inner dim"):
        load_plan("tp=2", prepared("nn-lstm")[1])


class Skipped(nn.Module):
    """Layer drop: a layer is left out by chance, which a program without branches cannot do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) if torch.rand(()) > 0.1 else x).square().mean()


class Clustered(nn.Module):
    """An adaptive softmax: how many rows belong to a cluster is read from the targets."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.AdaptiveLogSoftmaxWithLoss(8, 20, [5, 10], div_value=1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(x, torch.arange(6) + x[:, 0].long()).loss
        return found


@pytest.mark.parametrize("module", [Skipped, Clustered])
def test_refused(module: type[nn.Module]) -> None:
    with pytest.raises(CaptureError, match="values in a tensor") as caught:
        capture(module(), torch.randn(6, 8))
    assert caught.value.place and caught.value.remedy
