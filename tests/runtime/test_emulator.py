"""Ranks as threads: results, isolation, and every way to fail without a hang."""

from __future__ import annotations

import signal
import threading
import time

import pytest
import torch

from weft.runtime.links.emulator import run_ranks
from weft.runtime.links.transport import CollectiveMismatch, Doing, GroupComm, RankFailed, Transport

QUICK = 30.0
"""Far below any timeout: what is found must be found at once."""


@pytest.fixture(autouse=True)
def no_hang():
    start = time.monotonic()
    yield
    assert time.monotonic() - start < QUICK


def test_results_in_rank_order_and_sums_in_group_order() -> None:
    group = (2, 0, 1)
    values = [
        torch.tensor([1e16, 1.0], dtype=torch.float64),
        torch.tensor([-1e16, 1.0]).double(),
        torch.ones(2).double(),
    ]

    def body(transport: Transport) -> tuple[int, torch.Tensor]:
        return transport.rank, transport.all_reduce(values[transport.rank], group)

    results = run_ranks(3, body)
    assert [rank for rank, _ in results] == [0, 1, 2]
    want = (values[2] + values[0]) + values[1]
    assert want[0] != (values[0] + values[1] + values[2])[0]
    assert all(torch.equal(total, want) for _, total in results)


def test_thirty_runs_agree_bit_for_bit() -> None:
    def body(transport: Transport) -> torch.Tensor:
        x = torch.linspace(-1, 1, 257) * (transport.rank + 0.1)
        for _ in range(5):
            x = transport.all_reduce(x.sin(), (0, 1, 2, 3)) / 3
        return x

    first = run_ranks(4, body)
    for _ in range(30):
        assert all(torch.equal(a, b) for a, b in zip(first, run_ranks(4, body), strict=True))


@pytest.mark.parametrize(("op", "want"), [("sum", 6), ("max", 3), ("min", 1), ("prod", 6)])
def test_reductions(op: str, want: int) -> None:
    found = run_ranks(3, lambda t: t.all_reduce(torch.tensor(t.rank + 1), (0, 1, 2), op))
    assert [int(value) for value in found] == [want] * 3


def test_results_are_private() -> None:
    """What a rank does to its tensors after a call never shows elsewhere."""

    def body(transport: Transport) -> list[torch.Tensor]:
        mine, other = torch.full((3,), float(transport.rank)), 1 - transport.rank
        expects = {other: [((3,), torch.float32)]}
        found = [
            transport.all_reduce(mine, (0, 1)),
            *transport.all_gather(mine, (0, 1)),
            *transport.all_to_all({other: [mine]}, expects, (0, 1))[other],
        ]
        mine.fill_(99)
        kept = [tensor.clone() for tensor in found]
        for tensor in found:
            tensor.fill_(77)
        transport.barrier((0, 1))
        return kept

    for rank, found in enumerate(run_ranks(2, body)):
        assert [float(tensor[0]) for tensor in found] == [1, 0, 1, 1 - rank]


def test_group_comm_gathers_uneven_parts() -> None:
    def body(transport: Transport) -> list[list[float]]:
        comm = GroupComm(transport, (2, 0, 1))
        assert (comm.size, (2, 0, 1)[comm.rank]) == (3, transport.rank)
        return [part.tolist() for part in comm.all_gather(torch.arange(float(transport.rank)))]

    assert run_ranks(3, body) == [[[0.0, 1.0], [], [0.0]]] * 3


def test_state_of_the_caller_is_copied() -> None:
    def body(transport: Transport) -> tuple[bool, bool, torch.dtype]:
        return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        assert run_ranks(2, body) == [(False, True, torch.float16)] * 2
    assert [found[:2] for found in run_ranks(2, body)] == [(True, False)] * 2


def test_a_rank_that_raises_stops_the_others() -> None:
    def body(transport: Transport) -> None:
        if transport.rank == 1:
            transport.doing = Doing("mlp/linear", "model.py:7")
            raise ValueError("bad luck")
        transport.all_reduce(torch.ones(2), (0, 1, 2))

    with pytest.raises(RankFailed, match=r"rank 1 failed in mlp/linear at model.py:7: ValueError: bad luck") as caught:
        run_ranks(3, body)
    assert (caught.value.rank, caught.value.op, caught.value.place) == (1, "mlp/linear", "model.py:7")
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_rank_that_raises_in_backward_stops_the_others() -> None:
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, transport):
            ctx.transport = transport
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            if ctx.transport.rank == 0:
                raise ZeroDivisionError("in backward")
            return ctx.transport.all_reduce(grad, (0, 1)), None

    def body(transport: Transport) -> None:
        Broken.apply(torch.ones(2, requires_grad=True), transport).sum().backward()

    with pytest.raises(RankFailed, match="rank 0 failed") as caught:
        run_ranks(2, body)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_all_ranks_raise() -> None:
    def body(transport: Transport) -> None:
        raise KeyError(transport.rank)

    with pytest.raises(RankFailed):
        run_ranks(4, body)


