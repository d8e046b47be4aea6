"""What `bench/memory.py` and `bench/state.py` compare: state stored in parts, ours and torch's, on the same processes.

    zero=3   torch.distributed.fsdp.fully_shard of every block and of the root (FSDP2)
    zero=1   DistributedDataParallel with torch.distributed.optim.ZeroRedundancyOptimizer

All train the GPT of `bench/overhead.py` with fused AdamW, one thread per process, each rank on its share of one batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from bench.overhead import GPT, SETTLE, Step, averaged, model, stepper
from weft.runtime.initialise import begin
from weft.runtime.processes import ProcessTransport
from weft.train.opened import open_rank
from weft.train.weights import Replayed

PEERS = {"zero=3": "FSDP2", "zero=1": "ZeroRedundancyOptimizer"}


@contextmanager
def torch_group(transport: ProcessTransport, meeting: str) -> Iterator[None]:
    """torch's own process group, beside ours."""
    torch.set_num_threads(1)
    ranks = {"rank": transport.rank, "world_size": transport.num_ranks}
    dist.init_process_group("gloo", init_method=Path(meeting).as_uri(), **ranks)
    yield
    # torch joins the backend's threads while it holds the interpreter's lock: one that still wants it would hang
    time.sleep(SETTLE)
    dist.destroy_process_group()


def ours(transport: ProcessTransport, files: Any, batch: Any) -> Step:
    """The rank's parts are made one parameter at a time, as `parallelize` does with a function."""
    start = begin(model, 0)
    assert start.record is not None, start.reason
    return stepper(open_rank(files, transport, Replayed(start.record)), batch)


def fsdp2(batch: Any, *, hollow: bool) -> Step:
    """FSDP2; `hollow`: parts are made without the whole model, and so of other values than ours."""
    with torch.device("meta" if hollow else "cpu"):
        made = GPT() if hollow else model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in made.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(made, mesh=mesh)
    if hollow:
        made.to_empty(device="cpu")
        for parameter in made.parameters():
            nn.init.normal_(parameter.to_local(), std=0.02)
    return averaged(stepper(made, share(batch)), dist.get_world_size())


def redundancy(batch: Any) -> Step:
    """DDP, with the optimizer's state spread over the ranks."""
    module = DistributedDataParallel(model(), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(module.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-3, fused=True)
    mine = share(batch)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = module(*mine)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return averaged(step, dist.get_world_size())


def theirs(name: str, batch: Any, *, hollow: bool) -> Step:
    """The peer of a stage."""
    makers: dict[str, Callable[[], Step]] = {
        "zero=3": lambda: fsdp2(batch, hollow=hollow),
        "zero=1": lambda: redundancy(batch),
    }
    return makers[name]()


def share(batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The rank's rows."""
    return tuple(tensor.chunk(dist.get_world_size())[dist.get_rank()] for tensor in batch)
