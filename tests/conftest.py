"""For all tests: one thread per operator, hypothesis profiles, shared processes and captures, expected texts.

`quick` is the default profile; `--hypothesis-profile=full` gives ten times as many examples. Tests that scale their
number of examples read `settings.default.max_examples` when they are collected.
"""

from __future__ import annotations

import gc
import os
import signal
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
