"""Layers folded into one text give bit for bit what the unfolded text that traces every op gives, for every promised
model under every promised plan."""

from __future__ import annotations

import itertools

import pytest

from tests.acceptance.subjects import HAND_WRITTEN, MODELS, prepared
from tests.codegen.running import same_bits
from weft.lower import lower
from weft.plan.load import load_plan

RECIPES = ("dp=2", "tp=2", "dp=2,tp=2", "coshard=2")
MORE = ("dp=3", "tp=4", "dp=2,coshard=2", "coshard=4")


def equal(name: str, plan: str) -> None:
    subject, graph, _ = prepared(name)
    made = HAND_WRITTEN[plan](graph) if plan in HAND_WRITTEN else load_plan(plan, graph)
    same_bits(lower(made), subject)


@pytest.mark.parametrize(("name", "plan"), list(itertools.product(MODELS, (*RECIPES, *HAND_WRITTEN))))
def test_same_bits(name: str, plan: str) -> None:
    equal(name, plan)


@pytest.mark.full
@pytest.mark.parametrize(("name", "plan"), list(itertools.product(MODELS, MORE)))
def test_more_plans(name: str, plan: str) -> None:
    equal(name, plan)
