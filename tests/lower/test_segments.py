"""Pieces: convex, in an order in which each stands after what it reads, and what may not be divided is not."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from tests.property.graphs import random_case
from tests.property.plans import staged_plan
from weft.capture import capture
from weft.errors import PlanError, RuleError
from weft.ir.graph import Graph
from weft.lower.pipeline import lower_pieces
from weft.lower.segments import _between
from weft.plan.load import load_plan
from weft.plan.plan import Plan


class Skips(nn.Module):
    """A value that is read by all later layers, one that is read without gradient, a mask that all make."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        first = self.layers[0](x)
        mask = torch.ones(6, 6).tril()
        found = first
        for layer in self.layers[1:]:
            found = layer(found) @ mask + first
        with torch.no_grad():
            scale = first.abs().mean()
        return nn.functional.mse_loss(found, y) * scale


class Average(nn.Module):
    """A buffer that is read at the start and written at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found = self.b(torch.relu(self.a(x - self.mean)))
        self.mean.copy_(self.mean * 0.9 + found.detach().mean(0) * 0.1)
        return nn.functional.mse_loss(found, y)


class Far(nn.Module):
    """What the second layer makes is read by the third, and, by another way, by the fourth alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        second = self.layers[1](self.layers[0](x))
        weights = torch.softmax(second, -1)
        return nn.functional.mse_loss(self.layers[3](self.layers[2](second)) * weights, y)


def captured(module: nn.Module) -> Graph:
    return capture(module, (torch.randn(4, 6), torch.randn(4, 6)))


def test_what_a_stage_makes_for_one_far_behind_it_is_no_stage_of_its_own() -> None:
    graph = captured(Far())
    plan = Plan(graph, 4)
    for number in range(4):
        ops = [op.name for op in graph.ops if op.path == f"layers.{number}" or (not op.path and number == 3)]
        ops = [name for name in ops if "softmax" not in name or number != 3]
        ops += [op.name for op in graph.ops if "softmax" in op.name and number == 1]
        plan = plan.stage(str(number), ops, [number])
    segments = [part.piece.segment for part in lower_pieces(plan).parts]
    assert [one.devices for one in segments] == [(0,), (1,), (2,), (3,)]
    assert set(segments[3].reads) == {segments[1].name, segments[2].name}


def test_random_pieces_are_convex_and_in_order() -> None:
    found = 0
    for seed in range(40):
        draw = random.Random(seed)
        case = random_case(seed)
        try:
            made = lower_pieces(staged_plan(case.graph, draw))
        except (PlanError, RuleError):
            continue
        found += 1
        names = [part.piece.segment.name for part in made.parts]
        assert len(set(names)) == len(names)
        home = {name: number for number, part in enumerate(made.parts) for name in part.piece.gives}
        for number, part in enumerate(made.parts):
            assert all(home[name] < number for name in part.piece.takes)
            reads = {names[home[name]] for name in part.piece.takes}
            assert set(part.piece.segment.reads) == reads
        made_somewhere = {name for part in made.parts for op in part.piece.ops for name in op.outputs}
        wanted = {name for name in case.graph.outputs if name is not None}
        assert wanted <= made_somewhere
    assert found > 20


def test_a_skip_crosses_to_each_reader_and_masks_do_not_cross() -> None:
    made = lower_pieces(load_plan("pp=4,microbatches=2,stages=layers.1+layers.2+layers.3", captured(Skips())))
    assert len(made.parts) == 4
    sizes = {one.tensor: made.graph.tensors[one.tensor].sizes for one in made.crossings}
    assert (6, 6) not in sizes.values(), "the mask is made by whoever needs it"
    targets = [one.target for one in made.crossings if one.tensor == "layers.0/linear"]
    assert targets == [part.piece.segment.name for part in made.parts[1:]]


def test_who_reads_without_gradient_sends_none_back() -> None:
    """A piece of its own reads a trained value under no_grad: the giver must not wait for it."""
    graph = captured(Skips())
    quiet = [op.name for op in graph.ops if op.kind in ("abs", "mean")]
    assert quiet
    rest = [op.name for op in graph.ops if op.name not in quiet]
    made = lower_pieces(Plan(graph, 2).stage("a", rest, [0]).stage("b", quiet, [1]))
    (piece,) = [part.piece.segment for part in made.parts if part.piece.segment.devices == (1,)]
    assert not piece.trains
    assert [one.backward for one in made.crossings if one.target == piece.name] == [None]


def test_a_buffer_lives_in_one_piece() -> None:
    graph = captured(Average())
    ops = [op.name for op in graph.ops]
    reader = next(i for i, op in enumerate(graph.ops) if any(b.tensor in op.inputs for b in graph.buffers))
    plan = Plan(graph, 2).stage("a", ops[: reader + 1], [0]).stage("b", ops[reader + 1 :], [1])
    with pytest.raises(PlanError, match="buffer mean is read and written in different stages"):
        lower_pieces(plan)


def test_balanced_cuts_leave_a_buffer_whole() -> None:
    for stages in (2, 3):
        made = lower_pieces(load_plan(f"pp={stages},microbatches=2", captured(Before())))
        assert len(made.parts) == stages


class Before(Average):
    """Layers in front of what may not be divided."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return super().forward(self.front(x), y)


@pytest.mark.parametrize(
    ("first", "last", "name"),
    [
        ("h.0.attn", "h.3.mlp", "h.0-3"),
        ("wte", "h.1.mlp", "wte..h.1"),
        ("head", "head", "head"),
        ("h.2.attn", "h.2.mlp", "h.2.attn..mlp"),
    ],
)
def test_names(first: str, last: str, name: str) -> None:
    assert _between(first, last) == name
