"""What a rank of a pipeline does with its events, on files small enough to follow; teams and micro-batches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from weft.capture import capture
from weft.codegen.pipeline import generate_pipeline
from weft.ir.schedule import Pipeline
from weft.lower.pipeline import lower_pieces
from weft.order import make_schedule
from weft.plan.load import load_plan
from weft.runtime.links.emulator import run_ranks
from weft.runtime.links.replicas import Replica
from weft.runtime.links.subgroup import Subgroup
from weft.runtime.links.transport import CollectiveMismatch, Doing, Transport
from weft.runtime.training.load import load_pipeline
from weft.runtime.training.microbatches import TooFewRows, default_dims, split, split_arguments
from weft.runtime.training.pipeline import Event, Rank

MICROS = 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.down(torch.relu(self.up(x))), y)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Net]:
    return write_pipeline(tmp_path)


def write_pipeline(tmp_path: Path) -> tuple[Path, Net]:
    """A net in two stages, `up` and `down`, and its files."""
    module = Net().double()
    batch = (torch.randn(2, 4, dtype=torch.float64), torch.randn(2, 4, dtype=torch.float64))
    plan = load_plan(f"pp=2,microbatches={MICROS},stages=down", capture(module, batch))
    made = lower_pieces(plan)
    pipeline = Pipeline(tuple(part.piece.segment for part in made.parts), MICROS)
    for name, content in generate_pipeline([made], make_schedule("1f1b", pipeline)).items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    return tmp_path, module


def loaded(transport: Transport, folder: Path, module: nn.Module) -> Rank:
    rank = load_pipeline(folder, Replica(transport, transport.num_ranks))
    state = module.state_dict()
    with torch.no_grad():
        for one in rank.modules:
            for name in one.stored:
                one.part(name).copy_(state[name])
    return rank


def batches() -> list[list[torch.Tensor]]:
    draws = torch.Generator().manual_seed(0)
    return [[torch.randn(2, 4, dtype=torch.float64, generator=draws) for _ in "xy"] for _ in range(MICROS)]


def test_a_step_is_that_of_one_device(files: tuple[Path, Net]) -> None:
    folder, module = files
    counts = [0.5, 0.3, 0.2]

    def body(transport: Transport) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        rank = loaded(transport, folder, module)
        losses = rank.step(batches(), counts, 0, 0)
        return losses, {name: p.grad for one in rank.modules for name, p in one.trained() if p.grad is not None}

    expected = [module(*one) for one in batches()]
    torch.stack([loss * count for loss, count in zip(expected, counts, strict=True)]).sum().backward()
    found = run_ranks(2, body)
    grads = {**found[0][1], **found[1][1]}
    assert grads.keys() == dict(module.named_parameters()).keys()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-13, atol=1e-14)
    for losses, _ in found:
        torch.testing.assert_close(torch.stack(losses), torch.stack(expected).detach(), rtol=1e-13, atol=1e-14)


def test_nothing_is_kept_after_a_step(files: tuple[Path, Net]) -> None:
    folder, module = files

    def body(transport: Transport) -> bool:
        rank = loaded(transport, folder, module)
        for step in range(2):
            rank.step(batches(), [1 / MICROS] * MICROS, 0, step)
        return not rank._saved and not rank._queues

    assert run_ranks(2, body) == [True, True]


def test_a_lost_event_is_a_deadlock_that_names_events(files: tuple[Path, Net]) -> None:
    """Nobody runs the check here: even so nobody hangs, and what was waited for is told."""
    folder, module = files

    def body(transport: Transport) -> None:
        rank = loaded(transport, folder, module)
        if transport.rank == 1:
            rank.events = [event for event in rank.events if (event.phase, event.micro) != ("b", 1)]
        rank.step(batches(), [1 / MICROS] * MICROS, 0, 0)

    with pytest.raises(CollectiveMismatch, match="deadlock") as caught:
        run_ranks(2, body, timeout=20)
    line = f"test_pipeline.py:{Net.forward.__code__.co_firstlineno + 1}"
    assert "waits for gradient of" in str(caught.value), caught.value
    assert f"micro-batch 1 from rank 1 (in B1 of up at {line})" in str(caught.value), caught.value


def test_events_in_words() -> None:
    assert str(Event("b", "blocks.0-3", 2)) == "B2 of blocks.0-3"


def test_a_team_sees_only_itself() -> None:
    def body(transport: Transport) -> tuple[int, float, float, list[float]]:
        ranks = (3, 1) if transport.rank % 2 else (0, 2)
        team = Subgroup(Replica(transport, 4), ranks)
        team.doing = Doing("F0 of a")
        assert transport.doing == team.doing and team.num_ranks == 2
        mine = torch.tensor([float(transport.rank)])
        total = team.all_reduce(mine, (0, 1)).item()
        parts = torch.cat(team.all_gather(mine, (1, 0))).tolist()
        team.post(1 - team.rank, "to the other", [mine])
        (other,) = team.take(1 - team.rank, "to the other", [((1,), torch.float32)])
        team.barrier((0, 1))
        return team.rank, total, other.item(), parts

    assert run_ranks(4, body) == [
        (0, 2.0, 2.0, [2.0, 0.0]),
        (1, 4.0, 3.0, [1.0, 3.0]),
        (1, 2.0, 0.0, [2.0, 0.0]),
        (0, 4.0, 1.0, [1.0, 3.0]),
    ]


@pytest.mark.parametrize(("rows", "count"), [(8, 4), (9, 4), (7, 7), (5, 1)])
def test_micro_batches_cover_the_batch(rows: int, count: int) -> None:
    x, fixed = torch.arange(rows * 2).view(rows, 2), torch.arange(3)
    parts = split([x, fixed], [0, None], count)
    assert torch.equal(torch.cat([one for one, _ in parts]), x)
    assert all(torch.equal(other, fixed) for _, other in parts)
    sizes = [len(one) for one, _ in parts]
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)
    assert split_arguments([x, fixed], {}, [0, None], count)[1] == [size / rows for size in sizes]


def test_rows_that_cannot_be_cut() -> None:
    with pytest.raises(TooFewRows, match="3 rows cannot be cut into 4"):
        split([torch.zeros(3, 2)], [0], 4)
    with pytest.raises(TooFewRows, match=r"\[2, 3\]"):
        split([torch.zeros(3), torch.zeros(2)], [0, 0], 2)


def test_arguments_of_all_sorts() -> None:
    assert default_dims([torch.zeros(4, 2), torch.zeros(()), torch.zeros(3), torch.zeros(4)]) == [0, None, None, 0]
    made, _ = split_arguments((torch.zeros(4, 2), 7), {"mask": torch.ones(4), "name": "x"}, None, 2)
    assert [(args[0].shape[0], args[1], kw["mask"].shape[0], kw["name"]) for args, kw in made] == [(2, 7, 2, "x")] * 2
