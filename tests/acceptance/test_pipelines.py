"""Pipelines of whole models: pieces, micro-batches and every named schedule give the numbers of one device.

Through generated code in the emulator, float64, dropout on: losses, gradients and weights after two steps. Batches are
not a multiple of the micro-batches, so sizes differ. A sample runs always, the whole matrix where `full` tests do
(on processes: tests/processes/test_letters.py).
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from tests.processes.conftest import Pools
from weft.ir.graph import Graph
from weft.plan.load import load_plan
from weft.plan.plan import Plan
from weft.verify.compare import Sample, compare
from weft.verify.door import capture_subject, verify
from weft.verify.model_file import Subject, load_model_file
from weft.verify.pieces import InPieces, compile_pieces
from weft.verify.pipelined import run_pieces, written
from weft.verify.processes import compare_with_emulator, one_thread
from weft.verify.reference import run_reference

EXAMPLES = Path(__file__).parents[2] / "examples"
FILES = ("gpt.py", *(f"models/{name}.py" for name in ("llama", "t5", "vit", "swin", "unet", "mixtral")))
PLANS = ("pp=2", "pp=4", "pp=2,tp=2", "dp=2,pp=2", "dp=2,tp=2,pp=2")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")
COUNTS = (1, 4, 7)


@cache
def subject_of(file: str, rows: int) -> Subject:
    """The model of a file, its example cut or repeated to so many rows."""
    found = load_model_file(str(EXAMPLES / file))
    own = next(leaf.shape[0] for leaf in pytree.tree_leaves(found.example) if isinstance(leaf, torch.Tensor))

    def sized(leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor) or not leaf.dim() or leaf.shape[0] != own:
            return leaf
        return leaf[torch.arange(rows) % own]

    return replace(found, example=pytree.tree_map(sized, found.example))


@cache
def captured(file: str, rows: int) -> Graph:
    return capture_subject(subject_of(file, rows))


@cache
def reference_of(file: str, count: int) -> Sample:
    return run_reference(subject_of(file, rows_for(count)), seed=7, wide=True, microbatches=count)


def rows_for(count: int) -> int:
    """Two in each micro-batch, so that data can be cut in it too, and one more."""
    return 2 * count + 1


def compiled(file: str, recipe: str, count: int) -> InPieces:
    subject = subject_of(file, rows_for(count))

    def capture(one: Subject) -> Graph:
        first = next(leaf for leaf in pytree.tree_leaves(one.example) if isinstance(leaf, torch.Tensor))
        return captured(file, first.shape[0])

    def make(graph: Graph) -> Plan:
        return load_plan(recipe, graph)

    return compile_pieces(subject, make(capture(subject)), capture, make)


def equal_to_one_device(file: str, plan: str, schedule: str, count: int, pools: Pools | None = None) -> None:
    subject = subject_of(file, rows_for(count))
    recipe = f"{plan},microbatches={count},schedule={schedule}"
    made = compiled(file, recipe, count)
    reference = reference_of(file, count)
    with written(made) as directory:
        with one_thread():
            ours = run_pieces(directory, made, subject, seed=7, wide=True, reference=reference)
        if pools is not None:
            emulated, pool = ours, pools(made.plan.devices)
            ours = run_pieces(directory, made, subject, seed=7, wide=True, reference=reference, pool=pool)
            assert compare_with_emulator(ours, emulated, made.plan.devices).equal_bits
    assert not ours.disagreements
    worst = max(compare(ours, reference), key=lambda found: found.value)
    assert worst.value < 1e-9, worst


SAMPLE = (
    ("gpt.py", "pp=4", "1f1b", 4),
    ("gpt.py", "dp=2,tp=2,pp=2", "zb-v", 4),
    ("gpt.py", "pp=2,tp=2,recompute", "zb-h1", 7),
    ("models/llama.py", "pp=2,tp=2", "interleaved", 4),
    ("models/t5.py", "pp=4", "zb-h1", 1),
    ("models/unet.py", "dp=2,pp=2", "1f1b", 1),
    ("models/mixtral.py", "pp=2", "gpipe", 1),
)


@pytest.mark.parametrize(("file", "plan", "schedule", "count"), SAMPLE)
def test_sample(file: str, plan: str, schedule: str, count: int) -> None:
    equal_to_one_device(file, plan, schedule, count)


@pytest.mark.full
@pytest.mark.parametrize(
    ("file", "plan", "schedule", "count"), list(itertools.product(FILES, PLANS, SCHEDULES, COUNTS))
)
def test_matrix(file: str, plan: str, schedule: str, count: int) -> None:
    equal_to_one_device(file, plan, schedule, count)


@pytest.mark.full
@pytest.mark.parametrize(("file", "schedule"), list(itertools.product(FILES, SCHEDULES)))
def test_recomputed(file: str, schedule: str) -> None:
    equal_to_one_device(file, "pp=2,tp=2,recompute", schedule, 4)


@pytest.mark.full
def test_passes_without_gradient() -> None:
    """The first stages of an Evoformer are recycling passes; the last ones hold the same weights."""
    equal_to_one_device("models/evoformer.py", "pp=4,tp=2", "1f1b", 2)


class Normed(nn.Module):
    """Running statistics in both halves."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.ReLU()) for _ in range(3))
        )

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.layers(x), y)


@pytest.mark.parametrize(("rows", "count"), [(8, 4), (9, 4), (7, 3)])
def test_buffers_go_on_from_one_size_to_the_other(rows: int, count: int) -> None:
    result = verify(
        Normed(), (torch.randn(rows, 6), torch.randn(rows, 6)), plan=f"pp=2,microbatches={count},schedule=gpipe"
    )
    assert result.equal, result.differences


def test_a_loss_of_another_precision() -> None:
    """Told to all ranks as it is, in the model's own precision too."""
    batch = torch.randn(4, 6, dtype=torch.bfloat16), torch.randn(4, 6, dtype=torch.bfloat16)
    assert verify(Normed().bfloat16(), batch, plan="pp=2,microbatches=2").equal
