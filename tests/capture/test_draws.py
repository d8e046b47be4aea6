"""Random ops are numbered as an eager run draws."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, distributions, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import weft
from tests.capture.compare import assert_same
from weft.capture import capture
from weft.errors import CaptureError
from weft.ir.graph import Graph

X = torch.randn(2, 4, 8, dtype=torch.float64)


class Seen(TorchDispatchMode):
    """The primitive draws of an eager run: operator and number of elements drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.draws: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags and not self.is_quiet(func, args):
            self.draws.append(result.numel() if isinstance(result, Tensor) else result[0].numel())
        return result

    @staticmethod
    def is_quiet(func: Any, args: tuple[Any, ...]) -> bool:
        names = [argument.name for argument in func._schema.arguments]
        return "dropout_p" in names and (len(args) <= names.index("dropout_p") or not args[names.index("dropout_p")])


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.linear(x))


class Draws(nn.Module):
    """Every way of drawing; sizes tell the draws apart."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()
        self.nothing, self.all, self.rows = nn.Dropout(0.0), nn.Dropout(1.0), nn.Dropout1d(0.5)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.layer(x)  # 64 each
        torch.rand(5)  # dead, and yet a draw
        F.scaled_dot_product_attention(x, x, x, dropout_p=0.2)
        if torch.rand([]) < 0.0:
            return x.sum()
        x = self.rows(self.nothing(x)) + self.all(x)
        x = x + torch.rand(4, 1, dtype=x.dtype) + torch.bernoulli(torch.full((8,), 0.5, dtype=x.dtype))
        x = F.scaled_dot_product_attention(x, x, x, dropout_p=0.2)
        x = F.scaled_dot_product_attention(x, x, x)
        x = F.dropout(x[:1], 0.5, self.training) + F.dropout(x[:1], 0.5, False)
        noise = torch.empty(3, dtype=x.dtype).normal_(0, 2)
        noise.uniform_(-1, 1)
        noise = noise * torch.empty(3, dtype=x.dtype).bernoulli_(0.5)
        noise = noise + torch.empty(3, dtype=x.dtype).random_(1, 7) + torch.empty(3, dtype=torch.int64).random_(5)
        return (
            x.sum() + noise.sum() + torch.randn_like(x).sum() + torch.randint(3, (7,)).sum() + torch.randperm(9).sum()
        )


@pytest.mark.smoke
def test_one_eager_draw_per_numbered_op() -> None:
    module = Draws().double()
    graph = assert_same_draws(module, X)
    attention = [op.draw is not None for op in graph.ops if op.kind == "scaled_dot_product_attention"]
    assert attention == [True, False]
    assert [op.draw for op in graph.ops if op.path == "layer.drop"] == [0, 1, 2]
    assert not any(op.path == "nothing" for op in graph.ops)
    assert not any(op.kind == "rand" and op.draw in (3, 4, 5) for op in graph.ops), "dead draws are dropped"
    assert not any(op.constant for op in graph.ops if op.draw is not None)


def assert_same_draws(module: nn.Module, x: Tensor) -> Graph:
    graph = capture(module, x)
    with Seen() as seen:
        module(x)
    numbered = {op.draw: op for op in graph.ops if op.draw is not None}
    assert max(numbered) < len(seen.draws)
    missing = [number for number in range(len(seen.draws)) if number not in numbered]
    dead = [3, 4, 5] if isinstance(module, Draws) else []
    assert missing == dead
    for number, op in numbered.items():
        if op.kind not in ("scaled_dot_product_attention", "feature_dropout"):
            shape = graph.tensors[op.outputs[0]].sizes
            assert seen.draws[number] == torch.Size(shape).numel(), op.name
    return graph


def test_no_draws_in_evaluation() -> None:
    module = nn.Sequential(Layer(), nn.Dropout(0.5), nn.AlphaDropout(0.5), nn.RReLU()).double().eval()
    graph = assert_same(module, X)
    assert [op.draw for op in graph.ops] == [None] * len(graph.ops)
    assert not any("dropout" in op.target for op in graph.ops)


class Lines(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.generator = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "random_":
            return x * torch.empty_like(x).random_()
        if self.kind == "trunc_normal_":
            return x * nn.init.trunc_normal_(torch.empty(8))
        if self.kind == "distribution":
            noise = distributions.MultivariateNormal(torch.zeros(8), torch.eye(8), validate_args=True)
            return x + noise.rsample()
        return x * torch.rand(8, generator=self.generator)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("random_", "without an upper bound"),
        ("generator", "generator"),
        ("trunc_normal_", "draws again until"),
        ("distribution", "checks the values"),
    ],
)
def test_refuses_what_cannot_be_drawn(kind: str, words: str) -> None:
    with pytest.raises(CaptureError, match=words) as caught:
        capture(Lines(kind), X.float())
    assert "test_draws.py" in caught.value.place and caught.value.remedy


class Samples(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.b, self.kind = nn.Linear(8, 6), nn.Linear(6, 8), kind

    def forward(self, x: Tensor) -> Tensor:
        shapes = F.softplus(self.b(self.a(x).tanh())) + 0.2
        drawn = {
            "gamma": lambda: distributions.Gamma(shapes, shapes + 1).rsample(),
            "beta": lambda: distributions.Beta(shapes, shapes + 1).rsample(),
            "dirichlet": lambda: distributions.Dirichlet(shapes).rsample((2,)),
            "student": lambda: distributions.StudentT(shapes + 3).rsample(),
            "sample": lambda: distributions.Dirichlet(shapes).sample() * shapes,
        }[self.kind]()
        return (F.dropout(drawn, 0.3) * x).square().mean()


@pytest.mark.parametrize("kind", ["gamma", "beta", "dirichlet", "student", "sample"])
def test_distributions_draw_the_same_numbers(kind: str) -> None:
    for plan in ("dp=2", "tp=2"):
        assert weft.verify(Samples(kind), torch.randn(4, 8), plan=plan)
