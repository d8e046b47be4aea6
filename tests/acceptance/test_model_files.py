"""Every model file of examples/models under the five plans of the operators' promise, and what of its work is divided.

The interpreter and the generated code in the emulator: loss, gradients and weights after two steps equal one device,
dropout on (a third of the files on processes too: tests/processes/test_model_files.py). A sample runs always, the whole
matrix where `full` tests do.
"""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path

import pytest

from tests.processes.conftest import Pools
from weft.codegen import generate
from weft.compile.model_file import Subject, load_model_file
from weft.compile.subject import capture_subject
from weft.ir.graph import Graph
from weft.lower import lower
from weft.lower.check import check
from weft.plan.divided import divided
from weft.plan.load import load_plan
from weft.verify.compare import Sample, compare
from weft.verify.generated import run_generated
from weft.verify.processes import compare_with_emulator, one_thread
from weft.verify.reference import run_reference

FOLDER = Path(__file__).parents[2] / "examples" / "models"
FILES = tuple(sorted(path.stem for path in FOLDER.glob("*.py")))
PLANS = ("dp=2", "tp=2", "tp=3", "dp=2,tp=2", "coshard=2")
EXPERTS = ("mixtral", "deepseek_v3")
"""Their routers choose: less of the work is divided."""
ELSEWHERE = ("bert", "deepseek_v3", "graph", "llama", "mixtral", "qwen3", "state_space")
"""Samples of test_recipes.py and test_experts.py have them."""
LONG = ("evoformer", "swin", "unet")


@cache
def captured(name: str) -> tuple[Subject, Graph]:
    subject = load_model_file(str(FOLDER / f"{name}.py"))
    return subject, capture_subject(subject)


@cache
def prepared(name: str) -> tuple[Subject, Graph, Sample]:
    subject, graph = captured(name)
    return subject, graph, run_reference(subject, seed=7, wide=True)


def equal_to_one_device(name: str, recipe: str, pools: Pools | None = None) -> None:
    subject, graph, reference = prepared(name)
    program = lower(load_plan(recipe, graph))
    check(program)
    files = generate(program)
    with one_thread():
        emulated = run_generated(files, graph, subject, seed=7, wide=True, reference=reference)
    outcomes = [emulated]
    if pools is not None:
        pool = pools(program.devices)
        real = run_generated(files, graph, subject, seed=7, wide=True, reference=reference, pool=pool)
        assert compare_with_emulator(real, emulated, program.devices).equal_bits
        outcomes.append(real)
    for ours in outcomes:
        assert not ours.disagreements
        worst = max(compare(ours, reference), key=lambda found: found.value)
        assert worst.value < 1e-9, worst


def sample() -> list[object]:
    """A plan for each file, in turn."""
    return [
        pytest.param(name, PLANS[i % len(PLANS)], marks=pytest.mark.full if name in (*ELSEWHERE, *LONG) else ())
        for i, name in enumerate(FILES)
    ]


@pytest.mark.parametrize(("name", "recipe"), sample())
def test_sample(name: str, recipe: str) -> None:
    equal_to_one_device(name, recipe)


@pytest.mark.full
@pytest.mark.parametrize(("name", "recipe"), list(itertools.product(FILES, PLANS)))
def test_matrix(name: str, recipe: str) -> None:
    equal_to_one_device(name, recipe)


@pytest.mark.parametrize("name", FILES)
def test_nearly_all_work_is_divided(name: str) -> None:
    found = divided(load_plan("tp=2", captured(name)[1]))
    assert found.flops_share >= (0.90 if name in EXPERTS else 0.95), found.rest[:3]
