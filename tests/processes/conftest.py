"""Processes shared by all tests of a session: loading torch takes seconds, a job does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from weft.runtime.launch import Pool

PRELOAD = ("weft.verify.generated",)

Pools = Callable[[int], Pool]


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """`pools(4)` is a pool of four processes; after a failure it starts new ones by itself."""
    yield from _pools(by_pipe=True)


@pytest.fixture(scope="session")
def far_pools() -> Iterator[Pools]:
    """The same with processes that talk as those of different hosts do."""
    yield from _pools(by_pipe=False)


def _pools(*, by_pipe: bool) -> Iterator[Pools]:
    made: dict[int, Pool] = {}

    def get(num_ranks: int) -> Pool:
        return made.setdefault(num_ranks, Pool(num_ranks, preload=PRELOAD, by_pipe=by_pipe))

    yield get
    for pool in made.values():
        pool.close()
