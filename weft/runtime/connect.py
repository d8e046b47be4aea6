"""connect(): the transport of a process that torchrun (or any launcher that sets the same variables) has started.

In: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, and torch.distributed, which is initialised if the user has not done
so. Out: a ProcessTransport over all ranks, on a store of its own. Promised: a rank whose script raises tells the others
before it ends, and they end with one line each; a script that ends well leaves without waiting for the others.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Mapping
from types import TracebackType

import torch.distributed as dist

from weft.runtime.backend import backend_named, choose_backend
from weft.runtime.groups import Groups
from weft.runtime.processes import TIMEOUT, ProcessTransport
from weft.runtime.transport import Stopped


def is_launched(environment: Mapping[str, str] = os.environ) -> bool:
    """True if a launcher has told this process its rank, or torch.distributed is initialised."""
    return {"RANK", "WORLD_SIZE"} <= environment.keys() or (dist.is_available() and dist.is_initialized())


def connect(*, timeout: float = TIMEOUT) -> ProcessTransport:
    """The transport of this process. Every rank calls it, as often as the others.

    Args:
        timeout: seconds that one collective may take.
    """
    if not dist.is_initialized():
        per_host = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
        dist.init_process_group(choose_backend(per_host).name)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    whole = dist.distributed_c10d._get_default_store()
    # the number of this connection: the same on all ranks, since each makes the same ones in the same order
    number = whole.add(f"weft/connections of rank {rank}", 1)
    store = dist.PrefixStore(f"weft/{number}", whole)
    local = num_ranks == int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    groups = Groups(dist.PrefixStore("groups", store), rank, backend_named(dist.get_backend()), local=local)
    transport = ProcessTransport(
        store, groups, num_ranks, local_rank=int(os.environ.get("LOCAL_RANK", "0")), timeout=timeout
    )
    _tell_the_end(transport)
    return transport


def _tell_the_end(transport: ProcessTransport) -> None:
    """However the script ends, the other ranks learn of it."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        transport.fail(error)
        if isinstance(error, Stopped):
            print(f"rank {transport.rank} stopped: another rank failed ({transport.doing})", file=sys.stderr)
        else:
            before(kind, error, trace)

    sys.excepthook = hook
    atexit.register(transport.close)
