"""Dims marked dynamic become symbolic sizes that can be worked out for other values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.capture.compare import assert_same
from tests.graph_interpreter import run_graph
from tests.models import GPT, GPTConfig, gpt_example
from weft.capture import capture, specialise
from weft.errors import CaptureError
from weft.ir.graph import Graph, Size

CONFIG = GPTConfig(n_layer=1, dropout=0.0, flash=False)


def test_symbolic_sizes_serve_other_batches() -> None:
    module = GPT(CONFIG).double()
    graph = capture(module, gpt_example(CONFIG), dynamic={"idx": (0, 1), "targets": (0, 1)})
    assert graph.symbols == {"s0": ("idx", 0), "s1": ("idx", 1), "s2": ("targets", 0), "s3": ("targets", 1)}
    assert graph.tensors["view"].shape == (Size("s0*s1", 32), 32)
    assert not graph.by_name["arange"].constant, "it depends on a size that varies"
    assert_same(module, gpt_example(CONFIG, batch=3, length=5), graph=specialised(graph, 3, 5))
    # the same graph without specialising: the interpreter reads sizes off its inputs
    assert_serves_any_size(module, graph)


def specialised(graph: Graph, batch: int, length: int) -> Graph:
    fixed = specialise(graph, {"s0": batch, "s1": length, "s2": batch, "s3": length})
    assert fixed.symbols == {}
    assert fixed.tensors["view"].shape == (batch * length, 32)
    assert all(not isinstance(dim, Size) for tensor in fixed.tensors.values() for dim in tensor.shape)
    return fixed


def assert_serves_any_size(module: nn.Module, graph: Graph) -> None:
    example = gpt_example(CONFIG, batch=2, length=7)
    assert torch.allclose(run_graph(graph, module, example)[graph.loss], module(*example), atol=1e-13)


def test_position_as_key_and_negative_dim() -> None:
    graph = capture(nn.Linear(4, 3), torch.zeros(5, 6, 4), dynamic={"0": (-2,)})
    assert graph.symbols == {"s0": ("input", 1)}
    assert graph.tensors["linear"].shape == (5, Size("s0", 6), 3)


def test_specialise_refuses_what_does_not_fit() -> None:
    graph = capture(GPT(CONFIG), gpt_example(CONFIG), dynamic={"idx": (1,), "targets": (1,)})
    with pytest.raises(CaptureError, match="slice") as caught:
        specialise(graph, dict.fromkeys(graph.symbols, 17))
    assert "self.mask[:, :, :T, :T]" in caught.value.place
    with pytest.raises(CaptureError, match="sizes are given for nothing"):
        specialise(graph, {})
    with pytest.raises(CaptureError, match="size 1 for s0"):
        specialise(graph, dict.fromkeys(graph.symbols, 1))


class Fixes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(4, 3).sum()


def test_dim_that_cannot_vary() -> None:
    with pytest.raises(CaptureError, match="cannot vary") as caught:
        capture(Fixes(), torch.zeros(4, 3), dynamic={"x": (0,)})
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("dynamic", "words"),
    [({"y": (0,)}, "no tensor of the example"), ({"x": (2,)}, "there is no dim 2"), ({"x": (1,)}, "has size 1")],
)
def test_bad_dynamic(dynamic: dict[str, tuple[int, ...]], words: str) -> None:
    with pytest.raises(CaptureError, match=words):
        capture(Fixes(), torch.zeros(12, 1), dynamic=dynamic)
