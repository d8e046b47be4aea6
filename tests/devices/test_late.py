"""The matrices of models under recipes and schedules on the transport of devices, whose results come late: the numbers
of one device, and what is read or written by a call that is under way is left alone.

The same cases as under tests/acceptance, which has them in the emulator. A sample runs always, the whole matrices where
`full` tests do.
"""

from __future__ import annotations

import itertools

import pytest

import weft
from tests.acceptance import test_model_files as files
from tests.acceptance import test_pipelines as pipelines
from tests.acceptance import test_recipes as recipes
from tests.acceptance.subjects import prepared
from tests.acceptance.test_models import equal_to_one_device
from tests.devices.in_process import Recorder
from weft.plan.load import load_plan


def sampled(cases: list[tuple[object, ...]], sample: set[tuple[object, ...]]) -> list[object]:
    """All cases; those that are no sample are for full runs."""
    assert sample <= set(cases)
    return [case if case in sample else pytest.param(*case, marks=pytest.mark.full) for case in cases]


RECIPES = {("gpt-tied", "dp=2,tp=2,sp,recompute"), ("qwen3", "dp=2,tp=2,zero=3"), ("vit", "tp=3,sp")}
FILES = {("state_space", "dp=2,tp=2")}
PIPELINES = {("gpt.py", "dp=2,pp=2", "zb-h1"), ("gpt.py", "pp=2,tp=2", "interleaved")}


@pytest.mark.parametrize(("name", "recipe"), sampled(list(itertools.product(recipes.MODELS, recipes.RECIPES)), RECIPES))
def test_recipes(recorders: list[Recorder], name: str, recipe: str) -> None:
    equal_to_one_device(name, load_plan(recipe, prepared(name)[1]))


@pytest.mark.parametrize(("name", "recipe"), sampled(list(itertools.product(files.FILES, files.PLANS)), FILES))
def test_model_files(recorders: list[Recorder], name: str, recipe: str) -> None:
    files.equal_to_one_device(name, recipe)


@pytest.mark.parametrize(
    ("file", "plan", "schedule"),
    sampled(list(itertools.product(pipelines.FILES, pipelines.PLANS, pipelines.SCHEDULES)), PIPELINES),
)
def test_pipelines(recorders: list[Recorder], file: str, plan: str, schedule: str) -> None:
    pipelines.equal_to_one_device(file, plan, schedule, 4)


OTHERS = [
    ("models/evoformer.py", "pp=4,microbatches=2,schedule=nf1b"),
    ("models/mixtral.py", "pp=2,tp=2,microbatches=4,schedule=interlaced"),
    ("moe.py", "dp=2,tp=2,spread=matrices,zero=2"),
    ("lora.py", "dp=4,zero=2,zero_groups=2,recompute"),
    ("custom_ops.py", "dp=2,zero=3,microbatches=2"),
]


@pytest.mark.full
@pytest.mark.parametrize(("file", "plan"), OTHERS)
def test_other_schedules_and_stores(recorders: list[Recorder], file: str, plan: str) -> None:
    result = weft.verify(pipelines.EXAMPLES / file, plan=plan)
    assert result.equal, str(result)


@pytest.mark.parametrize("plan", ["dp=2,zero=3", pytest.param("pp=2,microbatches=2", marks=pytest.mark.full)])
def test_mixed_precision(recorders: list[Recorder], plan: str) -> None:
    result = weft.verify(pipelines.EXAMPLES / "mlp.py", plan=plan, precision="bf16")
    assert result.equal, str(result)
