"""Cuts into stages: balanced, at any operator, and what cannot be cut is refused."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
import torch
from torch import nn

from weft.capture import capture
from weft.errors import PlanError
from weft.ir.graph import Graph, Op
from weft.ops.book import RuleBook
from weft.ops.work import light_ops, work_of
from weft.plan.load import load_plan
from weft.plan.plan import Plan
from weft.plan.recipes.stages import stages_of

WIDTH = 64


class Tower(nn.Module):
    """Layers of one weight each."""

    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return nn.functional.mse_loss(x, y)


def tower(widths: list[int]) -> Graph:
    return capture(Tower(widths), (torch.randn(128, widths[0]), torch.randn(128, widths[-1])))


def linears(graph: Graph, stages: list) -> list[int]:
    return [sum(op.kind == "linear" for op in stage) for stage in stages]


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_alike_layers_are_shared_out_evenly(count: int) -> None:
    graph = tower([WIDTH] * 9)
    assert linears(graph, stages_of(graph, RuleBook(graph), count)) == [8 // count] * count


def test_the_cut_is_where_little_crosses() -> None:
    graph = tower([WIDTH, WIDTH, 4, WIDTH, WIDTH])
    assert linears(graph, stages_of(graph, RuleBook(graph), 2)) == [2, 2]


@pytest.mark.parametrize("count", [2, 3, 5])
def test_every_op_is_in_one_stage(count: int) -> None:
    graph = tower([16, 24, 8, 40, 16])
    book = RuleBook(graph)
    ops = [op.name for stage in stages_of(graph, book, count) for op in stage]
    assert ops == [op.name for op in graph.ops if op.name not in light_ops(graph, book)]
    assert all(stages_of(graph, book, count))


def test_as_many_stages_as_operators() -> None:
    graph = tower([4, 4, 4])
    book = RuleBook(graph)
    count = len(graph.ops) - len(light_ops(graph, book))
    assert [len(stage) for stage in stages_of(graph, book, count)] == [1] * count
    with pytest.raises(PlanError, match="a stage would have no work"):
        stages_of(graph, book, count + 1)


def test_stages_begin_at_modules() -> None:
    graph = tower([4] * 5)
    stages = stages_of(graph, RuleBook(graph), 3, ["layers.1", "layers.3"])
    assert linears(graph, stages) == [1, 2, 1]


@pytest.mark.parametrize(
    ("modules", "says"),
    [
        (["layers.7"], "no module 'layers.7'"),
        (["layers.0"], "would leave none before it"),
        (["layers.2", "layers.1"], "would leave none before it"),
        (["layers.2", "layers.2"], "would leave none before it"),
    ],
)
def test_modules_that_begin_no_stage(modules: list[str], says: str) -> None:
    graph = tower([4] * 5)
    with pytest.raises(PlanError, match=says) as caught:
        stages_of(graph, RuleBook(graph), len(modules) + 1, modules)
    assert caught.value.remedy


def test_stages_of_a_recipe() -> None:
    graph = tower([4] * 5)
    plan = load_plan("pp=2,virtual=2,schedule=interleaved,microbatches=4,stages=layers.1+layers.2+layers.3", graph)
    found = {name: stage.devices for name, stage in plan.stages.items()}
    places = [found[op.name] for op in graph.ops if op.kind == "linear"]
    assert places == [(0,), (1,), (0,), (1,)]
    places = [load_plan("pp=2,schedule=zb-v,microbatches=4,stages=layers.1+layers.2+layers.3", graph).stages]
    devices = [places[0][op.name].devices for op in graph.ops if op.kind == "linear"]
    assert devices == [(0,), (1,), (1,), (0,)]


def test_lines_that_do_not_fit() -> None:
    graph = tower([4] * 3)
    ops = [op.name for op in graph.ops]
    plan = Plan(graph, 2)
    with pytest.raises(PlanError, match="devices 0 to 1"):
        plan.stage("a", ops[:1], [2])
    with pytest.raises(PlanError, match="cannot live on devices"):
        plan.stage("a", ops[:1], [])
    with pytest.raises(PlanError, match="in stage 'a' already"):
        plan.stage("a", ops[:2], [0]).stage("b", ops[1:2], [1])
    with pytest.raises(PlanError, match="micro-batches are none"):
        plan.cut_batch(0)
    with pytest.raises(PlanError, match="cut into 2 before"):
        plan.cut_batch(2).cut_batch(4)
    with pytest.raises(PlanError, match="said twice"):
        plan.order("gpipe").order("1f1b")


class Uneven(nn.Module):
    """Layers of one size, of which the first may be wide inside, and a head that may be heavier than all of them."""

    def __init__(self, wide: int, classes: int) -> None:
        super().__init__()
        first = nn.Sequential(nn.Linear(WIDTH, wide), nn.ReLU(), nn.Linear(wide, WIDTH))
        self.layers = nn.ModuleList([first, *(nn.Linear(WIDTH, WIDTH) for _ in range(5))])
        self.head = nn.Linear(WIDTH, classes)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return nn.functional.cross_entropy(self.head(x), y)


@pytest.mark.parametrize(
    ("wide", "classes", "count"),
    [
        (WIDTH // 2, 8 * WIDTH, 2),
        (WIDTH // 2, 8 * WIDTH, 3),
        (5 * WIDTH, WIDTH, 2),
        (5 * WIDTH, WIDTH, 3),
        (4 * WIDTH, 8 * WIDTH, 3),
    ],
)
def test_uneven_models_are_cut_by_time_not_by_layers(wide: int, classes: int, count: int) -> None:
    graph = capture(Uneven(wide, classes), (torch.randn(256, WIDTH), torch.randint(classes, (256,))))
    book = RuleBook(graph)

    def time(ops: Iterable[Op]) -> float:
        return sum(work_of(op, book.rule(op), graph).time for op in ops)

    layers = [*(f"layers.{number}" for number in range(6)), "head"]
    even = stages_of(graph, book, count, [layers[len(layers) * at // count] for at in range(1, count)])
    ours = max(map(time, stages_of(graph, book, count)))
    assert ours < 0.9 * max(map(time, even))
    # what is wide is not cut: too much would cross
    whole = max(time(op for op in graph.ops if op.path.startswith(layer)) for layer in layers)
    assert ours < 1.25 * max(time(graph.ops) / count, whole)
