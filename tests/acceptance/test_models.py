"""Every promised model under every promised plan: loss, gradients and weights after two steps equal one device."""

from __future__ import annotations

import itertools

import pytest

from tests.acceptance.subjects import HAND_WRITTEN, MODELS, RECIPES, prepared
from weft.codegen import generate
from weft.lower import lower
from weft.lower.check import check
from weft.plan.load import load_plan
from weft.plan.plan import Plan
from weft.verify.compare import compare
from weft.verify.generated import run_generated


def equal_to_one_device(name: str, plan: Plan) -> None:
    subject, _, reference = prepared(name)
    program = lower(plan)
    check(program)
    ours = run_generated(generate(program), program.graph, subject, seed=7, wide=True, reference=reference)
    assert not ours.disagreements
    worst = max(compare(ours, reference), key=lambda found: found.value)
    assert worst.value < 1e-9, worst


@pytest.mark.parametrize(("name", "recipe"), list(itertools.product(MODELS, RECIPES)))
def test_recipe(name: str, recipe: str) -> None:
    equal_to_one_device(name, load_plan(recipe, prepared(name)[1]))


@pytest.mark.parametrize("name", ["mlp", "gpt-tied"])
def test_three_recipes_at_once(name: str) -> None:
    equal_to_one_device(name, load_plan("dp=2,tp=2,coshard=2", prepared(name)[1]))


@pytest.mark.parametrize(("name", "plan"), list(itertools.product(MODELS, HAND_WRITTEN)))
def test_plan_by_hand(name: str, plan: str) -> None:
    equal_to_one_device(name, HAND_WRITTEN[plan](prepared(name)[1]))
