"""ZeRO of whole models: optimizer state, gradients and parameters in parts give the numbers of one device.

In float64, dropout on: losses, gradients and weights after two steps through generated code in the emulator, for
optimizers with and without state, with one group of parameters or two, elementwise or not (those get whole matrices by
`spread`, zero has the rest); and with clipping, as a user trains. A sample runs always, the whole matrix where `full`
tests do.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import weft
from tests.acceptance.test_pipelines import captured
from tests.acceptance.test_pipelines import subject_of as sized
from tests.pieces import compile_pieces
from weft.capture.example import split_example
from weft.codegen import generate
from weft.compile.model_file import Subject, check_loss
from weft.lower import lower
from weft.lower.check import check
from weft.plan.load import load_plan
from weft.runtime.random import Stream
from weft.runtime.training.combined_optimizer import as_one
from weft.runtime.training.microbatches import split_arguments
from weft.verify.compare import Sample, compare
from weft.verify.draw_mode import DrawMode
from weft.verify.generated import run_generated
from weft.verify.processes import one_thread
from weft.verify.reference import run_reference

FILES = ("gpt.py", *(f"models/{name}.py" for name in ("llama", "vit", "mixtral")))
DOUBLED = (*FILES[:-1], "moe.py")
"""Models that run in float64 as they are: torch has no grouped product of it."""
NEAR = {"models/llama.py": 1e-5}
"""Its norms are computed in float32, whatever they are given."""
PLANS = ("dp=2", "dp=3", "dp=4", "dp=2,tp=2", "dp=4,zero_groups=2")
PIPELINES = ("dp=2", "dp=2,pp=2", "dp=2,tp=2,pp=2")
STAGES = (1, 2, 3)
ROWS = 10
"""Of a batch: four micro-batches of different sizes, each of which two replicas can share."""
STEPS = 2
BOUND = 0.1
"""Of a norm: gradients of these models are longer."""

Parameters = Sequence[nn.Parameter]


def two_groups(parameters: Parameters) -> torch.optim.Optimizer:
    """No decay on norms and biases."""
    groups = [
        {"params": [one for one in parameters if one.ndim >= 2], "weight_decay": 0.1},
        {"params": [one for one in parameters if one.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2)


def matrices_by(kind: Any, parameters: Parameters) -> list[torch.optim.Optimizer]:
    """What has two dims by one that looks at all of it, the rest by AdamW."""
    matrices = [one for one in parameters if one.ndim == 2]
    others = [one for one in parameters if one.ndim != 2]
    return [kind(matrices, lr=1e-2), torch.optim.AdamW(others, lr=1e-2)]


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-2),
    "momentum": partial(torch.optim.SGD, lr=1e-2, momentum=0.9, nesterov=True),
    "two groups": two_groups,
    "muon": as_one(partial(matrices_by, torch.optim.Muon)),
    "adafactor": as_one(partial(matrices_by, torch.optim.Adafactor)),
}
ELEMENTWISE = ("momentum", "two groups")
MIXING = ("muon", "adafactor")


@cache
def subject_of(file: str, optimizer: str) -> Subject:
    return replace(sized(file, ROWS), optimizer=OPTIMIZERS[optimizer])


@cache
def reference_of(file: str, optimizer: str, count: int) -> Sample:
    return run_reference(subject_of(file, optimizer), seed=7, wide=True, microbatches=count)


def judged(ours: Sample, reference: Sample) -> None:
    assert not ours.disagreements
    worst = max(compare(ours, reference), key=lambda one: one.value)
    assert worst.value < 1e-9, worst


def recipe_of(plan: str, stage: int, optimizers: Sequence[str]) -> str:
    whole = ",spread=matrices" if set(optimizers) <= set(MIXING) else ""
    return f"{plan},zero={stage}{whole}"


def whole(file: str, plan: str, stage: int, *optimizers: str) -> None:
    """One program, a run for each optimizer."""
    program = lower(load_plan(recipe_of(plan, stage, optimizers), captured(file, ROWS)))
    check(program)
    files = generate(program)
    with one_thread():
        for optimizer in optimizers:
            subject, reference = subject_of(file, optimizer), reference_of(file, optimizer, 1)
            judged(run_generated(files, program.graph, subject, seed=7, wide=True, reference=reference), reference)


def in_pieces(file: str, plan: str, stage: int, count: int, *optimizers: str) -> None:
    """The same in micro-batches."""
    recipe = f"{recipe_of(plan, stage, optimizers)},microbatches={count}"
    graph, cut = captured(file, ROWS), partial(load_plan, recipe)
    made = compile_pieces(subject_of(file, optimizers[0]), cut(graph), cut)
    files = made.files()
    with one_thread():
        for optimizer in optimizers:
            subject, reference = subject_of(file, optimizer), reference_of(file, optimizer, count)
            judged(run_generated(files, graph, subject, seed=7, wide=True, reference=reference), reference)


def doubled(example: Any) -> Any:
    def double(leaf: object) -> object:
        return leaf.double() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return pytree.tree_map(double, example)


def eager_step(module: nn.Module, example: Any, count: int, step: int) -> None:
    """Gradients of a step in micro-batches, as one device makes them."""
    args, kwargs = split_example(example)
    for micro, ((some, named), share) in enumerate(zip(*split_arguments(args, dict(kwargs), None, count), strict=True)):
        with DrawMode(Stream(0, step, micro)):
            loss = check_loss(module(*some, **named), "")
        (loss * share).backward()


def clipped(file: str, recipe: str, count: int = 1) -> None:
    """Trained as a user does, gradients clipped by the norm of all of them."""
    subject, near = sized(file, ROWS), NEAR.get(file, 1e-9)
    eager, example = copy.deepcopy(subject.model).double(), doubled(subject.example)
    plan = f"{recipe},microbatches={count}" if count > 1 else recipe
    parallel: Any = weft.parallelize(copy.deepcopy(eager), example, plan, emulate=True, cache=None)
    # what is rounding alone in a gradient must not become a step of full length
    mine, wanted = (torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-3) for module in (parallel, eager))
    for step in range(STEPS):
        for optimizer in (mine, wanted):
            optimizer.zero_grad()
        eager_step(eager, example, count, step)
        parallel.forward_backward(example)
        norm = torch.nn.utils.clip_grad_norm_(eager.parameters(), BOUND)
        assert norm > BOUND
        torch.testing.assert_close(weft.clip_grad_norm_(parallel, BOUND), norm, rtol=near, atol=0)
        for optimizer in (mine, wanted):
            optimizer.step()
    found = parallel.state_dict()
    for name, tensor in eager.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=near, atol=near / 10, msg=lambda text, n=name: n + text)


# --- the sample -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "stage", "optimizer"),
    [("dp=3", 1, "two groups"), ("dp=2,tp=2", 2, "momentum"), ("dp=4,zero_groups=2", 2, "adamw")],
)
def test_sample(plan: str, stage: int, optimizer: str) -> None:
    whole("gpt.py", plan, stage, optimizer)


@pytest.mark.parametrize(("plan", "stage"), [("dp=2,pp=2", 2), ("dp=2", 1)])
def test_sample_in_micro_batches(plan: str, stage: int) -> None:
    in_pieces("gpt.py", plan, stage, 2, "adamw")


# --- the matrix -------------------------------------------------------------------------------------------------


def rotated(plans: Sequence[str], files: Sequence[str] = FILES) -> list[tuple[str, str, int]]:
    """Every file under every plan, each with one of the stages in turn."""
    pairs = itertools.product(files, plans)
    return [(file, plan, STAGES[number % len(STAGES)]) for number, (file, plan) in enumerate(pairs)]


@pytest.mark.full
@pytest.mark.parametrize(("file", "plan", "stage"), list(itertools.product(FILES, PLANS, STAGES)))
def test_matrix(file: str, plan: str, stage: int) -> None:
    whole(file, plan, stage, *ELEMENTWISE)


@pytest.mark.full
@pytest.mark.parametrize(("file", "plan", "stage"), list(itertools.product(FILES, PIPELINES, STAGES)))
def test_matrix_in_micro_batches(file: str, plan: str, stage: int) -> None:
    in_pieces(file, plan, stage, 4, *ELEMENTWISE)


@pytest.mark.full
@pytest.mark.parametrize(("file", "plan", "stage"), rotated(PLANS))
def test_matrix_of_whole_matrices(file: str, plan: str, stage: int) -> None:
    whole(file, plan, stage, *MIXING)


@pytest.mark.full
@pytest.mark.parametrize(("file", "plan", "stage"), rotated(PIPELINES))
def test_matrix_of_whole_matrices_in_micro_batches(file: str, plan: str, stage: int) -> None:
    in_pieces(file, plan, stage, 4, *MIXING)


@pytest.mark.full
@pytest.mark.parametrize(("file", "plan", "stage"), rotated(PLANS, DOUBLED))
def test_matrix_clipped(file: str, plan: str, stage: int) -> None:
    clipped(file, f"{plan},zero={stage}")


@pytest.mark.full
@pytest.mark.parametrize(("file", "plan", "stage"), rotated(PIPELINES, DOUBLED))
def test_matrix_clipped_in_micro_batches(file: str, plan: str, stage: int) -> None:
    clipped(file, f"{plan},zero={stage}", 4)


class Biased(nn.Module):
    """A parameter that the batch is multiplied with before it is cut, as its mask is: the ops cut it along dp too."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.scale = nn.Parameter(torch.randn(4, 4)), nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x) + self.table
        h = h @ h.transpose(1, 2) + h.transpose(1, 2) * self.scale[:, None]
        return h.square().mean() + (self.table * self.table.t()).sum()


@pytest.mark.parametrize("stage", STAGES)
def test_what_the_ops_cut_over_replicas_is_stored_as_they_use_it(stage: int) -> None:
    assert weft.verify(Biased(), torch.randn(4, 4, 4), plan=f"dp=2,zero={stage}").equal
