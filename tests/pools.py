"""Processes that tests share: one pool of each size for a session of pytest, or for each of its workers.

Loading torch and the compiler takes seconds, a job on processes that are there does not. All processes are forked off
one server per worker, whichever test comes first: so it loads here what any of them needs. A pool starts new processes
by itself after a failure, so that tests whose ranks fail or are killed may use it too. What a test leaves behind in a
process is there in the next job: tests that count what lives in a process have a pool of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver

from weft.runtime.jobs.launch import Pool

Pools = Callable[[int], Pool]
"""A pool of so many processes."""

NEEDED = ("weft.verify.generated", "weft.train.command", "weft.train.memory.measured", "tests.processes.bodies")
_preload = forkserver.set_forkserver_preload


def preload(modules: Sequence[str]) -> None:
    """Let the server load what the pool that starts it asks for, and what the others will."""
    _preload([*modules, *(name for name in NEEDED if name not in modules)])


def shared(*, by_pipe: bool) -> Iterator[Pools]:
    """Pools by size, made when they are asked for and closed at the end."""
    made: dict[int, Pool] = {}

    def get(num_ranks: int) -> Pool:
        if num_ranks not in made:
            made[num_ranks] = Pool(num_ranks, by_pipe=by_pipe)
        return made[num_ranks]

    yield get
    for pool in made.values():
        pool.close()
