"""What the Graph says about inputs, outputs, parameters, buffers, constants and the loss."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from tests.capture.compare import assert_same
from weft.capture import capture
from weft.errors import CaptureError
from weft.ir.graph import Graph

X = torch.randn(4, 6, dtype=torch.float64)


class Parts(nn.Module):
    """Tied, frozen and unused parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.unused = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.frozen(self.first(x)).relu()).sum()


def test_tied_frozen_unused() -> None:
    graph = assert_same(Parts().double(), X)
    found = {parameter.tensor: parameter for parameter in graph.parameters}
    assert found["first.weight"].names == ("first.weight", "second.weight") and "second.weight" not in found
    assert not found["frozen.weight"].trainable and found["frozen.weight"].used
    assert found["unused.weight"].trainable and not found["unused.weight"].used
    assert graph.tensors["frozen/linear"].needs_grad and not graph.tensors["frozen.weight"].needs_grad


def test_two_parameters_over_one_memory_are_refused() -> None:
    module = Parts()
    module.second.weight = nn.Parameter(module.first.weight.detach())
    with pytest.raises(CaptureError, match=r"first\.weight and the parameter second\.weight share memory"):
        capture(module, X.float())


class Constants(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.arange(6, dtype=torch.float64)
        self.register_buffer("mask", torch.ones(6, dtype=torch.float64), persistent=False)
        self.register_buffer("moving", torch.ones(6, dtype=torch.float64))
        self.linear = nn.Linear(6, 6).double()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.moving.mul_(0.5)
        positions = (torch.arange(6, dtype=torch.float64) + 1).sqrt()
        fixed = positions * self.table * (self.mask > 0)
        return (self.linear(x) * fixed + self.moving.exp() + torch.rand(6).sum() * 0 + torch.tensor([2.0])).sum()


def test_constants_are_marked() -> None:
    graph = assert_same(Constants(), X)
    marks = {op.name: op.constant for op in graph.ops}
    assert marks["arange"] and marks["sqrt"] and marks["gt"] and marks["mul_2"]
    assert not marks["mul"] and not marks["exp"] and not marks["rand"] and not marks["linear/linear"]
    assert torch.equal(graph.constants["table"], Constants().table)
    assert graph.constants["constant"].tolist() == [2.0]


@dataclass
class Batch:
    x: Tensor
    scale: float
    extra: dict[str, Any]


@dataclass
class Result:
    loss: Tensor
    logits: Tensor
    label: str


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 2)

    def forward(self, batch: Batch, *rest: Tensor, flag: bool = False, **named: Tensor) -> Result:
        logits = self.linear(batch.x) * batch.scale + batch.extra["shift"] + rest[0] + named["bias"]
        return Result(logits.sum() if flag else logits.mean(), logits, "hello")


def test_nested_inputs_and_outputs() -> None:
    extra = {"shift": torch.ones(2, dtype=torch.float64), "none": None}
    batch = Batch(X, 2.0, extra)

    class Call(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Structured().double()

        def forward(self, batch: Batch, *rest: Tensor) -> Result:
            return self.inner(batch, *rest, flag=True, bias=rest[1])

    graph = assert_same(Call(), (batch, X[0, :2], X[1, :2]))
    assert [item.tensor for item in graph.inputs] == ["batch.x", "batch.extra.shift", "rest.0", "rest.1"]
    assert [item.where for item in graph.inputs] == ["batch.x", "batch.extra['shift']", "rest.0", "rest.1"]
    assert [graph.leaves[item.index] for item in graph.inputs] == [None] * 4 and 2.0 in graph.leaves
    assert graph.loss == graph.outputs[0] and graph.outputs[2] is None
    args, kwargs = pytree.tree_unflatten(list(graph.leaves), graph.in_spec)
    assert isinstance(args[0], Batch) and args[0].scale == 2.0 and kwargs == {}
    assert isinstance(pytree.tree_unflatten([1, 2, 3], graph.out_spec), Result)


def test_keyword_inputs() -> None:
    class Named(nn.Module):
        def forward(self, a: Tensor, b: Tensor, flag: bool = False) -> Tensor:
            return (a - b).sum() if flag else a.sum()

    graph = assert_same(Named(), {"b": X + 1, "a": X, "flag": True})
    assert [item.tensor for item in graph.inputs] == ["b", "a"]


Pair = namedtuple("Pair", ["loss", "other"])


@pytest.mark.parametrize(
    ("wrap", "has_loss"),
    [
        (lambda y: y.sum(), True),
        (lambda y: (y.sum(), y), True),
        (lambda y: {"loss": y.sum(), "y": y}, True),
        (lambda y: {"y": y, "loss": y.mean()}, True),
        (lambda y: Pair(y.sum(), y), True),
        (lambda y: [y.sum()], True),
        (lambda y: y, False),
        (lambda y: (y, y.sum()), True),
        (lambda y: {"y": y.sum()}, True),
        (lambda y: (y.mean(), y.sum()), False),
        (lambda y: y.argmax(), False),
    ],
)
def test_loss(wrap: Any, has_loss: bool) -> None:
    class Wraps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6).double()

        def forward(self, x: Tensor) -> Any:
            return wrap(self.linear(x))

    graph = assert_same(Wraps(), X)
    assert (graph.loss is not None) == has_loss


def test_input_that_needs_gradient() -> None:
    graph = capture(nn.Linear(6, 6, bias=False).requires_grad_(False), X.float().requires_grad_())
    assert graph.tensors["input"].needs_grad and graph.tensors["linear"].needs_grad


def test_output_that_is_an_input_or_a_parameter() -> None:
    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.weight, x

    graph = assert_same(Returns(), X.float())
    assert graph.outputs == ("weight", "x") and graph.ops == () and graph.parameters[0].used


def test_recurrent_module() -> None:
    class Runs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(6, 3, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.lstm(x)[0].sum()

    graph = assert_same(Runs().double(), X[None])
    assert [op.target for op in graph.ops if op.kind == "lstm"] == ["aten.lstm.input"]


def test_names_are_stable() -> None:
    first, second = capture(Parts(), X.float()), capture(Parts(), X.float())
    assert names(first) == names(second)


def names(graph: Graph) -> list[tuple[str, ...]]:
    return [(op.name, *op.inputs, *op.outputs) for op in graph.ops]


def test_bad_examples() -> None:
    module = nn.Linear(6, 6)
    with pytest.raises(CaptureError, match="meta device"):
        capture(module, torch.zeros(2, 6, device="meta"))
    with pytest.raises(CaptureError, match="the example is a str"):
        capture(module, "x")
    with pytest.raises(CaptureError, match="does not fit Linear"):
        capture(module, (X.float(), X.float()))
    with pytest.raises(CaptureError, match="does not fit Linear"):
        capture(module, {"y": X.float()})
    with pytest.raises(CaptureError, match="could not be traced"):
        capture(module, torch.zeros(2, 5))


def test_module_without_values() -> None:
    with torch.device("meta"):
        hollow = Parts()
    hollow.second.weight = hollow.first.weight
    before = [id(parameter) for parameter in hollow.parameters()]
    assert names(capture(hollow, X.float())) == names(capture(Parts(), X.float()))
    assert [id(parameter) for parameter in hollow.parameters()] == before
    with FakeTensorMode():
        fake = Parts()
    assert names(capture(fake, X.float())) == names(capture(Parts(), X.float()))
