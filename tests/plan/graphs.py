"""Graphs for plan tests: captured once per run, and an MLP of three layers written by hand."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor as Value
from torch import nn
from torch.nn import functional as F

from tests.models import GPT, MLP, GPTConfig, gpt_example
from weft.capture import capture
from weft.ir.graph import Graph, Input, Op, Parameter, Ref, Source, Tensor


def layers(width: int = 8, batch: int = 4, num_layers: int = 3) -> Graph:
    """`layers.*.fc/linear` and `layers.*/relu`, by hand."""
    tensors = [Tensor("x", (batch, width), torch.float64)]
    ops, parameters, last = [], [], "x"
    for i in range(num_layers):
        tensors += [Tensor(f"w{i}", (width, width), torch.float64, True)]
        tensors += [Tensor(f"{name}{i}", (batch, width), torch.float64, True) for name in "hr"]
        parameters.append(Parameter(f"w{i}", (f"layers.{i}.fc.weight",)))
        source = Source("model.py", i + 1, "h = self.fc(x)")
        arguments = (Ref(last), Ref(f"w{i}"))
        path = f"layers.{i}"
        ops.append(
            Op(f"{path}.fc/linear", "aten.linear.default", arguments, (), (f"h{i}",), f"{path}.fc", source=source)
        )
        ops.append(Op(f"{path}/relu", "aten.relu.default", (Ref(f"h{i}"),), (), (f"r{i}",), path))
        last = f"r{i}"
    return Graph(
        "Layers",
        {tensor.name: tensor for tensor in tensors},
        (Input("x", "0", 0),),
        tuple(parameters),
        (),
        {},
        tuple(ops),
        (last,),
        None,
    )


class Odd(nn.Module):
    """A frozen name (sort), an algorithm's (softmax), a module called twice, and more than one input."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Value, y: Value, shift: Value) -> Value:
        rows = self.act(torch.sort(x * self.scale, dim=1)[0])
        return (self.act(torch.softmax(rows, -1) - y) + shift).sum()


class GroupedAttention(nn.Module):
    """Attention with fewer key heads than query heads, and a two-layer MLP, around a residual."""

    def __init__(self, width: int = 32, heads: int = 4, key_heads: int = 2) -> None:
        super().__init__()
        self.heads, self.key_heads, self.size = heads, key_heads, width // heads
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, key_heads * self.size)
        self.v = nn.Linear(width, key_heads * self.size)
        self.o = nn.Linear(width, width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.first = nn.Linear(8, width)

    def forward(self, x: Value) -> Value:
        x = self.first(x)
        B, T, C = x.shape
        q = self.q(x).view(B, T, self.heads, self.size).transpose(1, 2)
        k, v = (
            one(x).view(B, T, self.key_heads, 1, self.size).expand(-1, -1, -1, self.heads // self.key_heads, -1)
            for one in (self.k, self.v)
        )
        k, v = (one.reshape(B, T, self.heads, self.size).transpose(1, 2) for one in (k, v))
        att = torch.softmax(q @ k.transpose(-2, -1), -1) @ v
        x = x + self.o(att.transpose(1, 2).reshape(B, T, C))
        return (x + self.down(F.gelu(self.up(x)))).sum()


@cache
def mlp_graph() -> Graph:
    return capture(MLP(), (torch.zeros(4, 6), torch.zeros(4, 6)))


@cache
def gpt_graph(*, tied: bool = True) -> Graph:
    config = GPTConfig(tied=tied)
    return capture(GPT(config), gpt_example(config))


@cache
def odd_graph() -> Graph:
    return capture(Odd(), (torch.zeros(4, 6), torch.zeros(4, 6), torch.zeros(1, 6)))


@cache
def grouped_graph() -> Graph:
    return capture(GroupedAttention(), (torch.zeros(4, 6, 8),))
