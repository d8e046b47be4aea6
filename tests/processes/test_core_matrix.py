"""Everything that Core promises, on processes, through generated code.

Every acceptance model under every recipe and hand-written plan for 2, 3 or 4 devices: equal bit for bit to the same
generated code in the emulator, and to the eager model near rounding.
"""

from __future__ import annotations

import itertools

import pytest

from tests.acceptance.subjects import HAND_WRITTEN, MODELS, RECIPES, prepared
from tests.processes.conftest import Pools
from weft.codegen import generate
from weft.ir.graph import Graph
from weft.lower import lower
from weft.plan.load import load_plan
from weft.plan.plan import Plan
from weft.verify.compare import compare
from weft.verify.generated import run_generated
from weft.verify.processes import compare_with_emulator, one_thread

PLANS = (*(recipe for recipe in RECIPES if recipe != "coshard=4"), *HAND_WRITTEN)
"""For several devices: `coshard=4` is for one."""
SAMPLE = (
    ("mlp", "dp=3"),
    ("mlp", "uneven"),
    ("gpt-tied", "tp=4"),
    ("gpt-tied", "stored-split"),
    ("gpt-untied", "megatron"),
    ("gpt2", "dp=2,tp=2"),
    ("llama", "dp=2,coshard=2"),
    ("bert", "different-grids"),
)


def make_plan(plan: str, graph: Graph) -> Plan:
    return HAND_WRITTEN[plan](graph) if plan in HAND_WRITTEN else load_plan(plan, graph)


def equal_on_processes(name: str, plan: str, pools: Pools) -> None:
    subject, graph, reference = prepared(name)
    program = lower(make_plan(plan, graph))
    assert program.devices in (1, 2, 3, 4)
    files = generate(program)
    with one_thread():
        emulated = run_generated(files, graph, subject, seed=7, wide=True, reference=reference)
    pool = pools(program.devices)
    ours = run_generated(files, graph, subject, seed=7, wide=True, reference=reference, pool=pool)
    assert not ours.disagreements
    assert ours.gradients[0].keys() == reference.gradients[0].keys() and ours.weights.keys() == reference.weights.keys()
    worst = max(compare(ours, reference), key=lambda found: found.value)
    assert worst.value < 1e-9, worst
    found = compare_with_emulator(ours, emulated, program.devices)
    assert found.equal_bits, found


@pytest.mark.parametrize(("name", "plan"), SAMPLE)
def test_sample(name: str, plan: str, pools: Pools) -> None:
    equal_on_processes(name, plan, pools)


@pytest.mark.full
@pytest.mark.parametrize(("name", "plan"), [pair for pair in itertools.product(MODELS, PLANS) if pair not in SAMPLE])
def test_matrix(name: str, plan: str, pools: Pools) -> None:
    equal_on_processes(name, plan, pools)


@pytest.mark.full
@pytest.mark.parametrize("name", ["mlp", "gpt-tied", "gpt2", "llama"])
def test_one_process(name: str, pools: Pools) -> None:
    equal_on_processes(name, "coshard=4", pools)
