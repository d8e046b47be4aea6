"""What the ranks of the tests do: functions that a process can find."""

from __future__ import annotations

import itertools
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.runtime.layout.sharding import Sharding
from weft.runtime.links.processes import ProcessTransport
from weft.runtime.links.replicas import Replica
from weft.runtime.links.transport import Doing, GroupComm, PeerLost, Transport
from weft.runtime.links.wire import LARGE
from weft.runtime.shm.segments import PIECE, Segments
from weft.runtime.training.load import load_pipeline

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool)

SIZES = (3, 40000, 2200001)
"""Numbers of float64: one round, two rounds, several blocks of which the last is short."""
SETTLED = 1.5
"""Seconds after which, on a busy machine too, the others wait and this rank has told what it does."""


def values(rank: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Some numbers of a rank: sums of them in floats depend on the order."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float64) * 10
    return made > 0 if dtype == torch.bool else made.abs().to(dtype) if dtype == torch.uint8 else made.to(dtype)


def everything(transport: Transport, payload: Any) -> list[Tensor]:
    """Every collective on every dtype, sizes from nothing to two rounds, groups in and out of order."""
    n, rank = transport.num_ranks, transport.rank
    found: list[Tensor] = []
    for group in (tuple(range(n)), tuple(reversed(range(n))), (1, 0)):
        if rank not in group:
            continue
        for dtype in DTYPES:
            for shape in ((), (0, 3), (5,), (3, 7), (123, 211)):
                mine = values(rank, dtype, shape)
                found.append(transport.all_reduce(mine, group))
                found += transport.all_gather(mine, group)
        for op in ("max", "min", "prod"):
            found.append(transport.all_reduce(values(rank, torch.float64, (4, 2)).t(), group, op))
        transport.barrier(group)
    return found


def long_sums(transport: Transport, payload: Any) -> list[bool]:
    """Sums of so many blocks that they share buffers; of whole numbers, which any order adds up to the same."""
    group, found = tuple(range(transport.num_ranks)), []
    for number in (3 * 2**20, 4 * 2**20 + 1, 12 * 2**20):
        mine = torch.arange(number, dtype=torch.int32) % 1000 + transport.rank
        total = transport.all_reduce(mine, group)
        wanted = (torch.arange(number, dtype=torch.int32) % 1000) * len(group) + sum(group)
        found.append(torch.equal(total, wanted))
    return found


def uneven(transport: Transport, payload: Any) -> dict[int, list[Tensor]]:
    """Rank r sends peer p pieces of other shapes and dtypes: p of them, of r rows. Nobody sends to rank 0."""
    n, rank = transport.num_ranks, transport.rank
    group = tuple(range(n))
    kinds = (torch.bool, torch.float64, torch.uint8, torch.float32)
    sends = {p: [values(rank, kinds[i % 4], (rank, i + 1)) for i in range(p)] for p in range(n) if p != rank}
    expects = {p: [((p, i + 1), kinds[i % 4]) for i in range(rank)] for p in range(n) if p != rank}
    return transport.all_to_all(sends, expects, group, "exchange")


def disjoint(transport: Transport, payload: Any) -> dict[int, list[Tensor]]:
    """The lower half holds a tensor, the upper half gets it."""
    n, rank = transport.num_ranks, transport.rank
    half, group = n // 2, tuple(range(n))
    if rank < half:
        return transport.all_to_all({rank + half: [values(rank, torch.float64, (3, 2))]}, {}, group, "exchange")
    return transport.all_to_all({}, {rank - half: [((3, 2), torch.float64)]}, group, "exchange")


def positions(transport: Transport, payload: Any) -> list[Tensor]:
    """A communicator gathers parts of different length in the order of its ranks."""
    ranks = (2, 0, 1)
    return GroupComm(transport, ranks).all_gather(torch.arange(float(transport.rank)))


def many_groups(transport: Transport, payload: Any) -> list[Tensor]:
    """Each rank has made other groups, and other numbers of them, before all meet."""
    pairs = [(0, 1), (2, 3), (0, 2), (1, 2), (0, 1, 3)]
    found = [transport.all_reduce(torch.tensor(transport.rank), g) for g in pairs if transport.rank in g]
    return [*found, transport.all_reduce(torch.tensor(1), (3, 1, 0, 2))]


def aside(transport: ProcessTransport, payload: Any) -> list[Tensor]:
    """Sums begun and waited for later, past other calls in the same group, in the order of their beginning."""
    group = tuple(range(transport.num_ranks))
    mine = [values(transport.rank, torch.float64, (size,)) for size in SIZES]
    handles = [transport.start_all_reduce(tensor.split(30_000), group) for tensor in mine]
    between = transport.all_reduce(torch.tensor(float(transport.rank)), group)
    found = [handle.wait() for handle in handles]
    return [*found, between]


def kept(transport: ProcessTransport, payload: Any) -> list[bool]:
    """Totals stay as they are for as long as somebody holds them; then their memory is used again."""
    group = tuple(range(transport.num_ranks))
    parts = [values(transport.rank, torch.float64, (size,)) for size in (3, 40_000, 50_001)]
    expected = sum(torch.cat([values(rank, torch.float64, (size,)) for size in (3, 40_000, 50_001)]) for rank in group)
    first = transport.start_all_reduce(parts, group).wait()
    second = transport.start_all_reduce([part * 2 for part in parts], group).wait()
    apart = bool((first == expected).all()) and bool((second == 2 * expected).all())
    address = second.data_ptr()
    del second
    third = transport.start_all_reduce([part * 4 for part in parts], group).wait()
    return [apart, bool((first == expected).all()), bool((third == 4 * expected).all()), third.data_ptr() == address]


def scattered(transport: ProcessTransport, payload: Any) -> Tensor:
    """Rank r's part of everybody's sum has r + 1 rows."""
    group = tuple(range(transport.num_ranks))
    starts = [rank * (rank + 1) // 2 for rank in (*group, len(group))]
    parts = tuple((((start, stop),), ((0, 2),)) for start, stop in itertools.pairwise(starts))
    full = torch.cat([values(transport.rank, torch.float64, (p + 1, 2)) for p in group])
    sharding = Sharding([tuple(full.shape)], [parts], [(transport.rank + 1, 2)], torch.float64)
    return transport.start_reduce_scatter([full], sharding, group).wait()[0]


def unchecked(transport: ProcessTransport, payload: Any) -> Tensor:
    transport.check = False
    return transport.all_reduce(values(transport.rank, torch.float32, (9,)), tuple(range(transport.num_ranks)))


def identity(transport: Transport, payload: Any) -> tuple[int, int, Any]:
    return transport.rank, os.getpid(), payload


# ways to fail


def raises(transport: ProcessTransport, payload: Any) -> None:
    transport.begin_step(2)
    transport.doing = Doing("mlp/linear", "model.py:7")
    if transport.rank == 1:
        raise ValueError("bad luck")
    transport.all_reduce(torch.ones(2), tuple(range(transport.num_ranks)))


def is_killed(transport: ProcessTransport, payload: Any) -> None:
    everyone = tuple(range(transport.num_ranks))
    transport.barrier(everyone)
    transport.begin_step(2)
    transport.doing = Doing("mlp/linear", "model.py:7")
    if transport.rank == 1:
        time.sleep(SETTLED)
        os.kill(os.getpid(), signal.SIGKILL)
    transport.all_reduce(torch.ones(2), everyone)


def never_comes(transport: ProcessTransport, payload: Any) -> None:
    """Rank 0 fails while the others are far from any collective."""
    if transport.rank == 0:
        raise KeyError("gone")
    while True:
        time.sleep(0.01)


def mixed_kinds(transport: Transport, payload: Any) -> None:
    if transport.rank == 0:
        transport.all_reduce(torch.ones(2), (0, 1))
    else:
        transport.all_gather(torch.ones(2), (0, 1))


def mixed_shapes(transport: Transport, payload: Any) -> None:
    transport.all_reduce(torch.ones(2 + transport.rank), (0, 1))


def mixed_dtypes(transport: Transport, payload: Any) -> None:
    transport.all_gather(torch.ones(2, dtype=[torch.float32, torch.int32][transport.rank]), (0, 1))


def mixed_operations(transport: Transport, payload: Any) -> None:
    transport.all_reduce(torch.ones(2), (0, 1), ["sum", "max"][transport.rank])


def unexpected_piece(transport: Transport, payload: Any) -> None:
    other = 1 - transport.rank
    transport.all_to_all({other: [torch.ones(3)]}, {other: [((3 + transport.rank,), torch.float32)]}, (0, 1))


def missing_piece(transport: Transport, payload: Any) -> None:
    other = 1 - transport.rank
    sends = {other: [torch.ones(3)]} if transport.rank else {}
    transport.all_to_all(sends, {other: [((3,), torch.float32)]}, (0, 1))


def wrong_order(transport: ProcessTransport, payload: Any) -> None:
    for group in ((0, 1), (0, 1, 2)):
        if transport.rank in group:
            transport.barrier(group)
    transport.doing = Doing(f"op{transport.rank}", f"model.py:{transport.rank}")
    for group in ((0, 1), (0, 1, 2)) if transport.rank != 1 else ((0, 1, 2), (0, 1)):
        if transport.rank in group:
            transport.all_reduce(torch.ones(1), group)


def leaves_early(transport: Transport, payload: Any) -> None:
    if transport.rank == 0:
        transport.barrier((0, 1))


def is_slow(transport: Transport, payload: Any) -> None:
    transport.barrier((0, 1))
    if transport.rank == 0:
        time.sleep(30)
    transport.barrier((0, 1))


def foreign_group(transport: Transport, payload: Any) -> None:
    transport.barrier((0,))


def bad_optimizer(parameters: object) -> torch.optim.Optimizer:
    raise ValueError("no optimizer today")


def boxed(transport: Transport, payload: Any) -> list[bool]:
    """Messages around the sizes that lie in shared memory, growing, one-way too; true for each that came as sent."""
    n, rank = transport.num_ranks, transport.rank
    group, found = tuple(range(n)), []
    sizes = [LARGE - 1, LARGE, 5, 3 * LARGE, 12 * LARGE, LARGE + 3, PIECE, 20 * LARGE, PIECE - 1, 30 * LARGE, 0]

    def message(step: int, sender: int, taker: int) -> Tensor:
        # one size per pair of ranks, so that some messages of an exchange travel in boxes and others do not
        size = sizes[(step + sender + taker) % len(sizes)]
        return torch.full((size,), (7 * step + 3 * sender + taker) % 251, dtype=torch.uint8)

    for step in range(len(sizes)):
        sends = {peer: [message(step, rank, peer)] for peer in group if peer != rank}
        wanted = {peer: message(step, peer, rank) for peer in group if peer != rank}
        expects = {peer: [(tuple(one.shape), one.dtype)] for peer, one in wanted.items()}
        came = transport.all_to_all(sends, expects, group, "exchange")
        found += [torch.equal(came[peer][0], wanted[peer]) for peer in wanted]
    for step in range(12):
        sent = torch.full((2 * LARGE,), step, dtype=torch.uint8)
        sends = {1: [sent]} if rank == 0 else {}
        expects = {0: [((2 * LARGE,), torch.uint8)]} if rank == 1 else {}
        came = transport.all_to_all(sends, expects, group, "exchange")
        found += [torch.equal(came[peer][0], sent) for peer in expects]
    return found


def boxes_before(transport: Transport, payload: Any) -> int:
    """How many boxes are open when a job begins; it then uses some."""
    links = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    boxed(transport, payload)
    return sum("memfd:weft" in str(link) for link in links)


def last_message(transport: Transport, payload: Any) -> bool:
    """Rank 0 ends right after it has sent; rank 1 looks late, into a box that it has not seen before."""
    sent = torch.full((4 * LARGE,), 7, dtype=torch.uint8)
    if transport.rank == 1:
        look = Segments.look

        def late(self: Segments, passage: Any) -> Any:
            self._pipes.wait(passage.exchange, self._look)
            time.sleep(1)
            return look(self, passage)

        Segments.look = late  # type: ignore[method-assign]
    sends = {1: [sent]} if transport.rank == 0 else {}
    expects = {0: [((4 * LARGE,), torch.uint8)]} if transport.rank == 1 else {}
    came = transport.all_to_all(sends, expects, (0, 1), "exchange")
    return transport.rank == 0 or torch.equal(came[0][0], sent)


MESSAGES = 40
"""More messages of half a page than a pipe holds."""


def many_letters(transport: Transport, payload: Any) -> list[Tensor]:
    """More than a pipe holds to each other rank, small and large by turns, taken in another order."""
    rank, others = transport.rank, [p for p in range(transport.num_ranks) if p != transport.rank]
    sizes = [512 if i % 3 else 5000 for i in range(MESSAGES)]
    for peer in (*others, rank):
        for i, size in enumerate(sizes):
            transport.post(peer, f"message {i}", [torch.full((size,), rank + 10.0 * i, dtype=torch.float64)])
    found = []
    for i in reversed(range(MESSAGES)):
        for peer in (rank, *others):
            found += transport.take(peer, f"message {i}", [((sizes[i],), torch.float64)])
    return [one[[0, -1]] for one in found]


def a_letter_that_does_not_fit(transport: Transport, payload: Any) -> list[Tensor]:
    """Rank 0 fills its pipe and waits for rank 1 in a collective, which rank 1 enters after the last message."""
    if transport.rank == 0:
        for i in range(MESSAGES):
            transport.post(1, f"message {i}", [torch.full((500,), float(i), dtype=torch.float64)])
        return [transport.all_reduce(torch.ones(1), (0, 1))]
    last = transport.take(0, f"message {MESSAGES - 1}", [((500,), torch.float64)])
    transport.all_reduce(torch.ones(1), (0, 1))
    return [last[0][:1]]


def writes_and_leaves(transport: Transport, payload: Any) -> list[Tensor]:
    """Rank 0 fills its pipe and is done; rank 1 comes later."""
    if transport.rank == 0:
        for i in range(MESSAGES):
            transport.post(1, f"message {i}", [torch.full((500,), float(i), dtype=torch.float64)])
        return []
    time.sleep(0.5)
    return [transport.take(0, f"message {i}", [((500,), torch.float64)])[0][:1] for i in range(MESSAGES)]


def letters_of_all_kinds(transport: Transport, payload: Any) -> list[Tensor]:
    """Every dtype, empty ones, several in one message, one tag again and again."""
    peer = 1 - transport.rank
    shapes = [(dtype, shape) for dtype in DTYPES for shape in ((), (0, 3), (3, 7), (60, 70))]
    found = []
    for _ in range(2):
        transport.post(peer, "again", [values(transport.rank, dtype, shape) for dtype, shape in shapes])
        found += transport.take(peer, "again", [(shape, dtype) for dtype, shape in shapes])
        transport.barrier((0, 1))  # a tag is used again when its message was taken
    return found


def is_killed_in_an_event(transport: Transport, payload: Any) -> None:
    """Rank 1 of a pipeline dies in an event; the others wait for what it would have sent."""
    transport.begin_step(3)
    if transport.rank == 1:
        transport.doing = Doing("F2 of blocks.1")
        time.sleep(SETTLED)
        os.kill(os.getpid(), signal.SIGKILL)
    transport.doing = Doing("B2 of blocks.0")
    transport.take(1, "gradient of x for blocks.1, micro-batch 2", [((3,), torch.float64)])


def is_killed_in_a_pipeline(transport: ProcessTransport, payload: Any) -> None:
    """Rank 1 dies in the forward of the third micro-batch of a real step."""
    rank = load_pipeline(payload["folder"], Replica(transport, transport.num_ranks))
    run = rank._forward

    def forward(share: Any, piece: Any, micro: int, batch: Any) -> None:
        if transport.rank == 1 and micro == 2:
            time.sleep(SETTLED)
            os.kill(os.getpid(), signal.SIGKILL)
        run(share, piece, micro, batch)

    rank._forward = forward  # type: ignore[method-assign]
    transport.begin_step(3)
    rank.step(payload["batches"], [1 / 3] * 3, 0, 0)


def tells_what_it_lost(transport: ProcessTransport, payload: Any) -> None:
    """Rank 1 dies; what rank 0 raises goes to a file, since the launcher tells of the death alone."""
    if transport.rank == 1:
        transport.post(0, "hello", [torch.zeros(1)])
        # not before its own message has arrived: it would be lost with this rank
        transport.take(0, "arrived", [((1,), torch.float32)])
        os.kill(os.getpid(), signal.SIGKILL)
    transport.take(1, "hello", [((1,), torch.float32)])
    transport.doing = Doing("B2 of blocks.0")
    transport.post(1, "arrived", [torch.zeros(1)])
    try:
        transport.take(1, "gradient of x, micro-batch 2", [((3,), torch.float64)])
    except PeerLost as error:
        Path(payload).write_text(str(error))
        raise


def sums_with_one_that_goes(transport: ProcessTransport, payload: Any) -> None:
    """Rank 1 dies between two sums."""
    transport.all_reduce(torch.zeros(3), (0, 1))
    if transport.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    transport.doing = Doing("B2 of blocks.0")
    try:
        transport.all_reduce(torch.zeros(3), (0, 1))
    except PeerLost as error:
        Path(payload).write_text(str(error))
        raise


def waits_for_a_slow_letter(transport: Transport, payload: Any) -> None:
    """Rank 1 is alive and posts nothing."""
    transport.post(1 - transport.rank, "hello", [torch.zeros(1)])
    transport.take(1 - transport.rank, "hello", [((1,), torch.float32)])
    if transport.rank == 1:
        transport.doing = Doing("F3 of blocks.1")
        time.sleep(20)
    transport.doing = Doing("B3 of blocks.0")
    transport.take(1, "gradient of x, micro-batch 3", [((3,), torch.float64)])
