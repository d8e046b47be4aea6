"""What ranks do that leave out a collective, on processes; and a backend that does not block the host."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.train.eager import adamw
from weft.runtime.links.backend import GLOO, Backend, PrefixStore
from weft.runtime.links.device import DeviceTransport
from weft.runtime.links.groups import Groups
from weft.runtime.links.processes import ProcessTransport
from weft.runtime.links.transport import Doing, Transport
from weft.train.opened import open_rank

LIMIT = 2.0
LONG = 600.0


@dataclass
class Issued:
    """A call that is over when all members have issued it. Waiting for it blocks nobody, and nothing is sent."""

    store: Any
    key: str
    size: int

    def is_completed(self) -> bool:
        return bool(self.store.add(self.key, 0) == self.size)

    def wait(self) -> None:
        return


@dataclass
class Stream:
    """The communicators of one rank, and what was issued to them."""

    calls: list[Issued] = field(default_factory=list)

    def is_done(self) -> bool:
        return all(one.is_completed() for one in self.calls)


@dataclass(frozen=True)
class OnStream(Backend):
    """A backend as those of devices are, but that it gives no results."""

    stream: Stream = field(default_factory=Stream)

    def make_group(self, store: Any, position: int, size: int, links: Any, **settings: Any) -> Any:
        return _Communicator(store, size, self.stream)

    def mark(self, device: torch.device) -> Any:
        return Stream(list(self.stream.calls)).is_done


class _Communicator:
    def __init__(self, store: Any, size: int, stream: Stream) -> None:
        self._store, self._size, self._stream, self._number = store, size, stream, 0

    def allreduce(self, tensors: Any, options: Any) -> Issued:
        found = Issued(self._store, f"call {self._number}", self._size)
        self._number += 1
        self._store.add(found.key, 1)
        self._stream.calls.append(found)
        return found


def leaves_out_a_sum(transport: ProcessTransport, where: str) -> None:
    """Rank 1 leaves out the second sum; both then wait for their devices."""
    transport.close()
    stream, store = Stream(), PrefixStore("stream", transport.store)
    backend = OnStream("stream", "cpu", False, stream)
    groups = Groups(store, transport.rank, backend, local=True, by_pipe=False)
    device = DeviceTransport(transport.store, groups, 2, device=torch.device("cpu"), timeout=LIMIT)
    for step in range(3):
        device.step = step
        device.doing = Doing("reshard all_reduce over tp", "model.py:7 (program.py:12)")
        if (step, device.rank) == (1, 1):
            time.sleep(LONG)
        device.all_reduce(torch.ones(3, 2), (0, 1))
    # what a device that is waited for looks like from the host
    time.sleep(LONG)


def leaves_out_a_sum_of_the_second(transport: ProcessTransport, given: None) -> None:
    """Two modules, each with a transport: rank 1 leaves out the second sum of the second one."""
    transport.close()
    backend, both = OnStream("stream", "cpu", False, Stream()), list[DeviceTransport]()
    for name in ("First", "Second"):
        groups = Groups(PrefixStore(name, transport.store), transport.rank, backend, local=True, by_pipe=False)
        watch = both[0].watch if both else None
        made = DeviceTransport(
            transport.store, groups, 2, device=torch.device("cpu"), timeout=LIMIT if both else LONG, watch=watch
        )
        made.whose = name
        both.append(made)
    for step in range(2):
        for device in both:
            if (step, device.rank, device.whose) == (1, 1, "Second"):
                time.sleep(LONG)
            device.begin_step(step)
            device.doing = Doing(f"sum of {device.whose}", f"model.py:{step}")
            device.all_reduce(torch.ones(3, 2), (0, 1))
    # the host goes on with the first: what it waits for is of the second
    both[0].begin_step(2)
    both[0].doing = Doing("an op")
    time.sleep(LONG)


def leaves_out(transport: ProcessTransport, given: tuple[Any, Any, Any, str, bool]) -> None:
    """Rank 1 leaves out a step, or an evaluation, and does something else for long."""
    files, model, batch, what, on_device = given
    used: Transport = transport
    if on_device:
        transport.close()
        # no pipes: what a device does goes through the backend
        groups = Groups(PrefixStore("device", transport.store), transport.rank, GLOO, local=True, by_pipe=False)
        used = DeviceTransport(transport.store, groups, 2, device=transport.device, timeout=LIMIT)
    parallel = open_rank(files, used, model, make_files=lambda wanted: files)
    optimizer = adamw(parallel)
    for step in range(3):
        if (transport.rank, step, what) == (1, 1, "training"):
            time.sleep(LONG)
        optimizer.zero_grad()
        loss = parallel(**batch)
        if (transport.rank, step, what) == (1, 1, "backward"):
            time.sleep(LONG)
        loss.backward()
        optimizer.step()
    parallel.eval()
    with torch.no_grad():
        for step in range(2):
            if (transport.rank, step, what) == (1, 1, "evaluation"):
                time.sleep(LONG)
            parallel(**batch)
