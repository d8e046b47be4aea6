"""Scripts written by hand, against plain autograd."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear

from tests.runtime.scripting import (
    F64,
    all_reduce,
    box,
    close,
    eager,
    gather_rows,
    load,
    reshard,
    run,
    scatter_rows,
    script,
    step,
    sync,
    whole,
)
from weft.runtime.script import Piece, Script, Transfer


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def square_sum(source: str) -> list:
    return [run("aten.mul.Tensor", source, source, out="sq"), run("aten.sum.default", "sq", out="loss")]


def test_megatron_mlp() -> None:
    """Column, then row linear: f sums gradients, g sums values."""
    x, w0, w1, w2 = randn(3, 4), randn(6, 4, seed=1), randn(8, 6, seed=2), randn(5, 8, seed=3)

    def scripted(rank: int) -> Script:
        return script(
            rank,
            2,
            [
                load("x", "x", leaf=False),
                load("w0", "w0"),
                load("w1", "w1"),
                load("w2", "w2"),
                run("aten.linear.default", "x", "w0", out="h"),
                reshard("h", "hf", [], [all_reduce((3, 6), 0, 1)], (((3, 6),), ((3, 6),))),
                run("aten.linear.default", "hf", "w1", out="a"),
                run("aten.gelu.default", "a", out="b"),
                run("aten.linear.default", "b", "w2", out="p"),
                reshard("p", "y", [all_reduce((3, 5), 0, 1)], [], (((3, 5),), ((3, 5),))),
                *square_sum("y"),
            ],
            [sync("w0", (6, 4)), sync("w1", (4, 6)), sync("w2", (5, 4))],
            outputs={"y": "y", "loss": "loss"},
        )

    parts = [{"x": x, "w0": w0, "w1": w1[r * 4 : r * 4 + 4], "w2": w2[:, r * 4 : r * 4 + 4]} for r in range(2)]
    results = step([scripted(0), scripted(1)], parts)
    loss, grads = eager(
        lambda x, w0, w1, w2: linear(gelu(linear(linear(x, w0), w1)), w2).square().sum(), x=x, w0=w0, w1=w1, w2=w2
    )
    for rank, (outputs, found) in enumerate(results):
        close(outputs["loss"], loss)
        close(found["w0"], grads["w0"])
        close(found["w1"], grads["w1"][rank * 4 : rank * 4 + 4])
        close(found["w2"], grads["w2"][:, rank * 4 : rank * 4 + 4])
    assert torch.equal(results[0][0]["y"], results[1][0]["y"])


def test_data_parallel_uneven() -> None:
    """Uneven rows, a tied use of the weight on every rank, gradients summed by the sync."""
    x, w = randn(5, 4), randn(4, 4, seed=1)
    rows = [2, 0, 3]

    def scripted(rank: int) -> Script:
        return script(
            rank,
            3,
            [
                load("x", "x", leaf=False),
                load("w", "w"),
                run("aten.linear.default", "x", "w", out="h"),
                run("aten.linear.default", "h", "w", out="y"),
                run("aten.mul.Tensor", "y", "y", out="sq"),
                run("aten.sum.default", "sq", out="part"),
                reshard("part", "loss", [all_reduce((), 0, 1, 2)], [], (((),), ((),))),
            ],
            [sync("w", (4, 4), all_reduce((4, 4), 0, 1, 2))],
            outputs={"loss": "loss"},
        )

    parts = [{"x": part, "w": w} for part in x.split(rows)]
    loss, grads = eager(lambda x, w: linear(linear(x, w), w).square().sum(), x=x, w=w)
    for outputs, found in step([scripted(r) for r in range(3)], parts):
        close(outputs["loss"], loss)
        close(found["w"], grads["w"])


def test_stored_split_used_as_copy() -> None:
    """ZeRO-3: gather before use, reduce into the stored part; the rows are uneven."""
    x, w, rows = randn(6, 4), randn(5, 4, seed=1), [3, 2]

    def scripted(rank: int) -> Script:
        stored = Script(
            rank,
            2,
            (
                load("x", "x", leaf=False),
                load("w", "w", gather_rows(rank, rows, 4)),
                run("aten.linear.default", "x", "w", out="y"),
                *square_sum("y"),
            ),
            (
                sync("w", (5, 4), scatter_rows(rank, rows, 4)).__class__(
                    "w", ("w",), (((5, 4),),), ((scatter_rows(rank, rows, 4),),), (rows[rank], 4), F64
                ),
            ),
            {"w": box((3 * rank, 3 + 2 * rank), (0, 4))},
            "loss",
        )
        return stored

    parts = [{"x": a, "w": b} for a, b in zip(x.split([4, 2]), w.split(rows), strict=True)]
    results = step([scripted(0), scripted(1)], parts)
    _, grads = eager(lambda x, w: linear(x, w).square().sum(), x=x, w=w)
    close(torch.cat([found["w"] for _, found in results]), grads["w"])
    assert [tuple(found["w"].shape) for _, found in results] == [(3, 4), (2, 4)]


def all_to_all(rank: int, rows: list[int], cols: list[int], *, back: bool = False) -> Transfer:
    """From row parts to column parts, or back."""
    r_at, c_at = [sum(rows[:i]) for i in range(3)], [sum(cols[:i]) for i in range(3)]
    by_col = [(box((0, rows[rank]), (c_at[p], c_at[p] + cols[p])), p) for p in range(3)]
    by_row = [(box((r_at[p], r_at[p] + rows[p]), (0, cols[rank])), p) for p in range(3)]
    sends, receives, shape = by_col, by_row, (sum(rows), cols[rank])
    if back:
        sends, receives, shape = by_row, by_col, (rows[rank], sum(cols))
    return Transfer(
        "all_to_all",
        (0, 1, 2),
        tuple(Piece(peer, 0, index) for index, peer in sends),
        tuple(Piece(peer, 0, index) for index, peer in receives),
        (shape,),
    )


def test_uneven_all_to_all_and_its_backward() -> None:
    x, w, rows, cols = randn(6, 5), randn(6, 5, seed=1), [1, 3, 2], [3, 2, 0]

    def scripted(rank: int) -> Script:
        here, there = (rows[rank], 5), (6, cols[rank])
        return script(
            rank,
            3,
            [
                load("x", "x", leaf=False),
                load("w", "w"),
                run("aten.mul.Tensor", "x", "w", out="a"),
                reshard(
                    "a", "b", [all_to_all(rank, rows, cols)], [all_to_all(rank, rows, cols, back=True)], ((here,), (there,))
                ),
                run("aten.sin.default", "b", out="c"),
                *square_sum("c"),
            ],
            [sync("w", here)],
            outputs={"b": "b"},
        )

    parts = [{"x": a, "w": b} for a, b in zip(x.split(rows), w.split(rows), strict=True)]
    results = step([scripted(r) for r in range(3)], parts)
    _, grads = eager(lambda x, w: (x * w).sin().square().sum(), x=x, w=w)
    close(torch.cat([outputs["b"] for outputs, _ in results], 1), x * w)
    close(torch.cat([found["w"] for _, found in results]), grads["w"])


def test_two_stages_on_different_ranks() -> None:
    """Ranks 0, 1 make halves, ranks 2, 3 use the whole, 3 ignoring it: senders have no targets, receivers no source."""
    x, w, v = randn(4, 3), randn(2, 3, seed=1), randn(5, 2, seed=2)
    group = (0, 1, 2, 3)

    def sender(rank: int) -> Script:
        out = [Transfer("exchange", group, tuple(Piece(p, 0, whole(2, 2)) for p in (2, 3)), (), ())]
        back = [Transfer("exchange", group, (), (Piece(2, 0, whole(2, 2)), Piece(3, 0, whole(2, 2))), ((2, 2),), True)]
        return script(
            rank,
            4,
            [
                load("x", "x", leaf=False),
                load("w", "w"),
                run("aten.linear.default", "x", "w", out="h"),
                reshard("h", "g", out, back, (((2, 2),), ())),
            ],
            [sync("w", (2, 3), all_reduce((2, 3), 0, 1))],
            loss=None,
        )

    def receiver(rank: int) -> Script:
        halves = tuple(Piece(p, 0, box((2 * p, 2 * p + 2), (0, 2))) for p in (0, 1))
        here = [Transfer("exchange", group, (), halves, ((4, 2),))]
        back = [Transfer("exchange", group, halves, (), ())]
        steps = [reshard("h", "g", here, back, ((), ((4, 2),)))]
        if rank == 2:
            steps += [load("v", "v"), run("aten.linear.default", "g", "v", out="y"), *square_sum("y")]
        syncs = [sync("v", (5, 2))] if rank == 2 else []
        return script(rank, 4, steps, syncs, loss="loss" if rank == 2 else None)

    parts = [{"x": x[:2], "w": w}, {"x": x[2:], "w": w}, {"v": v}, {}]
    results = step([sender(0), sender(1), receiver(2), receiver(3)], parts)
    _, grads = eager(lambda x, w, v: linear(linear(x, w), v).square().sum(), x=x, w=w, v=v)
    for rank in (0, 1):
        close(results[rank][1]["w"], grads["w"])
    close(results[2][1]["v"], grads["v"])
    assert results[3][1] == {}
