"""What the ranks of the tests do, on the transport of devices over gloo: functions that a process can find."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tests.processes import bodies
from weft.compile.model_file import load_optimizer
from weft.runtime.layout.sharding import Sharding
from weft.runtime.links.backend import PrefixStore
from weft.runtime.links.device import DeviceTransport
from weft.runtime.links.processes import ProcessTransport
from weft.runtime.links.transport import Transport
from weft.verify.generated import Task, train

ROUNDING = {torch.bfloat16: 0.6, torch.float32: 1e-5, torch.complex64: 1e-5}
"""Of sums of numbers of about 10."""


def on_device(transport: ProcessTransport) -> DeviceTransport:
    """The same ranks, as if they were of devices."""
    store = PrefixStore("device", transport.store)
    return DeviceTransport(store, transport._groups, transport.num_ranks, device=transport.device, timeout=30.0)


def run(transport: ProcessTransport, name: str) -> Any:
    """A body of these modules, by its name."""
    body = globals().get(name) or getattr(bodies, name)
    device = on_device(transport)
    found = body(device, None)
    device.close()
    return found


def trained(transport: ProcessTransport, task: Task) -> Any:
    """Steps of a program, as `verify` makes them."""
    device = on_device(transport)
    assert task.optimizer is not None or task.path is not None
    optimizer = task.optimizer if task.path is None else load_optimizer(task.path)
    found = train(task, device, optimizer, device.begin_step)
    device.close()
    return found


def shards(transport: Transport, payload: Any) -> list[Tensor]:
    """Buckets that are gathered and scattered: even and uneven parts, parts that a member lacks, parts in pieces."""
    n, rank = transport.num_ranks, transport.rank
    group = tuple(reversed(range(n)))
    even = tuple((((2 * at, 2 * at + 2),), ((0, 3),)) for at in range(n))
    uneven = tuple(None if at == 0 else (((at - 1, at),),) for at in range(n))
    pieces = tuple((((at, at + 1), (n + at, n + at + 1)),) for at in range(n))
    found = list[Tensor]()
    for dtype in (torch.float64, torch.int64, torch.int16):
        shapes = (2 * n, 3), (n - 1,), (2 * n,)
        mine = group.index(rank)
        full = [bodies.values(rank, dtype, shape) for shape in shapes]
        parts = even, uneven, pieces
        sizes = [
            (0,) if one[mine] is None else tuple(sum(stop - start for start, stop in each) for each in one[mine] or ())
            for one in parts
        ]
        some = slice(None), slice(1), slice(1, None)
        shardings = [Sharding(shapes[one], parts[one], sizes[one], dtype) for one in some]
        shards: list[Tensor] = []
        for one, sharding in zip(some, shardings, strict=True):
            made = transport.start_reduce_scatter(full[one], sharding, group).wait()
            found += made
            shards = shards or [each.reshape(-1) for each in made]
        handles = [
            transport.start_all_gather(shards[one], way, group) for one, way in zip(some, shardings, strict=True)
        ]
        handles.append(transport.start_all_gather(shards, shardings[0], group, full))
        found += [each for handle in handles for each in handle.wait()]
        found += full
    return found


def rows(transport: Transport, payload: Any) -> list[Tensor]:
    """Buckets of which each member has as many rows: runs long enough to be moved by themselves, and shorter ones."""
    n, rank = transport.num_ranks, transport.rank
    group, found = tuple(range(n)), list[Tensor]()
    shapes = (2 * n, 16), (8 * n,), (4 * n, 2, 8)
    parts = [
        tuple(
            (((shape[0] // n * at, shape[0] // n * (at + 1)),), *(((0, size),) for size in shape[1:])) for at in group
        )
        for shape in shapes
    ]
    mine = [(shape[0] // n, *shape[1:]) for shape in shapes]
    for dtype in (torch.float64, torch.int32, torch.bfloat16, torch.bool):
        sharding = Sharding(shapes, parts, mine, dtype)
        assert sharding.in_rows and (sharding.run > 0) == (dtype == torch.float64)
        full = [bodies.values(rank, dtype, shape) for shape in shapes]
        if dtype != torch.bfloat16:
            found += transport.start_reduce_scatter(full, sharding, group).wait()
        shards = [bodies.values(rank, dtype, shape).reshape(-1) for shape in mine]
        handles = [transport.start_all_gather(shards, sharding, group, to) for to in (None, full)]
        found += [each for handle in handles for each in handle.wait()]
    return [*found, *full]


def sums(transport: Transport, payload: Any) -> list[Tensor]:
    """Sums begun and waited for later, past other calls; what others see is not written to."""
    group = tuple(range(transport.num_ranks))
    held = bodies.values(transport.rank, torch.float64, (50,))
    view = held[10:]
    kinds = (torch.float64, torch.bfloat16, torch.int16, torch.bool, torch.complex64)
    handles = [transport.start_all_reduce([bodies.values(transport.rank, kind, (7,))], group) for kind in kinds]
    handles.append(transport.start_all_reduce([view], group))
    handles.append(transport.start_all_reduce([view, held.view(5, 10).t()], group))
    between = transport.all_reduce(torch.tensor(float(transport.rank)), group)
    return [*(one.wait() for one in handles), between, held]


def letters(transport: Transport, payload: Any) -> list[Tensor]:
    """Everybody leaves messages for everybody, in another order than they are asked for, empty ones among them."""
    n, rank = transport.num_ranks, transport.rank
    transport.meet([(a, b) for a in range(n) for b in range(n)])
    form = [((2, 3), torch.float64), ((0,), torch.int64), ((1,), torch.bool)]
    for turn in range(3):
        for peer in range(n):
            left = bodies.values(10 * rank + turn, torch.float64, (2, 3))
            transport.post(peer, f"turn {turn}", [left, torch.zeros(0, dtype=torch.int64), left[0, :1] > 0])
            transport.post(peer, f"nothing {turn}", [])
            left.zero_()
    found = list[Tensor]()
    for turn in (2, 0, 1):
        for peer in range(n):
            found += transport.take(peer, f"turn {turn}", form)
            found += transport.take(peer, f"nothing {turn}", [])
    return found


def told(transport: Transport, payload: Any) -> list[Tensor]:
    """Numbers of hosts, again and again, in several groups."""
    n, rank = transport.num_ranks, transport.rank
    groups = [tuple(range(n)), tuple(reversed(range(n))), (rank,)]
    found = [transport.tell([rank + turn, 1 / 3, math.inf], group) for turn in range(3) for group in groups]
    return [torch.tensor(one, dtype=torch.float64) for one in found]


def outside(transport: Transport, payload: Any) -> str:
    """A rank that calls a group that it is not in."""
    try:
        transport.all_reduce(torch.ones(1), tuple(rank for rank in (5, 6) if rank != transport.rank))
    except Exception as error:  # noqa: BLE001 - its words are the result
        return str(error).splitlines()[0]
    return ""
