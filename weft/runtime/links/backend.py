"""Backend: what carries messages between processes, and between which devices. The only file that names either.

In: a store, and the ranks that meet there. Out: a `Backend`, which makes the backend's group for some ranks. Known are

    gloo  tensors on the CPU. Its own all_reduce, all_gather and reduce_scatter cost two to four times its all_to_all,
          so everything is carried by all_to_all of bytes, and sums are added locally, in group order: any dtype and
          operation, and equal bit for bit to the emulator (`processes.py`).
    nccl  tensors on CUDA devices, one per process; xccl on XPUs. They do not block the host, have collectives of their
          own, and add in an order of their own (`device.py`). Written after the documentation and never run: there is
          no such device where this was made.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# torch.distributed has these names only where it was built, which type checkers cannot see
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, TCPStore

__all__ = [
    "BACKENDS",
    "Backend",
    "GLOO",
    "LOOPBACK",
    "PrefixStore",
    "Store",
    "TCPStore",
    "own_connection",
    "peak_memory",
]

FOREVER = timedelta(days=7)
"""Given to the backends: the transport keeps time itself, and says what it waited for when time is up."""
LATER = 10
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Backend:
    """How ranks talk.

    Args:
        host_waits: waiting for a message blocks the process (and not a stream of the device).
    """

    name: str
    device_type: str
    host_waits: bool

    def limit(self, seconds: float) -> timedelta:
        """What a call of it may take. The transport keeps time, and says what for; a backend of devices, which ends the
        process without a word of ours, much later: messages too, which may wait long for whoever takes them."""
        longest = FOREVER.total_seconds()
        return FOREVER if self.host_waits else timedelta(seconds=min(LATER * seconds, longest))

    def mark(self, device: torch.device) -> Callable[[], bool]:
        """Says whether the device has come to where the program stands now."""
        if device.type == "cpu":
            return lambda: True
        event = torch.Event(device)
        event.record()
        return event.query

    def links(self, *, local: bool) -> Sequence[Any]:
        """What all groups of a process share: gloo's sockets and their thread. `local`: all ranks are on this host."""
        if self.name != "gloo":
            return ()
        gloo = ProcessGroupGloo
        return (gloo.create_device(hostname=LOOPBACK) if local else gloo.create_default_device(),)

    def make_group(
        self,
        store: Store,
        position: int,
        size: int,
        links: Sequence[Any],
        *,
        ranks: Sequence[int],
        name: str,
        device: torch.device,
        timeout: timedelta = FOREVER,
    ) -> Any:
        """The group of `size` ranks that meet in `store`; only they enter. Blocks until all have.

        Args:
            position: this one's among them.
            ranks: their numbers in the job.
            name: what it is for: the flight recorder of the backend shows it.

        Made directly, not by `new_group`: that one wants either every rank of the job in one order or, with
        `use_local_synchronization`, a name that depends on how many groups each rank has made before (and hangs if
        they made different ones)."""
        if self.name == "gloo":
            options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout, options._devices = timeout, list(links)
            # a thread is not done with one exchange until it gets the interpreter's lock to let go of its tensors; with
            # one thread the next exchange waits for that, and takes three times as long
            options._threads = 2
            options.group_name, options.global_ranks_in_group = name, list(ranks)
            return ProcessGroupGloo(store, position, size, options)
        kind: Any = vars(dist)[f"ProcessGroup{self.name.upper()}"]  # not in every build
        options = kind.Options()
        options._timeout = timeout
        options.group_name, options.global_ranks_in_group = name, list(ranks)
        made = kind(store, position, size, options)
        # only a ProcessGroup around it can say what it is for
        named = dist.ProcessGroup(store, position, size)
        named._register_backend(device, vars(dist.ProcessGroup.BackendType)[self.name.upper()], made)
        named._set_group_name(dist.distributed_c10d.GroupName(name))
        named._set_group_desc(name)
        made.eager_connect_single_device(device)
        return made


GLOO = Backend(name="gloo", device_type="cpu", host_waits=True)
NCCL = Backend(name="nccl", device_type="cuda", host_waits=False)
XCCL = Backend(name="xccl", device_type="xpu", host_waits=False)
BACKENDS: Mapping[str, Backend] = {backend.name: backend for backend in (GLOO, NCCL, XCCL)}
"""By name."""


def peak_memory(device: torch.device) -> int:
    """Bytes that this process has used at most: of the device's memory, or of the host's where that is the device."""
    if device.type != "cpu":
        return int(torch.accelerator.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts KiB


def own_connection(store: Store) -> Store:
    """The same store through another connection: what blocks on one does not hold up the other."""
    return store.clone()  # type: ignore[attr-defined, no-any-return]
