"""Backend: what carries messages between processes, and on which device. The only file that names either.

In: what this machine has. Out: a `Backend`, which says where a rank's tensors live, makes the backend's group for some
ranks, and tells the transport how to carry each kind of collective. Two are known:

    gloo  tensors on the CPU. Its own all_reduce, all_gather and reduce_scatter cost two to four times its all_to_all,
          so everything is carried by all_to_all of bytes, and sums are added locally, in group order: any dtype and
          operation, and equal bit for bit to the emulator.
    nccl  tensors on CUDA devices, one per process of a host. all_reduce of numbers is NCCL's own: its order of adding
          is NCCL's, so results equal the emulator's to rounding only. Everything else is moved by all_to_all of bytes.

The nccl half is written after the documentation and has never run: there is no CUDA device where this was made.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# torch.distributed has these names only where it was built, which type checkers cannot see
from torch._C._distributed_c10d import AllreduceOptions, PrefixStore, ProcessGroupGloo, ReduceOp, Store, TCPStore

__all__ = [
    "BACKENDS",
    "Backend",
    "GLOO",
    "NCCL",
    "LOOPBACK",
    "PrefixStore",
    "Store",
    "TCPStore",
    "own_connection",
    "peak_memory",
]

FOREVER = timedelta(days=7)
"""Given to the backends: the transport keeps time itself, and says what it waited for when time is up."""
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Backend:
    """How ranks talk.

    Args:
        native_sums: operations that the backend's own all_reduce does, by name; none if sums are added locally.
        host_waits: waiting for a message blocks the process (and not a stream of the device).
    """

    name: str
    device_type: str
    native_sums: Mapping[str, Any]
    host_waits: bool

    def links(self, *, local: bool) -> Sequence[Any]:
        """What all groups of a process share: gloo's sockets and their thread. `local`: all ranks are on this host."""
        if self.name != "gloo":
            return ()
        gloo = ProcessGroupGloo
        return (gloo.create_device(hostname=LOOPBACK) if local else gloo.create_default_device(),)

    def make_group(self, store: Store, position: int, size: int, links: Sequence[Any]) -> Any:
        """The group of `size` ranks that meet in `store`; only they enter. Blocks until all have.

        Made directly, not by `new_group`: that one wants either every rank of the job in one order or, with
        `use_local_synchronization`, a name that depends on how many groups each rank has made before (and hangs if
        they made different ones)."""
        if self.name == "gloo":
            options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout, options._devices = FOREVER, list(links)
            # a thread is not done with one exchange until it gets the interpreter's lock to let go of its tensors; with
            # one thread the next exchange waits for that, and takes three times as long
            options._threads = 2
            return ProcessGroupGloo(store, position, size, options)
        nccl: Any = vars(dist)["ProcessGroupNCCL"]  # not in every build
        options = nccl.Options()
        options._timeout = FOREVER
        return nccl(store, position, size, options)

    def sums_natively(self, dtype: torch.dtype, op: str) -> bool:
        """True if the backend's own all_reduce is to be used."""
        return op in self.native_sums and dtype not in (torch.bool, torch.complex64, torch.complex128)

    def start_sum(self, group: Any, tensor: torch.Tensor, op: str) -> Any:
        """Sum in place over the group; returns the backend's work."""
        options = AllreduceOptions()
        options.reduceOp = self.native_sums[op]
        return group.allreduce([tensor], options)


GLOO = Backend(name="gloo", device_type="cpu", native_sums={}, host_waits=True)
NCCL = Backend(
    name="nccl",
    device_type="cuda",
    native_sums={
        "sum": ReduceOp.SUM,
        "prod": ReduceOp.PRODUCT,
        "max": ReduceOp.MAX,
        "min": ReduceOp.MIN,
    },
    host_waits=False,
)


BACKENDS: Mapping[str, Backend] = {backend.name: backend for backend in (GLOO, NCCL)}
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
