"""The rule book shares a rule only among ops that the rule cannot tell apart."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.capture import capture
from weft.ops.book import RuleBook


class Weighs(nn.Module):
    """Two losses alike but for who weighs the classes: a buffer, a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("fixed", torch.ones(5))
        self.trained = nn.Parameter(torch.ones(5))
        self.linear = nn.Linear(6, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.linear(x)
        with torch.no_grad():  # torch gives class weights no gradient
            seen = F.cross_entropy(logits, y, self.trained)
            return F.cross_entropy(logits, y, self.fixed) + seen


def test_rules_depend_on_gradients() -> None:
    graph = capture(Weighs(), (torch.zeros(4, 6), torch.zeros(4, dtype=torch.long)))
    trained, fixed = (op for op in graph.ops if op.kind == "cross_entropy_loss")
    book = RuleBook(graph)
    assert book.form(fixed) != book.form(trained)
    assert book.rule(trained).frozen and not book.rule(fixed).frozen
