"""Shapes that values would decide, known shapes for more dtypes, and what is set up at the first call."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.capture.compare import assert_same, assert_untouched, state_of
from tests.graph_interpreter import run_graph
from weft.capture import capture
from weft.errors import CaptureError

X = torch.randn(5, 6)


class Counts(nn.Module):
    def __init__(self, weighted: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.weighted = weighted

    def forward(self, x: Tensor) -> Tensor:
        best = x.argmax(-1)
        counts = torch.bincount(best, x[:, 0] if self.weighted else None, minlength=6)
        return (self.linear(x) * counts.to(x.dtype) * best.bincount(minlength=6)).sum()


@pytest.mark.parametrize("weighted", [False, True])
def test_counts_of_known_length(weighted: bool) -> None:
    assert_same(Counts(weighted).double(), X.double())


class CountsThree(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum() * torch.bincount(x.argmax(-1), minlength=3).sum()


def test_counts_beyond_the_known_length_raise_in_the_run() -> None:
    graph = capture(CountsThree(), X)
    small, large = torch.eye(6)[torch.tensor([[0, 2, 2, 1, 0], [0, 2, 2, 5, 0]])]
    assert run_graph(graph, CountsThree(), small)[graph.outputs[0] or ""] == 25
    with pytest.raises(RuntimeError, match="out of bounds"):
        run_graph(graph, CountsThree(), large)


class Unknown(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sum() * getattr(self, self.what)(x.argmax(-1)).sum()

    def counts(self, best: Tensor) -> Tensor:
        return torch.bincount(best)

    def classes(self, best: Tensor) -> Tensor:
        return F.one_hot(best)

    def loop(self, best: Tensor) -> Tensor:
        return torch.stack([one.sum() for one in (best > 2).nonzero()])


@pytest.mark.parametrize(
    ("what", "words", "remedy", "line"),
    [
        ("counts", "how many counts", "minlength", "torch.bincount(best)"),
        ("classes", "number of classes", "num_classes", "F.one_hot(best)"),
        ("loop", "as often as the values", "range known beforehand", "one in (best > 2).nonzero()"),
    ],
)
def test_unknown_lengths_are_refused(what: str, words: str, remedy: str, line: str) -> None:
    with pytest.raises(CaptureError, match=words) as caught:
        capture(Unknown(what), X)
    assert remedy in caught.value.remedy and line in caught.value.place


class Grouped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 8, 4))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        return F.grouped_mm(x, self.weight.transpose(-2, -1), offs=ends).square().sum()


def test_grouped_products_of_any_dtype() -> None:
    """torch's own shape function takes bfloat16 only."""
    ends = torch.tensor([2, 2, 6], dtype=torch.int32)
    for dtype in (torch.float32, torch.bfloat16):
        graph = capture(Grouped().to(dtype), (torch.randn(6, 4, dtype=dtype), ends))
        found = [op for op in graph.ops if op.kind == "_grouped_mm"]
        assert len(found) == 1 and graph.tensors[found[0].outputs[0]].sizes == (6, 8)
    with pytest.raises(CaptureError, match="widths 5 and 4"):
        capture(Grouped(), (torch.randn(6, 5), ends))


class Collects(nn.Module):
    """Sets up hooks at the first call, and notes that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        self.sink = seen.append
        if not getattr(self, "is_set_up", False):
            self.linear.register_forward_hook(lambda module, args, output: self.sink(output))
            self.is_set_up = True
        y = self.linear(x)
        del self.sink
        return y.sum() + sum(one.square().sum() for one in seen)


def test_hooks_that_the_first_call_sets_up() -> None:
    module = Collects()
    before = state_of(module)
    first, second = (capture(module, X) for _ in range(2))
    assert first.ops == second.ops
    assert [op.kind for op in first.ops].count("square") == 1
    assert_untouched(module, before)
    assert not module.linear._forward_hooks and not hasattr(module, "is_set_up")


class SetsItselfUp(nn.Module):
    """Its second forward differs from its first."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.ready = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if not self.ready:
            self.ready = True
            return y.sum()
        return y.square().sum()


def test_a_first_call_that_computes_something_else_is_refused() -> None:
    module = SetsItselfUp()
    with pytest.raises(CaptureError, match="second forward"):
        capture(module, X)
    assert module.ready is False
