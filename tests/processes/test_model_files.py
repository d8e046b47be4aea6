"""A third of the model files on processes: bit for bit what the emulator has, and equal to one device."""

from __future__ import annotations

import itertools

import pytest

from tests.acceptance.test_model_files import equal_to_one_device
from tests.processes.conftest import Pools

FILES = ("t5", "swin", "resnet", "mixtral", "evoformer", "recommender")
PLANS = ("dp=2", "tp=2", "tp=3", "dp=2,tp=2")


@pytest.mark.parametrize(("name", "recipe"), [("t5", "tp=3")])
def test_sample(name: str, recipe: str, pools: Pools) -> None:
    equal_to_one_device(name, recipe, pools)


@pytest.mark.full
@pytest.mark.parametrize(("name", "recipe"), list(itertools.product(FILES, PLANS)))
def test_matrix(name: str, recipe: str, pools: Pools) -> None:
    equal_to_one_device(name, recipe, pools)
