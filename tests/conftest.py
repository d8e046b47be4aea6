"""For all tests: one thread per operator, hypothesis profiles, shared processes and captures, expected texts.

`quick` is the default profile; `--hypothesis-profile=full` gives ten times as many examples. Tests that scale their
number of examples read `settings.default.max_examples` when they are collected.
"""

from __future__ import annotations

import gc
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path

# Before torch loads: test workers and rank threads share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.captures import CAPTURES
from tests.pools import Pools, preload, shared
from weft.capture import api
from weft.runtime.jobs.launch import Pool

torch.set_num_threads(1)
# until all tests are collected: what is imported stays
gc.disable()
# A shell starts background jobs with Ctrl-C ignored, and what they start inherits that; tests of it need it back.
signal.signal(signal.SIGINT, signal.default_int_handler)

_common = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
settings.register_profile("quick", max_examples=50, derandomize=True, database=None, **_common)
settings.register_profile("full", max_examples=500, print_blob=True, **_common)
settings.load_profile("quick")

api.captured = CAPTURES
# also for the pools that commands make
forkserver.set_forkserver_preload = preload

GOLDEN = Path(__file__).parent / "golden"
SAMPLED = {
    "acceptance/test_experts.py::test_model_file": 2,
    "acceptance/test_families.py::test_family": 2,
    "acceptance/test_model_files.py::test_nearly_all_work_is_divided": 2,
    "acceptance/test_model_files.py::test_sample": 2,
    "acceptance/test_models.py::test_plan_by_hand": 2,
    "acceptance/test_models.py::test_recipe": 2,
    "acceptance/test_name_clashes.py::test_sample": 2,
    "acceptance/test_recipes.py::test_sample": 2,
    "acceptance/test_vision_families.py::test_family": 2,
    "capture/test_draws.py::test_distributions_draw_the_same_numbers": 2,
    "capture/test_outside.py::test_caches_of_tensors_stay_the_users": 2,
    "capture/test_outside.py::test_no_gradient_flows_through_regions_without": 2,
    "codegen/test_equal.py::test_same_bits": 3,
    "docs/test_plans.py::test_every_row_equals_one_device": 2,
    "lower/test_typed.py::test_recipe": 2,
    "processes/test_core_matrix.py::test_sample": 2,
    "processes/test_letters.py::test_a_letter_that_does_not_come_in_time": 2,
    "processes/test_letters.py::test_a_rank_killed_in_mid_step": 2,
    "runtime/test_homes.py::test_processes_are_the_emulator": 2,
    "train/test_interrupted.py::test_what_follows_is_as_in_eager": 3,
    "train/test_shards.py::test_what_takes_each_element_by_itself_is_right": 2,
    "train/test_unused_outputs.py::test_weights_after_some_steps": 3,
    "verify/test_computed_weights.py::test_weights_that_are_computed": 2,
    "verify/test_faults.py::test_a_fault_in_the_program_is_seen": 2,
    "verify/test_odd_models.py::test_equal": 2,
    "verify/test_spread.py::test_equal": 2,
}
"""Matrices of which every so many-th case runs in `make test`; all of them in `make test-full`."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--golden", action="store_true", help="rewrite the expected texts under tests/golden")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """From here on Python's collector looks at what tests make, not at the half million objects that were imported."""
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the rest of large matrices to `make test-full`."""
    seen: Counter[str] = Counter()
    for item in items:
        name = item.nodeid.partition("[")[0].removeprefix("tests/")
        if name in SAMPLED and item.get_closest_marker("full") is None:
            if seen[name] % SAMPLED[name]:
                item.add_marker(pytest.mark.full)
            seen[name] += 1


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """`pools(4)` is a pool of four processes; after a failure it starts new ones by itself."""
    yield from shared(by_pipe=True)


@pytest.fixture(scope="session")
def far_pools() -> Iterator[Pools]:
    """The same with processes that talk as those of different hosts do."""
    yield from shared(by_pipe=False)


@pytest.fixture(scope="session")
def pool(pools: Pools) -> Pool:
    """Two processes."""
    return pools(2)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden("gpt.graph.txt", text)` compares a text with the stored one, or stores it under `--golden`."""
    rewrite = request.config.getoption("--golden")

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if rewrite:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"no expected text {path.name}: run `make golden` and read the difference"
        assert text == path.read_text(encoding="utf-8"), f"{name} changed: run `make golden` and read the difference"

    return compare
