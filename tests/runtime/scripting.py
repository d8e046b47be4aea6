"""Short spellings for Scripts written by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.runtime.emulator import run_ranks
from weft.runtime.interpret import Rank
from weft.runtime.random import Stream
from weft.runtime.script import Index, Instruction, Load, Local, Piece, Reshard, Run, Script, Sync, Transfer
from weft.runtime.transport import Transport

F64 = torch.float64
STREAM = Stream(0, 0, 0)


def box(*intervals: tuple[int, int]) -> Index:
    """One interval per dim."""
    return tuple((interval,) if interval[0] < interval[1] else () for interval in intervals)


def whole(*sizes: int) -> Index:
    return box(*((0, size) for size in sizes))


def load(key: str, tensor: str, *transfers: Transfer, leaf: bool = True) -> Load:
    return Load(key, tensor, transfers, leaf)


def run(target: str, *args: Any, out: str | Local, op: str = "", place: str = "", **settings: Any) -> Run:
    """`"x"` among the arguments is slot 0 of value x."""
    bound = tuple(Local(arg) if isinstance(arg, str) else arg for arg in args)
    output = Local(out) if isinstance(out, str) else out
    return Run(target, bound, (), (output,), op or target, place, **settings)


def reshard(
    source: str,
    target: str,
    forward: Sequence[Transfer],
    backward: Sequence[Transfer] | None,
    shapes: tuple[Any, Any],
    dtype: torch.dtype = F64,
) -> Reshard:
    return Reshard(
        source, target, tuple(forward), None if backward is None else tuple(backward), shapes[0], shapes[1], dtype
    )


def all_reduce(shape: tuple[int, ...], *group: int) -> Transfer:
    return Transfer("all_reduce", group, (), (), (shape,))


def gather_rows(rank: int, rows: Sequence[int], cols: int) -> Transfer:
    """From uneven row parts to copies."""
    group, starts = tuple(range(len(rows))), [sum(rows[:r]) for r in range(len(rows))]
    return Transfer(
        "all_gather",
        group,
        tuple(Piece(peer, 0, whole(rows[rank], cols)) for peer in group),
        tuple(Piece(peer, 0, box((starts[peer], starts[peer] + rows[peer]), (0, cols))) for peer in group),
        ((sum(rows), cols),),
    )


def scatter_rows(rank: int, rows: Sequence[int], cols: int) -> Transfer:
    """From partial sums to uneven row parts."""
    group, starts = tuple(range(len(rows))), [sum(rows[:r]) for r in range(len(rows))]
    return Transfer(
        "reduce_scatter",
        group,
        tuple(Piece(peer, 0, box((starts[peer], starts[peer] + rows[peer]), (0, cols))) for peer in group),
        tuple(Piece(peer, 0, whole(rows[rank], cols)) for peer in group),
        ((rows[rank], cols),),
        add=True,
    )


def sync(parameter: str, shape: tuple[int, ...], *transfers: Transfer, source: str | None = None) -> Sync:
    return Sync(parameter, (source or parameter,), (((shape),),), (transfers,), shape, F64)


def script(
    rank: int,
    num_ranks: int,
    instructions: Sequence[Instruction],
    syncs: Sequence[Sync] = (),
    *,
    loss: str | None = "loss",
    outputs: Mapping[str, str] | None = None,
    updates: Mapping[str, str] | None = None,
) -> Script:
    return Script(rank, num_ranks, tuple(instructions), tuple(syncs), {}, loss, outputs or {}, updates or {})


def step(scripts: Sequence[Script], parts: Sequence[Mapping[str, Tensor]]) -> list[tuple[dict[str, Tensor], Any]]:
    """Forward and backward on every rank: outputs and gradients."""

    def body(transport: Transport) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        rank = Rank(scripts[transport.rank], transport, state=parts[transport.rank])
        outputs = rank.forward({}, STREAM)
        return outputs, rank.backward()

    return run_ranks(len(scripts), body, timeout=20)


def eager(body: Callable[..., Tensor], **tensors: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of plain autograd."""
    leaves = {
        name: tensor.clone().requires_grad_(tensor.is_floating_point() and not name.startswith("x"))
        for name, tensor in tensors.items()
    }
    loss = body(**leaves)
    loss.backward()
    return loss.detach(), {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
