"""Pipelines of whole models: pieces, micro-batches and every named schedule give the numbers of one device.

Through generated code in the emulator, float64, dropout on: losses, gradients and weights after two steps. Batches are
not a multiple of the micro-batches, so sizes differ. A sample runs always, the whole matrix where `full` tests do
(on processes: tests/processes/test_letters.py).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, lru_cache, partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from tests.pieces import compile_pieces
from tests.processes.conftest import Pools
from weft.compile.model_file import Subject, load_model_file
from weft.compile.pieces import InPieces
from weft.compile.subject import capture_subject
from weft.ir.graph import Graph
from weft.order.names import make_schedule
from weft.plan.load import load_plan
from weft.plan.plan import Plan
from weft.runtime.program.module import ParallelModule
from weft.verify.api import verify
from weft.verify.compare import Sample, compare
from weft.verify.generated import run_generated
from weft.verify.judged import run_both
from weft.verify.reference import run_reference

EXAMPLES = Path(__file__).parents[2] / "examples"
FILES = ("gpt.py", *(f"models/{name}.py" for name in ("llama", "t5", "vit", "swin", "unet", "mixtral")))
PLANS = ("pp=2", "pp=4", "pp=2,tp=2", "dp=2,pp=2", "dp=2,tp=2,pp=2")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")
COUNTS = (1, 4, 7)
ROWS, MORE = 2, 3
"""Rows of a micro-batch: data can be cut in it too. The first has one more."""


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
    return ROWS * (count - 1) + MORE


@lru_cache(maxsize=6)
def compiled(file: str, recipe: str, count: int) -> InPieces:
    subject = subject_of(file, rows_for(count))

    def make(graph: Graph) -> Plan:
        return load_plan(f"{recipe},microbatches={count}", graph)

    # the plan of the whole batch tells how many micro-batches there are: that of one of them does too
    return compile_pieces(subject, make(captured(file, MORE)), make)


def in_order(file: str, plan: str, schedule: str, count: int) -> Mapping[str, bytes]:
    """The files of a plan under a schedule. What does not depend on it is compiled once for all and counts."""
    alike = schedule if schedule in ("interleaved", "zb-v") else "1f1b"
    made = compiled(file, f"{plan},schedule={alike}", max(COUNTS))
    pipeline = replace(made.pipeline, microbatches=count)
    sizes = made.sizes[: max(made.size_of[:count]) + 1]
    order = make_schedule(schedule, pipeline)
    return replace(made, sizes=sizes, size_of=made.size_of[:count], pipeline=pipeline, schedule=order).files()


def equal_to_one_device(file: str, plan: str, schedule: str, count: int, pools: Pools | None = None) -> None:
    subject, reference, graph = subject_of(file, rows_for(count)), reference_of(file, count), captured(file, MORE)
    files = in_order(file, plan, schedule, count)
    run = partial(run_generated, files, graph, subject, seed=7, wide=True, reference=reference)
    if pools is None:
        ours = run()
    else:
        pool = pools(compiled(file, f"{plan},schedule=1f1b", max(COUNTS)).plan.devices)
        ours, found = run_both(run, say=lambda text: None, pool=pool)
        assert found.equal_bits
    assert not ours.disagreements
    worst = max(compare(ours, reference), key=lambda one: one.value)
    assert worst.value < 1e-9, worst


SAMPLE = (
    ("gpt.py", "pp=4", "1f1b", 4),
    ("gpt.py", "dp=2,tp=2,pp=2", "zb-v", 4),
    ("models/llama.py", "pp=2,tp=2", "interleaved", 4),
    pytest.param("models/t5.py", "pp=4", "zb-h1", 1, marks=pytest.mark.full),
    pytest.param("models/unet.py", "dp=2,pp=2", "1f1b", 1, marks=pytest.mark.full),
    pytest.param("models/mixtral.py", "pp=2", "gpipe", 1, marks=pytest.mark.full),
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


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[object, ...]]:
    """How often each recomputed region of each module has run, by step and micro-batch."""
    counted: Counter[tuple[object, ...]] = Counter()
    own = ParallelModule.recompute

    def recompute(
        module: ParallelModule, function: Callable[..., object], *inputs: object, **options: object
    ) -> object:
        def called(*args: object) -> object:
            counted[id(module), module.transport.rank, function.__name__, module.stream] += 1
            return function(*args)

        return own(module, called, *inputs, **options)

    monkeypatch.setattr(ParallelModule, "recompute", recompute)
    return counted


def once_more(runs: Counter[tuple[object, ...]]) -> None:
    """Every region has run forward and once again, for each micro-batch of each step."""
    assert runs and set(runs.values()) == {2}
    streams = Counter(stream for _, _, _, stream in runs)
    assert len(set(streams.values())) == 1, "regions that some micro-batches do not come by"


@pytest.mark.full
@pytest.mark.parametrize(("file", "schedule"), list(itertools.product(FILES, SCHEDULES)))
def test_recomputed(file: str, schedule: str, runs: Counter[tuple[object, ...]]) -> None:
    equal_to_one_device(file, "pp=2,tp=2,recompute", schedule, 4)
    once_more(runs)


@pytest.mark.parametrize(
    "schedule",
    [one if one in ("1f1b", "zb-h1") else pytest.param(one, marks=pytest.mark.full) for one in SCHEDULES],
)
def test_recomputed_once_for_each_block_and_micro_batch(schedule: str, runs: Counter[tuple[object, ...]]) -> None:
    equal_to_one_device("gpt.py", "pp=2,recompute", schedule, 4)
    once_more(runs)


@pytest.mark.full
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("file", "pattern"), [("gpt.py", "**.mlp"), ("models/llama.py", "model.layers.*")])
def test_some_modules_recomputed(file: str, pattern: str, schedule: str, runs: Counter[tuple[object, ...]]) -> None:
    equal_to_one_device(file, f"dp=2,pp=2,recompute={pattern}", schedule, 7)
    once_more(runs)


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
