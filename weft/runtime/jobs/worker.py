"""Worker: a process that runs jobs, one after the other, as one rank.

In: through a pipe, jobs (which function, which files). Out: the function's result in a file, and through the pipe that
it is there, or that the rank failed; how it failed stands in the job's store. Promised: after a failure the process
ends, since a backend with a broken call in it is of no more use; it also ends when its launcher is gone.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch

from weft.runtime.jobs.devices import use_device
from weft.runtime.jobs.heap import give_memory_back
from weft.runtime.links.backend import BACKENDS, LOOPBACK, PrefixStore, Store, TCPStore
from weft.runtime.links.device import open_transport
from weft.runtime.links.groups import Groups
from weft.runtime.links.processes import JobTransport

FAILED = 1
"""Exit code of a process whose rank failed."""
MEETING = timedelta(seconds=120)
"""What the store allows for the slowest process to start."""


@dataclass(frozen=True)
class Crew:
    """What all workers of a pool have in common."""

    num_ranks: int
    port: int
    backend: str
    devices: tuple[str, ...]
    """Of each rank."""
    num_threads: int
    timeout: float
    """Seconds that a call of the backend may take, where it keeps time itself."""
    by_pipe: bool = True
    """They may talk past the backend."""
    gives_back: bool = True
    """Memory that tensors have left goes back to the system (`heap.py`)."""


@dataclass(frozen=True)
class Job:
    """One call of a function on all ranks: `entry(transport, payload)`."""

    name: str
    entry: str
    payload: str
    """File with what the function gets."""
    result: str
    """File for what it returns."""
    check: bool
    timeout: float


def serve(rank: int, crew: Crew, pipe: Connection) -> None:
    """The life of a worker."""
    # Ctrl-C reaches every process of the terminal; the launcher alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(crew.num_threads)
    if crew.gives_back:
        give_memory_back()
    store = TCPStore(LOOPBACK, crew.port, None, False, MEETING, wait_for_workers=False)
    device = use_device(torch.device(crew.devices[rank]))
    backend = BACKENDS[crew.backend]
    groups = Groups(
        PrefixStore("groups", store),
        rank,
        backend,
        local=True,
        by_pipe=crew.by_pipe,
        timeout=backend.limit(crew.timeout),
        device=device,
    )
    while (job := _next(pipe)) is not None:
        run_job(job, crew, PrefixStore(job.name, store), groups, pipe)


def _next(pipe: Connection) -> Job | None:
    try:
        job: Job | None = pipe.recv()
    except (EOFError, OSError):
        return None
    return job


def _tell(pipe: Connection, word: Any) -> None:
    """Say something to the launcher. One that has gone (it was interrupted, say) needs no answer."""
    with suppress(OSError):
        pipe.send(word)


def run_job(job: Job, crew: Crew, store: Store, groups: Groups, pipe: Connection) -> None:
    """Run one job and tell the launcher."""
    device = torch.device(crew.devices[groups.rank])
    transport = open_transport(store, groups, crew.num_ranks, device=device, check=job.check, timeout=job.timeout)
    try:
        # written by the launcher, which is this program
        payload = torch.load(job.payload, weights_only=False)
        result = resolve(job.entry)(transport, payload)
        torch.save(result, job.result)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the launcher raises it
        end_failed(transport, pipe, error)
    transport.close()
    _tell(pipe, "done")


def resolve(entry: str) -> Callable[[JobTransport, Any], Any]:
    """The function that `module:function` names."""
    module, _, path = entry.partition(":")
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    assert callable(found), f"{entry} is not a function"
    return found  # type: ignore[no-any-return]


def end_failed(transport: JobTransport, pipe: Connection, error: BaseException) -> None:
    """Whatever a rank raises is told to the others and to the launcher, and is the end of the process."""
    failure = transport.fail(error)
    _tell(pipe, failure.to_json())
    sys.stdout.flush()
    sys.stderr.flush()
    # not by an exception: the backend's threads may hang in a call whose members are gone
    os._exit(FAILED)