def mixed_kinds(transport: Transport) -> None:
    if transport.rank == 0:
        transport.all_reduce(torch.ones(2), (0, 1))
    else:
        transport.all_gather(torch.ones(2), (0, 1))


def mixed_shapes(transport: Transport) -> None:
    transport.all_reduce(torch.ones(2 + transport.rank), (0, 1))


def mixed_dtypes(transport: Transport) -> None:
    transport.all_gather(torch.ones(2, dtype=[torch.float32, torch.float64][transport.rank]), (0, 1))


def mixed_operations(transport: Transport) -> None:
    transport.all_reduce(torch.ones(2), (0, 1), ["sum", "max"][transport.rank])


def unexpected_piece(transport: Transport) -> None:
    other = 1 - transport.rank
    transport.all_to_all({other: [torch.ones(3)]}, {other: [((3 + transport.rank,), torch.float32)]}, (0, 1))


def missing_piece(transport: Transport) -> None:
    other = 1 - transport.rank
    sends = {other: [torch.ones(3)]} if transport.rank else {}
    transport.all_to_all(sends, {other: [((3,), torch.float32)]}, (0, 1))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (mixed_kinds, ["all_reduce(sum) of float32[2]", "all_gather sending float32[2]"]),
        (mixed_shapes, ["float32[2]", "float32[3]"]),
        (mixed_dtypes, ["float32[2]", "float64[2]"]),
        (mixed_operations, ["all_reduce(sum)", "all_reduce(max)"]),
        (unexpected_piece, ["sent float32[3] to rank 1, which expects float32[4]"]),
        (missing_piece, ["rank 0 sent nothing to rank 1, which expects float32[3]"]),
    ],
)
def test_mismatched_collectives_name_both_sides(body, words: list[str]) -> None:
    with pytest.raises(CollectiveMismatch) as caught:
        run_ranks(2, body)
    assert all(word in str(caught.value) for word in ["rank 0", "rank 1", *words]), str(caught.value)


def test_wrong_order_is_a_deadlock_found_at_once() -> None:
    def body(transport: Transport) -> None:
        transport.doing = Doing(f"op{transport.rank}", f"model.py:{transport.rank}")
        groups = [(0, 1), (0, 1, 2)] if transport.rank != 1 else [(0, 1, 2), (0, 1)]
        for group in groups:
            if transport.rank in group:
                transport.all_reduce(torch.ones(1), group)

    with pytest.raises(CollectiveMismatch, match="deadlock") as caught:
        run_ranks(3, body, timeout=30)
    assert caught.value.waits.keys() == {0, 1, 2}
    assert "group (0, 1), waiting for rank 1 (in op0 at model.py:0)" in caught.value.waits[0]
    assert "group (0, 1, 2), waiting for rank 0" in caught.value.waits[1]


def test_a_rank_that_leaves_early_is_a_deadlock() -> None:
    def body(transport: Transport) -> None:
        if transport.rank == 0:
            transport.barrier((0, 1))

    with pytest.raises(CollectiveMismatch, match="deadlock") as caught:
        run_ranks(2, body, timeout=30)
    assert caught.value.waits[1] == "has ended"


def test_a_slow_rank_is_a_timeout() -> None:
    def body(transport: Transport) -> None:
        if transport.rank == 0:
            time.sleep(1.0)
        transport.barrier((0, 1))

    with pytest.raises(CollectiveMismatch, match=r"waited 0.1 s") as caught:
        run_ranks(2, body, timeout=0.1)
    assert caught.value.waits[0] == "is running"


def test_a_foreign_group_is_refused() -> None:
    with pytest.raises(CollectiveMismatch, match="which it is not in"):
        run_ranks(2, lambda transport: transport.barrier((0,)))


def test_an_interrupt_ends_the_ranks_at_once() -> None:
    """Ctrl-C comes to the main thread while ranks compute and wait."""
    begun, ended = threading.Event(), []

    def body(transport: Transport) -> None:
        try:
            if transport.rank == 0:
                transport.barrier((0, 1))
            begun.set()
            while True:
                transport.doing = Doing("mlp/linear")
                time.sleep(0.01)
        finally:
            ended.append(transport.rank)

    def interrupt() -> None:
        begun.wait(QUICK)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        run_ranks(2, body)
    assert sorted(ended) == [0, 1]


def test_an_interrupt_does_not_wait_for_a_long_operator() -> None:
    free = threading.Event()

    def body(transport: Transport) -> None:
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        free.wait(QUICK)

    with pytest.raises(KeyboardInterrupt):
        run_ranks(1, body)
    assert not free.is_set()
    free.set()
