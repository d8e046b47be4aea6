"""connect(): the transport of a process that torchrun (or any launcher that sets the same variables) has started.

In: RANK, WORLD_SIZE, what the launcher tells of this host, and torch.distributed, which is initialised if the user has
not done so. Out: a Job: a transport over all ranks, on a store of its own, and what rank 0 shares. Promised: all
ranks decide together where they compute, and rank 0 says so; a rank whose script raises tells the others before it
ends, and they end with one line each; a script that ends well leaves without waiting for the others.
"""

from __future__ import annotations

import atexit
import base64
import os
import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from weft.errors import RunError
from weft.runtime.jobs.devices import Chosen, Device, Seen, choose, look, use_device
from weft.runtime.jobs.heap import give_memory_back
from weft.runtime.links.backend import BACKENDS, PrefixStore, Store
from weft.runtime.links.device import open_transport
from weft.runtime.links.groups import Groups
from weft.runtime.links.processes import TIMEOUT, JobTransport
from weft.runtime.links.transport import PeerFailed, Stopped
from weft.runtime.watch.watch import FIRST, Watch

POLL = 0.05
"""Seconds between two looks for what rank 0 shares."""


_watches = WeakKeyDictionary[dist.ProcessGroup, Watch]()
"""Of this process, by the job: all parallel modules have one, so that who waits in one knows who waits in another."""


def is_launched(environment: Mapping[str, str] = os.environ) -> bool:
    """True if a launcher has told this process its rank, or torch.distributed is initialised."""
    return {"RANK", "WORLD_SIZE"} <= environment.keys() or (dist.is_available() and dist.is_initialized())


class Job:
    """A process's place in a job: the way to the other ranks, and what rank 0 shares with them."""

    def __init__(self, transport: JobTransport, store: Store) -> None:
        self.transport = transport
        self._store, self._num_shared = store, 0

    def share(self, make: Callable[[], Mapping[str, bytes]]) -> dict[str, bytes]:
        """What `make` gives on rank 0, on every rank. It may take its time, and if it raises all ranks do."""
        self._num_shared += 1
        key = f"shared/{self._num_shared}"
        if self.transport.rank == 0:
            try:
                found = dict(make())
            except BaseException:
                # an interrupt or sys.exit() too: the others ask for nothing but these two keys
                self._store.set(f"{key}/failed", "1")
                raise
            for name, content in found.items():
                self._store.set(f"{key}/{name}", base64.b64encode(content).decode())
            self._store.set(key, "\n".join(found))
            return found
        while not self._store.check([key]):
            if self._store.check([f"{key}/failed"]):
                raise PeerFailed("rank 0 failed, and made nothing for the others", remedy=FIRST) from Stopped()
            time.sleep(POLL)
        names = self._store.get(key).decode().splitlines()
        return {name: base64.b64decode(self._store.get(f"{key}/{name}")) for name in names}


def connect(
    *, device: Device | None = None, backend: str | None = None, timeout: float | None = None, whose: str = ""
) -> Job:
    """The job of this process. Every rank calls it, as often as the others.

    With `WEFT_CHECK=1`, on all ranks, members make sure in every step that they mean the same.

    Args:
        device, backend: what every rank has if not given (`devices.py`). torch.distributed as the user has initialised
            it stays as it is; a backend for one kind of device alone (gloo, nccl) is taken as asked for.
        timeout: seconds that one collective may take.
        whose: the module that it is for, in messages where a rank has several.
    """
    whole, rank, num_ranks = _meet()
    if backend is None and device is None and dist.is_initialized() and dist.get_backend() in BACKENDS:
        backend = dist.get_backend()
    # the number of this connection: the same on all ranks, since each makes the same ones in the same order
    number = whole.add(f"weft/connections of rank {rank}", 1)
    store = PrefixStore(f"weft/{number}", whole)
    chosen = _decide(look(device, backend), PrefixStore("seen", store), rank, num_ranks)
    if not rank:
        chosen.tell()
    if not dist.is_initialized():
        dist.init_process_group(chosen.backend, store=whole, rank=rank, world_size=num_ranks)
    give_memory_back()
    local = num_ranks == int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    seconds, carrier = TIMEOUT if timeout is None else timeout, BACKENDS[chosen.backend]
    used, limit = use_device(chosen.device), carrier.limit(seconds)
    groups = Groups(PrefixStore("groups", store), rank, carrier, local=local, timeout=limit, device=used)
    everybody = dist.group.WORLD
    assert everybody is not None
    watch = _watches.get(everybody)
    transport = open_transport(store, groups, num_ranks, device=used, timeout=seconds, watch=watch)
    if watch is None:
        _watches[everybody] = transport.watch
        _tell_the_end(transport)
    transport.whose = whose
    atexit.register(transport.close)
    return Job(transport, PrefixStore("shared", store))


def _meet() -> tuple[Store, int, int]:
    """Where all ranks leave words for each other, this one's number, and how many there are."""
    if not dist.is_initialized():
        found: tuple[Store, int, int] = next(rendezvous("env://"))
        return found
    try:
        return dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    except (KeyError, ValueError, RuntimeError) as error:
        raise RunError(
            f"torch.distributed was initialised with {dist.get_backend()!r}, which has no store",
            remedy="init_process_group('gloo') or ('nccl'), or leave it to parallelize()",
        ) from error


def _decide(mine: Seen, store: Store, rank: int, num_ranks: int) -> Chosen:
    """Where this rank computes, from what all of them see."""
    store.set(str(rank), mine.to_json())
    keys = [str(one) for one in range(num_ranks)]
    while not store.check(keys):
        time.sleep(POLL)
    return choose([Seen.from_json(one) for one in store.multi_get(keys)], rank)


def _tell_the_end(transport: JobTransport) -> None:
    """However the script ends, the other ranks learn of it."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        transport.fail(error)
        if isinstance(error, Stopped) or isinstance(error.__cause__, Stopped):
            print(f"rank {transport.rank} stopped: another rank failed ({transport.watch.busy[0]})", file=sys.stderr)
        else:
            before(kind, error, trace)

    sys.excepthook = hook
    transport.watch.ends = lambda error: print(f"rank {transport.rank} was ended: {error}", file=sys.stderr, flush=True)
