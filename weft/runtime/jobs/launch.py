"""Launch: processes of this machine as ranks.

In: a number of ranks and a function of a module, `entry(transport, payload)`. Out: what it returned, rank by rank, or
one error. Processes are started once and serve several jobs (`Pool`): loading torch takes seconds. They meet at a port
of the loopback address that the launcher listens on; payloads and results travel in files of a private folder.

Promised: when a rank raises, is killed, or waits in vain, `run` raises in seconds, and the error names the rank, the
step, the op or collective, and what every other rank was doing; no process outlives the pool or its launcher.
Processes do not run the caller's script again: it needs no guard, and the function must be in a module.
"""

from __future__ import annotations

import multiprocessing
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from multiprocessing import connection, spawn
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any
from unittest import mock

import torch

from weft.runtime.jobs.devices import Device, choose, look
from weft.runtime.jobs.worker import Crew, Job, serve
from weft.runtime.links.backend import LOOPBACK, PrefixStore, Store, TCPStore
from weft.runtime.links.processes import TIMEOUT
from weft.runtime.links.transport import CollectiveMismatch, Doing, RankFailed
from weft.runtime.watch.states import Failure, describe, failure_key, read_states
from weft.runtime.watch.watch import GRACE

Entry = Callable[[Any, Any], Any]
"""Called with the transport of the rank, and the payload."""

LAST_WORDS = GRACE + 1.0
"""Seconds after the first failure in which the other processes may end by themselves."""


class ProcessFailed(RankFailed):
    """A process failed; the others were ended. `waits` says what each rank was doing, `step` which step it was."""

    def __init__(self, failure: Failure, waits: dict[int, str]) -> None:
        cause = type(failure.error, (RemoteError,), {})(failure.message)
        cause.add_note(failure.trace)
        super().__init__(failure.rank, Doing(failure.what, failure.place), cause)
        self.step, self.waits = failure.step, waits
        step = "" if failure.step is None else f" in step {failure.step}"
        lines = [f"  rank {rank} {what}" for rank, what in sorted(waits.items()) if rank != failure.rank]
        self.args = ("\n".join([str(self).replace(" failed", f" failed{step}", 1), *lines]),)


class RemoteError(RuntimeError):
    """What a process raised, by name and text; its trace is a note."""


class Pool:
    """Processes that serve jobs until the pool is closed. After a failure new ones are started for the next job.

    Args:
        device, backend: what this machine has if not given (`devices.py`).
        timeout: seconds that one collective may take.
        num_threads: of each process, within an operator.
        preload: modules that the processes need, loaded once for all of them where the system can fork.
        by_pipe: they may talk past the backend; False: as processes of different hosts do.
        gives_back: memory that tensors have left goes back to the system (`heap.py`); False: as the C library likes.
    """

    def __init__(
        self,
        num_ranks: int,
        *,
        device: Device | None = None,
        backend: str | None = None,
        timeout: float | None = None,
        num_threads: int = 1,
        preload: Sequence[str] = (),
        by_pipe: bool = True,
        gives_back: bool = True,
    ) -> None:
        assert num_ranks >= 1, f"{num_ranks} ranks"
        self.num_ranks = num_ranks
        seen = look(device, backend)
        ranks = range(num_ranks)
        everybody = [replace(seen, local=(rank, num_ranks)) for rank in ranks]
        self.chosen = [choose(everybody, rank) for rank in ranks]
        """Where each of them computes."""
        self._timeout = TIMEOUT if timeout is None else timeout
        self._num_threads, self._by_pipe, self._gives_back = num_threads, by_pipe, gives_back
        self._context = _context(("weft.runtime.jobs.worker", *preload))
        self._workers: list[tuple[BaseProcess, Connection]] = []
        self._store: TCPStore | None = None
        self._num_jobs = 0

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def process_ids(self) -> list[int]:
        """Of the processes that live, by rank."""
        return [process.pid for process, _ in self._workers if process.pid is not None and process.is_alive()]

    def run(
        self,
        entry: Entry | str,
        payload: Any = None,
        *,
        each: Sequence[Any] | None = None,
        check: bool = True,
        timeout: float | None = None,
    ) -> list[Any]:
        """Call `entry(transport, payload)` on every rank and return the results in rank order.

        Args:
            each: a payload for each rank, instead of one for all.
            check: before every collective, members make sure that they mean the same.
            timeout: instead of the pool's.
        """
        seconds = self._timeout if timeout is None else timeout
        name = entry_name(entry)
        assert each is None or len(each) == self.num_ranks, f"{len(each or ())} payloads for {self.num_ranks} ranks"
        self.start()
        assert self._store is not None
        self._num_jobs += 1
        job = f"job{self._num_jobs}"
        with tempfile.TemporaryDirectory(prefix="weft-") as folder, ExitStack() as unless_well:
            files = self._save(Path(folder), payload, each)
            # whatever comes, Ctrl-C among it: nothing of the job may go on
            unless_well.callback(self.close)
            for rank, (_, pipe) in enumerate(self._workers):
                result = str(Path(folder) / f"result{rank}")
                pipe.send(Job(job, name, str(files[rank]), result, check, seconds))
            failures = self._watch(PrefixStore(job, self._store))
            if failures:
                raise _error(failures, describe(read_states(PrefixStore(job, self._store), self.num_ranks)))
            unless_well.pop_all()
            results = [f"{folder}/result{rank}" for rank in range(self.num_ranks)]
            # the launcher has no part in the ranks' devices
            return [torch.load(one, weights_only=False, map_location="cpu") for one in results]

    def close(self) -> None:
        """End all processes."""
        for _, pipe in self._workers:
            pipe.close()
        for process, _ in self._workers:
            if process.is_alive():
                process.kill()
        for process, _ in self._workers:
            process.join()
            process.close()
        self._workers, self._store = [], None

    def _save(self, folder: Path, payload: Any, each: Sequence[Any] | None) -> list[Path]:
        payloads = [payload] if each is None else each
        files = [folder / f"payload{number}" for number in range(len(payloads))]
        for file, one in zip(files, payloads, strict=True):
            torch.save(one, file)
        return files * self.num_ranks if each is None else files

    def start(self) -> None:
        """Start the processes unless all of them live. They load what they need while the caller goes on."""
        if len(self.process_ids) == self.num_ranks:
            return
        self.close()
        self._store, port = _listen()
        devices = tuple(str(one.device) for one in self.chosen)
        backend = self.chosen[0].backend
        crew = Crew(
            self.num_ranks, port, backend, devices, self._num_threads, self._timeout, self._by_pipe, self._gives_back
        )
        for rank in range(self.num_ranks):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(
                target=serve, args=(rank, crew, theirs), name=f"weft rank {rank}", daemon=True
            )
            with mock.patch.object(spawn, "get_preparation_data", _without_main):
                process.start()
            theirs.close()
            self._workers.append((process, ours))

    def _watch(self, store: Store) -> list[Failure]:
        """Wait until all ranks are done, or one failed and the others had time to say so."""
        waiting = dict(enumerate(self._workers))
        failures: list[Failure] = []
        until: float | None = None
        while waiting and (until is None or time.monotonic() < until):
            ready = connection.wait(
                [item for process, pipe in waiting.values() for item in (pipe, process.sentinel)],
                None if until is None else max(0.0, until - time.monotonic()),
            )
            for rank, (process, pipe) in list(waiting.items()):
                if pipe in ready or process.sentinel in ready:
                    del waiting[rank]
                    failure = _outcome(rank, process, pipe, store)
                    failures += [failure] if failure is not None else []
            if failures and until is None:
                until = time.monotonic() + LAST_WORDS
        return failures


