"""Scripts written by hand, against plain autograd."""

from __future__ import annotations

import pytest
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
from weft.runtime.emulator import run_ranks
from weft.runtime.interpret import Rank
from weft.runtime.random import Stream, whole_draw
from weft.runtime.script import Give, Local, Loop, Peers, Piece, Region, Run, Script, Sync, Transfer
from weft.runtime.transport import RankFailed, Transport


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
        scatter = Sync("w", ("w",), (((5, 4),),), ((scatter_rows(rank, rows, 4),),), (rows[rank], 4), F64)
        steps = (
            load("x", "x", leaf=False),
            load("w", "w", gather_rows(rank, rows, 4)),
            run("aten.linear.default", "x", "w", out="y"),
            *square_sum("y"),
        )
        return Script(rank, 2, steps, (scatter,), {"w": box((3 * rank, 3 + 2 * rank), (0, 4))}, "loss")

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
                    "a",
                    "b",
                    [all_to_all(rank, rows, cols)],
                    [all_to_all(rank, rows, cols, back=True)],
                    ((here,), (there,)),
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


def test_random_ops_get_the_stream_and_repeat_in_recomputation() -> None:
    """Dropout inside a region: the second run draws the same numbers, another step draws others."""
    x, w = randn(40, 3), randn(40, 3, seed=1)
    drop = Run(
        "weft.dropout", (Local("h"), 0.5, True), (("draw", whole_draw(0, (40, 3))),), (Local("d"),), "dropout", ""
    )
    body = (run("aten.mul.Tensor", "x", "w", out="h"), drop)
    steps = [load("x", "x", leaf=False), load("w", "w"), Region(body, ("d",)), *square_sum("d")]
    scripted = script(0, 1, steps, [sync("w", (40, 3))], outputs={"d": "d"})

    def body_(transport: Transport) -> list[tuple[Tensor, Tensor]]:
        rank, found = Rank(scripted, transport, state={"w": w}), []
        for number in (0, 0, 1):
            outputs = rank.forward({"x": x}, Stream(7, number, 0))
            found.append((outputs["d"], rank.backward()["w"]))
        return found

    (first, gradient), (again, _), (other, _) = run_ranks(1, body_)[0]
    assert torch.equal(first, again) and not torch.equal(first, other)
    close(gradient, 2 * first * x * 2 * (first != 0))
    assert 0 < int((first == 0).sum()) < first.numel()


def test_peers_grad_mode_autocast_and_opaque_functions() -> None:
    seen: list[tuple[str, int, int]] = []

    def talk(x: Tensor, comms: list, factor: float) -> tuple[Tensor, Tensor]:
        (comm,) = comms
        assert not torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        return comm.all_reduce(x) * factor, torch.tensor(comm.rank)

    def scripted(rank: int) -> Script:
        opaque = Run(
            "function:talk",
            (Local("w"), [Peers((1, 0))], 2.0),
            (),
            (Local("s", 1), Local("position")),
            "talk",
            "",
            grad=False,
            function=talk,
        )
        cast = run("aten.linear.default", "w32", "w32", out="low", autocast=("cpu", torch.bfloat16, True))
        wide = run("aten.linear.default", "w32", "w32", out="high")
        steps = [load("w", "w"), load("w32", "w32"), opaque, cast, wide]
        steps += [Run("aten.mul.Tensor", (Local("s", 1), Local("w")), (), (Local("y"),), "mul", ""), *square_sum("y")]
        outputs = {"low": "low", "high": "high", "position": "position"}
        return script(rank, 2, steps, [sync("w", (2, 2))], outputs=outputs)

    w = randn(2, 2)

    def body(transport: Transport) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        def trace(op: str, index: int, slot: int, tensor: Tensor) -> None:
            if transport.rank == 0:
                seen.append((op, index, slot))

        state = {"w": w, "w32": w.float()}
        rank = Rank(scripted(transport.rank), transport, state=state, trace=trace)
        return rank.forward({}, Stream(0, 0, 0)), rank.backward()

    for rank, (outputs, gradients) in enumerate(run_ranks(2, body)):
        assert (outputs["low"].dtype, outputs["high"].dtype) == (torch.bfloat16, torch.float32)
        assert int(outputs["position"]) == 1 - rank
        close(gradients["w"], 2 * (4 * w) ** 2 * w)
    assert seen[:2] == [("talk", 0, 1), ("talk", 1, 0)]


def test_forward_without_gradients() -> None:
    """Evaluation: no graph, no tokens, nothing to send back."""
    x, w = randn(3, 4), randn(4, 4, seed=1)
    steps = [
        load("x", "x", leaf=False),
        load("w", "w"),
        run("aten.linear.default", "x", "w", out="h"),
        reshard("h", "s", [all_reduce((3, 4), 0, 1)], [all_reduce((3, 4), 0, 1)], (((3, 4),), ((3, 4),))),
        Loop(((Give(Local("s"), "t", None, (3, 4)),),) * 2, True, ("t",)),
    ]

    def body(transport: Transport) -> Tensor:
        rank = Rank(script(transport.rank, 2, steps, loss=None, outputs={"t": "t"}), transport, state={"w": w})
        return rank.forward({"x": x}, Stream(0, 0, 0))["t"]

    with torch.no_grad():
        for found in run_ranks(2, body):
            close(found, 4 * linear(x, w))


def test_missing_and_misshapen_parts_are_refused() -> None:
    stored = Script(0, 1, (), (), {"w": whole(4, 4)}, None)
    for state, words in (
        ({}, "not given its part of w"),
        ({"w": randn(2, 4)}, r"has shape \(2, 4\), planned \(4, 4\)"),
    ):
        with pytest.raises(RankFailed, match=words):
            run_ranks(1, lambda t, state=state: Rank(stored, t, state=state).forward({}, Stream(0, 0, 0)))


def test_a_script_of_another_rank_is_refused() -> None:
    with pytest.raises(RankFailed, match="the script is for rank 0 of 2"):
        run_ranks(1, lambda t: Rank(script(0, 2, []), t, state={}))


def test_zeros_of_a_parameter_that_the_rank_does_not_store() -> None:
    """A bias along a summed cut: the value on rank 0, zeros on rank 1, which stores nothing and says the dtype."""
    b = randn(3)
    zeros = Transfer("local", (), (), (), ((3,),))

    def scripted(rank: int) -> Script:
        steps = [
            load("b", "b", *([zeros] if rank else [])),
            reshard("b", "s", [all_reduce((3,), 0, 1)], [], (((3,),), ((3,),))),
            *square_sum("s"),
        ]
        kept = Sync(
            "b",
            ("b",),
            (((3,),),),
            ((Transfer("local", (), (), (), ()),) if rank else (),),
            None if rank else (3,),
            F64,
        )
        return script(rank, 2, steps, [kept])

    results = step([scripted(0), scripted(1)], [{"b": b}, {}])
    close(results[0][1]["b"], 2 * b)
    assert results[1][1] == {}
