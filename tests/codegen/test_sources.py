"""The user's lines as comments: the text of each once in a file, where most of its ops are."""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.capture import capture
from weft.codegen import generate
from weft.lower import lower
from weft.plan.load import load_plan

COMMENT = re.compile(r"^ *# (\w+\.py:\d+)(?: (?: (.*)|\.\.\.))$", re.MULTILINE)


class Layer(nn.Module):
    INNER = "y = self.down(F.gelu(self.up(self.norm(x))))"

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.gelu(self.up(self.norm(x))))
        return x + torch.tanh(y)


class Net(nn.Module):
    ENDING = "return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())"

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(8, 20)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def test_a_line_is_told_once_where_most_of_it_is() -> None:
    batch = torch.randint(20, (4, 6)), torch.randint(20, (4, 6))
    text = generate(lower(load_plan("tp=2,coshard=2", capture(Net(), batch))))["program.py"].decode()
    told = {line: place for place, line in COMMENT.findall(text) if line}
    assert len(told) == text.count("test_sources.py:") - 2
    embedded, ending = "x = self.words(tokens)", Net.ENDING
    assert set(told) == {embedded, ending, Layer.INNER, "return x + torch.tanh(y)"}
    forward, block, chunk = re.split(r"^    def ", text, flags=re.MULTILINE)[1:]
    # one op of a line stands before the loop, one of the layer's line outside of the chunks: they have its place
    before, after = forward.split("for layer in")
    assert f"# {told[ending]} ...\n" in before and ending in after.split("F.linear")[0]
    assert f"# {told[Layer.INNER]} ...\n" in block and Layer.INNER in chunk.split("F.linear")[0]
