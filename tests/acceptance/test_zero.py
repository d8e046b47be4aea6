"""ZeRO of whole models: optimizer state, gradients and parameters in parts give the numbers of one device.

Through generated code in the emulator, float64, dropout on: losses, gradients and weights after two steps, for
optimizers with and without state, with one group of parameters or two. A sample runs always, the whole matrix where
`full` tests do.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from torch import nn

from tests.acceptance.test_pipelines import subject_of as sized
from weft.lower import lower
from weft.lower.check import check
from weft.plan.load import load_plan
from weft.verify.compare import Sample, compare
from weft.verify.door import capture_subject
from weft.verify.generated import run_generated
from weft.verify.model_file import Subject
from weft.verify.pieces import compile_pieces
from weft.verify.pipelined import written
from weft.verify.processes import emitted, one_thread
from weft.verify.reference import run_reference

FILES = ("gpt.py", *(f"models/{name}.py" for name in ("llama", "vit", "mixtral")))
PLANS = ("dp=2", "dp=3", "dp=4", "dp=2,tp=2")
PIPELINES = ("dp=2,pp=2", "dp=2,tp=2,pp=2", "dp=2")
STAGES = (1, 2, 3)
ROWS = 10
"""Of a batch: four micro-batches of different sizes, each of which two replicas can share."""


def two_groups(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """No decay on norms and biases."""
    groups = [
        {"params": [one for one in parameters if one.ndim >= 2], "weight_decay": 0.1},
        {"params": [one for one in parameters if one.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2)


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-2),
    "momentum": partial(torch.optim.SGD, lr=1e-2, momentum=0.9, nesterov=True),
    "two groups": two_groups,
}


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


def whole(file: str, plan: str, stage: int, optimizer: str) -> None:
    subject = subject_of(file, optimizer)
    program = lower(load_plan(f"{plan},zero={stage}", capture_subject(subject)))
    check(program)
    reference = reference_of(file, optimizer, 1)
    with emitted(program) as directory, one_thread():
        judged(run_generated(directory, program.graph, subject, seed=7, wide=True, reference=reference), reference)


def in_pieces(file: str, plan: str, stage: int, optimizer: str, count: int) -> None:
    subject, recipe = subject_of(file, optimizer), f"{plan},zero={stage},microbatches={count}"
    graph = capture_subject(subject)
    made = compile_pieces(subject, load_plan(recipe, graph), capture_subject, lambda one: load_plan(recipe, one))
    reference = reference_of(file, optimizer, count)
    with written(made.files()) as directory, one_thread():
        judged(run_generated(directory, graph, subject, seed=7, wide=True, reference=reference), reference)


@pytest.mark.parametrize(
    ("file", "plan", "stage", "optimizer"),
    [
        ("gpt.py", "dp=3", 1, "two groups"),
        ("gpt.py", "dp=2,tp=2", 2, "momentum"),
    ],
)
def test_sample(file: str, plan: str, stage: int, optimizer: str) -> None:
    whole(file, plan, stage, optimizer)


@pytest.mark.parametrize(("plan", "stage"), [("dp=2,pp=2", 2), ("dp=2", 1)])
def test_sample_in_micro_batches(plan: str, stage: int) -> None:
    in_pieces("gpt.py", plan, stage, "adamw", 2)


@pytest.mark.full
@pytest.mark.parametrize(
    ("file", "plan", "stage", "optimizer"), list(itertools.product(FILES, PLANS, STAGES, OPTIMIZERS))
)
def test_matrix(file: str, plan: str, stage: int, optimizer: str) -> None:
    whole(file, plan, stage, optimizer)


@pytest.mark.full
@pytest.mark.parametrize(
    ("file", "plan", "stage", "optimizer"), list(itertools.product(FILES, PIPELINES, STAGES, ("adamw", "momentum")))
)
def test_matrix_in_micro_batches(file: str, plan: str, stage: int, optimizer: str) -> None:
    in_pieces(file, plan, stage, optimizer, 4)