def entry_name(entry: Entry | str) -> str:
    """`module:function`, by which a process finds the function."""
    if isinstance(entry, str):
        return entry
    if "<" in entry.__qualname__ or entry.__module__ == "__main__":
        raise ValueError(f"{entry.__qualname__} cannot be found by another process: define it at the top of a module")
    return f"{entry.__module__}:{entry.__qualname__}"


def _context(preload: Sequence[str]) -> Any:
    """How processes are started: forked off a server that has loaded torch and nothing else, where there is fork."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    return context


_prepare: Callable[[str], dict[str, Any]] = spawn.get_preparation_data


def _without_main(name: str) -> dict[str, Any]:
    """What a new process is told about this one, except to run its script: that takes seconds, and has effects."""
    return {key: value for key, value in _prepare(name).items() if not key.startswith("init_main")}


def _listen() -> tuple[TCPStore, int]:
    """A store at a free port that only this machine can reach."""
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        listener.listen()
        port = int(listener.getsockname()[1])
        store = TCPStore(
            LOOPBACK,
            port,
            None,
            True,
            timedelta(seconds=TIMEOUT),
            wait_for_workers=False,
            # the store closes it
            master_listen_fd=listener.detach(),
        )
    return store, port


def _outcome(rank: int, process: BaseProcess, pipe: Connection, store: Store) -> Failure | None:
    """How a rank's job ended: None if well."""
    try:
        word = pipe.recv() if pipe.poll() else None
    except (EOFError, OSError):
        word = None
    if word == "done":
        return None
    if word is not None:
        return Failure.from_json(word)
    process.join()
    if store.check([failure_key(rank)]):
        return Failure.from_json(store.get(failure_key(rank)))
    state = read_states(store, rank + 1).get(rank, {"what": "", "place": "", "step": None})
    how = _how(process.exitcode)
    return Failure(rank, "died", "ProcessEnded", how, state["what"], state["place"], state["step"])


def _how(code: int | None) -> str:
    if code is not None and code < 0:
        return f"the process was killed by {signal.Signals(-code).name}"
    return f"the process ended with exit code {code}"


def _error(failures: Sequence[Failure], waits: dict[int, str]) -> Exception:
    """The one failure that explains the others."""
    order = ("mismatch", "error", "died", "lost", "stopped")
    first = min(failures, key=lambda failure: (order.index(failure.sort), failure.rank))
    if first.sort == "mismatch":
        return CollectiveMismatch(first.message, rank=first.rank, waits=waits or first.waits)
    return ProcessFailed(first, waits)
