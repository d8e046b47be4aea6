"""Pieces cut, sent, put in place and added; views and copies."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.runtime.scripting import F64, all_reduce, box, whole
from weft.runtime.layout.execute import execute, execute_all, put, size, take
from weft.runtime.layout.transfer import Piece, Transfer
from weft.runtime.links.emulator import run_ranks
from weft.runtime.links.transport import CollectiveMismatch, RankFailed, Transport

X = torch.arange(24.0, dtype=F64).reshape(4, 6)


class FakeTransport:
    """A transport that must not be used."""

    rank, num_ranks, device = 0, 1, torch.device("cpu")


def test_take_of_everything_is_the_tensor_itself() -> None:
    assert take(X, whole(4, 6)) is X
    scalar = torch.tensor(3.0)
    assert take(scalar, ()) is scalar


def test_take_and_put_are_reverses() -> None:
    index = (((2, 4), (0, 1)), ((1, 2), (4, 6)))
    part = take(X, index)
    assert torch.equal(part, X[[2, 3, 0]][:, [1, 4, 5]]) and tuple(part.shape) == size(index)
    out = torch.zeros_like(X)
    put(out, index, part)
    assert torch.equal(take(out, index), part) and int((out != 0).sum()) == int((part != 0).sum())
    put(out, index, part, add=True)
    assert torch.equal(take(out, index), 2 * part)


def test_empty_takes() -> None:
    assert take(X, ((), ((0, 6),))).shape == (0, 6)
    put(X.clone(), ((), ((0, 6),)), torch.empty(0, 6, dtype=F64))


def test_put_refuses_a_piece_of_another_shape() -> None:
    with pytest.raises(AssertionError, match="shape"):
        put(X.clone(), box((0, 2), (0, 6)), X[:1])


def test_local_transfer_needs_no_transport() -> None:
    slices = Transfer("local", (), (Piece(0, 0, box((0, 4), (2, 5))),), (Piece(0, 0, whole(4, 3)),), ((4, 3),))
    (found,) = execute(slices, [X], FakeTransport(), dtype=X.dtype)
    assert torch.equal(found, X[:, 2:5]) and found.is_contiguous()
    assert found.untyped_storage().nbytes() == found.nbytes, "a part must not keep the whole alive"
    same = Transfer("local", (), (Piece(0, 0, whole(4, 6)),), (Piece(0, 0, whole(4, 6)),), ((4, 6),))
    (found,) = execute(same, [X], FakeTransport(), dtype=X.dtype)
    assert found.data_ptr() == X.data_ptr()


def test_local_transfer_that_names_another_rank_is_refused() -> None:
    wrong = Transfer("local", (), (Piece(1, 0, whole(4, 6)),), (), ())
    with pytest.raises(AssertionError, match="other ranks"):
        execute(wrong, [X], FakeTransport(), dtype=X.dtype)


def test_zeros_where_nothing_comes() -> None:
    nothing = Transfer("local", (), (), (), ((2, 3),))
    (found,) = execute(nothing, [], FakeTransport(), dtype=torch.float32)
    assert torch.equal(found, torch.zeros(2, 3)) and found.dtype == torch.float32


def test_adding_does_not_write_to_the_source() -> None:
    source, slots = X.clone(), (whole(4, 6), whole(4, 6))
    both = Transfer(
        "local",
        (),
        tuple(Piece(0, s, i) for s, i in enumerate(slots)),
        tuple(Piece(0, 0, i) for i in slots),
        ((4, 6),),
        True,
    )
    (found,) = execute(both, [source, X], FakeTransport(), dtype=X.dtype)
    assert torch.equal(found, 2 * X) and torch.equal(source, X)


def test_several_slots_and_peers() -> None:
    """Rank 0 holds the columns as two slots, every rank wants some rows of the whole."""
    rows = [(0, 1), (1, 1), (1, 4)]
    group = (0, 1, 2)

    def body(transport: Transport) -> torch.Tensor:
        r = transport.rank
        height = rows[r][1] - rows[r][0]
        sends, tensors = (), []
        if r == 0:
            tensors = [X[:, :2], X[:, 2:]]
            sends = tuple(Piece(p, s, box(rows[p], (0, tensors[s].shape[1]))) for p in group for s in (0, 1))
        receives = tuple(Piece(0, 0, box((0, height), cols)) for cols in ((0, 2), (2, 6)))
        (found,) = execute(Transfer("exchange", group, sends, receives, ((height, 6),)), tensors, transport, dtype=F64)
        return found

    assert torch.equal(torch.cat(run_ranks(3, body)), X)


@pytest.mark.parametrize("shares", list(itertools.product((0, 1, 3), repeat=2)))
def test_reduce_scatter_then_gather_is_a_sum(shares: tuple[int, int]) -> None:
    rows = [*shares, 4 - min(sum(shares), 4)] if sum(shares) <= 4 else [3, 1, 0]
    starts = [sum(rows[:i]) for i in range(3)]
    boxes = [box((starts[i], starts[i] + rows[i]), (0, 6)) for i in range(3)]

    def body(transport: Transport) -> torch.Tensor:
        r, group = transport.rank, (0, 1, 2)
        mine = whole(rows[r], 6)
        scatter = Transfer(
            "reduce_scatter",
            group,
            tuple(Piece(p, 0, boxes[p]) for p in group),
            tuple(Piece(p, 0, mine) for p in group),
            ((rows[r], 6),),
            True,
        )
        gather = Transfer(
            "all_gather",
            group,
            tuple(Piece(p, 0, mine) for p in group),
            tuple(Piece(p, 0, boxes[p]) for p in group),
            ((4, 6),),
        )
        return execute_all([scatter, gather], [X * (r + 1)], transport, dtype=X.dtype)[0]

    assert all(torch.equal(found, X * 6) for found in run_ranks(3, body))


def test_all_reduce_of_one_rank_and_of_two_slots() -> None:
    (found,) = execute(all_reduce((4, 6), 0), [X], FakeTransport(), dtype=X.dtype)
    assert torch.equal(found, X)
    with pytest.raises(AssertionError, match="one local tensor"):
        execute(all_reduce((4, 6), 0, 1), [X, X], FakeTransport(), dtype=X.dtype)


def test_wrong_dtype_is_refused_not_converted() -> None:
    def body(transport: Transport) -> None:
        piece = Piece(1 - transport.rank, 0, whole(4, 6))
        if transport.rank == 0:
            execute(Transfer("exchange", (0, 1), (piece,), (), ()), [X], transport, dtype=X.dtype)
        else:
            execute(Transfer("exchange", (0, 1), (), (piece,), ((4, 6),)), [], transport, dtype=torch.float32)

    with pytest.raises(CollectiveMismatch, match=r"float64.*expects float32"):
        run_ranks(2, body)


def test_a_bad_index_names_the_rank() -> None:
    def body(transport: Transport) -> None:
        execute(Transfer("local", (), (Piece(transport.rank, 0, whole(4)),), (), ()), [X], transport, dtype=X.dtype)

    with pytest.raises(RankFailed, match="index of 1 dims"):
        run_ranks(2, body)


class Wider(TorchDispatchMode):
    """New tensors asked for as float32 come as float64."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = F64
        return func(*args, **kwargs)


