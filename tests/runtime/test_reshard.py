"""Reshards in autograd: who takes part in backward, in which order, with which gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.runtime.scripting import F64, all_reduce, reshard, whole
from weft.runtime.layout.reshard import Reshard, run_reshard
from weft.runtime.layout.transfer import Piece, Transfer
from weft.runtime.links.emulator import run_ranks
from weft.runtime.links.transport import Transport
from weft.runtime.program.module import ParallelModule, Part

PAIR = (0, 1)


def backward(roots: list[Tensor], tokens: list[Tensor]) -> None:
    """Backward from what is there, and from the tokens with gradient zero."""
    gradients = [torch.ones_like(root) for root in roots] + [torch.zeros_like(token) for token in tokens]
    torch.autograd.backward([*roots, *tokens], gradients)


def summed(source: str, target: str) -> tuple[str, Reshard]:
    """Sums forward and backward: partial to copy, and the gradient too."""
    shape = (2,)
    return reshard(source, target, [all_reduce(shape, *PAIR)], [all_reduce(shape, *PAIR)], ((shape,), (shape,)))


class Recorder:
    """A transport that keeps the order of what each rank did."""

    def __init__(self, transport: Transport, log: list[str]) -> None:
        self._transport, self.log = transport, log
        self.rank, self.num_ranks, self.device = transport.rank, transport.num_ranks, transport.device

    @property
    def doing(self):
        return self._transport.doing

    @doing.setter
    def doing(self, value) -> None:
        self._transport.doing = value

    def all_reduce(self, tensor: Tensor, group: tuple[int, ...], op: str = "sum") -> Tensor:
        self.log.append(self.doing.what)
        return self._transport.all_reduce(tensor, group, op)


def test_backward_runs_in_reverse_creation_order_on_every_rank() -> None:
    """Ranks use the values differently, or not at all: the order of the backward collectives is one."""

    def body(transport: Transport) -> list[str]:
        recorder, tokens = Recorder(transport, []), []
        anchor = torch.zeros((), requires_grad=True)
        x = torch.ones(2, dtype=F64, requires_grad=True)
        values = [x * 1]
        for i in range(6):
            source = values[0] if i % 2 else values[-1]
            (out,), token = run_reshard(*summed(f"a{i}", f"b{i}"), [source], recorder, anchor)
            tokens.append(token)
            values.append(out * (i + 1))
        # rank 0 uses late values first and two of them twice, rank 1 uses one
        used = [values[1], values[6], values[2], values[6]] if transport.rank == 0 else [values[3]]
        recorder.log.clear()
        root = torch.stack(used).sum()
        backward([root], tokens)
        return recorder.log

    want = [f"backward of reshard a{i} -> b{i}" for i in reversed(range(6))]
    assert run_ranks(2, body, timeout=10) == [want, want]


def test_unused_value_gives_zeros_and_still_takes_part() -> None:
    def body(transport: Transport) -> Tensor:
        tokens, anchor = [], torch.zeros((), requires_grad=True)
        x = torch.full((2,), 3.0, dtype=F64, requires_grad=transport.rank == 0)
        (out,), token = run_reshard(*summed("a", "b"), [x * 1 if transport.rank == 0 else x], transport, anchor)
        tokens.append(token)
        assert out.requires_grad, "on every rank, whatever the source needs"
        roots = [(out * out).sum()] if transport.rank == 1 else []
        backward(roots, tokens)
        assert anchor.grad is None
        return x.grad

    found = run_ranks(2, body, timeout=10)
    assert torch.equal(found[0], torch.full((2,), 12.0, dtype=F64)) and found[1] is None


@pytest.mark.parametrize("off", ["no_grad", "no backward"])
def test_no_autograd_where_no_gradient_flows(off: str) -> None:
    step_ = reshard("a", "b", [], [] if off == "no_grad" else None, (((2,),), ((2,),)))

    def body(transport: Transport) -> None:
        x = torch.ones(2, dtype=F64, requires_grad=True) * 2
        anchor = torch.zeros((), requires_grad=True)
        with torch.set_grad_enabled(off != "no_grad"):
            (out,), token = run_reshard(*step_, [x], transport, anchor)
        assert token is None and not out.requires_grad

    run_ranks(1, body)


def test_integers_and_one_tensor_in_two_slots() -> None:
    twice = Transfer(
        "local",
        (),
        (Piece(0, 0, whole(2)), Piece(0, 0, whole(2))),
        (Piece(0, 0, whole(2)), Piece(0, 1, whole(2))),
        ((2,), (2,)),
    )
    once = Transfer(
        "local",
        (),
        (Piece(0, 0, whole(2)), Piece(0, 1, whole(2))),
        (Piece(0, 0, whole(2)), Piece(0, 0, whole(2))),
        ((2,),),
        True,
    )

    def body(transport: Transport) -> Tensor:
        anchor = torch.zeros((), requires_grad=True)
        ids = reshard("i", "j", [twice], None, (((2,),), ((2,), (2,))), torch.int64)
        (first, second), token = run_reshard(*ids, [torch.arange(2)], transport, anchor)
        assert token is None and first.tolist() == second.tolist() == [0, 1]
        x = torch.ones(2, dtype=F64, requires_grad=True)
        copies = reshard("a", "b", [twice], [once], (((2,),), ((2,), (2,))))
        (a, b), _ = run_reshard(*copies, [x], transport, anchor)
        (2 * a + 3 * b).sum().backward()
        return x.grad

    assert run_ranks(1, body)[0].tolist() == [5.0, 5.0]


def test_another_shape_than_planned_is_refused() -> None:
    def body(transport: Transport) -> None:
        run_reshard(*summed("a", "b"), [torch.ones(3, dtype=F64)], transport, torch.zeros((), requires_grad=True))

    with pytest.raises(RuntimeError, match=r"source of reshard a -> b is \(\(3,\),\), planned as \(\(2,\),\)"):
        run_ranks(2, body)


def test_an_op_that_talks_is_reached_where_its_result_is_unused() -> None:
    """The backward of a talking op enters a collective: rank 1, which ignores the result, must enter it too."""

    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, comm):
            ctx.comm = comm
            return comm.all_reduce(x)

        @staticmethod
        def backward(ctx, grad):
            return ctx.comm.all_reduce(grad), None

    class Talks(ParallelModule, grid={"tp": 2}, parameters={"w": Part((2,), dtype=F64)}):
        def forward(self) -> Tensor:
            found = self.comm.reached(Sum.apply(self.w, self.comm.along("tp")))
            return self.finish(found.sum().detach(), *([found.sum()] if self.transport.rank == 0 else []))

    def body(transport: Transport) -> Tensor:
        module = Talks(transport, {"w": torch.full((2,), 2.0, dtype=F64)})
        module().backward()
        return module.w.grad

    for found in run_ranks(2, body, timeout=10):
        assert found.tolist() == [1.0, 1.0]
