"""What backward never reaches has no gradient, as in eager: an optimizer passes it over, and does not decay it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from weft.capture import capture
from weft.codegen import generate
from weft.compile.model_file import Subject
from weft.lower import lower
from weft.lower.check import check
from weft.plan.load import load_plan
from weft.verify.compare import compare
from weft.verify.generated import run_generated
from weft.verify.reference import run_reference


class Idle(nn.Module):
    """The first linear is computed, and its gradient is zero, or there is none."""

    def __init__(self, end: str) -> None:
        super().__init__()
        self.idle, self.used, self.end = nn.Linear(6, 6), nn.Linear(6, 6), end

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.idle(x).relu()
        match self.end:
            case "zeros":
                x = x + torch.zeros_like(y)
            case "detach":
                x = x + y.detach()
            case "argmax":
                x = x + y.argmax(1)[:, None]
            case "times zero":
                x = x + y * 0
        return self.used(x).square().mean(), y


@pytest.mark.parametrize("recipe", ["dp=2", "tp=2", "dp=2,coshard=2"])
@pytest.mark.parametrize("end", ["zeros", "detach", "argmax", "output", "times zero"])
def test_equal_to_one_device(end: str, recipe: str) -> None:
    torch.manual_seed(0)
    subject = Subject(Idle(end), (torch.randn(4, 6),))
    graph = capture(subject.model, subject.example)
    reference = run_reference(subject, seed=7, wide=True)
    assert ("idle.weight" in reference.gradients[0]) == (end == "times zero")
    program = lower(load_plan(recipe, graph))
    check(program)
    ours = run_generated(generate(program), graph, subject, seed=7, wide=True, reference=reference)
    assert not ours.disagreements
    assert max(found.value for found in compare(ours, reference)) < 1e-12