def test_a_mode_that_widens_dtypes_widens_what_is_expected() -> None:
    """The plan says float32, the ranks run in float64: receivers and zeros follow."""

    def body(transport: Transport) -> list[torch.Tensor]:
        piece = Piece(1 - transport.rank, 0, whole(4, 6))
        with Wider():
            if transport.rank == 0:
                return execute(Transfer("exchange", (0, 1), (piece,), (), ()), [X], transport, dtype=torch.float32)
            shapes = ((4, 6), (2,))
            return execute(Transfer("exchange", (0, 1), (), (piece,), shapes), [], transport, dtype=torch.float32)

    sent, (found, zeros) = run_ranks(2, body)
    assert sent == [] and torch.equal(found, X) and zeros.dtype == F64


class Gathers(FakeTransport):
    """Brings rows of `X` in one memory, with a hole of some rows for what the rank has itself."""

    rank, num_ranks = 1, 3

    def __init__(self, hole: int = 1) -> None:
        self.came = torch.full((3 + hole, 6), torch.nan, dtype=F64)
        self.came[0], self.came[1 + hole :] = X[0], X[2:]

    def all_to_all(self, *_: Any) -> dict[int, list[torch.Tensor]]:
        return {0: [self.came[:1]], 2: [self.came[-2:]]}


def test_what_is_gathered_stays_where_it_came() -> None:
    sends = tuple(Piece(peer, 0, whole(1, 6)) for peer in range(3))
    receives = tuple(Piece(peer, 0, box(rows, (0, 6))) for peer, rows in enumerate([(0, 1), (1, 2), (2, 4)]))
    transfer = Transfer("all_gather", (0, 1, 2), sends, receives, ((4, 6),))
    mine = X[1:2].clone()
    for transport, stays in ((Gathers(), True), (Gathers(0), False), (Gathers(2), False)):
        (found,) = execute(transfer, [mine], transport, dtype=X.dtype)  # type: ignore[arg-type]
        assert torch.equal(found, X) and found.is_contiguous()
        assert (found.data_ptr() == transport.came.data_ptr()) is stays
        assert found.data_ptr() != mine.data_ptr()
